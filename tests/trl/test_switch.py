"""What a TRL user does first: own files, own Python script, own reward, own data, own algorithm."""

import json
import logging
import math
import os
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

import trl_tiny as tiny
from dew.cli.evaluate import load_model
from dew.compare.sampling import prompt_text
from dew.engines.trl import launch
from dew.engines.trl.launch import parse
from dew.errors import ConfigError
from dew.run.config import make_run
from dew.run.folder import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = {
    "model_name_or_path": "tiny", "output_dir": "unused", "num_generations": 4, "per_device_train_batch_size": 8,
    "bf16": False, "use_cpu": True, "verifier": "math",
}  # fmt: skip


def brevity(completions, **_):
    return [None if text.startswith("b") else 1 / (1 + len(text)) for text in completions]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A Python run with two rewards, LoRA and evaluation during training."""
    folder = tmp_path_factory.mktemp("switch")
    tiny.model().save_pretrained(folder / "base")
    tiny.tokenizer().save_pretrained(folder / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    others = {"eval_dataset": tiny.prompts(8), "peft_config": lora}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
    trainer = tiny.trainer(
        folder / "run", [brevity, tiny.has_a], policy=str(folder / "base"), others=others, records_every=1,
        outcome_reward="has_a", per_device_eval_batch_size=8, num_generations_eval=4, **settings,
    )  # fmt: skip
    trainer.train()
    return trainer, folder / "run"


# ── a run from Python ─────────────────────────────────────────────────────────────────────────────────────
def test_records_keep_every_reward_by_name(run):
    for answer in (answer for group in RunFolder(run[1]).records() for answer in group.answers):
        text = re.sub("<[a-z]+>", "", answer.text)
        expected = {"has_a": tiny.has_a([text])[0], "brevity": brevity([text])[0]}
        assert answer.rewards["has_a"] == answer.reward == expected["has_a"]
        if expected["brevity"] is None:
            assert math.isnan(answer.rewards["brevity"])
        else:
            assert answer.rewards["brevity"] == pytest.approx(expected["brevity"], rel=1e-4)


def test_evaluation_during_training_reports_pass_at_k(run):
    for line in RunFolder(run[1]).metrics():
        assert line["eval/pass@1"] == pytest.approx(line["eval/accuracy"])
        assert line["eval/pass@1"] <= line["eval/pass@2"] <= line["eval/pass@4"]


def test_the_documents_and_the_trackers_agree_on_names(run):
    text = (ROOT / "docs" / "metrics.md").read_text().partition("## Alarms")[0]
    known = {name for row in re.findall(r"^\| (`[^|]*)\|", text, re.M) for name in re.findall(r"`([^`]+)`", row)}
    logged = {name for entry in run[0].state.log_history for name in entry if not name.startswith(("eval_", "train_"))}
    logged = {re.sub(r"(rewards?/)(has_a|brevity)", r"\1<part>", name) for name in logged}
    assert logged - {"step", "total_flos"} <= known
    assert {"seconds/generation", "seconds/update", "accuracy"} <= logged


def test_a_used_folder_is_refused_unless_overwritten_or_resumed(tmp_path, caplog):
    saves = {"save_strategy": "steps", "save_steps": 1}
    first = tiny.trainer(tmp_path, others={"eval_dataset": tiny.prompts(2)}, max_steps=2, **saves)
    first.evaluate()  # of the start, before training
    first.train()
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [0, 1, 2]
    (tmp_path / "notes.txt").write_text("mine")
    again = tiny.trainer(tmp_path, max_steps=3, **saves)
    assert "earlier run" not in caplog.text  # it may be resumed
    with pytest.raises(ConfigError, match="overwrite_output_dir=True"):
        again.train()
    assert len(RunFolder(tmp_path).metrics()) == 3
    again.train(resume_from_checkpoint=True)
    assert len(RunFolder(tmp_path).metrics()) == 4
    tiny.trainer(tmp_path, max_steps=1, overwrite_output_dir=True, **saves).train()
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [1]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert (tmp_path / "notes.txt").exists()


def test_batches_that_do_not_line_up_are_named_when_a_trainer_is_built(tmp_path, caplog):
    split = {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "per_device_train_batch_size": 4}
    tiny.trainer(tmp_path, **split)
    assert "optimizer steps do not line up with generations" in caplog.text


# ── evaluation ────────────────────────────────────────────────────────────────────────────────────────────
def test_the_model_of_a_lora_run_from_python_is_found_and_merged(run):
    model, tokenizer = load_model(str(run[1]))  # its newest checkpoint
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert model.config._name_or_path == str(RunFolder(run[1]).model())  # of the scores, not the base model's
    assert "2508.04349" in (run[1] / "README.md").read_text()
    ids = tokenizer("1+2=", return_tensors="pt")["input_ids"]
    run[0].model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, run[0].model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_model_in_bfloat16_is_evaluated_in_float32_on_a_cpu(tmp_path):
    for part in (tiny.model().bfloat16(), tiny.tokenizer()):
        part.save_pretrained(tmp_path)
    assert load_model(str(tmp_path))[0].dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def test_prompts_are_those_of_training_with_its_arguments_of_the_chat_template(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ end }}"
    for part in (tiny.model(), tokenizer):
        part.save_pretrained(tmp_path)
    template = {"end": "=", "chat_template": "mine"}
    tiny.trainer(tmp_path, max_steps=1, chat_template_kwargs=template).train()  # without a config.yaml
    assert prompt_text(load_model(str(tmp_path))[1], [{"role": "user", "content": "1+1"}]) == "1+1="
    tokenizer.chat_template = "{{ 'user: ' + messages[0].content }}"
    with pytest.raises(ConfigError, match="template cannot read the prompt"):
        prompt_text(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}])
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="no final model and no checkpoint"):
        load_model(str(tmp_path))


# ── TRL's files ───────────────────────────────────────────────────────────────────────────────────────────
def test_datasets_and_env_of_trls_files(tmp_path, monkeypatch):
    monkeypatch.delenv("TRIAL_VARIABLE", raising=False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in "ab":
        rows = [{"prompt": f"{name}{i}", "answer": str(i), "other": 1} for i in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files, columns = [str(tmp_path / f"{name}.jsonl") for name in "ab"], ["prompt", "answer"]
    sources = [{"path": "json", "data_files": file, "columns": columns} for file in files]
    keys = {"env": {"TRIAL_VARIABLE": 3}, "datasets": sources, "test_split_size": 0.25}
    parsed = parse(make_run({**SMALL, **keys, "eval_strategy": "steps"}))
    assert os.environ.pop("TRIAL_VARIABLE") == "3"
    assert parsed.run.settings["datasets"][0] == sources[0] and parsed.run.to_dict()["env"] == {"TRIAL_VARIABLE": 3}
    train, test = launch.data_of(parsed)
    assert (len(train), len(test)) == (15, 5) and set(train.column_names) == {"prompt", "answer"}
    without = parse(make_run({**SMALL, "datasets": sources, "eval_strategy": "steps"}))
    with pytest.raises(ConfigError, match=r"there are train\. Set dataset_train_split or dataset_t"):
        launch.data_of(without)


def test_trls_own_loss_reports_dews_metrics(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    settings = {"num_iterations": 2, "algorithm": "trl", "records_every": 1, "learning_rate": 1e-2}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = tiny.trainer(tmp_path, [brevity, tiny.has_a], max_steps=4, num_generations=8, **settings)
    trainer.train()
    lines = RunFolder(tmp_path).metrics()
    assert {"accuracy", "entropy", "clip/low", "clip/high", "ratio/mean", "kl/approx", "loss"} <= set(lines[0])
    assert lines[0]["ratio/max"] == 1.0 and lines[1]["ratio/max"] > 1.0
    assert [x["entropy"] for x in trainer.state.log_history if "entropy" in x] == [x["entropy"] for x in lines]
    answers = [answer for group in RunFolder(tmp_path).records() for answer in group.answers]
    assert any(x for answer in answers for x in answer.advantage)
