"""The report without a browser: reading, statistics, the written files, and damaged input."""

import base64
import gzip
import html
import json
import multiprocessing
import re
import shutil
import socket
import struct
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch

from dew.compare import Sampling, Scores
from dew.compare.sampling import Sampled
from dew.compare.scores import ScoredProblem
from dew.credit import group_relative
from dew.errors import ConfigError, RecordError
from dew.report import build, build_from_records, charts_of, content_of
from dew.report.readers import Run, arms_of
from dew.report.results import remarks, rows_of
from dew.report.serve import IDLE, View, make_server
from dew.report.tokens import above_mean, statistics, summary
from dew.report.write import blobs
from dew.rewards import Verdict
from dew.run.folder import RunFolder, lock
from dew.run.records import AnswerRecord, GroupRecord, read_records, write_records
from make_run import make_run, make_study


def report_of(page: Path) -> dict[str, Any]:
    return json.loads(page.with_suffix(".json").read_text())


def unpack(page: Path) -> list[Any]:
    """The data in the page, as the browser reads it."""
    packed = re.search(r'<script type="text/plain" id="data">\n(.*?)\n</script>', page.read_text(), re.S)
    assert packed
    return [json.loads(gzip.decompress(base64.b64decode(line))) for line in packed[1].split("\n")]


def answer(correct: bool, tokens: str = "ab", **signals: Any) -> AnswerRecord:
    return AnswerRecord(tokens=list(tokens), correct=correct, reward=float(correct), **signals)


def rule_values(content: dict[str, Any], name: str) -> list[Any]:
    """What the page has for a rule without formula, group after group."""
    n = next(n for n, rule in enumerate(content["rules"]) if name in rule["label"].split(", "))
    return [group["rules"].get(str(n), group["rules"].get(n)) for run in content["runs"] for group in run["groups"]]


# ── golden: numbers worked by hand ──────────────────────────────────────────────────────────────────────────
def test_share_of_credit_by_entropy() -> None:
    """Twenty tokens, |credit| 1 on the ten of lowest entropy, 3 on the others, 40 in all: tenths are 2/40 or 6/40."""
    entropy = [0.1 * k for k in range(1, 21)]
    credit = [1.0] * 10 + [3.0] * 10
    order = np.random.default_rng(0).permutation(20)
    shuffled = answer(True, "x" * 20, entropy=[entropy[k] for k in order], advantage=[credit[k] for k in order])
    found = statistics([GroupRecord(0, 0, "", [shuffled])])["deciles"]
    assert found["correct"]["shares"] == pytest.approx([0.05] * 5 + [0.15] * 5)
    assert found["correct"]["tops"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
    assert "wrong" not in found


def test_words_relative_to_the_mean_of_their_answer() -> None:
    """|A| = 1, 1, 4 has mean 2: the third token has 4/2 − 1 = +100 %, the others −50 %. Five uses are needed."""
    wrong = AnswerRecord([" so", " we", " Wait"], False, 0.0, advantage=[-1.0, -1.0, -4.0])
    found = statistics([GroupRecord(0, g, "", [wrong]) for g in range(5)])["words"]
    assert found == {"correct": [], "wrong": [{"word": "Wait", "uses": 5, "extra": pytest.approx(1.0)}]}


def test_untrained_tokens_are_not_counted() -> None:
    tool = answer(True, "abc", live=[True, False, True], entropy=[0.5, 99.0, 0.5], advantage=[1.0, 50.0, 1.0])
    found = statistics([GroupRecord(0, 0, "", [tool])])
    assert found["tokens"] == 2 and found["entropy"]["mean_correct"] == pytest.approx(0.5)


def test_groups_without_signal_are_excluded_from_credit() -> None:
    without = GroupRecord(0, 0, "", [answer(True, entropy=[1.0, 1.0], advantage=[0.0, 0.0])])
    with_signal = GroupRecord(0, 1, "", [answer(True, entropy=[1.0, 1.0], advantage=[2.0, 2.0])])
    found = statistics([without, with_signal])
    assert found["credit"]["mean_correct"] == pytest.approx(2.0) and found["tokens"] == 4


# ── remarks ─────────────────────────────────────────────────────────────────────────────────────────────────
def run_of(name: str, values: list[float], **others: Any) -> Run:
    return Run(name="run", kind="dew", metrics=[{"step": i, name: value} for i, value in enumerate(values)], **others)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("entropy", [1.0] * 25 + [0.1] * 25, [1.0] * 25 + [0.5] * 25),
        ("groups/mixed_share", [0.05] * 50, [0.8] * 50),
        ("length/truncated_share", [0.0] * 40 + [0.9] * 10, [0.1] * 50),
    ],
)
def test_bad_curves_give_one_remark_and_good_ones_none(name: str, bad: list[float], good: list[float]) -> None:
    found = remarks(run_of(name, bad))
    assert len(found) == 1 and found[0]["message"] and found[0]["remedy"]
    assert remarks(run_of(name, good)) == []
    assert remarks(run_of(name, bad, alarms=[{"alarm": found[0]["alarm"]}])) == []


def test_a_remark_names_the_setting_of_the_runs_own_rule() -> None:
    """As an alarm during training does; a rule of a user's file is not imported for it."""
    rules = {"gtpo": "gtpo(alpha2=0.3,pool=outcome)", "rules.py:Mine": None}
    for rule, expected in rules.items():
        facts = {"algorithm": {"name": rule, "settings": {"alpha2": 0.3}}}
        (found,) = remarks(run_of("credit/flipped_share", [0.1] * 5, facts=facts))
        assert found["remedy"] == (f"Write `algorithm: {expected}`, which cannot flip a sign." if expected else "")


# ── what is written ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "one", steps=30, groups=6, size=4)


def test_page_and_json_have_the_content_of_the_records(run: Path) -> None:
    page = build([run])
    assert page == run / "report.html"
    (shown,) = report_of(page)["runs"]
    head, *groups = unpack(page)
    assert groups == shown["groups"] and head["runs"][0]["metrics"]["step"] == list(range(1, 31))
    heading = head["runs"][0].pop("groups")[0]  # the page opens without the answers
    assert head["runs"][0] == {key: value for key, value in shown.items() if key != "groups"}
    assert heading["answers"] == 4 and "settings" not in heading
    for group, record in zip(groups, RunFolder(run).records(), strict=True):
        for made, kept in zip(group["answers"], record.answers, strict=True):
            assert made["tokens"] == list(kept.tokens) and kept.entropy and kept.advantage
            assert made["entropy"] == pytest.approx(list(kept.entropy), rel=1e-4)
            assert np.broadcast_to(made["advantage"], len(kept.tokens)) == pytest.approx(list(kept.advantage), rel=1e-3)


def test_credit_of_other_rules_on_the_recorded_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of a rule is the recorded groups of a step; a group without possible entropies has fewer rules."""
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text(
        "from dew.algorithms import DAPO\n\nclass Mine(DAPO):\n    name = 'mine'\n\n"
        "    def advantages(self, rollouts):\n        return 2 * super().advantages(rollouts)\n"
    )
    Path("trap.py").write_text("open('ran', 'w')")
    high, low = [0.1, 0.9, 0.2, 0.3, 0.4], [0.5, 0.1, 0.2, 0.3, 1.4]
    known = [answer(True, "abcde", entropy=high), answer(False, "abcde", entropy=low)]
    bare = [answer(True, "ab"), answer(True, "abc"), answer(False, "a")]
    groups = [GroupRecord(1, 0, "", known, algorithm="forking_tokens", settings={"keep": 0.4})]
    groups += [GroupRecord(2, 0, "", bare, algorithm="trap.py:Trap"), GroupRecord(2, 1, "", bare[:2])]
    groups += [GroupRecord(3, 0, "", [answer(c, "a", entropy=[-9.0], logp=[2.0]) for c in (True, False)])]
    content = content_of([Run("one", "records", groups=groups)], ["rules.py:Mine"])
    labels = [rule["label"] for rule in content["rules"]]
    assert [rule["method"] for rule in content["rules"][:4]] == ["GTPO", "GTPO", "GRPO-S", "GRPO"]
    assert any(label.startswith("grpo, dapo, gspo") for label in labels)  # the same credit, one entry
    a = 0.5 / (0.5**0.5 + 1e-4)  # one of two is correct: ±0.5 by the std √½
    mine = rule_values(content, "mine")
    assert mine[0] == pytest.approx([2 * a, -2 * a], abs=5e-3) and mine[2] == [0.0, 0.0]
    forked = rule_values(content, "forking_tokens(keep=0.4)")  # 4 of 10: 1.4 and 0.5, 0.9 and 0.4
    assert [[v != 0 for v in row] for row in forked[0]] == [[0, 1, 0, 0, 1], [1, 0, 0, 0, 1]]
    assert forked[1] is forked[3] is None and mine[1] is not None
    assert not Path("ran").exists()  # a record is data


def test_rules_to_compare_are_named_on_the_command_line(run: Path, tmp_path: Path, dew: Any) -> None:
    code, *_ = dew("report", run, "--compare", "gtpo(alpha2=0.7)", "-o", tmp_path / "page.html")
    assert code == 0 and report_of(tmp_path / "page.html")["rules"][-1]["label"] == "gtpo(alpha2=0.7)"
    code, _, err = dew("report", run, "--compare", "gtpp", "-o", tmp_path / "other.html")
    assert code == 1 and "Did you mean 'gtpo'?" in err and not (tmp_path / "other.html").exists()
    code, _, err = dew("report", run, "--compare", "kl_cov", "-o", tmp_path / "page.html")
    assert code == 0 and "kl_cov is not in Compare" in err


def test_a_rule_to_compare_that_gives_nan_is_an_error(
    run: Path, tmp_path: Path, monkeypatch: Any, dew: Any, algorithm_registry: Any
) -> None:
    (tmp_path / "rules.py").write_text(
        "from dew.algorithms import DAPO\nclass Mine(DAPO):\n    name = 'mine'\n"
        "    def advantages(self, rollouts):\n        return super().advantages(rollouts).bfloat16() / 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    code, _, err = dew("report", run, "--compare", "rules.py:Mine", "-o", tmp_path / "page.html")
    assert code == 1 and "mine: some advantages are NaN or infinite." in err and "Warning" not in err


def test_what_is_not_a_run_is_named(tmp_path: Path, dew: Any) -> None:
    (tmp_path / "mine.jsonl").write_text("{}")
    said = dew("report", tmp_path / "mine.jsonl")[2].replace("\n", " ")
    assert f"a file of token records: dew report --records {tmp_path / 'mine.jsonl'}" in said
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "grid.json").write_text('{"settings": {}, "arms": ["dapo"], "sources": {}}')
    assert "no run has finished yet." in dew("report", tmp_path / "study")[2]


def test_charts_of_the_metrics() -> None:
    """A repeated metric has no chart; one that never changes, or is unknown, a folded one."""
    moving, flat = [0.1, 0.2, 0.4], [1.0, 1.0, 1.0]
    columns = {"step": [1, 2, 3], "reward": moving, "accuracy": moving, "loss": flat, "own": [3.0, 1.0, 2.0]}
    found = [(chart["title"], chart["names"], chart["folded"]) for chart in charts_of([columns])]
    assert found == [("Reward", ["accuracy"], False), ("loss", ["loss"], True), ("own", ["own"], True)]
    assert [chart["folded"] for chart in charts_of([{"step": [1, 2, 3]}, {"step": [1, 2, 3], "loss": flat}])] == [True]


def test_page_makes_no_requests(run: Path) -> None:
    page = html.unescape(build([run]).read_text())
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    assert "default-src 'none'" in page and "'unsafe-inline'" not in page
    assert page.count("<script") == 2 and page.count("</script") == 2
    assert "Leon Sorokin" in page  # uPlot's licence is included


def test_several_runs_are_written_to_out(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", steps=30, groups=2, size=4, seed=1)
    page = build([run, other], tmp_path / "both.html")
    assert page == tmp_path / "both.html" and page.with_suffix(".json").exists()
    head, *groups = unpack(page)
    assert [r["name"] for r in head["runs"]] == ["synthetic-gtpo-seed0", "synthetic-gtpo-seed1"]
    assert len(groups) == sum(len(r["groups"]) for r in head["runs"])
    assert build([run], tmp_path) == tmp_path / "report.html"
    assert build([run], tmp_path / "lr0.5") == tmp_path / "lr0.5.html"
    assert len(report_of(build([run.parent, run, run / ".." / run.name], tmp_path / "page.html"))["runs"]) == 1


def test_large_runs_are_sampled(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokens = sum(group.size for group in RunFolder(run).records())
    monkeypatch.setattr("dew.report.readers.PAGE_TOKENS", tokens // 2)
    found = report_of(build([run], tmp_path))["runs"][0]
    assert 0 < found["sample"]["groups"] < found["sample"]["of"] == 6
    assert sum(len(a["tokens"]) for g in found["groups"] for a in g["answers"]) <= tokens // 2
    for step, length in ((1, 9), (2, 5), (3, 7)):
        write_records(tmp_path, step, [GroupRecord(step, 0, "", [answer(True, "x" * length)])])
    monkeypatch.setattr("dew.report.readers.PAGE_TOKENS", 3)  # if none fits, the smallest is shown
    found = report_of(build([tmp_path]))["runs"][0]
    assert [g["step"] for g in found["groups"]] == [2] and found["sample"]["of"] == 3


def test_not_all_large_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(12):
        write_records(tmp_path, step, [GroupRecord(step, 0, "", [answer(True)])])
    size = max(path.stat().st_size for path in RunFolder(tmp_path).record_files())
    monkeypatch.setattr("dew.report.readers.READ_BYTES", 4 * size)
    found = report_of(build([tmp_path]))["runs"][0]
    assert (found["sample"]["files"], found["sample"]["files_of"]) == (4, 12)
    assert [g["step"] for g in found["groups"]] == [0, 4, 7, 11]


def test_long_curves_are_thinned_and_keep_rare_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dew.report.MAX_STEPS", 5)
    run = RunFolder(tmp_path)
    for step in range(17):
        run.append_metrics({"step": step, "reward": step / 10} | ({"eval/pass@1": 0.5} if step == 3 else {}))
    found = report_of(build([tmp_path]))["runs"][0]
    rewards, passed = [0.0, 0.4, 0.8, 1.2, 1.6], [None, 0.5, None, None, None]
    assert found["metrics"] == {"step": [0, 4, 8, 12, 16], "reward": rewards, "eval/pass@1": passed}
    assert found["sample"]["steps"] == 5 and found["sample"]["steps_of"] == 17


def test_list_of_groups_omits_the_common_prefix(tmp_path: Path) -> None:
    answers = [AnswerRecord(tokens=["a"], correct=True, reward=1.0)]
    two = ["1+1?", "1+2?"]
    for prefix, shown in (("<system>\nBe short.\n", two), ("", two), ("", ["Sum.\n1+1?"] * 2)):
        groups = [GroupRecord(step=1, group=n, prompt=prefix + text, answers=answers) for n, text in enumerate(shown)]
        write_records(tmp_path, 1, groups)
        report = report_of(build([tmp_path]))
        head = json.loads(gzip.decompress(base64.b64decode(blobs(report)[0])))
        assert [group["prompt"] for group in head["runs"][0]["groups"]] == shown


# ── damaged files ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "alarms.jsonl", "scores.json"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b'{"step": 1, "na\n', b"[[1]]\n", b"\xff\xfe\n"])
def test_damaged_file_is_reported_and_the_rest_is_shown(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make_run(tmp_path / "run", steps=5, groups=2, size=4)
    (folder / name).write_bytes(content)
    found = report_of(build([folder]))["runs"][0]
    assert found["groups"]
    harmless = name.endswith("jsonl") and b"\n" not in content  # empty, or a line being written
    assert [name in notice for notice in found["notices"]] == ([] if harmless else [True])


def test_damaged_lines_of_a_log_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_run(tmp_path / "run", steps=5, groups=2, size=4)
    log = folder / "metrics.jsonl"
    log.write_bytes(b'{"step": 1, "na\n{"loss": 2}\n' + log.read_bytes())
    content = report_of(build([folder]))
    assert f"{log}: skipped damaged lines (2 of 7)." == content["runs"][0]["notices"][0] == caplog.messages[0]
    assert any(finding["text"] == caplog.messages[0] for finding in content["findings"])
    RunFolder(folder).write_run({"status": "running"})  # without a lock, its last step shows whether it still runs
    log.write_bytes(b"damaged\n")
    assert "no line" in report_of(build([folder]))["runs"][0]["notices"][0]


def test_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    """A process writes metrics, records and run.json as fast as it can, and is killed while writing."""
    folder = tmp_path / "run"
    writer = multiprocessing.get_context("fork").Process(target=_write_forever, args=(folder,))
    writer.start()
    while len(RunFolder(folder).record_files()) < 3:
        time.sleep(0.01)
    steps = []
    for _ in range(4):
        found = report_of(build([folder]))["runs"][0]
        assert found["notices"] == [] and found["groups"]
        steps.append(found["sample"]["steps_of"])
    writer.kill()
    writer.join()
    assert steps == sorted(steps) and steps[0] < steps[-1]
    assert report_of(build([folder]))["runs"][0]["notices"] == []


def _write_forever(folder: Path) -> None:
    run, step = RunFolder(folder), 0
    answers = [AnswerRecord(tokens=["4", "2"], correct=bool(i), reward=i, entropy=[0.5, 0.1]) for i in (0, 1)]
    while True:
        step += 1
        run.write_run({"name": "busy", "status": "running", "step": step})
        run.append_metrics({"step": step, "reward": 0.5, "text": "x" * 20_000})
        run.write_records(step, [GroupRecord(step=step, group=0, prompt="6·7?", answers=answers)], keep=10)


def test_folder_without_a_run(tmp_path: Path) -> None:
    says = {r"run\.json .* trainer_state\.json": [tmp_path], "no such folder": [tmp_path / "no"], "No run given": []}
    for text, folders in says.items():
        with pytest.raises(ConfigError, match=text):
            build(folders)


# ── other trainers ──────────────────────────────────────────────────────────────────────────────────────────
def test_trl_run(tmp_path: Path) -> None:
    """TRL 1.16 writes its curves into each checkpoint."""
    same = {"loss": 0.01, "rewards/accuracy/std": 0.2, "completions/clipped_ratio": 0.2, "frac_reward_zero_std": 0.4}
    log = [{**same, "step": n, "reward": 0.1 * n, "rewards/accuracy/mean": 0.1 * n} for n in (1, 2)]
    log[1]["grad_norm"] = float("nan")
    for step in (1, 10):
        (checkpoint := tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "log_history": [*log, {"step": 2, "eval_reward": 0.7}]}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    found = (content := report_of(build([tmp_path])))["runs"][0]
    assert found["kind"] == "trl" and found["facts"]["steps"] == 10
    expected = {"step": [1, 2], "reward/accuracy": [0.1, 0.2], "groups/mixed_share": [0.6, 0.6]}
    expected |= {"length/truncated_share": [0.2, 0.2], "eval/reward": [None, 0.7]}
    assert expected.items() <= found["metrics"].items()
    assert content["rows"][0]["name"] == "reward" and content["findings"][0]["remedy"].endswith("back to checkpoint-1.")


def test_records_of_another_trainer(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "p", "algorithm": "mine", "answers": [{"tokens": ["a", "b"], "reward": 1}]}\n')
    found = report_of(build_from_records(path, tmp_path / "page.html"))["runs"][0]
    assert found["kind"] == "records" and found["name"] == "mine.jsonl"
    assert found["groups"][0]["answers"][0]["correct"] and len(read_records(path)) == 1
    path.write_text('{"group": 3, "answers": []}\n' * 2)
    with pytest.raises(RecordError, match="step 0 has more than one group 3"):
        build_from_records(path)


# ── arms, rows and findings ─────────────────────────────────────────────────────────────────────────────────
def run_with(name: str, algorithm: str, seed: int, accuracy: float = 0.5, **facts: Any) -> Run:
    """A run of ten steps with constant metrics."""
    settings = {"alpha2": 0.1} if algorithm == "gtpo" else {}
    facts = {"algorithm": {"name": algorithm, "settings": settings}, "seed": seed, "model": "m", **facts}
    metrics = [{"step": step, "accuracy": accuracy, "entropy": 0.5} for step in range(10)]
    return Run(name, "dew", facts, config=f"algorithm: {algorithm}\nseed: {seed}\noutput_dir: {name}", metrics=metrics)


def test_runs_that_differ_only_in_their_seed_form_an_arm() -> None:
    runs = [run_with(f"{a}{s}", a, s) for a in ("grpo", "gtpo") for s in (0, 1)]
    arms, settings = arms_of(runs)
    assert [(arm["label"], arm["runs"]) for arm in arms] == [("grpo", [0, 1]), ("gtpo", [2, 3])]
    assert {row["name"]: row["values"] for row in settings} == {
        "algorithm": ["grpo", "grpo", "gtpo", "gtpo"],
        "seed": ["0", "1", "0", "1"],
    }  # grpo has no alpha2: that is not a difference


def test_runs_on_verl_have_their_own_paths_and_still_form_an_arm() -> None:
    def run(name: str, seed: int, mode: str) -> Run:
        config = f"""
            algorithm: {{dew_run: {{folder: /runs/{name}}}}}
            actor: {{data_loader_seed: {seed}, fsdp_config: {{seed: {seed}}}}}
            data: {{train_files: /runs/{name}/data/train.parquet, seed: {seed}}}
            trainer: {{experiment_name: {name}, v1: {{trainer_mode: {mode}}}}}
        """
        return Run(name, "dew", {"algorithm": "gtpo", "seed": seed}, config=config)

    arms, _ = arms_of([run("a", 0, "dew_sync"), run("b", 1, "dew_sync"), run("c", 0, "dew_colocate_async")])
    expected = {"gtpo trainer_mode=dew_sync": [0, 1], "gtpo trainer_mode=dew_colocate_async": [2]}
    assert {arm["label"]: arm["runs"] for arm in arms} == expected


def test_runs_with_other_settings_are_not_averaged() -> None:
    runs = [run_with("a", "grpo", 0, model="small"), run_with("b", "grpo", 1, model="large")]
    assert [arm["label"] for arm in arms_of(runs)[0]] == ["grpo model=small", "grpo model=large"]
    named = [run_with("a", "gtpo", 0, arm="gtpo"), run_with("b", "gtpo", 0, arm="gtpo(alpha2=0.5)")]
    named.append(replace(named[0], facts={**named[0].facts, "algorithm": {"name": "gtpo", "settings": {}}}))
    assert [(arm["label"], arm["runs"]) for arm in arms_of(named)[0]] == [("gtpo", [0, 2]), ("gtpo(alpha2=0.5)", [1])]
    edited = [run_with("a", "Mine", seed, arm="Mine", source=f"code{seed}") for seed in (1, 2)]
    assert [arm["label"] for arm in arms_of(edited)[0]] == ["Mine source=code1", "Mine source=code2"]
    assert [arm["label"] for arm in arms_of([Run("x", "trl"), Run("y", "trl")])[0]] == ["x", "y"]


def pairs_of(runs: list[Run], name: str = "accuracy") -> dict[tuple[str, str], Any]:
    found = [d for row in rows_of(runs, arms_of(runs)[0]) if row["name"] == name for d in row["differences"]]
    return {(d.arm, d.baseline): pytest.approx(d.by_pair) for d in found}


def test_the_headline_of_many_arms_names_the_baseline_and_the_range() -> None:
    many = [run_with(str(i), f"rule{i}", 0, i / 10) for i in range(1, 7)]
    assert content_of(many)["headline"].endswith("rule1 10% solved, 5 others 20% to 60%")
    assert content_of([replace(many[0], metrics=[]), *many[1:]])["headline"].endswith("5 arms 20% to 60% solved")


def test_only_comparable_runs_are_paired() -> None:
    """Of the same seed, length and model; two runs of one seed count as their mean."""
    grpo, dapo = ([run_with(f"{a}{s}", a, s, x) for s in range(3)] for a, x in (("grpo", 0.5), ("dapo", 0.7)))
    assert pairs_of([*grpo, *dapo, run_with("again", "dapo", 0, 0.9)]) == {("dapo", "grpo"): (0.3, 0.2, 0.2)}
    unequal = content_of([*grpo, *dapo[:2]])
    assert unequal["headline"].endswith("dapo (2 runs) 70% to 70% solved, grpo (3 runs) 50%")
    says = "over all seeds of an arm (0–2 of grpo; 0–1 of dapo), differences over those that it shares with the base"
    assert says in unequal["findings"][1]["text"]
    others = [run_with(f"dew{s}", "dew", s, 0.6) for s in (0, 2, 5)]  # equally many seeds, but not the same ones
    assert "(0–2 of grpo; 0, 2, 5 of dew), diff" in content_of([*grpo, *dapo, *others])["findings"][1]["text"]
    assert "(3 runs)" not in content_of([*grpo, *dapo])["headline"]
    failed = replace(dapo[0], metrics=dapo[0].metrics[:4])
    assert pairs_of([*grpo, failed, *dapo[1:]]) == {("dapo", "grpo"): (0.2, 0.2)}
    assert "The runs have 3 to 9 steps" in content_of([*grpo, failed])["findings"][0]["text"]
    assert pairs_of([*(replace(run, facts={"algorithm": "grpo", "model": "m"}) for run in grpo), *dapo]) == {}
    elsewhere = [replace(run, facts={**run.facts, "warm_start": {"digest": "x"}}) for run in dapo]
    assert content_of([*grpo, *elsewhere])["findings"][0]["text"].startswith("Not compared with the baseline")
    apart = ("k=8", "settings", {"k": 8}), ("n=4", "batches", {"n": 4}), ("rewards=x", "rewards", "x")
    for label, name, x in (*apart, ("model=x", "model", "x")):
        others = [replace(run, facts={**run.facts, name: x}, config=None) for run in (*grpo, *dapo)]
        assert (f"dapo {label}", f"grpo {label}") in pairs_of([*grpo, *dapo, *others])
    assert content_of([*grpo, *others])["headline"].startswith("9 steps")  # of which model?
    entry = {"when": "after", "task": "t", "n_problems": 200, "k": 4, "scores": {"pass@1": {"value": 0.5}}}
    start, rises = entry | {"when": "before"}, zip(grpo, (0.5, 0.5, 0.9), strict=True)  # the interval includes 0
    risen = [replace(r, scores=[start, entry | {"scores": {"pass@1": {"value": x}}}]) for r, x in rises]
    assert content_of(risen)["findings"][0]["kind"] == "note"
    areas = [replace(r, scores=[entry | {"scores": {"area": {"value": 0.5}}}]) for r in (*grpo, failed, *dapo[1:])]
    assert pairs_of(areas, "area") == {("dapo", "grpo"): (0.0, 0.0)}
    for n, pairs in ((200, 1), (9, 0)):
        scored = [replace(r, scores=[entry | {"n_problems": m}]) for rs, m in ((grpo, 200), (dapo, n)) for r in rs]
        assert len(pairs_of(scored, "pass@1")) == pairs


def test_every_evaluation_set_has_rows_of_its_own() -> None:
    metrics = {f"eval/{of}_pass@{k}": 1 / k for of in ("b", "a_b") for k in (1, 2, 8)}
    rows = rows_of([Run("x", "dew", metrics=[{"step": 1, **metrics}])], [])
    assert [row["name"] for row in rows] == ["eval/a_b_pass@1", "eval/a_b_pass@8", "eval/b_pass@1", "eval/b_pass@8"]


def test_a_study_is_judged_over_its_seeds(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", arms=3, seeds=6, generations=12)
    content = report_of(build([folder]))
    assert [arm["label"] for arm in content["arms"]] == ["baseline", "synthetic(1)", "synthetic(2)"]
    differences = next(row for row in content["rows"] if row["name"] == "area")["differences"]
    p = sorted(d["p"] for d in differences)
    assert sorted(d["holm"] for d in differences) == pytest.approx([min(1.0, 2 * p[0]), max(min(1.0, 2 * p[0]), p[1])])
    assert {(d["unit"], d["pairs"]) for d in differences} == {("seeds", 6)}
    assert content["findings"][0]["text"] == (
        "synthetic(1) and synthetic(2) are within noise of baseline in mean accuracy in training (±0.006), "
        "pass@1 (±0.019), pass@16 (±0.019) and accuracy at the end of training (±0.019)."
    )
    assert len(content["runs"]) == 18 and "strength" in json.dumps(content["settings"])


def test_tasks_of_a_study_are_judged_apart(tmp_path: Path) -> None:
    """Each task has the numbers that it has in a study of its own."""
    both = make_study(tmp_path / "both", arms=3, seeds=6, generations=12, tasks=2)
    for run in (both / "synthetic").iterdir():
        if run.name.startswith("synthetic_2") or run.name == "synthetic_1-lr0.0001-seed3":
            path = run / "metrics.jsonl"
            path.write_text(path.read_text().replace('"credit/flipped_share": 0.01', '"credit/flipped_share": 0.2'))
    content = report_of(build([both]))
    for results in content["tasks"]:
        alone = tmp_path / results["task"]
        shutil.copytree(both / results["task"], alone / "only")
        shutil.copy(both / "grid.json", alone)
        single = report_of(build([alone]))
        assert [results[key] for key in ("findings", "rows")] == [single[key] for key in ("findings", "rows")]
        names = [row["name"] for row in results["rows"]]
        assert names[:4] == ["area", "pass@1", "pass@16", "final"] and not {"accuracy", "eval/pass@1"} & set(names)
    labels = [arm["label"] for arm in content["tasks"][1]["arms"]]
    assert labels == ["baseline @ 0.0001", "synthetic(1) @ 0.0002", "synthetic(2) @ 0.0002"]
    (text,) = (finding["text"] for finding in content["tasks"][0]["findings"] if finding.get("alarm") == "wrong_sign")
    assert text.endswith(" In 1 of 6 runs of synthetic(1) and 6 of 6 runs of synthetic(2).")


def test_token_records_of_some_runs_of_a_large_study_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dew.report.readers.MAX_RECORDED", 2)
    for seed in range(5):
        make_run(tmp_path / f"gtpo-seed{seed}", steps=2, groups=1, size=2, seed=seed)
    runs = report_of(build([tmp_path]))["runs"]
    assert [len(run["groups"]) for run in runs] == [1, 0, 0, 0, 1]


def write_answers(folder: Path, verdicts: list[bool], scored_by: str = "math") -> None:
    """The same verdicts on the answers to each of 40 problems."""
    judged = [Verdict("correct" if right else "wrong", "1") for right in verdicts]
    problems = [ScoredProblem(f"{i}?", "1", [Sampled("1", 1, False)] * len(judged), judged) for i in range(40)]
    scores = Scores("sums", "by hand", Sampling(k=len(judged)), problems, 1.0, scored_by=scored_by)
    scores.write(folder / "answers-after.json")
    RunFolder(folder).write_scores([{"when": "after", **scores.summary()}])


def test_one_run_each_is_paired_by_problem(tmp_path: Path) -> None:
    """dapo has both answers right, grpo one of them."""
    for name, verdicts in (("dapo", [True, True]), ("grpo", [True, False])):
        write_answers(make_run(tmp_path / f"{name}-seed0", steps=5, groups=1, size=2, algorithm=name), verdicts)
        RunFolder(tmp_path / f"{name}-seed0").write_run({"arm": name})
    (tmp_path / "grid.json").write_text('{"settings": {}, "arms": ["grpo", "dapo"], "sources": {}}')
    content = report_of(build([tmp_path]))
    assert [arm["label"] for arm in content["arms"]] == ["grpo", "dapo"]  # the baseline first
    assert content["findings"][0]["text"].startswith("dapo is ahead of grpo in pass@1 by 0.500")
    write_answers(tmp_path / "dapo-seed0", [True, True], scored_by="mine.score > 0.5")
    assert not any(row["differences"] for row in report_of(build([tmp_path]))["rows"])  # scored differently


def test_falling_pass_at_k_is_the_first_finding(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_run({"name": "mine"})
    run.write_metrics([{"step": step, "accuracy": 0.1 * step} for step in (1, 2)])

    def found(*scores: tuple[float, float]) -> list[tuple[str, str]]:
        known = zip(("before", "after"), scores, strict=True)
        values = [(when, {"pass@1": {"value": one}, "pass@16": {"value": k}}) for when, (one, k) in known]
        run.write_scores([{"when": when, "task": "t", "scores": of} for when, of in values])
        return [(x["kind"], x["text"]) for x in report_of(build([tmp_path]))["findings"]]

    narrower = "mine: pass@16 fell by 30.0 points. The answers have become less diverse."
    assert found((0.2, 0.91), (0.3, 0.61)) == [("bad", narrower), ("good", "mine: pass@1 rose by 10.0 points.")]
    exploited = "mine: pass@1 fell by 20.0 points. Training accuracy did not fall: the policy may exploit"
    first, second = found((0.3, 0.91), (0.1, 0.91))
    assert first == ("bad", f"{exploited} the reward or memorise problems.") and second == (
        "note",
        "mine: pass@16 did not change.",
    )


def test_an_alarm_of_several_runs_is_one_finding() -> None:
    alarm = {"step": 3, "alarm": "truncated", "message": "Too long.", "remedy": "Raise it."}
    made = [run_with(name, "grpo", i) for i, name in enumerate("abc")]
    runs = [replace(run, alarms=[alarm], facts={**run.facts, "alarms": {"truncated": 7}}) for run in made]
    found = [f for f in content_of(runs)["findings"] if f.get("alarm")]
    assert [f["text"] for f in found] == ["a: Too long (step 3, 7 steps in all). In 3 of 3 runs of grpo."]


@pytest.mark.parametrize(
    ("status", "error", "checkpoint", "says", "remedy"),
    [
        ("failed", "RewardError: boom", True, "Stopped by an error at step 12 of 60: RewardError: boom", "dew resume"),
        ("running", None, False, "Killed (its process ended without an error, often out of memory) at", "again"),
        ("stopped", None, True, "Interrupted at step 12 of 60.", "trainer.train(resume_from_checkpoint=True)`"),
    ],
)
def test_why_a_run_ended_is_the_first_finding(tmp_path, status, error, checkpoint, says, remedy) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_run({"status": status, "error": error, "steps": 60})
    folder.append_metrics({"step": 12, "accuracy": 0.5, "reward": 0.5})
    folder.append_alarm({"step": 3, "alarm": "truncated", "message": "Too long.", "remedy": "Raise it."})
    if checkpoint:
        (folder.path / "checkpoint-10").mkdir()
    if error:
        (folder.path / "config.yaml").touch()  # of `dew train`
    if status == "running":
        with lock(folder.path):
            page = report_of(build([folder.path]))
            assert page["findings"][0]["text"].startswith("Too long (step 3).")
            assert page["runs"][0]["facts"]["status"] == status
    content = report_of(build([folder.path]))
    assert content["findings"][0]["text"].startswith(says) and remedy in content["findings"][0]["remedy"]
    assert content["headline"] == "12 of 60 steps: 50% solved"


def test_a_run_without_a_lock_file_is_killed_if_it_is_silent(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    for age, alive in ((3000.0, False), (5.0, True)):
        folder.write_metrics([{"step": k, "time": time.time() - age + k} for k in (1, 2)])
        assert folder.alive() is alive


def test_tokens_of_an_arm_are_one_finding() -> None:
    """In each of two runs one of one groups has one flipped token of four."""
    right = answer(True, entropy=[0.5, 0.001], advantage=[1.0, -1.0])
    wrong = answer(False, entropy=[0.001, 0.001], advantage=[-1.0, -2.0])
    group = GroupRecord(1, 0, "", [right, wrong])
    runs = [replace(run_with(name, name[0], i % 2), groups=[group]) for i, name in enumerate(("a-0", "a-1", "b-0"))]
    found = [f for f in content_of(runs)["findings"] if f.get("link", "").startswith("#groups")]
    texts, links = ["a: 2 of 2", "b: 1 of 1"], ["#groups", "#groups&in=3"]
    assert [f["text"].split(" recorded")[0] for f in found] == texts and {f["kind"] for f in found} == {"amber"}
    assert [f["link"] for f in found] == [f"{link}&with=flipped&by=flipped" for link in links]
    assert "2 tokens, 25.0% of those that train." in found[0]["text"]


# ── groups in numbers ───────────────────────────────────────────────────────────────────────────────────────
def test_summary_of_a_group() -> None:
    """|A| = 1, 3: std 1, mean 2, spread 1/2. |A| = 1, 1: 0. Mean 1/4. Two of four entropies below 0.01.

    telling = (min(1/2, 0) + (1/2)/10) · 4 · 1/2 · 1/2 · (1 − 1/2) = 0.025
    """
    right = answer(True, entropy=[0.5, 0.001], advantage=[1.0, 3.0])
    wrong = answer(False, entropy=[0.009, 0.02], advantage=[-1.0, 1.0])
    found = summary(GroupRecord(0, 0, "", [right, wrong]))
    assert (found["spread"], found["sure"], found["flipped"]) == (pytest.approx(0.25), 0.5, 1)
    assert found["telling"] == pytest.approx(0.025)


def test_the_wrong_sign_is_that_of_dew_credit() -> None:
    for seed in range(50):
        rewards = torch.rand(6, generator=torch.Generator().manual_seed(seed)).mul(3).round()
        rewards[0] = -1.0  # not all equal
        group = GroupRecord(0, 0, "", [AnswerRecord(["a"], r > 0.5, r) for r in rewards.tolist()])
        assert np.sign(above_mean(group)).tolist() == group_relative(rewards).sign().tolist()


# ── dew view ────────────────────────────────────────────────────────────────────────────────────────────────
def test_server_answers_only_with_its_token(run: Path, capfd: Any) -> None:
    server, address = make_server([run])
    server.daemon_threads = False  # closing it waits for its answers
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert server.server_address[0] == "127.0.0.1" and address.startswith("http://127.0.0.1:")
        with urlopen(address) as answer:
            page = html.unescape(answer.read().decode())
            assert answer.headers["Cache-Control"] == "no-store"
        assert "connect-src 'self'" in page and "data-live=" in page
        assert "connect-src" not in html.unescape(build([run]).read_text())  # the file makes no requests
        with urlopen(f"{address}data") as answer:
            lines = answer.read().decode().split("\n")
        assert len(lines) == 1 + len(list(RunFolder(run).records()))
        with pytest.raises(ConfigError, match="cannot be used"):
            make_server([run], server.server_address[1])
        root = address.rsplit("/", 2)[0]
        for path in ("", "/", "/x/", f"/{'a' * 32}/data", f"{address.removeprefix(root)}run.json", "/../run.json"):
            with pytest.raises(HTTPError) as error:
                urlopen(root + path)
            assert error.value.code == 404
        with closing(socket.create_connection(("127.0.0.1", server.server_port))) as closed:  # a page closed at once
            closed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            closed.sendall(f"GET {address.removeprefix(root)}data HTTP/1.1\r\n\r\n".encode())
        server.RequestHandlerClass.timeout = 0.2
        with closing(socket.create_connection(("127.0.0.1", server.server_port), timeout=60)) as idle:
            assert idle.recv(1) == b""  # closed by the server
        server.RequestHandlerClass.timeout = IDLE
        urlopen(Request(f"{address}stamp", headers={"Host": "localhost:99"})).close()  # a tunnel
        with pytest.raises(HTTPError):  # a page of another host
            urlopen(Request(f"{address}stamp", headers={"Host": f"evil.example:{server.server_port}"}))
    finally:
        server.shutdown()
        server.server_close()
    assert capfd.readouterr().err == ""


def test_view_is_rebuilt_when_the_run_grows_and_kept_when_it_breaks(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3, groups=1, size=2)
    view = View([folder])
    before, content = view.update()
    assert view.update()[0] == before
    RunFolder(folder).append_metrics({"step": 4, "reward": 0.5})
    after, content = view.update()
    assert after != before and content["runs"][0]["metrics"]["step"] == [1, 2, 3, 4]
    view._next = 0.0
    (folder / "run.json").write_text('{"schema": 99}')
    assert view.update() == (after, content)


def test_a_report_holds_no_paths_of_the_machine(tmp_path):
    folder = make_run(tmp_path / "run", steps=3, groups=1, size=2)
    RunFolder(folder).write_run({"model": "/home/me/models/mine"})
    RunFolder(tmp_path / "b").write_run({"model": "/home/me/other/mine", "algorithm": "gtpo"})
    content = report_of(build([folder, tmp_path / "b"], tmp_path))
    assert "/home/me" not in json.dumps(content) and content["runs"][0]["facts"]["model"] == "mine"
