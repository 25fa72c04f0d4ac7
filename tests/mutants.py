"""Change the credit functions, losses and algorithms in small ways, and list the changes that no test notices.

    make mutants                         all of them, one per core at a time: minutes
    python tests/mutants.py gtpo clamp   those whose description contains one of the words

The changes are made in the syntax tree: a comparison or an operator is swapped, a negation dropped, a number changed,
two arguments or branches exchanged, a keyword argument left out, a call such as `.detach()` or `.clamp_min(1)` removed.
Each is tested in a fork of a process that has imported what the tests need, with the tests that call the changed
function, quick ones first. The exit code is 1 if a change survives that is not in equivalent_mutants.txt, or
if an entry of that file is stale: there is no such change any more.
"""

import ast
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
DEW = ROOT / "src" / "dew"
SOURCES = [
    DEW / "ops.py",
    DEW / "losses.py",
    *sorted(DEW.glob("credit/[!_]*.py")),
    *(x for x in sorted(DEW.glob("algorithms/[!_]*.py")) if x.stem != "user_rules"),
]
NAMES = "golden gtpo grpo_s turns outcome_pool comparison baseline_credit losses rules algorithms rollouts"
TESTS = [ROOT / f"tests/core/test_{name}.py" for name in NAMES.split()]
LIMIT = 300
"""Seconds after which a change counts as noticed: some loop for ever."""
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
SKIPPED = ("annotation", "returns", "decorator_list", "bases")
EQUIVALENT = {line.partition("  # ")[0] for line in (ROOT / "tests/equivalent_mutants.txt").read_text().splitlines()}
"""Changes that make no difference, or none on a CPU; without the line number."""


def variants(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in SWAPPED:
            yield ast.Compare(left, [SWAPPED[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in SWAPPED:
            yield ast.BinOp(left, SWAPPED[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPPED[type(op)](), values)
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value) if not 0 < value < 1e-5:  # not what only guards against rounding
            yield ast.Constant(value + 1 if isinstance(value, int) else 2 * value + (value == 0))
        case ast.Call(function, arguments, keywords):
            if isinstance(function, ast.Attribute) and (function.attr.startswith("clamp") or not arguments + keywords):
                yield function.value
            if len(arguments) > 2 and ast.unparse(function) != "unmet":  # a list of messages
                yield ast.Call(function, [*arguments[:-2], arguments[-1], arguments[-2]], keywords)
            for keyword in keywords:
                if keyword.arg != "device":
                    yield ast.Call(function, arguments, [k for k in keywords if k is not keyword])


def mutants(node: ast.AST) -> Iterator[str]:
    """Change the tree in place, one change at a time: `line: before -> after`."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if name not in SKIPPED and isinstance(child, ast.AST):
                for changed in variants(child):
                    small = isinstance(child, ast.Constant | ast.UnaryOp)  # shown with what it stands in
                    before = ast.unparse(node if small else child)
                    children[i] = changed
                    setattr(node, name, children if isinstance(value, list) else changed)
                    yield f"{child.lineno}: {before} -> {ast.unparse(node if small else changed)}"
                children[i] = child
                setattr(node, name, value)
                yield from mutants(child)


class Mutated(SourceFileLoader):
    """Imports a module of dew from a syntax tree."""

    def __init__(self, source: Path, tree: ast.Module) -> None:
        super().__init__(".".join(source.relative_to(ROOT / "src").with_suffix("").parts), str(source))
        self.tree = tree

    def find_spec(self, name, path=None, target=None):
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, name):
        return compile(ast.fix_missing_locations(self.tree), self.path, "exec")


class Callers:
    """Plugin of pytest: the functions that each test calls, as (file, first line), and the seconds it takes."""

    def __init__(self) -> None:
        self.found = dict[str, tuple[float, list[tuple[str, int]]]]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        seen, began = set(), time.process_time()
        sys.settrace(lambda frame, *_: seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno)))
        yield
        sys.settrace(None)
        ours = [place for place in seen if Path(place[0]) in SOURCES]
        self.found[item.nodeid] = time.process_time() - began, ours
        return True


def trace() -> dict[str, list[tuple[str, int]]]:
    """The functions that each test calls, quick tests first; found in a process of its own."""
    reader, writer = os.pipe()
    if not os.fork():
        run_tests(TESTS, callers := Callers())
        with os.fdopen(writer, "w") as file:
            json.dump(callers.found, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        found = json.load(file)
    os.wait()
    return {test: calls for test, (_, calls) in sorted(found.items(), key=lambda item: item[1][0])}


def callers(source: Path, tree: ast.Module, line: int, calls: dict[str, list[tuple[str, int]]]) -> list[str]:
    """The tests that call the function with this line; all for a line outside of functions."""
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.lineno <= line <= x.end_lineno]
    if not functions:
        return list(calls)
    of = max(functions, key=lambda x: x.lineno)
    first = min([of.lineno, *(x.lineno for x in of.decorator_list)])
    return [test for test, places in calls.items() if any(f == str(source) and first <= n <= line for f, n in places)]


def start(source: Path, tree: ast.Module, tests: list[str]) -> int:
    if pid := os.fork():
        return pid
    signal.alarm(LIMIT)
    sys.meta_path.insert(0, Mutated(source, tree))

    def select(items):
        items[:] = sorted((x for x in items if x.nodeid in order), key=lambda x: order[x.nodeid])

    order = {test: i for i, test in enumerate(tests)}
    files = {ROOT / test.split("::")[0] for test in tests}
    os._exit(run_tests(["-x", *files], SimpleNamespace(pytest_collection_modifyitems=select)) if tests else 0)


def run_tests(arguments: Iterable[str | Path], plugin: object = None) -> int:
    """pytest in this process, silently."""
    outputs = os.dup(1), os.dup(2)
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    code = pytest.main(["-q", "-p", "no:cacheprovider", *map(str, arguments)], plugins=[plugin] if plugin else [])
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    return int(code)


def main(words: list[str]) -> int:
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(ROOT / "src"))
    run_tests(["--collect-only", *TESTS])  # imports what dew and the tests need; both are imported again in each fork
    for name in [x for x in sys.modules if re.match(r"(dew|tests|conftest|groups|oracles)\b|test_", x)]:
        del sys.modules[name]
    calls = trace()
    running, survivors, count, stale = dict[int, str](), list[str](), 0, set(EQUIVALENT)

    def finish() -> None:
        pid, status = os.wait()
        name = running.pop(pid)
        if status == 0 and re.sub(r":\d+:", ":", name) not in EQUIVALENT:
            survivors.append(name)
            print(f"survives  {name}", flush=True)

    for source in SOURCES:
        tree = ast.parse(source.read_text())
        for change in mutants(tree):
            name = f"{source.relative_to(DEW)}:{change}"
            if not words or any(word in name for word in words):
                tests = callers(source, tree, int(change.partition(":")[0]), calls)
                count, running[start(source, tree, tests)] = count + 1, name
                if len(running) == len(os.sched_getaffinity(0)):
                    finish()
            stale.discard(f"{source.relative_to(DEW)}:{change.partition(':')[2]}")
    while running:
        finish()
    for name in sorted(stale):
        print(f"stale     {name}")
    print(f"{count} changes, {len(survivors)} survive")
    return int(bool(survivors or stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
