"""Preference pairs: TRL's loss with weighted tokens, its gradient, refusals, metrics, records, and resuming."""

import json
import runpy
from pathlib import Path

import pytest
import torch

import trl_tiny
from dew.credit import preference_weights
from dew.errors import ConfigError
from dew.run.folder import RunFolder

PAIRS = [("3+1=", "4a", "7hb1"), ("2+2=", "4ab", "22"), ("1+0=", "1cd", "0a1"), ("5+0=", "5", "05gh")]


def pairs(n=8):
    from datasets import Dataset

    return Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), PAIRS[i % 4], strict=True)) for i in range(n)])


def settings(folder, **own):
    plain = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "bf16": False, "use_cpu": True}
    plain |= {"gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    return {**plain, "disable_tqdm": True, "output_dir": str(folder), "loss_type": ["sigmoid"], "beta": 0.3, **own}


def trainer(folder, kind="full", ours=True, **own):
    """`full`: with a reference model. `lora`: a new adapter, without which the model is the reference. `adapter`: an
    adapter that is trained further, of which TRL keeps a copy."""
    from peft import LoraConfig, get_peft_model
    from trl import DPOConfig, DPOTrainer

    from dew.engines.trl import DewDPOConfig, DewDPOTrainer

    torch.manual_seed(1)
    policy, low_rank = trl_tiny.model(seed=0), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    more = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])} if kind == "lora" else {}
    if kind == "adapter":
        policy = get_peft_model(policy, low_rank)
    ref = trl_tiny.model(seed=5) if kind == "full" else None
    cls, config = (DewDPOTrainer, DewDPOConfig) if ours else (DPOTrainer, DPOConfig)
    args = config(**settings(folder, **own))
    return cls(policy, ref, args, None, pairs(), processing_class=trl_tiny.tokenizer(), **more)


def loss_and_gradient(trainer):
    trainer.model.train()
    for name, weights in trainer.model.named_parameters():
        if ".default." in name:  # an adapter starts as the reference: move away
            with torch.no_grad():
                weights.add_(0.3)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradient = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad and p.grad is not None]
    return loss.detach(), torch.cat(gradient), batch


@pytest.mark.parametrize("kind", ["full", "lora", "adapter"])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_without_weights_it_is_trls_dpo(tmp_path, loss, kind):
    theirs, grad, _ = loss_and_gradient(trainer(tmp_path / "a", kind, ours=False, loss_type=[loss]))
    ours, own_grad, _ = loss_and_gradient(trainer(tmp_path / "b", kind, loss_type=[loss], alpha=0.0))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert grad.norm() > 1e-2
    torch.testing.assert_close(own_grad, grad, atol=1e-5, rtol=1e-5)


def test_a_step_whose_loss_is_nan_is_skipped_and_leaves_no_number(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    compute = run.compute_ref_log_probs
    first = iter([torch.nan])
    monkeypatch.setattr(run, "compute_ref_log_probs", lambda *args: [next(first, 1.0) * x for x in compute(*args)])
    run.train()
    lines, alarms = RunFolder(tmp_path).metrics(), RunFolder(tmp_path).alarms()
    assert [line["steps/skipped"] for line in lines] == [1.0, 0.0]
    assert "loss" not in lines[0] and "loss" in lines[1]
    assert {alarm["alarm"] for alarm in alarms} == {"skipped"}, "and none about corrupted weights"


def by_hand(trainer, batch, loss):
    """The loss from the models' logits, in loops over the rows."""
    ids, mask = batch["input_ids"], batch["completion_mask"].bool()
    with torch.no_grad():
        policy = trainer.model(ids, attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
        reference = trainer.ref_model(ids, attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    sums = []
    for row in range(len(ids)):
        rejected = row >= len(ids) // 2
        deltas, values = [], []
        for t in range(1, ids.shape[1]):
            if mask[row, t]:
                p, q, token = policy[row, t - 1], reference[row, t - 1], ids[row, t]
                deltas.append(float(p[token] - q[token]))
                H = max(-float((q.exp() * q).sum()), trainer.args.entropy_floor)
                values.append(1 / H if rejected else H)
        mean = sum(values) / len(values)
        terms = [(1 + trainer.args.alpha * (x / mean - 1)) * d for x, d in zip(values, deltas, strict=True)]
        sums.append(sum(terms) / (len(terms) if loss == "ipo" else 1))
    margins = torch.tensor(sums[: len(sums) // 2]) - torch.tensor(sums[len(sums) // 2 :])
    beta = trainer.args.beta
    each = (margins - 1 / (2 * beta)) ** 2 if loss == "ipo" else -torch.nn.functional.logsigmoid(beta * margins)
    return each.mean()


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_the_weighted_loss_is_the_formula(tmp_path, loss):
    ours = trainer(tmp_path, loss_type=[loss], alpha=0.8, entropy_floor=0.5)
    found, _, batch = loss_and_gradient(ours)
    torch.testing.assert_close(found, by_hand(ours, batch, loss), atol=1e-4, rtol=1e-4)
    plain, _, _ = loss_and_gradient(trainer(tmp_path / "plain", loss_type=[loss], alpha=0.0))
    assert abs(found - plain) > 1e-2  # the weights are felt


def test_trls_head_gives_the_same_weights(tmp_path):
    exact, grad, _ = loss_and_gradient(trainer(tmp_path / "a"))
    theirs, their_grad, _ = loss_and_gradient(trainer(tmp_path / "b", exact_head=False))
    torch.testing.assert_close(theirs, exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(their_grad, grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("alpha", 1.5, "weights could be negative"),
        ("entropy_floor", 0.0, "nats above 0"),
        ("loss_type", ["sigmoid", "aot"], "'aot'"),
        ("loss_type", "sft", "'sft'"),
        ("f_divergence_type", "js_divergence", "reverse_kl"),
        ("use_weighting", True, "one kind of weights"),
        ("precompute_ref_log_probs", True, "entropy at every token"),
        ("records_groups", 0, "records_groups"),
    ],
)
def test_what_cannot_be_weighted_is_refused(tmp_path, setting, value, says):
    from dew.engines.trl import DewDPOConfig

    with pytest.raises(ConfigError, match=says):
        DewDPOConfig(**settings(tmp_path, **{setting: value}))


def test_a_run_leaves_metrics_and_the_weights_of_every_token(tmp_path):
    ours = trainer(tmp_path, "lora", alpha=0.5, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    ours.train()
    run = RunFolder(tmp_path)
    assert run.run()["status"] == "done" and run.run()["algorithm"]["settings"]["alpha"] == 0.5
    assert [line["step"] for line in run.metrics()] == [1, 2]
    first = run.metrics()[0]
    names = ("rewards/accuracies", "rewards/margins", "weights/std_chosen", "weights/std_rejected", "weights/max")
    assert set(names) | {"loss", "grad_norm", "entropy", "entropy/chosen", "entropy/rejected"} <= set(first)
    assert first["weights/std_chosen"] > 0.01 and first["loss"] == pytest.approx(0.6931, abs=1e-3)  # π = π_ref: log 2
    groups = list(run.records())
    assert len(groups) == 2 and groups[0].algorithm == "dpo"
    chosen, rejected = groups[0].answers
    assert (groups[0].prompt, chosen.text, rejected.text) in {(p, f"{c}<eos>", f"{r}<eos>") for p, c, r in PAIRS}
    assert chosen.correct and not rejected.correct and min(chosen.advantage) > 0 > max(rejected.advantage)
    assert sum(chosen.advantage) == pytest.approx(len(chosen.tokens), rel=1e-3)  # weights are 1 on average
    assert chosen.ratio == pytest.approx([1.0] * len(chosen.tokens), abs=1e-4)
    surest, w = max(zip(chosen.entropy, chosen.advantage, strict=True)), max(chosen.advantage)
    assert surest[1] == w  # the least certain token of a chosen answer weighs most
    assert min(zip(rejected.entropy, rejected.advantage, strict=True))[1] == min(rejected.advantage)


def test_a_resumed_run_is_the_same(tmp_path):
    def metrics(folder):
        return [
            {k: line[k] for k in ("loss", "rewards/margins", "weights/max")} for line in RunFolder(folder).metrics()
        ]

    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 2}
    trainer(tmp_path / "whole", **saved).train()
    trainer(tmp_path / "parts", **{**saved, "max_steps": 4}).train()
    folder = tmp_path / "parts"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(x for x in lines if json.loads(x)["step"] <= 2) + "\n")
    (folder / "checkpoint-4" / "dew_manifest.json").unlink()  # as if it had been killed while saving
    trainer(folder, **saved).train(resume_from_checkpoint=True)
    assert metrics(folder) == metrics(tmp_path / "whole")


# ---- dew train ---------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path):
    """A run with a file of six pairs, two of which have equal answers."""
    rows = [{"prompt": "2,5>7:", "chosen": "2+5=7", "rejected": f"2+5={i % 3 or '2+5=7'}"} for i in range(1, 7)]
    rows[1]["rejected"] = rows[4]["rejected"] = "2+5=7"
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = settings(tmp_path / "run", per_device_train_batch_size=3, alpha=0.25, save_strategy="steps")
    keys |= {"trainer": "dpo", "model_name_or_path": "tiny", "pairs": str(tmp_path / "pairs.jsonl"), "save_steps": 1}
    return {**keys, "task": "countdown", "scores": {"problems": 2, "k": 2, "max_new_tokens": 16}, "records_every": 1}


def test_a_recipe_trains_on_a_file_of_pairs(recipe, tmp_path):
    from dew.engines.trl.launch import build_trainer, launch
    from dew.engines.trl.settings import parse
    from dew.preflight import preflight
    from dew.preflight.plan import plan
    from dew.run.config import make_run, read_run

    run = make_run(recipe)
    checks = {check.name: check for check in preflight(run)}
    assert checks["pairs"].status == "warning" and checks["pairs"].facts == {"rows": 6, "same": 2}
    parsed = parse(run)
    assert plan(parsed)["algorithm"] == "dpo(alpha=0.25, beta=0.3, loss_type=sigmoid)"
    assert launch(parsed, build_trainer(parsed), say=lambda _: None) == "done"
    folder = RunFolder(tmp_path / "run")
    assert folder.finished() and [entry["when"] for entry in folder.scores()] == ["before", "after"]
    assert folder.run()["algorithm"]["name"] == "dpo" and len(list(folder.records())) == 6  # of 2 steps
    assert read_run(tmp_path / "run" / "config.yaml").to_dict() == make_run(recipe).to_dict()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"trainer": "kto"}, "grpo or dpo"),
        ({"engine": "verl"}, "Use engine: trl"),
        ({"algorithm": "gtpo"}, "Remove one"),
        ({"dataset_name": "some/pairs"}, "trains on one of them"),
        ({"trainer": None}, "only `trainer: dpo`"),
        ({"num_generations": 4}, "num_generations is not a setting"),
        ({"pairs": None}, "dew pairs"),
        ({"pairs": "absent.jsonl"}, "absent.jsonl: cannot be read"),
        ({"pairs": "bad.jsonl"}, "pairs: bad.jsonl:2 has no rejected"),
    ],
)
def test_mistakes_in_a_recipe_are_named(recipe, tmp_path, monkeypatch, changed, says):
    from dew.engines.trl.launch import data_of
    from dew.engines.trl.settings import parse
    from dew.run.config import make_run

    monkeypatch.chdir(tmp_path)
    good = json.dumps({"prompt": "1", "chosen": "2", "rejected": "3"})
    (tmp_path / "bad.jsonl").write_text(good + '\n{"prompt": "1", "chosen": "2"}\n')
    with pytest.raises(ConfigError, match=says):
        data_of(parse(make_run({**recipe, **changed})))


@pytest.mark.slow
def test_the_commands_from_pairs_to_report(recipe, tmp_path):
    import subprocess
    import sys

    def dew(*words):
        command = [sys.executable, "-m", "dew.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    made = dew("pairs", "tiny", "made.jsonl", "-n", "48", "-k", "4", "--max-new-tokens", "32")
    assert "pairs; " in made
    (tmp_path / "run.yaml").write_text(json.dumps({**recipe, "pairs": "made.jsonl", "max_steps": 4}))
    assert "pairs right" in dew("train", "run.yaml")
    assert json.loads(dew("explain", "run", "--json"))["algorithm"] == "dpo"
    assert (tmp_path / "run" / "report.html").is_file()
    folder = tmp_path / "run"
    for path in (folder / "model").iterdir():
        path.unlink()
    (folder / "model").rmdir()
    (folder / "checkpoint-4" / "dew_manifest.json").unlink()
    assert "Done" in dew("resume", "run")
    assert "pass@1" in dew("eval", "run", "-n", "4", "-k", "2", "--max-new-tokens", "16")


def test_the_control_of_the_example_moves_weights_within_an_answer():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "weighted_dpo.py"))
    chosen, mask = torch.tensor([True, False]), torch.ones(2, 40, dtype=torch.bool)
    mask[0, :5], mask[1, 30:] = False, False
    entropy = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) + 0.05
    weights, moved = preference_weights(chosen, entropy, mask), example["shuffled_weights"](chosen, entropy, mask)
    assert (weights != moved).any(1).all() and (moved[~mask] == 0).all()
    for own, other, live in zip(weights, moved, mask, strict=True):
        assert own[live].sort().values.tolist() == other[live].sort().values.tolist()
    runs = [{"seed": 0, "alpha": a, "shuffled": s, "correct": [c, 1]} for a, s, c in ((0, 0, 1), (1, 0, 2), (1, 1, 1))]
    rows = example["table"]({"before": [0, 0], "runs": runs}, 2).splitlines()[3:]
    assert [row.split("|")[1:4] for row in rows] == [
        [" 0 ", " 1 ", " 0.500 "], [" 1 ", " 1 ", " 0.750 "], [" 1 shuffled ", " 1 ", " 0.500 "],
    ]  # fmt: skip
