"""`dew lab` on language models: adapters of many runs stacked on one model."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dew.algorithms.base import Part
from dew.algorithms.credit import give_credit
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.lora import LoraPolicies, LoraSettings, as_base
from dew.engines.lab.stack import Replica, Stack
from dew.engines.lab.text import TextTask
from dew.rollouts import Rollouts
from tests.support import trl_tiny

SMALL = LoraSettings(
    group_size=4, prompts=3, optimizer_steps=2, generations=3, eval_problems=3, eval_k=2, evaluations=1,
    max_new_tokens=7, rank=4, alpha=8.0, pass_tokens=60,
)  # fmt: skip
SHAPE = {
    "vocab_size": 3 + len(trl_tiny.LETTERS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES = ("Llama", "Qwen2", "Qwen3")


def model(family="Llama", device="cpu", dtype=torch.float32):
    import transformers

    torch.manual_seed(0)
    shape = {**SHAPE, "head_dim": 16} if family == "Qwen3" else SHAPE
    config = getattr(transformers, f"{family}Config")(**shape, attn_implementation="sdpa")
    found = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in found.named_parameters():  # biases and norms that do something
        if parameter.ndim == 1:
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (0 if "bias" in name else 1))
    return found.to(device, dtype)


class Additions(TextTask):
    """Without a data set: an answer is correct if it holds an even digit."""

    def __init__(self, base, tokens):
        self.name, self.base, self.tokens, self._cache = "additions", base, tokens, {}
        self.rows = [{"prompt": f"{i}+{j}=" + "abc"[: i % 3], "answer": str(i + j)} for i in range(8) for j in range(4)]
        self.trained = 24

    def _scored(self, texts, rows):
        return [float(any(digit in text for digit in "02468")) for text in texts]


def stack(arms, seeds=(0,), family="Llama", settings=SMALL, device="cpu", dtype=torch.float32, rate=1e-2):
    base = as_base(family, model(family, device, dtype), trl_tiny.tokenizer())
    task = Additions(base, settings.max_new_tokens)
    replicas = [Replica(arm, seed) for arm in parse_arms(arms, [rate], controls=False) for seed in seeds]
    rates = torch.tensor([x.arm.learning_rate for x in replicas], device=device)
    policies = LoraPolicies(base, task.prompt, [x.seed for x in replicas], rates, settings)
    return Stack(task, policies, replicas, settings, device)


def captured(run):
    """Answers and problems of each generation of a stack."""
    seen, sample = [], run.policies.sample

    def kept(problems, uniforms):
        seen.append((problems, sample(problems, uniforms)))
        return seen[-1][1]

    run.policies.sample = kept
    return seen


def peft_run(family, run, seen):
    """The same run in plain PyTorch: PEFT's layers, torch's Adam, one answer at a time, no packing."""
    from peft import LoraConfig, get_peft_model

    s, replica = run.settings, run.replicas[0]
    config = LoraConfig(r=s.rank, lora_alpha=s.alpha, target_modules="all-linear", lora_dropout=0.0)
    plain = get_peft_model(model(family), config)
    first = stack([replica.arm.label], [replica.seed], family).policies
    named = dict(plain.named_parameters())
    for name, layer in first.layers.items():
        named[f"base_model.model.{name}.lora_A.default.weight"].data.copy_(layer.a[0].T)
    trained = {n: p for n, p in named.items() if p.requires_grad}
    adam = torch.optim.Adam(trained.values(), lr=replica.arm.learning_rate, betas=(0.9, 0.999))
    rule = replace(replica.arm.algorithm, max_tokens=s.max_new_tokens)
    norms = []
    for number, (problems, answers) in enumerate(seen):
        rows = [x[0].unflatten(0, (s.prompts, s.group_size)) for x in (answers.mask, answers.logp, answers.entropy)]
        reward = run.task.rewards(answers, problems.repeat_interleave(s.group_size, 1))[0].view(s.prompts, -1)
        keep = rule.signal(Rollouts(mask=rows[0], reward=reward))
        given = dict(zip(("mask", "logp", "entropy"), (x[keep] for x in rows), strict=True))
        advantages = torch.zeros_like(rows[1])
        advantages[keep] = give_credit(rule, Rollouts(reward=reward[keep], **given)).advantages
        live = (rows[0] & keep[:, None, None]).flatten(0, 1)
        noise = run._uniforms("order", number, s.answers)[0]
        order = (noise + ~live.any(-1)).argsort()[: int(live.any(-1).sum())]
        for i in range(s.optimizer_steps):
            chosen = order[i :: s.optimizer_steps]
            count = rule.divisor(int(live[chosen].sum()), len(chosen))
            for row in chosen.tolist():
                n, prompt = int(live[row].sum()), run.task.prompt(int(problems[0, row // s.group_size]))
                tokens = answers.tokens[0, row, :n]
                logits = plain(torch.cat([torch.tensor(prompt), tokens])[None]).logits[0, len(prompt) - 1 : -1]
                logp = logits.log_softmax(-1).gather(-1, tokens[:, None]).T
                part = Part(mask=live[row : row + 1, :n], old_logp=answers.logp[0, row : row + 1, :n])
                rule.loss(logp, part, advantages.flatten(0, 1)[row : row + 1, :n], count=count)[0].backward()
            norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0))
            adam.step()
            adam.zero_grad()
    return named, torch.stack(norms).view(len(seen), -1).mean(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replica_equals_a_run_with_peft(family):
    run = stack(["dapo", "gtpo"], seeds=[1, 2], family=family)
    seen = captured(run)
    for number in range(3):
        run.generation(number)
    one = SimpleNamespace(replicas=[run.replicas[3]], **{k: getattr(run, k) for k in ("settings", "task")})
    one._uniforms = lambda *args: run._uniforms(*args)[3:]
    own = [(problems[3:], type(answers)(*(None if x is None else x[3:] for x in answers))) for problems, answers in seen]
    named, norms = peft_run(family, one, own)
    torch.testing.assert_close(torch.stack([x["grad_norm"][3] for x in run.history]), norms, rtol=1e-4, atol=1e-6)
    for name, layer in run.policies.layers.items():
        for side, x in (("A", layer.a[3].T), ("B", layer.b[3])):
            expected = named[f"base_model.model.{name}.lora_{side}.default.weight"]
            # Adam divides by the size of a gradient: where it is near 0, rounding decides the direction.
            near = (x - expected).abs() <= 1e-5 + 1e-3 * expected.abs()
            assert near.float().mean() > 0.98, (name, side, (x - expected).abs().max())
