"""Break the credit functions, losses and algorithms in small ways, and check that a test fails each time.

    make mutants                        all mutants, one per core at a time
    python tests/mutants.py gtpo clamp  those whose description contains one of the words

Mutants are made from the syntax tree: a comparison or an operator is swapped, a negation dropped, a number changed, two
arguments or branches exchanged, a keyword argument left out, a call such as `.detach()` or `.clamp_min(1)` removed. Each
runs in a fork of a process that has imported torch. Survivors are printed, and the exit code is 1 if there are any
besides `EQUIVALENT`.
"""

import ast
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [*sorted((ROOT / "src/dew/credit").glob("*.py")), *sorted((ROOT / "src/dew/algorithms").glob("*.py"))]
SOURCES = [
    ROOT / "src/dew/ops.py",
    ROOT / "src/dew/losses.py",
    *(s for s in SOURCES if s.name not in ("own.py", "__init__.py")),
]
TESTS = [
    "golden",
    "gtpo",
    "grpo_s",
    "turns",
    "outcome_pool",
    "baseline_credit",
    "losses",
    "rules",
    "algorithms",
    "rollouts",
]
LIMIT = 300
"""Seconds after which a mutant counts as caught: some loop for ever."""
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
SKIPPED = ("annotation", "returns", "decorator_list", "bases")
EQUIVALENT: set[str] = set()
"""Mutants that compute the same."""


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
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1 if isinstance(value, int) else 2 * value + (value == 0))
        case ast.Call(function, arguments, keywords):
            if isinstance(function, ast.Attribute) and (function.attr.startswith("clamp") or not arguments + keywords):
                yield function.value
            if len(arguments) > 2:
                yield ast.Call(function, [*arguments[:-2], arguments[-1], arguments[-2]], keywords)
            for keyword in keywords:
                yield ast.Call(function, arguments, [k for k in keywords if k is not keyword])


def mutants(node: ast.AST) -> Iterator[str]:
    """Change the tree in place, one mutant after another, each described by its line."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if name in SKIPPED or not isinstance(child, ast.AST):
                continue
            for changed in variants(child):
                before, after = ast.unparse(child), ast.unparse(changed)
                put(node, name, i, changed)
                yield f"{child.lineno}: {before} -> {after}"
                put(node, name, i, child)
            yield from mutants(child)


def put(node: ast.AST, name: str, i: int, child: ast.AST) -> None:
    if isinstance(getattr(node, name), list):
        getattr(node, name)[i] = child
    else:
        setattr(node, name, child)


class Finder:
    """Import one module from a syntax tree."""

    def __init__(self, source: Path, tree: ast.Module) -> None:
        self.name = ".".join(source.relative_to(ROOT / "src").with_suffix("").parts)
        self.source, self.tree = source, tree

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != self.name:
            return None
        loader = SourceFileLoader(name, str(self.source))
        loader.get_code = lambda _: compile(ast.fix_missing_locations(self.tree), self.source, "exec")  # type: ignore
        return spec_from_file_location(name, self.source, loader=loader)


def run_tests(*arguments: str) -> int:
    """Run pytest in this process, silently."""
    out = os.dup(1), os.dup(2)
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    try:
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))
    finally:
        os.dup2(out[0], 1), os.dup2(out[1], 2)


def warm_up() -> None:
    """Import what the tests import, and forget dew and the tests themselves."""
    run_tests("--collect-only", *tests_of(SOURCES[0]))
    own = ("dew", "tests", "conftest", "groups", "oracles")
    for name in [name for name in sys.modules if name.split(".")[0] in own or name.startswith("test_")]:
        del sys.modules[name]


def tests_of(source: Path) -> list[str]:
    """The tests, those first that mention the most of what the file defines."""
    names = [x.name for x in ast.parse(source.read_text()).body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
    files = [ROOT / f"tests/core/test_{name}.py" for name in TESTS]
    return [str(f) for f in sorted(files, key=lambda f: -sum(map(f.read_text().count, names)))]


def start(source: Path, tree: ast.Module) -> int:
    """A process that runs the tests of a mutant."""
    if pid := os.fork():
        return pid
    signal.alarm(LIMIT)
    sys.meta_path.insert(0, Finder(source, tree))  # type: ignore[arg-type]
    os._exit(run_tests(*tests_of(source)))


def main(words: list[str]) -> int:
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(ROOT / "src"))
    warm_up()
    running, alive, count = dict[int, str](), list[str](), 0

    def finish() -> None:
        pid, status = os.wait()
        if status == 0:
            alive.append(running[pid])
            print(f"survived  {alive[-1]}", flush=True)
        del running[pid]

    for source in SOURCES:
        tree = ast.parse(source.read_text())
        for change in mutants(tree):
            name = f"{source.relative_to(ROOT / 'src/dew')}:{change}"
            if not words or any(word in name for word in words):
                count += 1
                running[start(source, tree)] = name
                if len(running) == len(os.sched_getaffinity(0)):
                    finish()
    while running:
        finish()
    new = [name for name in alive if re.sub(r":\d+:", ":", name) not in EQUIVALENT]
    print(f"{count - len(alive)} of {count} mutants caught, {len(alive) - len(new)} of the others known as equivalent")
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
