"""`plain_head`: find a model's linear head, or explain why it has none."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dew.kernels import Head, linear_logprob_entropy, plain_head


def model(layer, **config):
    return SimpleNamespace(get_output_embeddings=lambda: layer, config=SimpleNamespace(**config))


@pytest.mark.parametrize(
    "config, temperature, softcap",
    [
        ({"final_logit_softcapping": 30.0}, 1.0, 30.0),
        ({"logits_scaling": 8.0}, 8.0, None),
        ({"logit_scale": 0.0625}, 16.0, None),
        ({"final_logit_softcapping": None}, 1.0, None),
        ({}, 1.0, None),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_head_and_the_transforms_of_its_config_are_found(config, temperature, softcap, bias):
    layer = nn.Linear(4, 9, bias=bias)
    head = plain_head(model(layer, **config))
    assert isinstance(head, Head) and head.weight is layer.weight and head.bias is layer.bias
    assert (head.temperature, head.softcap) == (temperature, softcap)


class Wrapped(nn.Linear):
    """Like an adapter layer: a Linear by class that does more."""


HOOKED, EMPTY = nn.Linear(4, 9), nn.Linear(4, 9)
HOOKED.register_forward_hook(lambda *args: None)
EMPTY.weight = nn.Parameter(torch.empty(0))


@pytest.mark.parametrize(
    "given, says",
    [
        (SimpleNamespace(), "get_output_embeddings"),
        (model(None), "NoneType"),
        (model(Wrapped(4, 9)), "Wrapped"),
        (model(HOOKED), "hooks"),
        (model(EMPTY), "sharded"),
        (model(nn.Linear(4, 9), final_logit_softcapping=30.0, logits_scaling=8.0), "logits_scaling"),
        (model(nn.Linear(4, 9), lm_head_multiplier=2.0), "lm_head_multiplier"),
    ],
)
def test_other_heads_give_a_reason(given, says):
    reason = plain_head(given)
    assert isinstance(reason, str) and says in reason


@pytest.mark.parametrize("adapter", [False, True])
def test_head_reproduces_the_logits_of_a_transformers_model(adapter):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma2Config(vocab_size=50, head_dim=8, num_key_value_heads=1, **sizes)
    llm = transformers.Gemma2ForCausalLM(config).eval()
    if adapter:
        peft = pytest.importorskip("peft")
        llm = peft.get_peft_model(llm, peft.LoraConfig(target_modules=["q_proj"]))
    head = plain_head(llm)
    assert isinstance(head, Head)
    tokens = torch.arange(1, 8)[None]
    with torch.no_grad():
        out = llm(tokens, output_hidden_states=True)
        settings = {"bias": head.bias, "temperature": head.temperature, "softcap": head.softcap}
        got, _ = linear_logprob_entropy(out.hidden_states[-1][0], head.weight, tokens[0], **settings)
    torch.testing.assert_close(got, out.logits[0].log_softmax(-1).gather(1, tokens[0][:, None])[:, 0])
