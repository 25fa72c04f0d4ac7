"""Change the credit functions, losses and algorithms in small ways, and list the changes that no test notices.

    make mutants                         all of them, one per core at a time: minutes
    python tests/mutants.py gtpo clamp   those whose description contains one of the words

The changes are made in the syntax tree: a comparison or an operator is swapped, a negation dropped, a number changed,
two arguments or branches exchanged, a keyword argument left out, a call such as `.detach()` or `.clamp_min(1)` removed.
Each is tested in a fork of a process that has imported what the tests need. The exit code is 1 if a change survives
that is not in EQUIVALENT.
"""

import ast
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEW = ROOT / "src" / "dew"
SOURCES = [
    DEW / "ops.py",
    DEW / "losses.py",
    *sorted(DEW.glob("credit/[!_]*.py")),
    *sorted(DEW.glob("algorithms/[!_]*.py")),
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
EQUIVALENT = {
    "losses.py: torch.where(mask, old_logp, 0) -> torch.where(mask, old_logp, 1)",  # masked later
    "losses.py: torch.where(mask, logp.to(torch.promote_types(logp.dtype, torch.float32)), 0)"
    " -> torch.where(mask, logp.to(torch.promote_types(logp.dtype, torch.float32)), 1)",
    "credit/comparison.py: mask.sum(-1, keepdim=True).clamp_min(1) -> mask.sum(-1, keepdim=True).clamp_min(2)",
    "credit/comparison.py: 1 / H -> 2 / H",  # divided by a mean that doubles too
    "credit/comparison.py: torch.where(first, place, 0) -> torch.where(first, place, 1)",  # the rest only name levels
    "credit/comparison.py: enumerate([(one,), (one, two)], start=1) -> enumerate([(one,), (one, two)])",
    "credit/comparison.py: start=1 -> start=2",
    "credit/comparison.py: torch.where(shared, length, level) -> torch.where(shared, level, length)",
}
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
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1 if isinstance(value, int) else 2 * value + (value == 0))
        case ast.Call(function, arguments, keywords):
            if isinstance(function, ast.Attribute) and (function.attr.startswith("clamp") or not arguments + keywords):
                yield function.value
            if len(arguments) > 2:
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
                    constant = isinstance(child, ast.Constant)  # shown with what it stands in
                    before = ast.unparse(node if constant else child)
                    children[i] = changed
                    setattr(node, name, children if isinstance(value, list) else changed)
                    yield f"{child.lineno}: {before} -> {ast.unparse(node if constant else changed)}"
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


def start(source: Path, tree: ast.Module) -> int:
    """A process that runs the tests, those first that mention the most of what the file defines."""
    if pid := os.fork():
        return pid
    signal.alarm(LIMIT)
    sys.meta_path.insert(0, Mutated(source, tree))
    names = re.findall(r"^(?:def|class) (\w+)", source.read_text(), re.MULTILINE)
    os._exit(run_tests("-x", *sorted(TESTS, key=lambda test: -sum(map(test.read_text().count, names)))))


def run_tests(*arguments: str | Path) -> int:
    """pytest in this process, silently."""
    outputs = os.dup(1), os.dup(2)
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    code = pytest.main(["-q", "-p", "no:cacheprovider", *map(str, arguments)])
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    return int(code)


def main(words: list[str]) -> int:
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(ROOT / "src"))
    run_tests("--collect-only", *TESTS)  # imports what dew and the tests need; both are imported again in each fork
    for name in [x for x in sys.modules if re.match(r"(dew|tests|conftest|groups|oracles)\b|test_", x)]:
        del sys.modules[name]
    running, survivors, count = dict[int, str](), list[str](), 0

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
                count, running[start(source, tree)] = count + 1, name
                if len(running) == len(os.sched_getaffinity(0)):
                    finish()
    while running:
        finish()
    print(f"{count} changes, {len(survivors)} survive")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
