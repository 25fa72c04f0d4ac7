"""Hostile text has no effect: not where answers are judged, nor in records, the report, the console, or recipes."""

import ast
import datetime
import gzip
import io
import json
import logging
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from attacks import ATTACKS, PLACES, completions
from dew.cli import console
from dew.cli.console import LogToConsole
from dew.cli.runs import RunView
from dew.errors import DewError
from dew.report import build
from dew.rewards.math import math_verdicts, workers
from dew.run.config import parse_yaml
from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord, read_records

SOURCES = sorted((Path(__file__).parents[2] / "src" / "dew").rglob("*.py"))


# ── models from someone else: the linter (pyproject.toml) refuses eval, pickles and shells ───────────────────
def findings(text: str) -> list[str]:
    """Calls that could run code of a model or ask for it on the terminal."""
    found = []
    for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name, said = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        loads = name.endswith(".from_pretrained") and name != "PeftConfig.from_pretrained"
        # False, or what the user allowed
        closed = said.get("trust_remote_code") in ("False", "parsed.args.trust_remote_code", "trusted")
        wrong = (loads and not closed) or (loads and "Model" in name and said.get("use_safetensors") != "True")
        found += [name] if wrong or (name.endswith("torch.load") and said.get("weights_only") != "True") else []
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p).split("src/dew/")[-1])
def test_no_file_runs_code_of_a_model(path):
    assert findings(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["torch.load(f)", "torch.load(f, weights_only=False)", "AutoTokenizer.from_pretrained(x)",
     "AutoModelForCausalLM.from_pretrained(x, trust_remote_code=True, use_safetensors=True)",
     "AutoModelForCausalLM.from_pretrained(x, trust_remote_code=False)"],
)  # fmt: skip
def test_the_search_itself_finds_each(line):
    assert findings(line)


# ── verifiers ───────────────────────────────────────────────────────────────────────────────────────────────
WATCHER = r"""
import json, os, signal, sys
from dew.rewards import extract, normalize, verifier, verifiers
from dew.rewards.worker import violates
from dew.rewards.latex import WARM_UP, compare
from dew.tasks.datasets import TEMPLATES, render
import logging
logging.disable(logging.CRITICAL)
for case in WARM_UP: compare(*case)
countdown, equation = map(verifier, ("countdown", "equation"))
completions = json.load(sys.stdin)
seen, on = [], False

def watch(event, arguments):
    global on
    if not on: return
    if violates(event, arguments):
        on = False
        seen.append([event, repr(arguments)[:200], now])
        on = True

class Late(BaseException): pass
def ring(*_): raise Late
signal.signal(signal.SIGALRM, ring)

def core(answer, marked, gold):
    signal.setitimer(signal.ITIMER_REAL, 2)
    try: compare(answer, marked, gold)
    except (Exception, Late): pass
    finally: signal.setitimer(signal.ITIMER_REAL, 0)

sys.addaudithook(watch)
for now in completions:
    on = True
    found = extract.find_answer(now)
    extract.find_gold(now)
    extract.is_formula(now)
    normalize.read_number(now)
    normalize.words(now); normalize.gold_choice(now); normalize.final_choice(now)
    for form in (verifiers.think_format, verifiers.think_answer_format, verifiers.boxed_format): form([now])
    countdown.check(now, numbers=[3, 5], answer="8")
    equation.check(now, numbers=[3, 5], answer=8)
    for template in TEMPLATES: render(template, now)
    if found is not None:
        core(found.text, found.marked, "8")
        core(found.text, found.marked, r"\frac{x}{2}")
    core("x+1", True, now)
    on = False
print(json.dumps(seen))
"""


def python(script: str, cwd: Path, given: object = None) -> Any:
    """The JSON that a script prints last; `given` is its standard input."""
    command, sent = [sys.executable, "-c", script], json.dumps(given)
    done = subprocess.run(command, input=sent, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(("places", "every"), [(1, 3), pytest.param(len(PLACES), 1, marks=pytest.mark.slow)])
def test_no_verifier_runs_writes_starts_or_connects(tmp_path, places, every):
    pytest.importorskip("math_verify")
    canary = tmp_path / "canary"
    assert python(WATCHER, tmp_path, completions(places, str(canary))[::every]) == []
    assert not canary.exists() and list(tmp_path.iterdir()) == []


def test_the_watcher_sees_what_sympy_would_have_done(tmp_path):
    """With sympy's own parser in place the same watch finds text that is run."""
    unprotected = WATCHER.replace(
        "completions = json",
        "import dew.rewards.latex as r; from importlib import reload; "
        "reload(r.sympy_parser); r._parse_gold.cache_clear(); completions = json",
    )
    assert any(event == "compile" for event, *_ in python(unprotected, tmp_path, [r"\boxed{12345 x}"]))


@pytest.mark.parametrize("part", [slice(1, None, 6), pytest.param(slice(None), marks=pytest.mark.slow)])
def test_through_the_pool_every_attack_gets_a_verdict_and_leaves_nothing(tmp_path, monkeypatch, part):
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    workers.close()
    canary = tmp_path / "canary"
    texts = completions(1, str(canary))[part]
    try:
        verdicts = math_verdicts(texts, ["8"] * len(texts), timeout=3)
    finally:
        workers.close()
    assert {v.status for v in verdicts} <= {"correct", "wrong", "unparsable", "timeout"}
    assert list(tmp_path.iterdir()) == []


DEEDS = [
    "eval('1')", "exec('x = 1')", "compile('1', '<string>', 'eval')", "compile('1', 'x.py', 'eval') and eval('1')",
    "os.system('true')", "os.popen('true')", "subprocess.run(['true'])", "os.fork()", "os.execv('/bin/true', ['true'])",
    "os.posix_spawn('/bin/true', ['true'], {})", "open('f', 'w')", "open('f', 'a')", "open('f', 'x')",
    "open('f', 'r+b')",
    "os.open('f', os.O_CREAT | os.O_WRONLY)", "os.mkdir('d')", "os.remove('kept')", "os.rename('kept', 'f')",
    "os.symlink('/etc', 's')", "socket.create_connection(('127.0.0.1', 9))", "socket.socket().bind(('', 0))",
    "ctypes.CDLL(None)", "pickle.loads(pickle.dumps(os.getcwd))", "os.kill(os.getpid(), 9)", "shutil.rmtree('.')",
    "(lambda: 0).__class__((lambda: 0).__code__.replace(co_consts=()), {})", "os.chmod('kept', 0)",
    "sympy.sympify('1+1')", "sympy.lambdify(sympy.Symbol('x'), sympy.Symbol('x'))(1)",
]  # fmt: skip


def test_a_confined_process_can_do_nothing_of_it(tmp_path):
    (tmp_path / "kept").write_text("kept")
    script = (
        "import ctypes, json, os, pickle, shutil, socket, subprocess, sys, sympy, sympy.parsing.sympy_parser\n"
        "from dew.rewards.worker import enter_sandbox\ndone = []\nenter_sandbox()\n"
    )
    for deed in DEEDS:
        script += f"try:\n    {deed}\n    done.append({deed!r})\nexcept Exception: pass\n"
    assert python(script + "print(json.dumps(done))", tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


WORKER = """
import json, os, socket
from dew.rewards import latex
from dew.rewards.worker import run_worker
latex.compare = lambda *request: open("made", "w").close() or ("correct", None)
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    run_worker(theirs, latex.handle)
    os._exit(0)
theirs.close()
ours.sendall(json.dumps({"answer": "", "marked": True, "gold": "", "timer": 20}).encode() + b"\\n")
print(ours.recv(100).decode())
"""


def test_a_worker_whose_parser_opens_a_file_to_write_finds_nothing(tmp_path):
    assert python(WORKER, tmp_path) == ["unparsable", None] and list(tmp_path.iterdir()) == []


# ── records, report, console ────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory) -> Path:
    """A run whose every text is an attack."""
    folder = tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>"
    run = RunFolder(folder)
    attack = iter(ATTACKS * 3)
    run.write_run(
        {"name": "</title><script>alert(2)</script>", "model": next(attack), "data": next(attack), "seed": "\x1b[2J"}
    )
    (folder / "config.yaml").write_text("task: </script><script>alert(1)</script>\n")
    run.append_metrics({"step": 1, "reward": 0.5, "<script>": 1.0, "reward/\x1b[31m": 2.0})
    run.append_alarm({"step": 1, "alarm": "<b>", "message": "\x1b]0;owned\x07[link=x]y[/link]", "remedy": "<script>"})
    run.write_scores(
        [{"when": "before", "task": "<script>", "scores": {"<svg onload=x>": {"value": 0.5, "low": 0, "high": 1}}}]
    )
    for step in range(3):
        groups = []
        for number in range(30):
            text = next(attack)
            answers = [
                AnswerRecord([text, next(attack)], correct, float(correct), extracted=text, verdict=text,
                             entropy=[0.5, 1.0], advantage=[1.0, -1.0], shaped=[1.0, 1.1], grpo=[1.0, 1.0])
                for correct in (True, False)
            ]  # fmt: skip
            groups.append(
                GroupRecord(step, number, next(attack), answers, gold=text, algorithm=text, settings={text: text})
            )
        run.write_records(step, groups)
    return folder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_records_keep_every_attack_as_it_is(hostile_run):
    groups = [g for path in RunFolder(hostile_run).record_files() for g in read_records(path)]
    assert len(groups) == 90 and all(g.answers[0].tokens[0] == g.gold for g in groups)
    raw = gzip.decompress(RunFolder(hostile_run).record_files()[0].read_bytes())
    assert raw.isascii() and b"\x1b" not in raw


def test_the_page_has_the_same_elements_whatever_a_model_wrote(hostile_run, tmp_path):
    harmless = RunFolder(tmp_path / "harmless")
    harmless.append_metrics({"step": 1, "reward": 0.5})
    page = build([hostile_run], tmp_path / "hostile.html").read_text()
    ours = build([harmless.path], tmp_path / "harmless.html").read_text()
    found, expected = Tags(), Tags()
    found.feed(page)
    expected.feed(ours)
    assert found.tags == expected.tags
    assert not [name for name in found.attributes if name.startswith("on")]
    for attack in ATTACKS:
        if len(attack) > 12:
            assert attack not in page or attack in ours, attack


def printed(show) -> str:
    """What a terminal would get, without the sequences that rich makes itself."""
    file = io.StringIO()
    terminal = console.PlainConsole(file=file, force_terminal=True, color_system="truecolor", width=100)
    show(terminal)
    return re.sub(r"\x1b\[[0-9;]*[mABCDGHJK]|\x1b\[\?25[lh]", "", file.getvalue())


def test_nothing_but_text_reaches_the_terminal():
    def show(terminal):
        table = Table(title=attack)
        table.add_column(attack)
        table.add_row(attack)
        for thing in (attack, Text(attack), table):
            terminal.print(thing, soft_wrap=True)

    for attack in ATTACKS:
        text, line = printed(show), attack.split("\n")[0]
        assert all(c.isprintable() or c == "\n" for c in text), attack
        if line.isprintable() and line.isascii() and len(line) < 60:
            assert text.startswith(line)  # neither brackets nor names of emoji are taken for more


def test_commands_show_a_hostile_run_without_a_control_character(hostile_run, dew, tmp_path):
    for words in (
        ["explain", hostile_run],
        ["report", hostile_run, "--out", tmp_path / "r.html"], ["report", tmp_path / "\x1b[2J[link=x]y[/link]"],
        ["train", "\x1b[31m[bold]x.yaml"], ["resume", "\x1b]0;x\x07"], ["recipes", "[/]\x1b[2J"],
        ["compare", hostile_run, "--algorithms", "\x1b[31m[red]"],
    ):  # fmt: skip
        _, out, err = dew(*words)
        assert all(c.isprintable() or c == "\n" for c in out + err), words
        assert "Traceback" not in err


def test_progress_and_warnings_too(hostile_run, capsys):
    view = RunView(hostile_run)
    view.label = "\x1b[2J"
    view.poll()
    text = printed(lambda terminal: [terminal.print(line) for line in (view.line(), *view.alarms)])
    assert all(c.isprintable() or c == "\n" for c in text)
    LogToConsole().emit(logging.LogRecord("dew", 30, "", 0, "\x1b[2J[link=x]", None, None))
    assert capsys.readouterr().err == "·[2J[link=x]\n"


# ── recipes and templates ───────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("form", ["%s", "a: %s", "a: [%s]", "%s: a", "task: countdown\nx: &x %s\ny: *x"])
def test_yaml_gives_plain_values_or_an_error(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    for attack in ATTACKS:
        try:
            value = parse_yaml(form.replace("%s", attack.replace("CANARY", str(tmp_path / "canary"))))
        except DewError:
            continue
        assert _plain(value), attack
    assert list(tmp_path.iterdir()) == []


def _plain(x: object) -> bool:
    if isinstance(x, dict):
        return all(map(_plain, [*x.keys(), *x.values()]))
    if isinstance(x, list | set | tuple):
        return all(map(_plain, x))
    return x is None or type(x) in (str, int, float, bool, bytes, datetime.date, datetime.datetime)
