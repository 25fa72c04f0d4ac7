"""LoRA adapters of many replicas on the linear layers of one model: the base is shared, A and B have a replica axis R.

Input rows are sorted by replica. Each is multiplied by the shared base weight and by the adapter of its replica. Layers
that read the same input are computed as one product, on a GPU by `lora_kernels`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dew.decoding.same_input import SAME_INPUT, ComputedTogether, joined
from dew.engines.lab.tasks import generator
from dew.engines.lab.tiny import HAS_TRITON
from dew.errors import ConfigError, Problem

TILE, WIDE = 64, 64
"""As in `lora_kernels`. Layers are only joined if their widths are multiples of WIDE."""


class Rows:
    """Which replica each input row belongs to. Rows are sorted by replica."""

    def __init__(self, replicas: int, device: torch.device | str) -> None:
        self.every = torch.arange(replicas, device=device)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def arrange(self, owners: Tensor, tokens: int = 1) -> None:
        """Set the rows from the `owners` (B,) of B sequences, in ascending order, with `tokens` rows each."""
        self.count((owners[:, None] == self.every).sum(0) * tokens, len(owners) * tokens)

    def count(self, counts: Tensor, total: int) -> None:
        """Set the number of rows of each replica, (R,). Tensors for the same total keep their addresses, for graphs."""
        ends = counts.cumsum(0)
        starts, tiles = F.pad(ends, (1, 0)), (counts + TILE - 1) // TILE
        last = tiles.cumsum(0)
        number = torch.arange(total // TILE + len(self.every), device=counts.device)
        replica = torch.searchsorted(last, number, right=True)
        inside, replica = replica < len(self.every), replica.clamp_max(len(self.every) - 1)
        first = starts[replica] + (number - (last - tiles)[replica]) * TILE
        new = torch.stack([replica, first, torch.where(inside, ends[replica], 0)], 1).int(), starts.int()
        for old, now in zip(self._kept.setdefault(total, new), new, strict=True):
            old.copy_(now)

    def __getitem__(self, total: int) -> tuple[Tensor, Tensor]:
        """(tiles, 3) replica, first row and end of each tile; (R + 1,) first row of each replica, and the end."""
        return self._kept[total]


class StackedLinear(nn.Module):
    """A frozen linear layer with an adapter for each replica: A (R, in, r) and B (R, out, r)."""

    joined: "Joined"
    """The layers that are computed in one product with this one."""
    number: int
    """The index of this layer among them."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base, self.a, self.b = base, a, b

    def forward(self, x: Tensor) -> Tensor:
        return self.joined.output(self.number, x)


class Joined:
    """Linear layers that read the same input and are computed as one product."""

    def __init__(self, layers: Sequence[StackedLinear], rows: Rows, scale: float) -> None:
        self.layers, self.rows, self.scale = layers, rows, scale
        self.output, bases = ComputedTogether(self._product), [x.base for x in layers]
        self.weight = joined([x.weight for x in bases])
        self.bias = None if bases[0].bias is None else joined([x.bias for x in bases])
        self.a, self.b = ([getattr(x, side) for x in layers] for side in "ab")
        self.low = tuple(torch.cat(x, i).to(self.weight.dtype).detach() for x, i in ((self.a, 2), (self.b, 1)))
        """All A and all B, concatenated and in the dtype of the base, for the kernels."""
        rank = self.a[0].shape[2]
        self.parts = [*self.low[0].split(rank, 2), *self.low[1].split([x.out_features for x in bases], 1)]
        for i, layer in enumerate(layers):
            layer.joined, layer.number = self, i
        if self.weight.is_cuda and HAS_TRITON:
            from dew.engines.lab import lora_kernels

            self._kernels, device = lora_kernels, self.weight.device
            sizes = ([bases[0].in_features], rank * len(bases)), ([x.out_features for x in bases], rank)
            self._layouts = [lora_kernels.Layout(*x, device) for x in sizes]

    def _product(self, x: Tensor) -> Sequence[Tensor]:
        if self.weight.is_cuda and HAS_TRITON:
            found = self.fused(x)
            return found if isinstance(found, tuple) else (found,)
        flat = x.reshape(-1, x.shape[-1])
        starts = self.rows[len(flat)][1].tolist()
        base = F.linear(flat, self.weight, self.bias).split([len(x.base.weight) for x in self.layers], 1)
        parts = zip(base, self.a, self.b, strict=True)
        return [(y + self.scale * _adapted(flat, a, b, starts)).view(*x.shape[:-1], -1) for y, a, b in parts]

    def fused(self, x: Tensor, gated: bool = False) -> Any:
        """The output of each layer, by the kernels; if `gated`, silu of the first times the second."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        given = (self.low, self._layouts, self.rows[len(flat)], self.scale, gated, *self.a, *self.b)
        found = self._kernels.AdaptedLinear.apply(flat, self.weight, self.bias, *given)
        if isinstance(found, tuple):
            return tuple(y.view(*x.shape[:-1], -1) for y in found)
        return found.view(*x.shape[:-1], -1)


def _adapted(x: Tensor, a: Tensor, b: Tensor, starts: Sequence[int]) -> Tensor:
    parts = zip(x.split([j - i for i, j in pairwise(starts)]), a, b, strict=True)
    return torch.cat([rows @ A.to(x.dtype) @ B.to(x.dtype).T for rows, A, B in parts])


def stack_adapters(model: Any, rows: Rows, seeds: Sequence[int], settings: Any) -> dict[str, StackedLinear]:
    """Replace the linear layers, or those of an earlier stack; return the new ones. As in PEFT, A is random, B is 0."""
    wanted, head = settings.target_modules.split(","), model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear and module is not head and not name.endswith(".base"))
        or isinstance(module, StackedLinear)
    }
    chosen = {name: x for name, x in linear.items() if wanted == ["all"] or name.rpartition(".")[2] in wanted}
    if not chosen:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        what = f"target_modules={settings.target_modules}: the model has no such linear layers."
        raise ConfigError(Problem(what, remedy=f"Name some of: {known}."))
    found = dict[str, StackedLinear]()
    for name, module in linear.items():
        layer: Any = module.base if isinstance(module, StackedLinear) else module
        if name in chosen:
            weight = layer.weight
            bound, shape = layer.in_features**-0.5, (layer.in_features, settings.rank)
            a = {seed: torch.rand(shape, generator=generator(seed, "adapter", name)) for seed in set(seeds)}
            A = torch.stack([a[seed] * 2 * bound - bound for seed in seeds]).to(weight.device).requires_grad_()
            B = torch.zeros(len(seeds), layer.out_features, settings.rank, device=weight.device, requires_grad=True)
            layer = found[name] = StackedLinear(layer, A, B)
        model.set_submodule(name, layer)
    for some in _same_input(found):
        Joined([found[name] for name in some], rows, settings.alpha / settings.rank)
    return found


def _same_input(layers: dict[str, StackedLinear]) -> list[list[str]]:
    """Group the layers that read the same input: q, k and v of attention; gate and up of a gated MLP. Either all layers
    of a group have a bias or none has."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name, layer in layers.items():
        owner, _, own = name.rpartition(".")
        kind = next((" ".join(x) for x in SAME_INPUT if own in x), own)
        if layer.base.out_features % WIDE:
            kind = own
        groups.setdefault((owner, kind, layer.base.bias is None), []).append(name)
    return list(groups.values())


def fuse(model: Any) -> list[Any]:
    """Compute norms and gated MLPs with one kernel each; return the rotary embeddings, to be replaced in updates."""
    if model.device.type != "cuda" or not HAS_TRITON:
        return []
    from dew.decoding.fused import fused_parts
    from dew.engines.lab.lora_kernels import Rotary

    def forward(mlp: Any, x: Tensor) -> Tensor:
        found: Tensor = mlp.down_proj(mlp.gate_proj.joined.fused(x, gated=True))
        return found

    parts = fused_parts(model)
    for mlp in model.modules():
        both = [getattr(mlp, name, None) for name in SAME_INPUT[1]]
        joined = getattr(both[0], "joined", None)
        if joined and joined.layers == both and "SiLU" in type(getattr(mlp, "act_fn", None)).__name__:
            parts.append((mlp, "forward", partial(forward, mlp)))
    rotary = [(owner, name, Rotary.apply) for owner, name, _ in parts if name != "forward"]
    for part in parts:
        if part[1] == "forward":
            setattr(*part)
    return rotary
