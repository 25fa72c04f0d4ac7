"""`dew lab` on language models: adapters of many runs stacked on one model."""

import json
import math
import shutil
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tests.support import trl_tiny

from dew.algorithms.base import Part
from dew.algorithms.credit import give_credit
from dew.engines.lab import LoraSettings, differences, load_study, markdown, study
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.lora import Base, LoraPolicies, as_base, load_base
from dew.engines.lab.stack import Replica, Stack
from dew.engines.lab.tasks import Answers
from dew.engines.lab.text import TextTask
from dew.errors import ConfigError
from dew.rewards import verifier
from dew.rollouts import Rollouts
from dew.tasks import task

studies = import_module("dew.engines.lab.study")
SMALL = LoraSettings(
    group_size=4, prompts=3, optimizer_steps=2, generations=3, eval_problems=3, eval_k=2, evaluations=1,
    max_new_tokens=7, rank=4, alpha=8.0, pass_tokens=60,
)  # fmt: skip
SHAPE = {
    "vocab_size": 3 + len(trl_tiny.LETTERS), "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
"""With it q, k and v are joined, as are gate and up; with Qwen3's own width of heads q, k and v are not."""
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
        self.name, self.base, self.tokens = "additions", base, tokens
        self.rows = [{"prompt": f"{i}+{j}=" + "abc"[: i % 3], "answer": str(i + j)} for i in range(8) for j in range(4)]
        self.prompts = [base.tokenizer(row["prompt"])["input_ids"] for row in self.rows]
        self.trained, self.judge, self._early = 24, verifier("countdown"), []

    def _scored(self, texts, rows):
        return [float(any(digit in text for digit in "02468")) for text in texts]


def stack(arms, seeds=(0,), family="Llama", settings=SMALL, device="cpu", dtype=torch.float32, rate=1e-2):
    base = as_base(family, model(family, device, dtype), trl_tiny.tokenizer())
    task = Additions(base, settings.max_new_tokens)
    replicas = [Replica(arm, seed) for arm in parse_arms(arms, [rate], controls=False) for seed in seeds]
    rates = torch.tensor([x.arm.learning_rate for x in replicas], device=device)
    squares = any(x.arm.algorithm.needs_sum_sq for x in replicas)
    policies = LoraPolicies(base, task.prompts, [x.seed for x in replicas], rates, settings, sum_sq=squares)
    return Stack(task, policies, replicas, settings, device)


def captured(run):
    """Answers and problems of each generation of a stack."""
    seen, sample = [], run.policies.sample

    def kept(problems, uniforms):
        seen.append((problems, sample(problems, uniforms)))
        return seen[-1][1]

    run.policies.sample = kept
    return seen


def scored(policies, problems, answers):
    """Log-probabilities and entropies of the answers, in one pass."""
    problems, tokens, mask = (x.to(policies.device) for x in (problems, answers.tokens, answers.mask))
    with mock.patch.object(policies, "pass_tokens", 4096):
        ((_, asked),) = policies.passes(problems, mask.sum(-1))
    return policies.score(asked, tokens, mask)


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
            count = rule.divisor(int(live.sum()), len(order)) / s.optimizer_steps
            for row in chosen.tolist():
                n, prompt = int(live[row].sum()), run.task.prompts[int(problems[0, row // s.group_size])]
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
    for number in range(3):  # from the second on, the adapters are not 0
        run.generation(number)
        assert (run.history[-1]["sampling/logp_difference"] < 1e-5).all()
    one = SimpleNamespace(replicas=[run.replicas[3]], **{k: getattr(run, k) for k in ("settings", "task")})
    one._uniforms = lambda *args: run._uniforms(*args)[3:]
    own = [(p[3:], type(answers)(*(None if x is None else x[3:] for x in answers))) for p, answers in seen]
    named, norms = peft_run(family, one, own)
    found = torch.stack([x["grad_norm"][3] for x in run.history])
    assert (found > 0.01).sum() >= 2
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=1e-7)
    for name, layer in run.policies.layers.items():
        for side, x in (("A", layer.a[3].T), ("B", layer.b[3])):
            expected = named[f"base_model.model.{name}.lora_{side}.default.weight"]
            # Adam divides by the size of a gradient: where it is near 0, rounding decides the direction.
            near = (x - expected).abs() <= 1e-5 + 1e-3 * expected.abs()
            assert near.float().mean() > 0.98, (name, side, (x - expected).abs().max())


@pytest.mark.parametrize("algorithm", ["gtpo", "grpo_s"])
def test_the_loss_and_its_gradient_are_those_of_the_trainer(algorithm, tmp_path):
    from peft import LoraConfig

    from dew.engines.trl.loss import loss_part

    adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0)
    others = {"rollout_func": trl_tiny.scripted, "peft_config": adapters}
    trainer = trl_tiny.ready(tmp_path, others=others, algorithm=algorithm)
    batch = trl_tiny.generation(trainer)
    torch.manual_seed(1)
    named = dict(trainer.model.named_parameters())
    for parameter in (p for p in named.values() if p.requires_grad):
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # away from the policy that sampled
    expected = trainer._loss(trainer.model, batch)
    expected.backward()

    plain = trl_tiny.model()
    plain.load_state_dict({k: named[f"base_model.model.{_wrapped(k, named)}"] for k in plain.state_dict()})
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    base = as_base("tiny", plain.eval().requires_grad_(False), trl_tiny.tokenizer())
    policies = LoraPolicies(base, prompts, [0], torch.tensor([1e-3]), replace(SMALL, pass_tokens=4096))
    for name, layer in policies.layers.items():
        a, b = (named[f"base_model.model.{name}.lora_{side}.default.weight"] for side in "AB")
        layer.a.data.copy_(a.T[None])
        layer.b.data.copy_(b[None])
    tokens, mask = batch["completion_ids"][None], batch["completion_mask"].bool()[None]
    problems = torch.arange(len(prompts)).view(1, -1, 1)
    ((_, rows),) = policies.passes(problems, mask.sum(-1))
    logp, entropy = policies.score(rows, tokens, mask)
    share = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    part, count = loss_part(batch, logp[0], entropy[0]), batch["divisor"] * share
    loss = trainer.algorithm.loss(logp[0], part, batch["advantages"], count=count)[0]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    policies.adam.backward(loss)
    largest = max(p.grad.abs().max() for p in policies.parameters.values())
    assert largest > 1e-3, "a batch without gradient proves nothing"
    for name, layer in policies.layers.items():
        a, b = (named[f"base_model.model.{name}.lora_{side}.default.weight"].grad for side in "AB")
        torch.testing.assert_close(layer.a.grad[0], a.T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.b.grad[0], b, rtol=1e-4, atol=1e-5)


def _wrapped(name, named):
    """The name of a base weight inside PEFT's layers."""
    module, _, kind = name.rpartition(".")
    inner = f"{module}.base_layer.{kind}"
    return inner if f"base_model.model.{inner}" in named else name


def test_rules_that_read_the_sum_of_squares_get_it():
    run = stack(["dapo", "otb"], seeds=[0])
    seen = captured(run)
    run.generation(0)
    answers = seen[0][1]
    logp, mask = answers.logp, answers.mask
    assert (answers.sum_sq[mask] >= logp[mask].exp() ** 2 - 1e-6).all() and (answers.sum_sq[mask] <= 1 + 1e-6).all()
    assert (answers.sum_sq[mask] >= (-answers.entropy[mask]).exp() - 1e-6).all()  # Jensen
    assert (run.history[0]["grad_norm"] > 0).all()


def test_answers_are_judged_in_another_process_while_others_are_sampled(monkeypatch):
    base = load_base("tiny", "cpu")
    task = TextTask("countdown", base, 12, 4)
    texts = [task.rows[0]["prompt"], "1+1=2", "7"]
    ids = [[*base.tokenizer(text).input_ids, base.ends[0]] for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in ids], batch_first=True, padding_value=-1)[None]
    facts = torch.tensor([[[0], [1], [1]]])
    answers = Answers(tokens, tokens * 0.0, tokens * 0.0, tokens >= 0)
    expected = task.rewards(answers, facts)
    task.ended([0, 1], tokens[0, :2])
    here = []
    monkeypatch.setattr(task, "_scored", lambda texts, rows: here.extend(texts) or [0.25] * len(texts))
    found = task.rewards(answers, facts)
    assert found[0, :2].tolist() == expected[0, :2].tolist() and found[0, 2] == 0.25 and len(here) == 1
    task.base.tokenizer.clean_up_tokenization_spaces = True  # such a tokenizer decodes no answers as one empty text
    task.ended([0, 1, 1], tokens[0])
    assert task.rewards(answers, facts).tolist() == expected.tolist()
    task.base.tokenizer.clean_up_tokenization_spaces = False
    task._process.popen.kill()  # then they are judged here
    task.ended([0, 1], tokens[0, :2])
    assert task.rewards(answers, facts).tolist() == [[0.25] * 3]


def test_a_reward_function_is_called_as_in_training(tmp_path):
    """With token ids and the columns of the data. What is not a finite number counts as 0."""
    code = "def score(completions, completion_ids, prompts, answer, **_):\n"
    code += "    return [{1: None, 2: float('inf')}.get(len(ids), len(ids)) for ids in completion_ids]\n"
    (tmp_path / "mine.py").write_text(code)
    base = load_base("tiny", "cpu")
    task = TextTask("countdown", base, 12, 4, f"{tmp_path}/mine.py:score")
    mask = torch.arange(3) < torch.tensor([[1], [2], [3]])
    tokens = torch.where(mask, 5, -1)[None]
    answers = Answers(tokens, tokens * 0.0, tokens * 0.0, mask[None])
    assert task.rewards(answers, torch.tensor([[[0]]])).tolist() == [[0.0, 0.0, 3.0]]


def test_a_file_named_like_a_built_in_task_does_not_get_its_verifier(tmp_path):
    file = tmp_path / "countdown.jsonl"
    file.write_text("\n".join(map(json.dumps, task("countdown").rows(20))))
    with pytest.raises(ConfigError, match=r"countdown.jsonl has no verifier of its own"):
        TextTask(str(file), load_base("tiny", "cpu"), 12, 4)


def test_the_kl_divergence_is_that_from_the_base_model():
    """0 at the start, and after an update the mean difference from an unchanged model."""
    run = stack(["dapo", "dew"], seeds=(0, 1))
    seen = captured(run)
    for number in range(3):
        run.generation(number)
    assert [sorted({"kl"} & x.keys()) for x in run.history] == [[], [], ["kl"]]  # one evaluation, at the end
    run.generation(2)  # with other adapters
    (problems, answers), fresh = seen[-1], model()
    for i, kl in enumerate(run.history[-1]["kl"].tolist()):
        differences = []
        numbers = problems[i, :, 0].repeat_interleave(SMALL.group_size).tolist()
        for row in range(0, len(numbers), 4):  # a quarter of the answers
            tokens, logp, mask = (x[i, row] for x in (answers.tokens, answers.logp, answers.mask))
            prompt, answer = run.task.prompts[numbers[row]], tokens[mask]
            logits = fresh(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1 : -1]
            differences += (logp[mask] - logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]).tolist()
        assert kl == pytest.approx(sum(differences) / len(differences), abs=1e-5) and abs(kl) > 1e-4
    new = stack(["dapo"], settings=replace(SMALL, generations=1))
    new.generation(0)
    assert new.history[0]["kl"].item() == pytest.approx(0, abs=1e-6)


def test_replicas_do_not_leak_into_one_another():
    """To rounding: the rows of all runs are one product, and libraries add up in an order that depends on its size."""
    alone, beside = stack(["gtpo"], seeds=[3]), stack(["gtpo", "dapo@0.05"], seeds=[3])
    other = next(i for i, x in enumerate(beside.replicas) if x.arm.label == "gtpo")
    for number in range(3):
        for run in (alone, beside):
            run.generation(number)
        for name, x in alone.history[-1].items():
            torch.testing.assert_close(x[0], beside.history[-1][name][other], rtol=1e-4, atol=1e-5)
    different = {name for name, x in beside.history[-1].items() if (x[0] - x[1]).abs() > 1e-4}
    assert {"entropy", "grad_norm"} <= different


def test_waiting_prompts_take_the_places_of_their_own_replica():
    run = stack(["dapo"], seeds=[0, 1])
    run.generation(0)
    problems = torch.arange(20).view(1, 20, 1).expand(2, -1, -1)
    uniforms = run._uniforms("held-out", 0, 40, 7, 2)
    whole = run.policies.sample(problems, uniforms)
    run.policies.settings = replace(SMALL, prompts=2, group_size=2)  # 4 rows at once instead of 12
    few = run.policies.sample(problems, uniforms)
    assert torch.equal(whole.tokens, few.tokens) and whole.mask.any(-1).all()
    torch.testing.assert_close(whole.logp, few.logp, rtol=1e-4, atol=1e-5)


def test_a_pass_takes_at_most_half_of_the_memory(monkeypatch):
    config = SimpleNamespace(hidden_size=100, intermediate_size=50, num_hidden_layers=2)
    config.get_text_config = lambda: config
    gpu = SimpleNamespace(device=torch.device("cuda"), config=config, dtype=torch.bfloat16)
    gpu.get_memory_footprint = lambda: 1_000_000
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=5_000_000))
    base = Base("m", gpu, None, (), None)  # (800 + 200) numbers x 2 layers x 2 bytes a token, of 4 MB
    assert [base.pass_tokens(LoraSettings(pass_tokens=n)) for n in (49_152, 100)] == [500, 100]
    gpu.device = torch.device("cpu")
    monkeypatch.setattr("dew.engines.lab.lora.free_memory", lambda: 2_000_000)
    assert base.pass_tokens(LoraSettings()) == 250


# ── whole studies on the model that comes with dew ──────────────────────────────────────────────────────────
FAST = LoraSettings(
    group_size=4, prompts=4, optimizer_steps=1, generations=3, eval_problems=4, eval_k=2, evaluations=2,
    max_new_tokens=6, rank=4, alpha=8.0, pass_tokens=4096,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _few_problems():
    """Generating and tokenizing 20,000 of them takes longer than these studies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dew.engines.lab.text.MOST", 100)
        yield


def run_study(folder, arms=("dapo", "dew"), **more):
    """Judged by their digits, some of the answers are correct although they are short."""
    how = {"model": "tiny", "tasks": ["countdown"], "seeds": 2, "settings": FAST, "device": "cpu", **more}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTask, "ended", lambda *_: None)
        patch.setattr(TextTask, "_scored", Additions._scored)
        return study(list(arms), output=folder, learning_rates=[1e-3], say=lambda _: None, **how)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study with controls: dapo, gtpo, gtpo without weights, gtpo with permuted weights."""
    folder = tmp_path_factory.mktemp("study")
    run_study(folder, arms=["dapo", "gtpo"], controls=True)
    return folder


def numbers(folder):
    return {path.parent.name: path.read_text() for path in folder.rglob("metrics.jsonl")}


def test_a_study_on_a_model_is_resumed_within_a_stack(tmp_path, monkeypatch):
    found = run_study(tmp_path / "whole", seeds=1)
    assert len(found) == 2 and {"area", "pass@1", "pass@2"} <= found[0].scores.keys()
    monkeypatch.setattr(studies, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(studies, "CHECKPOINT_SHARE", math.inf)
    generation, calls = Stack.generation, []

    def interrupted(self, number):
        calls.append(number)
        if calls.count(2):
            raise KeyboardInterrupt
        return generation(self, number)

    monkeypatch.setattr(Stack, "generation", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(tmp_path / "killed", seeds=1)
    assert (tmp_path / "killed" / studies.CHECKPOINT).exists() and not list((tmp_path / "killed").rglob("run.json"))
    edited = [Replica(replace(arm, source="edited"), 0) for arm in parse_arms(["dapo", "dew"], [1e-3])]
    kept = torch.load(tmp_path / "killed" / studies.CHECKPOINT, weights_only=False)
    assert studies._checkpoint(tmp_path / "killed", "countdown", edited, kept["made"]) is None  # of the earlier rule
    monkeypatch.setattr(Stack, "generation", lambda self, number: calls.append(number) or generation(self, number))
    del calls[:]
    shutil.copytree(tmp_path / "killed", tmp_path / "changed")
    run_study(tmp_path / "changed", seeds=1, settings=replace(FAST, generations=2))
    assert calls == [0, 1]  # not from the checkpoint, which has other settings
    del calls[:]
    run_study(tmp_path / "killed", seeds=1)
    assert calls == [2] and not (tmp_path / "killed" / studies.CHECKPOINT).exists()
    assert (lines := numbers(tmp_path / "killed")) == numbers(tmp_path / "whole")
    assert all(json.loads(line)["grad_norm"] > 0 for text in lines.values() for line in text.splitlines())


def test_a_study_stops_at_its_limit(tmp_path, monkeypatch):
    """A generation takes 10 s by this clock, a stack of 3 of them 30."""
    generation, clock = Stack.generation, [0.0]

    def timed(self, number):
        clock[0] += 10
        return generation(self, number)

    monkeypatch.setattr(Stack, "generation", timed)
    monkeypatch.setattr(studies, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    how = {"arms": ["otb"], "seeds": 4, "runs_at_once": 2}
    assert len(run_study(tmp_path, limit_seconds=45, **how)) == 2  # a second stack would not end in time
    assert len(run_study(tmp_path, limit_seconds=15, **how)) == 2  # it is interrupted after two generations
    assert (tmp_path / studies.CHECKPOINT).exists()
    clock[0] = 0
    assert len(run_study(tmp_path, **how)) == 4 and clock[0] == 10  # its last generation


def test_the_adapter_of_a_run_loads_with_peft_and_its_run_is_exported_and_evaluated(finished, tmp_path, dew):
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file

    run = finished / "countdown" / "gtpo-lr0.001-seed0"
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(run / "adapter")).eval()
    base = load_base("tiny", "cpu")
    policies = LoraPolicies(base, [], [0], torch.tensor([1e-3]), FAST)
    stored = load_file(run / "adapter" / "adapter_model.safetensors")
    for name, layer in policies.layers.items():
        layer.a.data.copy_(stored[f"base_model.model.{name}.lora_A.weight"].T[None])
        layer.b.data.copy_(stored[f"base_model.model.{name}.lora_B.weight"][None])
        assert layer.b.abs().sum() > 0
    ids = base.tokenizer("3,7,2>8:", return_tensors="pt")
    greedy = {"do_sample": False, "max_new_tokens": 20}
    expected = loaded.generate(**ids, **greedy)
    for width in range(1, 40):
        policies.rows.arrange(torch.zeros(1, dtype=torch.long), width)
    assert torch.equal(base.model.generate(**ids, **greedy), expected)
    torch.testing.assert_close(base.model(**ids).logits, loaded(**ids).logits, rtol=1e-4, atol=1e-4)
    code, _, err = dew("export", run, tmp_path / "best")  # the same, merged, and with the base's tokenizer
    assert code == 0, err
    merged = load_base(str(tmp_path / "best"), "cpu")
    assert merged.tokenizer("3").input_ids
    torch.testing.assert_close(merged.model(**ids).logits, loaded(**ids).logits, rtol=1e-4, atol=1e-4)
    code, out, err = dew("eval", run, "--problems", "2", "-k", "1")  # on the run's task
    assert code == 0 and "countdown: 2 held-out problems" in out and "pass@1" in out, err


def test_the_summary_compares_with_placebos(finished):
    found = load_study(finished)
    assert "permuted tokens" in markdown(found)
    assert {d.baseline for d in differences(found, "countdown", "pass@1", "placebo")} == {"gtpo(placebo=True)"}
    entry = json.loads((found[0].folder / "scores.json").read_text())[0]
    assert len(entry["solved"]) == 2 and len(entry["solved"][0]) == 4  # evaluations, problems


def test_a_study_on_a_file_stays_in_its_folder_and_keeps_to_its_problems(tmp_path):
    problems = [{x: row[x] for x in ("prompt", "answer", "numbers")} for row in task("countdown").rows(20)]
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, problems)))
    how = {"tasks": [str(file)], "reward": "countdown", "settings": replace(FAST, eval_problems=50)}
    found = run_study(tmp_path / "study", seeds=1, **how)
    assert [r.arm for r in found] == ["dapo", "dew"] and list(file.parent.iterdir()) == [file]
    entry = json.loads((found[0].folder / "scores.json").read_text())[0]
    assert entry["n_problems"] == len(entry["solved"][0]) < 20
    file.write_text("\n".join(map(json.dumps, problems[1:])))
    with pytest.raises(ConfigError, match="trained on other problems"):
        run_study(tmp_path / "study", seeds=2, **how)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--model", "no/such/model"], "no folder"),
        (["--model", "tiny", "--task", "countdwn"], "countdown"),
        (["--task", "gsm8k"], "--model"),
        (["--reward", "math"], "--model"),
        (["--model", "tiny", "--task", "countdown", "--settings", "{rnak: 3}"], "rank"),
        (["--model", "tiny", "--task", "countdown", "--settings", "{target_modules: attention}"], "q_proj"),
        (["--model", "tiny", "--task", "countdown", "--reward", "maths"], "math"),
        (["--model", "tiny", "--settings", "{task_settings: 3}"], "not a mapping"),
    ],
)
def test_mistakes_are_explained(typed, words, dew, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = dew("lab", "dapo", "--seeds", "1", *typed)
    assert code and words in error


def test_between_its_optimizer_steps_an_update_does_not_wait_for_the_device(monkeypatch):
    """All passes are planned before the first step, and no targets are checked."""
    run, called = stack(["dapo", "gtpo"], [1, 2]), []
    monkeypatch.setattr("dew.kernels.linear._live_rows", lambda *args: pytest.fail("reads the targets"))
    for owner, name in ((run.policies, "passes"), (run.policies.adam, "step")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, own=own, name=name: called.append(name) or own(*args))
    run.generation(0)
    steps = called.count("step")
    assert steps > 1 and called == ["passes"] * steps + ["step"] * steps


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_the_kernels_train_as_plain_pytorch_does(family):
    plain, exact = stack(["dapo", "gtpo"], [1, 2], family), stack(["dapo", "gtpo"], [1, 2], family, device="cuda")
    rough = stack(["dapo", "gtpo"], [1, 2], family, device="cuda", dtype=torch.bfloat16)
    seen = captured(plain)
    plain.generation(0)
    problems, answers = seen[0]
    for run, tolerance in ((exact, 1e-4), (rough, 0.05)):
        asked, live = problems.repeat_interleave(4, 1), answers.mask
        logp, entropy = scored(run.policies, asked, answers)
        near = [(x.cpu() - y)[live].abs().max() for x, y in ((logp, answers.logp), (entropy, answers.entropy))]
        assert max(near) < (1e-3 if run is exact else 0.2)
        fresh = stack(["dapo", "gtpo"], [1, 2], family)
        for x in (run, fresh):
            x.policies.adam.backward(scored(x.policies, asked, answers)[0].square().sum())
        for name, x in run.policies.parameters.items():
            expected = fresh.policies.parameters[name].grad
            error = (x.grad.cpu() - expected).norm() / expected.norm().clamp_min(1e-6)
            assert error < tolerance, (name, error)
        run.generation(0)
        assert (run.history[-1]["sampling/logp_difference"] < (1e-4 if run is exact else 0.05)).all()
