"""A vocabulary split over two or three gloo processes gives what the whole vocabulary gives."""

import math

import pytest
import torch

import trl_tiny as tiny
from dew.errors import ConfigError, ShapeError
from dew.kernels import linear_logprob_entropy
from dew.kernels.sharded import merge

N, D = 7, 8


def inputs(v, bias):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, D, dtype=torch.float64), torch.randn(v, D, dtype=torch.float64)
    hidden[3] *= 40  # one peaked row
    targets = torch.tensor([0, v - 1, -100, v // 2, 1, v // 2 - 1, -100])
    return hidden, weight, torch.randn(v, dtype=torch.float64) if bias else None, targets


def whole(v, bias, **settings):
    hidden, weight, b, targets = inputs(v, bias)
    leaves = [x.requires_grad_() for x in (hidden, weight, b) if x is not None]
    logp, entropy, squares = linear_logprob_entropy(
        hidden, weight, targets, bias=b, entropy_grad=True, sum_sq=True, impl="reference", **settings
    )
    gradients = torch.autograd.grad((logp * weights()).sum() + (entropy * weights().flip(0)).sum(), leaves)
    return logp.detach(), entropy.detach(), squares, gradients


def weights():
    return torch.arange(N, dtype=torch.float64) - 3


def part(rank, folder, sizes, v, bias, **settings):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=len(sizes))
    hidden, weight, b, targets = inputs(v, bias)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    leaves = [hidden, weight[mine].clone(), *([] if b is None else [b[mine].clone()])]
    leaves = [x.requires_grad_() for x in leaves]
    own = dict(zip(("hidden", "weight", "bias"), leaves, strict=False))
    group = torch.distributed.group.WORLD
    settings = {"entropy_grad": True, "sum_sq": True, "group": group, **settings}
    logp, entropy, squares = linear_logprob_entropy(**own, targets=targets, **settings)
    gradients = torch.autograd.grad((logp * weights()).sum() + (entropy * weights().flip(0)).sum(), leaves)
    torch.save((logp.detach(), entropy.detach(), squares, gradients), folder / f"{rank}.pt")
    with pytest.raises(ShapeError, match=f"outside 0 … {v - 1}"):
        linear_logprob_entropy(hidden, own["weight"], targets.clamp_max(0) + v, group=group)
    with pytest.raises(ConfigError, match="split vocabulary"):
        linear_logprob_entropy(hidden, own["weight"], targets, impl="reference", group=group)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("sizes", "bias", "settings"),
    [((5, 5), False, {}), ((6, 2, 5), True, {"temperature": 0.7, "softcap": 5.0})],
)
def test_values_and_gradients_are_those_of_the_whole_vocabulary(sizes, bias, settings, tmp_path):
    v, ranks = sum(sizes), range(len(sizes))
    assert tiny.in_children(lambda rank: part(rank, tmp_path, sizes, v, bias, **settings), len(sizes)) == [0] * len(
        sizes
    )
    *values, (dh, *others) = whole(v, bias, **settings)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in ranks]
    for *own_values, (own_dh, *_) in found:
        torch.testing.assert_close(own_values, values)
        torch.testing.assert_close(own_dh, dh)
    for i, expected in enumerate(others):
        torch.testing.assert_close(torch.cat([found[rank][3][1 + i] for rank in ranks]), expected)


def test_two_halves_by_hand():
    """p = (1/2, 1/4 | 1/8, 1/8): the second half holds 1/4 of the probability, H = 1.75 bits, Σπ² = 11/32."""
    lse = torch.tensor([[0.75], [0.25]]).log() + 3
    entropy = torch.tensor([[math.log(3) - 2 / 3 * math.log(2)], [math.log(2)]])
    logp = torch.tensor([[-math.inf], [math.log(1 / 2)]])
    squares = torch.tensor([[5 / 9], [1 / 2]])  # 4/9 + 1/9 and 1/4 + 1/4
    whole_lse, whole_entropy, whole_logp, whole_squares = merge(lse, entropy, logp, squares)
    assert whole_lse.item() == pytest.approx(3.0)
    assert whole_entropy.item() == pytest.approx(1.75 * math.log(2))
    assert whole_logp.item() == pytest.approx(math.log(1 / 8))
    assert whole_squares.item() == pytest.approx(11 / 32)


def test_a_rank_without_any_probability():
    """−inf on a rank: masked columns. 0 · log 0 = 0."""
    lse = torch.tensor([[1.0], [-math.inf]])
    found = merge(lse, torch.tensor([[0.5], [0.0]]), torch.tensor([[-0.25], [-math.inf]]), torch.ones(2, 1))
    assert [x.item() for x in found] == [1.0, 0.5, -0.25, 1.0]
