"""Random files and texts at every door: whatever comes in, only a DewError comes out.

tests/security/test_fuzz.py runs a few of each with every test run, many in a slow test, and every find that was ever
made here.
"""

import atexit
import gzip
import json
import logging
import math
import shutil
import signal
import string
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import trl_tiny
from attacks import ATTACKS, FAMILIES
from dew.cli.console import out
from dew.cli.report import explain
from dew.cli.runs import RunView
from dew.compare import Scores, read_result
from dew.engines.trl.guide import RecordedGuide
from dew.engines.trl.launch import parse
from dew.errors import DewError
from dew.report import content_of
from dew.report.readers import Run, read_run
from dew.report.write import blobs
from dew.rewards import Verdict, verifier
from dew.rewards.latex import compare
from dew.rewards.math import verdict_or_answer
from dew.run.config import OWN_KEYS, check_keys, make_run, parse_yaml, to_yaml
from dew.run.folder import RunFolder
from dew.run.permission import check_permission
from dew.run.records import SIGNALS, read_records
from dew.tasks import task
from hostile import WORDS

# ── what goes in ────────────────────────────────────────────────────────────────────────────────────────────
POOL = 10_000
"""Values drawn at first use, which costs a hundredth of drawing them one by one; hypothesis chooses among them."""
SPECIAL = [None, True, False, 0, 1, -1, "", "1", 10**400, 1e308, -0.0, math.nan, math.inf, -math.inf, 10**20, "nan", "trl",
           "tiny", "countdown", "math", "a" * 300, "\x00", "\ud800"]  # fmt: skip


KINDS = (string.printable, "".join(map(chr, range(0xA0, 0x2FF))), "🙂\u202e\ufeff\ud800\x00\x1b\x85\u2028٣²")


def random_text(dice: Random, longest: int = 20) -> str:
    return "".join(dice.choice(dice.choice(KINDS)) for _ in range(dice.randint(0, longest)))


def random_value(dice: Random, depth: int = 0) -> Any:
    """Anything that JSON can say."""
    kind = dice.randrange(9 if depth < 4 else 6)
    if kind > 6:
        return [random_value(dice, depth + 1) for _ in range(dice.randint(0, 4))]
    if kind == 6:
        return {random_text(dice, 8): random_value(dice, depth + 1) for _ in range(dice.randint(0, 4))}
    plain = (dice.choice(SPECIAL), dice.choice(ATTACKS), dice.gauss(0, 10), dice.randint(-9, 99))
    return random_text(dice) if kind > 3 else plain[kind]


def drawn(kind: Callable[[Random], Any]) -> st.SearchStrategy[Any]:
    def values() -> st.SearchStrategy[Any]:
        dice = Random(0)
        return st.sampled_from([kind(dice) for _ in range(POOL)])

    return st.deferred(values)


VALUES, TEXTS = drawn(random_value), drawn(random_text)

YAML_LINES = st.sampled_from(
    ["task: countdown", "engine: trl", "problems: 12", "scores: {problems: 4, k: 2}", "scores: true", "learning_rate: 1e-6",
     "task_settings: {numbers: 3}", "- a", "  - b", "? x", ": y", "a: &a [1, 2]", "b: *a", "<<: {c: 1}", "---", "...",
     "%YAML 1.2", "#", "'", '"', "|", ">", "a: |\n  text", "a: >-\n  text", "\t", "{", "}", "[", "]", ",", "!!str 1",
     "!!int x", "!!float .", "!!bool 1", "!!null x", "!!timestamp 1", "!!binary =", "!!set {a}", "!!omap [a: 1]", "a:", ": ",
     "1e5", "0x1F", "0o17", "1_000", ".inf", "-.inf", ".nan", "~", "yes", "2001-01-01", "12:30:45", "\ufeff", "\x85", "\u2028"]
) | st.sampled_from(ATTACKS) | TEXTS  # fmt: skip
YAML_TEXT = st.lists(YAML_LINES, max_size=8).map("\n".join) | st.lists(YAML_LINES, max_size=5).map(" ".join) | TEXTS

TRL_KEYS = ["learning_rate", "output_dir", "max_steps", "report_to", "reward_funcs", "model_init_kwargs", "algorithm",
            "algorithm_kwargs", "num_generations", "model_name_or_path", "guide", "use_cpu", "seed", "deepspeed", "dtype",
            "trust_remote_code", "vllm_server_host", "attn_implementation", "push_to_hub", "records_every", "beta"]  # fmt: skip
SETTINGS = st.dictionaries(st.sampled_from([*OWN_KEYS, *TRL_KEYS]) | TEXTS, VALUES, max_size=6)

PER_ANSWER = ("tokens", "correct", "reward", "extra", "extracted", "verdict", "truncated", "guided", "live", *SIGNALS)
PER_GROUP = ("schema", "step", "group", "prompt", "gold", "algorithm", "settings", "answers")


@st.composite
def groups(draw: Any) -> dict[str, Any]:
    """A good group with a few values replaced by any others."""
    tokens = draw(st.integers(0, 3))
    numbers = st.lists(st.floats(0.01, 10), min_size=tokens, max_size=tokens)
    answers: list[Any] = [
        {"tokens": ["a"] * tokens, "correct": correct, "reward": float(correct), "entropy": draw(numbers),
         "advantage": draw(numbers), "shaped": draw(numbers), "settings": {"alpha1": 1.0}}
        for correct in draw(st.lists(st.booleans(), max_size=4))
    ]  # fmt: skip
    group = {"schema": 1, "step": 1, "group": 0, "prompt": "p", "answers": answers}
    for _ in range(draw(st.integers(0, 2))):
        if answers and draw(st.booleans()):
            chosen = draw(st.sampled_from(answers))
            chosen[draw(st.sampled_from(PER_ANSWER))] = draw(VALUES | numbers)
        else:
            group[draw(st.sampled_from(PER_GROUP))] = draw(VALUES)
    return group


GOOD = json.dumps(
    {"schema": 1, "step": 1, "group": 0, "prompt": "p", "answers": [
        {"tokens": ["a", "b"], "correct": c, "reward": float(c), "entropy": [0.5, 1.0], "advantage": [1.0, -1.0]}
        for c in (True, False)
    ]}
).encode()  # fmt: skip


@st.composite
def damaged(draw: Any, whole: bytes = GOOD) -> bytes:
    """A good file with bytes changed, cut out, doubled, or put in."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        how = draw(st.integers(0, 3))
        if how == 0 and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif how == 1:
            del content[at : at + draw(st.integers(1, 40))]
        elif how == 2:
            content[at:at] = content[at : at + draw(st.integers(1, 40))]
        else:
            content[at:at] = draw(
                st.binary(max_size=12) | st.sampled_from([b"\n", b"[", b"{", b'"', b"\x00", b"1e999"])
            )
    return bytes(content)


LINE_FILE = damaged() | damaged(gzip.compress(GOOD, mtime=0)) | damaged(GOOD + b"\n" + GOOD) | st.binary(max_size=60)
ROW = st.dictionaries(
    st.sampled_from(["prompt", "answer", "problem", "solution", "completion", "numbers", "token_ids", "logprobs"]),
    VALUES, max_size=4,
)  # fmt: skip
ROWS = st.lists(ROW | VALUES, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()) | damaged(
    b'{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n'
)
METRIC = st.dictionaries(
    st.sampled_from(["step", "reward", "entropy", "time", "alarm", "message", "when", "scores", "groups/mixed_share", "loss",
                     "grad_norm", "accuracy", "groups/sampled", "length/mean", "tokens_per_second", "ratio/max", "kl/approx", "clip/high"]),
    VALUES | st.floats() | st.integers(), max_size=6,
)  # fmt: skip
RUN_FILES = st.fixed_dictionaries(
    {},
    optional={
        "run.json": VALUES.map(json.dumps) | st.dictionaries(TEXTS, VALUES, max_size=3).map(json.dumps) | TEXTS,
        "scores.json": st.lists(METRIC | VALUES, max_size=2).map(json.dumps) | TEXTS,
        "metrics.jsonl": st.lists(METRIC, max_size=6).map(lambda x: "\n".join(map(json.dumps, x))) | TEXTS,
        "alarms.jsonl": st.lists(METRIC, max_size=3).map(lambda x: "\n".join(map(json.dumps, x))) | TEXTS,
        "config.yaml": YAML_TEXT,
    },
)
LATEX = st.lists(
    st.sampled_from([*WORDS, *FAMILIES["latex"], *FAMILIES["numbers"], r"\boxed{", "}", "1", "2x", r"\frac{1}{2}", r"\sqrt{2}",
                     "#### ", "The answer is ", "$", "<answer>", "</answer>", "(", ")", "[1, 2)", r"\{1, 2\}", "x = 3",
                     r"\pi", "50\\%", r"\text{cm}", "1,000", "0.5", "-", "+", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"]),
    min_size=1, max_size=7,
).map("".join) | st.sampled_from(ATTACKS) | TEXTS  # fmt: skip
GOLDS = st.sampled_from(["8", r"\frac{1}{2}", "x+1", r"\{1, 2\}", "(1, 2)", "C", r"\text{blue}", "x > 3", ""]) | LATEX


# ── the doors ───────────────────────────────────────────────────────────────────────────────────────────────
HERE = Path(tempfile.mkdtemp(prefix="dew-fuzz-"))
atexit.register(shutil.rmtree, HERE, ignore_errors=True)


def put(name: str, content: bytes | str) -> Path:
    path = HERE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", errors="surrogatepass"))
    return path


def yaml_text(text: str) -> None:
    """Any text as a recipe; what is read is written and read again the same."""
    run = make_run(parse_yaml(text), source="r.yaml")
    with suppress(DewError):
        check_permission(run, (), untrusted=True)
    again = make_run(parse_yaml(to_yaml(run)))
    assert repr(again.to_dict()) == repr(run.to_dict())


def recipe(keys: dict[str, Any]) -> None:
    """Any values under the keys of a recipe, its task, its verifier and the permissions that it asks for."""
    run = make_run(keys, source="r.yaml")
    to_yaml(run)
    if run.task is not None:
        task(run.task, **run.task_settings)
    if run.verifier is not None:
        verifier(run.verifier)
    check_permission(run, (), untrusted=True)
    check_keys(run.settings, TRL_KEYS, source="r.yaml")


def recipe_parsed(keys: dict[str, Any]) -> None:
    """The same through TRL's parser, with what is needed to get there."""
    parse(make_run({"model_name_or_path": "tiny", "use_cpu": True, "bf16": False, **keys}), dry=True)


def record_bytes(content: bytes) -> None:
    read_records(put("r.jsonl", content))


def record(group: dict[str, Any]) -> None:
    """A group of any values: read, credited as `dew explain` does, shown as `dew report` does."""
    path = put("g.jsonl", json.dumps(group))
    blobs(content_of([Run("r", "records", groups=read_records(path))]))
    with out.capture():
        explain(path)


def run_folder(files: dict[str, str]) -> None:
    """A run's folder with anything in its files: read, shown as a report and a line, compared."""
    for name in ("run.json", "scores.json", "metrics.jsonl", "alarms.jsonl", "config.yaml"):
        (HERE / "run" / name).unlink(missing_ok=True)
    for name, content in {"run.json": "{}", **files}.items():
        put(f"run/{name}", content)
    view = RunView(HERE / "run")
    view.poll()
    view.line()
    blobs(content_of([read_run(HERE / "run", 1000)]))
    RunFolder(HERE / "run").finished()
    with suppress(DewError):
        read_result(HERE / "run")


def rows(content: bytes) -> None:
    """Any file as problems: as a task of JSON Lines, as a set with a template, as JSON, packed."""
    for name, settings_ in (("t.jsonl", {}), ("t.jsonl", {"template": "plain"}), ("t.json", {"template": "chat"})):
        with suppress(DewError):
            for split in ("train", "held_out"):
                task(str(put(name, content)), **settings_).rows(1, split=split)
    task(str(put("t.jsonl.gz", gzip.compress(content, 1))), template="r1", problem="prompt").rows(1)


TOKENIZER = trl_tiny.tokenizer()


def guide(content: bytes) -> None:
    """Any file as a guide's recorded answers."""
    RecordedGuide(str(put("guide.jsonl", content)), TOKENIZER, 16)


def foreign(content: bytes) -> None:
    """Any file as a trainer state of TRL's, and as scores of an evaluation."""
    put("trl/trainer_state.json", content)
    with suppress(DewError):
        read_run(HERE / "trl", 1000)
    Scores.read(put("scores.json", content))


FOREIGN = st.one_of(
    VALUES.map(lambda v: json.dumps({"log_history": v, "global_step": 1}).encode()),
    st.lists(METRIC, max_size=3).map(lambda v: json.dumps({"log_history": v}).encode()),
    damaged(json.dumps({"task": "t", "model": "m", "sampling": {"k": 1}, "seconds": 1.0, "problems": [
        {"prompt": "p", "gold": "g", "answers": [{"text": "a", "tokens": 1, "truncated": False, "status": "wrong",
                                                  "extracted": None}]}]}).encode()),
)  # fmt: skip


def gold_columns(case: tuple[str, Any, Any]) -> None:
    """Verifiers that are given any columns: a file's `numbers` and `answer` may be anything."""
    text, numbers, answer = case
    for name in ("countdown", "equation"):
        with suppress(DewError):
            verifier(name).verdicts([text], [{"numbers": numbers, "answer": answer}])


def verdict(case: tuple[str, str]) -> None:
    """What the asking process does by itself to judge an answer, and what a worker does."""
    text, gold = case
    decided = verdict_or_answer(text, gold)
    if isinstance(decided, Verdict):
        return
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        compare(decided.text, decided.marked, gold)
    except (Exception, _Late):
        pass  # in a worker it is `unparsable` or `timeout`
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Late(BaseException):
    pass


def _ring(*_: Any) -> None:
    raise _Late


DOORS = {  # what is called, with which inputs, how many of them in every run of the tests
    "recipe, text": (yaml_text, YAML_TEXT, 80),
    "recipe, values": (recipe, SETTINGS, 150),
    "recipe, values, TRL's parser": (recipe_parsed, SETTINGS, 20),
    "records, bytes": (record_bytes, LINE_FILE, 150),
    "records, values": (record, groups(), 30),
    "run folder": (run_folder, RUN_FILES, 50),
    "rows of problems": (rows, ROWS, 60),
    "guide's answers": (guide, ROWS, 150),
    "runs of other trainers": (foreign, FOREIGN, 80),
    "gold columns": (gold_columns, st.tuples(LATEX | st.from_regex(r"(\d[-+*]\d=\d;?){1,3}"), VALUES, VALUES), 80),
    "verdicts": (verdict, st.tuples(LATEX, GOLDS), 50),
}  # fmt: skip


def fuzz(name: str, times: int = 1) -> int:
    """Inputs at this door, and `times` as many again from other seeds; how many of them were refused."""
    check, inputs, count = DOORS[name]
    refused = 0

    def enter(given_: Any) -> None:
        nonlocal refused
        try:
            check(given_)
        except DewError as error:
            refused += 1
            assert len(str(error)) < 20_000, "an error that nobody reads"

    logging.disable(logging.CRITICAL)
    before = signal.signal(signal.SIGALRM, _ring)
    plan = settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
                    suppress_health_check=list(HealthCheck))  # fmt: skip
    try:
        for turn in range(times):  # the longer hypothesis draws, the more it thinks about what it has drawn
            seed(turn)(plan(given(inputs)(enter)))()
    finally:
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)
    return refused
