"""Log-probability and entropy from hidden states: compare dew with other libraries on one GPU.

    pip install --no-deps --target PEERS trl==1.16.0 verl==0.9.1 liger-kernel==0.8.5 cut-cross-entropy==25.1.1
    pip install --target PEERS "nvidia-cutlass-dsl[cu13]==4.8.1" apache-tvm-ffi          # for Liger's Hopper kernels
    python benchmarks/kernels.py --peers PEERS --out benchmarks/results/kernels-h200.md

Needs an NVIDIA GPU of compute capability 9.0. Implementations that cannot be imported or fail are listed and skipped.
verl's kernels run without assertions, because one rejects widths that are not a multiple of 128. `--also FILE` adds
your own implementations: a Python file whose `entries()` yields pairs of a name and a function
(hidden, weight, targets) -> (logp, entropy).

bfloat16 inputs, medians of device time. A GPU at its power limit is faster after a rest, so implementations take turns:
in each of five rounds each runs twice as warm-up and twice timed; those slower than 150 ms stop after three rounds. MB
is the peak memory beyond inputs and gradients; err H the largest error of the entropy on 64 rows against float64.
"""

import argparse
import contextlib
import importlib
import importlib.util
import math
import platform
import re
import site
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dew.kernels import linear, linear_logprob_entropy

SHAPES = {"7B": (16_384, 3_584, 152_064), "32B": (8_192, 5_120, 152_064), "SmolLM2": (32_768, 576, 49_152)}
TRL_CHUNK = 32_768
"""Columns per tile in TRL's trainers."""
SAMPLE = 64
"""Rows on which the entropy is checked."""
ROUNDS, WARM, TIMED = 5, 2, 2
"""Turns of each implementation, and the warm-up and timed runs of a turn."""
SLOW_MS, SLOW_ROUNDS = 150.0, 3
"""Slower implementations get fewer turns."""

Op = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
Problem = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Entry:
    """One implementation, a function of (hidden, weight, targets), and how it is measured."""

    name: str
    op: Op
    forward: bool = True
    """Whether the forward pass is measured separately."""
    frozen: bool = False
    silent: float = 0.0
    """Share of the rows with zero upstream gradient."""
    sketch: bool = False
    """Whether it was added with --also."""


@dataclass
class Row:
    """Measurements of one implementation; the columns are "forward" and "both"."""

    entry: Entry
    error: float | None = None
    mb: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def ms(self, column: str) -> float | None:
        return statistics.median(self.times[column]) if self.times.get(column) else None


# Ours.


def without_keeping(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Always four matrix products, however much memory is free."""
    with patch.object(linear, "KEPT", (0.0, 0, 0)):
        return linear_logprob_entropy(hidden, weight, targets)


def ours() -> Iterator[Entry]:
    yield Entry("dew", linear_logprob_entropy)
    yield Entry("dew, with Σπ²", partial(linear_logprob_entropy, sum_sq=True))
    yield Entry("dew, four products", without_keeping, forward=False)
    yield Entry("dew, four products, half of the rows without gradient", without_keeping, forward=False, silent=0.5)
    yield Entry("dew, frozen head", linear_logprob_entropy, forward=False, frozen=True)


# Peers.


def stand_in(name: str, path: Path | None = None, **names: Any) -> None:
    """Register a module without importing its package; submodules are still found through `path`."""
    module = types.ModuleType(name)
    module.__dict__.update(names)
    if path is not None:
        module.__path__ = [str(path)]
    sys.modules[name] = module


def found(folder: Path | None, package: str) -> Path:
    """The folder of a package, without importing it."""
    for place in [folder, *map(Path, sys.path)]:
        if place is not None and (place / package).is_dir():
            return place / package
    raise ImportError(f"{package} is not installed")


def without_assertions(name: str, path: Path) -> None:
    """Import a module as `python -O` would."""
    module = types.ModuleType(name)
    module.__file__ = str(path)
    module.__package__ = name.rpartition(".")[0]
    sys.modules[name] = module
    exec(compile(path.read_text(), str(path), "exec", optimize=1), module.__dict__)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logq = torch.log_softmax((hidden @ weight.T).float(), -1)
    entropy = -(logq.detach().exp() * logq.detach()).sum(-1)
    return logq.gather(-1, targets[:, None])[:, 0], entropy


def trl(folder: Path | None) -> Iterator[Entry]:
    root = found(folder, "trl")
    stand_in("trl", root)
    stand_in("trl.trainer", root / "trainer")
    stand_in("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    chunked = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    full = importlib.import_module("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy

    def tiles(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = chunked.apply(hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ("entropy",))
        return out[0], out[1].detach()

    def logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp, entropy = full(hidden @ weight.T, targets)
        return logp, entropy.detach()

    yield Entry("TRL chunked", tiles)
    yield Entry("TRL full logits", logits)


def verl(folder: Path | None) -> Iterator[Entry]:
    root = found(folder, "verl")
    stand_in("verl", root)
    stand_in("verl.utils", root / "utils")
    stand_in(
        "verl.utils.device",
        get_device_capability=torch.cuda.get_device_capability,
        get_device_name=lambda: "cuda",
        is_cuda_available=True,
        get_torch_device=lambda: torch.cuda,
    )
    stand_in("verl.utils.kernel", root / "utils" / "kernel")
    without_assertions("verl.utils.kernel.kernels", root / "utils" / "kernel" / "kernels.py")
    sys.modules["verl.utils.kernel"].__dict__["kernels"] = sys.modules["verl.utils.kernel.kernels"]
    apply = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def op(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp, entropy = apply(hidden, weight, targets, 1.0, "none")
        return logp, entropy.detach()

    yield Entry("verl Triton", op)


def liger(folder: Path | None) -> Iterator[Entry]:
    importlib.import_module("cutlass")
    name = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    apply = importlib.import_module(name).LigerFusedLinearScaledCrossEntropyFunction.apply

    def split(tiles: int) -> Op:
        def op(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            loss, entropy = apply(hidden, weight, targets, 1.0, -100, tiles, True)
            return -loss, entropy.detach()

        return op

    for tiles in (1, 2):
        yield Entry(f"Liger SM90, split {tiles}", split(tiles))


def liger_cross_entropy(folder: Path | None) -> Iterator[Entry]:
    name = "liger_kernel.ops.fused_linear_cross_entropy"
    function = importlib.import_module(name).LigerFusedLinearCrossEntropyFunction

    def op(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        return -function.apply(hidden, weight, targets)[0], None

    yield Entry("Liger fused linear CE (no entropy)", op, forward=False)


def cut_cross_entropy(folder: Path | None) -> Iterator[Entry]:
    apply = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def op(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        return -apply(hidden, weight, targets, reduction="none"), None

    yield Entry("cut-cross-entropy (no entropy)", op)


PEERS = {
    "trl": trl,
    "verl": verl,
    "liger-kernel (CE)": liger_cross_entropy,
    "cut-cross-entropy": cut_cross_entropy,
    "liger-kernel": liger,
}


def sketches(file: Path) -> Iterator[Entry]:
    spec = importlib.util.spec_from_file_location("also", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, op in module.entries():
        yield Entry(name, op, sketch=True)


def entries(folder: Path | None, also: Path | None, missing: list[str]) -> list[Entry]:
    """All implementations that can be imported; the others are listed in `missing`."""
    every = [*ours(), Entry("naive, all logits", naive)]
    makers: dict[str, Callable[[], Iterator[Entry]]] = {name: partial(make, folder) for name, make in PEERS.items()}
    if also is not None:
        makers[also.name] = partial(sketches, also)
    for name, make in makers.items():
        try:
            every += make()
        except Exception as error:
            missing.append(f"{name}: {one_line(error)}")
    return every


def one_line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# Measuring.


def peak(work: Callable[[], Any]) -> float:
    """Peak memory in MB beyond what is currently allocated, which includes the gradients of an earlier run."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def problem(shape: tuple[int, int, int]) -> Problem:
    """Scores with a spread of 2, as confident as a language model's."""
    n, d, v = shape
    torch.manual_seed(0)
    hidden = torch.randn(n, d, device="cuda").bfloat16()
    weight = (torch.randn(v, d, device="cuda") * 2 / math.sqrt(d)).bfloat16()
    return hidden, weight, torch.randint(v, (n,), device="cuda")


def true_entropy(hidden: Tensor, weight: Tensor) -> Tensor:
    logq = torch.log_softmax(hidden[:SAMPLE].double() @ weight.double().T, -1)
    return -(logq.exp() * logq).sum(-1)


class Runner:
    """One implementation on one problem."""

    def __init__(self, entry: Entry, given: Problem):
        hidden, weight, targets = given
        self.entry, self.given, self.row = entry, given, Row(entry)
        self.x, self.w = hidden.detach().requires_grad_(), weight.detach().requires_grad_(not entry.frozen)
        self.g = torch.randn(len(targets), device="cuda")
        self.g[torch.rand(len(targets), device="cuda") < entry.silent] = 0

    def forward(self) -> Tensor | None:
        with torch.no_grad():
            return self.entry.op(*self.given)[1]

    def both(self) -> None:
        self.release()
        logp, *_ = self.entry.op(self.x, self.w, self.given[2])
        logp.backward(self.g if logp.ndim else None)

    def release(self) -> None:
        self.x.grad = self.w.grad = None

    def once(self, truth: Tensor) -> None:
        """Error of the entropy and peak memory, after a run that compiles."""
        entropy = self.forward()
        if entropy is not None:
            self.row.error = (entropy[:SAMPLE].double() - truth).abs().max().item()
        del entropy
        self.both()
        if self.entry.forward:
            self.row.mb["forward"] = peak(self.forward)
        self.row.mb["both"] = peak(self.both)
        self.release()

    def turn(self, column: str) -> None:
        """Warm up, then measure the time."""
        work = {"forward": self.forward, "both": self.both}[column]
        for _ in range(WARM):
            work()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED)]
        for start, end in marks:
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        self.row.times.setdefault(column, []).extend(start.elapsed_time(end) for start, end in marks)
        self.release()


def run(name: str, every: list[Entry], missing: list[str]) -> list[Row]:
    """Measure one shape. Implementations that fail are listed and skipped."""
    given = problem(SHAPES[name])
    truth = true_entropy(*given[:2])
    runners = [Runner(entry, given) for entry in every]

    def attempt(runner: Runner, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            runners.remove(runner)
            runner.release()
            missing.append(f"{runner.entry.name} at {name}: {one_line(error)}")
            print(missing[-1], flush=True)

    for runner in list(runners):
        torch.cuda.empty_cache()
        attempt(runner, partial(runner.once, truth))
    for column in ("forward", "both"):
        for turn in range(ROUNDS):
            for runner in list(runners):
                slow = (runner.row.ms(column) or 0.0) > SLOW_MS
                if column in runner.row.mb and not (slow and turn >= SLOW_ROUNDS):
                    attempt(runner, partial(runner.turn, column))
    return [runner.row for runner in runners]


# Writing.


def against(own: Row, other: Row, column: str) -> str:
    mine, theirs = own.ms(column), other.ms(column)
    if mine is None or theirs is None:
        return "not measured"
    return f"{mine:.2f} / {theirs:.2f} ms ({other.entry.name}) = {mine / theirs:.3f}"


def ratio(rows: list[Row], column: str, *, small: bool) -> str:
    """dew against the fastest peer that also gives the entropy; `small`: among those that do not hold all logits."""
    own = [r for r in rows if r.entry.name == "dew"]
    peers = [r for r in rows if not r.entry.name.startswith("dew") and not r.entry.sketch and r.error is not None]
    peers = [r for r in peers if r.ms(column) and not (small and "logits" in r.entry.name)]
    if not own or not peers:
        return "no peer measured"
    return against(own[0], min(peers, key=lambda r: r.ms(column) or math.inf), column)


def table(name: str, rows: list[Row]) -> str:
    n, d, v = SHAPES[name]

    def show(x: float | None, form: str) -> str:
        return "" if x is None else format(x, form)

    lines = [f"## {name}: N {n:,}, D {d:,}, V {v:,}", ""]
    lines += ["| | fwd ms | MB | f+b ms | MB | err H |", "|---|---|---|---|---|---|"]
    for r in rows:
        pairs = ((show(r.ms(c), ".2f"), show(r.mb.get(c), ",.0f")) for c in ("forward", "both"))
        cells = [cell for pair in pairs for cell in pair]
        lines.append(f"| {r.entry.name} | {' | '.join(cells)} | {show(r.error, '.0e')} |")
    lines += ["", "dew against the fastest peer that gives the entropy:", ""]
    for title, column in (("forward", "forward"), ("forward and backward", "both")):
        lines.append(f"- {title}, without all logits in memory: {ratio(rows, column, small=True)}")
        lines.append(f"- {title}, any: {ratio(rows, column, small=False)}")
    for own in (r for r in rows if r.entry.name == "dew"):
        for r in (r for r in rows if r.entry.name == "dew, with Σπ²"):
            lines.append(f"- Σπ², forward: {against(r, own, 'forward')}")
        for r in (r for r in rows if r.entry.sketch):
            both = [against(own, r, column) for column in ("forward", "both")]
            lines.append(f"- added, forward: {'; forward and backward: '.join(both)}")
    return "\n".join([*lines, ""])


def version(package: str, folder: Path | None) -> str:
    for found_ in metadata.distributions(name=package, path=[str(folder)] if folder else sys.path):
        return f"{package} {found_.version}"
    return f"{package} (version unknown)"


def document(date: str, packages: str, tables: list[str], missing: list[str]) -> str:
    head = [
        "# Kernels on one GPU",
        "",
        f"{date} · {torch.cuda.get_device_name()} · Python {platform.python_version()}, torch {torch.__version__}, "
        f"triton {metadata.version('triton')} · {packages}",
        "",
        f"bfloat16 inputs, medians of device time. Implementations take turns: {ROUNDS} rounds ({SLOW_ROUNDS} if "
        f"slower than {SLOW_MS:.0f} ms) of {WARM} warm-up and {TIMED} timed runs. MB = peak beyond the inputs "
        f"and the gradients; err H = largest error of the entropy on {SAMPLE} rows against float64. Written by "
        "`benchmarks/kernels.py`.",
        "",
    ]
    tail = ["Skipped: " + ("nothing." if not missing else ""), "", *(f"- {line}" for line in missing), ""]
    return "\n".join([*head, *tables, *tail])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the packages of the other libraries")
    parser.add_argument("--also", type=Path, help="Python file with your own entries()")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", help="measure only implementations whose whole name matches this regular expression")
    parser.add_argument("--date", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.peers:
        site.addsitedir(str(args.peers))  # also what a package's .pth file adds
    missing: list[str] = []
    every = [e for e in entries(args.peers, args.also, missing) if not args.only or re.fullmatch(args.only, e.name)]
    packages = ", ".join(version(p, args.peers) for p in ("trl", "verl", "liger-kernel", "cut-cross-entropy"))
    tables: list[str] = []
    for name in args.shapes:
        tables.append(table(name, run(name, every, missing)))
        print(tables[-1], flush=True)
        if args.out:
            args.out.write_text(document(args.date, packages, tables, missing))
    print("Skipped:", *missing, sep="\n- ")


if __name__ == "__main__":
    main()
