"""Free memory within the limits of control groups."""

import psutil
import pytest

from dew import memory

MIB = 2**20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("membership", "folder", "names", "limit", "left"),
    [
        ("0::/", "", V2, 100 * MIB, 70),  # a container: 100 - 40 in use, 10 of them cached files
        ("0::/job_7/step_0", "job_7", V2, 100 * MIB, 70),  # Slurm: the job has a limit, its step has none
        ("4:memory:/docker/abc\n1:cpu:/", "memory", V1, 100 * MIB, 70),  # a container that sees its group as the root
        ("4:memory:/docker/abc\n0::/", "memory/docker/abc", V1, 100 * MIB, 70),
        ("0::/", "", V2, 35 * MIB, 5),
        ("0::/", "", V2, 20 * MIB, 0),  # the kernel lowered the limit
        ("0::/", "", V2, "max", None),
        ("0::/elsewhere", "job_7", V2, 100 * MIB, None),  # not the group of this process
    ],
)
def test_the_smallest_limit_counts(tmp_path, monkeypatch, membership, folder, names, limit, left):
    (tmp_path / "self").write_text(f"{membership}\n")
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{40 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 1\n{names[2]} {10 * MIB}\n")
    found = memory.free_memory()
    assert found > 100 * MIB if left is None else found == left * MIB


def test_without_control_groups_it_is_what_the_machine_has(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "none")
    assert 0 < memory.free_memory() <= psutil.virtual_memory().total
