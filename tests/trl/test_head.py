"""dew's operator inside TRL's forward gives what the logits give."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head

import trl_tiny as tiny
from dew import GTPO
from dew.engines.compat import FUSED_HEAD
from dew.engines.trl.loss import exact_head, uses_exact_head


def model(**settings):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, **settings
    )
    return LlamaForCausalLM(config)


def batch():
    ids = torch.randint(0, 37, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 7:] = -100
    return ids, labels


def from_logits(net, ids, labels, temperature):
    logits = net(ids).logits[:, :-1] / temperature
    logp = logits.log_softmax(-1)
    mask = labels[:, 1:] != -100
    chosen = logp.gather(-1, labels[:, 1:].clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(mask, chosen, 0), torch.where(mask, -(logp.exp() * logp).sum(-1), 0)


def fused(net, head=None, temperature=1.0):
    """By TRL's forward, with dew's operator unless another head is given."""
    ids, labels = batch()
    add_fused_lm_head(net, temperature=temperature, outputs=("log_probs", "entropy"))
    with head or exact_head():
        return net(ids, labels=labels, fused_lm_head=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_values_and_gradients_are_those_of_the_logits(temperature, tied):
    net = model(tie_word_embeddings=tied)
    ids, labels = batch()
    expected = from_logits(net, ids, labels, temperature)
    expected[0].sum().backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    out = fused(net, temperature=temperature)
    torch.testing.assert_close(out.log_probs, expected[0])
    torch.testing.assert_close(out.entropy, expected[1])
    out.log_probs.sum().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], msg=name)


@tiny.runs_trls_loss
def test_a_scaled_head_is_scaled():
    net = model(logit_scale=0.25)
    theirs, ours = fused(net, nullcontext()), fused(net)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs)
    torch.testing.assert_close(ours.entropy, theirs.entropy)


def test_a_head_that_zero_3_partitions_is_gathered_again_in_the_backward_pass(monkeypatch):
    """A simulated partition: outside of the context the weight is empty, as DeepSpeed leaves it."""
    net = model(tie_word_embeddings=False)
    ids, labels = batch()
    from_logits(net, ids, labels, 1.0)[0].sum().backward()
    expected = net.lm_head.weight.grad.clone()
    net.zero_grad()
    weight, full, gathered = net.lm_head.weight, net.lm_head.weight.data, []
    weight.ds_status = "partitioned"

    @contextmanager
    def gather(*parameters):
        gathered.append(len(parameters))
        weight.data = full
        yield
        weight.data = torch.empty(0)

    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gather)
    out = fused(net)
    assert weight.numel() == 0 and len(gathered) == 1
    (gradient,) = torch.autograd.grad(out.log_probs.sum(), weight)
    assert weight.numel() == 0 and len(gathered) == 2
    torch.testing.assert_close(gradient, expected)


def test_trls_head_is_restored_after_an_error():
    theirs = getattr(utils, FUSED_HEAD)
    with pytest.raises(RuntimeError), exact_head():
        assert getattr(utils, FUSED_HEAD) is not theirs
        raise RuntimeError
    assert getattr(utils, FUSED_HEAD) is theirs


def test_a_head_that_is_not_linear_is_logged(caplog):
    net = model()
    assert uses_exact_head(True, net, GTPO())
    net.lm_head = torch.nn.Sequential(net.lm_head)
    assert not uses_exact_head(True, net, GTPO())
    assert "TRL's head" in caplog.text and "not a plain nn.Linear" in caplog.text
