"""Whole runs of verl on Ray with TransferQueue, FSDP2 on gloo and a rollout on the CPU. Needs verl (make test-verl).

Two simulated GPUs, so two trainer processes and two rollout replicas; the bundled tiny model on countdown.
"""

import subprocess
import sys
from collections import defaultdict

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: these run with `make test-verl`")
from dew.engines.credit import Rows, give_credit
from dew.run.folder import RunFolder
from verl_run import overrides, run_verl, with_rollout_apart, write_data

pytestmark = pytest.mark.slow
STEPS, ANSWERS, PROMPTS = 2, 4, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("verl")


@pytest.fixture(scope="module")
def data(root):
    return write_data(root)


def run(root, data, name, *more, steps=STEPS):
    """The run's folder, batches and log. A failed run shows the end of its log."""
    folder = root / name
    settings = [
        *overrides(data, folder, steps=steps, answers=ANSWERS, prompts=PROMPTS),
        "trainer.v1.trainer_mode=dew_sync", f"+algorithm.dew_run.folder={folder / 'run'}",
        "+algorithm.dew_run.records_every=1", "+algorithm.dew_run.records_groups=8", *more,
    ]  # fmt: skip
    done = run_verl(folder, settings)
    log = (folder / "log.txt").read_text()
    assert done.returncode == 0, log[-6000:]
    batches = [torch.load(path, weights_only=False) for path in sorted((folder / "batches").iterdir())]
    return RunFolder(folder / "run"), batches, log


def check_batch(batch):
    """Each group alone gets the advantages that verl trained on, wherever its rows were in the batch."""
    advantages, groups = batch["advantages"], defaultdict(list)
    for row, uid in enumerate(batch["index"]):
        if batch["mask"][row].any():
            groups[uid].append(row)
    for rows in groups.values():
        n = len(rows)
        extra = batch["rewards"][rows].sum(-1) - batch["score"][rows]
        own = {"mask": batch["mask"][rows], "outcome": batch["acc"][rows], "extra": extra}
        signals = {name: batch[name][rows] for name in ("entropy", "logp") if batch[name] is not None}
        alone = give_credit(batch["algorithm"], Rows(group=torch.zeros(n, dtype=torch.long), **own, **signals))
        torch.testing.assert_close(advantages[rows], alone.advantages, rtol=1e-5, atol=1e-6)
    return groups


def check_folder(run, steps):
    assert run.run()["status"] == "done" and run.run()["engine"] == "verl"
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert {"accuracy", "reward", "entropy", "length/mean", "grad_norm", "seconds/generation"} <= line.keys()
        assert line["entropy/floor_share"] < 0.5  # float32: not mostly rounding
    assert len(run.record_files()) == steps
    subprocess.run(
        [sys.executable, "-c", "from dew.cli import main; main()", "report", str(run.path)],
        check=True,
        capture_output=True,
    )
    assert (run.path / "report.html").stat().st_size > 10_000


def test_grpo_in_our_trainer_mode(root, data):
    """verl's own estimator, recorded: the baseline in the same report."""
    run_, _, _ = run(root, data, "grpo", "algorithm.adv_estimator=grpo")
    check_folder(run_, STEPS)
    for group in run_.records():
        for answer in group.answers:
            assert answer.advantage == pytest.approx(answer.grpo, rel=1e-3, abs=1e-4)


def test_gtpo_with_checkpoint_and_resume(root, data):
    first, batches, _ = run(
        root, data, "gtpo", "algorithm.adv_estimator=gtpo", "actor_rollout_ref.actor.policy_loss.loss_mode=dew",
        "trainer.save_freq=1",
    )  # fmt: skip
    check_folder(first, STEPS)
    assert len(batches) == STEPS
    spread = 0
    for batch in batches:
        half = len(batch["index"]) // 2
        groups = check_batch(batch)
        spread += sum(len({row < half for row in rows}) == 2 for rows in groups.values())
    assert spread  # groups whose rows went to both workers
    again, batches, log = run(
        root, data, "gtpo", "algorithm.adv_estimator=gtpo", "actor_rollout_ref.actor.policy_loss.loss_mode=dew",
        "trainer.save_freq=1", "trainer.resume_mode=auto", steps=STEPS + 1,
    )  # fmt: skip
    assert f"setting global step to {STEPS}" in log
    check_folder(again, STEPS + 1)
    assert len(batches) == STEPS + 1
    check_batch(batches[-1])


def test_grpo_s_with_dapos_filter(root, data):
    run_, batches, _ = run(
        root, data, "grpo_s", "algorithm.adv_estimator=grpo_s", "actor_rollout_ref.actor.policy_loss.loss_mode=dew",
        "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc", "+algorithm.dew.beta2=0.2",
        steps=5,  # three of four groups are mixed: with fewer steps the filter may have nothing to drop
    )  # fmt: skip
    check_folder(run_, 5)
    assert batches[0]["algorithm"].beta2 == 0.2
    for batch in batches:
        for rows in check_batch(batch).values():
            assert 0 < batch["acc"][rows].sum() < len(rows)  # the filter keeps only mixed groups
            assert batch["advantages"][rows].abs().sum() > 0
    assert sum(line["groups/dropped"] for line in run_.metrics()) > 0


def test_entropy_advantage_reads_the_current_policy(root, data):
    run_, batches, _ = run(
        root, data, "entropy_advantage", "algorithm.adv_estimator=entropy_advantage",
        "actor_rollout_ref.actor.calculate_entropy=True",
    )  # fmt: skip
    check_folder(run_, STEPS)
    check_batch(batches[0])
    for line in run_.metrics():  # the workers use dew's loss; a step may have no group with signal
        assert (line["credit/bonus"] > 0) == (line["groups/mixed_share"] > 0)


@pytest.mark.parametrize("mode", ["colocate", "separate"])
def test_gtpo_in_an_asynchronous_mode(mode, root, data):
    """Separate: two batches a step, and the old policy is that of the step's beginning, whose weights verl restores."""
    how = ["trainer.v1.trainer_mode=dew_colocate_async"] if mode == "colocate" else with_rollout_apart(root / mode)
    run_, batches, _ = run(root, data, mode, "algorithm.adv_estimator=gtpo", *how)
    check_folder(run_, STEPS)
    for batch in batches:
        check_batch(batch)


def test_an_algorithm_of_the_users_own(root, data):
    """Registered in a module that the configuration names: in the driver, the trainer and the workers."""
    name = "first_tokens"
    run_, batches, _ = run(
        root, data, name, f"algorithm.adv_estimator={name}", "+algorithm.dew.first=3", "+algorithm.dew.factor=2.0",
        "actor_rollout_ref.model.external_lib=verl_own_algorithm",
    )  # fmt: skip
    check_folder(run_, STEPS)
    assert run_.run()["algorithm"]["name"] == name
    for batch in batches:
        check_batch(batch)
        assert batch["algorithm"].first == 3 and not batch["advantages"][:, 3:].any()
    assert all(line["own/factor"] == 2.0 for line in run_.metrics())  # the workers used its loss
