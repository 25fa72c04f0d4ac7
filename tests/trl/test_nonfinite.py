"""An infinity or a NaN, wherever it comes from: the step is skipped and counted, the third in a row stops the run."""

import math
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

import trl_tiny as tiny
from dew.engines.trl import rollout
from dew.engines.trl.metrics import NonFinite
from dew.engines.trl.rewards import checked
from dew.errors import EngineError
from dew.run.folder import RunFolder

NAN, INF = math.nan, math.inf


class Weights(TrainerCallback):
    """Records the weights before each step and after the last, and the optimizer's own count of steps."""

    def __init__(self):
        self.seen, self.counts = [], []

    def on_step_begin(self, args, state, control, model=None, **_):
        self._keep(model)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        self.counts.append(max((int(s["step"]) for s in optimizer.state.values() if "step" in s), default=0))
        if state.global_step == state.max_steps:
            self._keep(model)

    def _keep(self, model):
        self.seen.append(tiny.weights(model))

    def moved(self):
        return [not torch.equal(a, b) for a, b in zip(self.seen, self.seen[1:], strict=False)]


# Where a value that is not finite enters, in which steps.
def replacing(owner, name, change):
    """Pass what a method returns through `change`."""
    inner = getattr(owner, name)
    object.__setattr__(owner, name, lambda *args, **kwargs: change(inner(*args, **kwargs)))


def in_reward(trainer, due, value):
    inner = trainer.reward_funcs[0]

    def spoiled(completions, **columns):
        values = inner(completions=completions, **columns)
        return [value, *values[1:]] if due() else values

    trainer.reward_funcs[0] = checked(spoiled)


def in_scoring(trainer, due, value):
    """While the sampling policy is scored."""

    def spoil(found):
        if due() and not torch.is_grad_enabled():
            found[0][0, 0] = value
        return found

    trainer._captured_sampling._exact = False  # a scoring pass in every generation
    replacing(trainer, "_get_per_token_logps_and_entropies", spoil)


def in_sampling(trainer, due, value):
    """In the entropies that the sampler returns with its tokens."""
    with mock.patch.object(rollout, "refusal", lambda model: None):
        trainer.sampling_model()

    def spoil(found):
        if due():
            found[2][0][0] = value
        return found

    replacing(trainer._captured_sampling, "generate", spoil)


def in_update(trainer, due, value):
    """In the log-probabilities of the pass that trains, in one micro-batch of several."""
    calls = []

    def spoil(found):
        if not (due() and torch.is_grad_enabled()):
            return found
        calls.append(1)
        bad = torch.zeros_like(found[0])
        bad[0, 0] = value if len(calls) % trainer.args.gradient_accumulation_steps == 0 else 0
        return (found[0] + bad, *found[1:])

    replacing(trainer, "_get_per_token_logps_and_entropies", spoil)


def in_advantages(trainer, due, value):
    def spoil(found):
        found = found.clone()
        found[0, 0, 0] = value if due() else found[0, 0, 0]
        return found

    replacing(trainer.algorithm, "advantages", spoil)


def in_gradient(trainer, due, value):
    next(iter(trainer.model.parameters())).register_hook(lambda gradient: gradient * value if due() else gradient)


def some(cases, default):
    """All of them among the slow tests; a few in every run."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=[] if case in default else pytest.mark.slow)
        for case in cases
    ]


ENTRIES = {
    "reward": in_reward, "logits, scored": in_scoring, "entropy, scored in sampling": in_sampling,
    "advantages": in_advantages, "logits, trained": in_update, "gradient": in_gradient,
}  # fmt: skip


def broken(folder, entry, steps, value=NAN, **settings):
    plain = {"max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "records_every": 1}
    trainer = tiny.trainer(folder, has_mixed, **{**plain, **settings})
    ENTRIES[entry](trainer, lambda: trainer.state.global_step + 1 in steps, value)
    weights = Weights()
    trainer.add_callback(weights)
    return trainer, weights


def has_mixed(completions, **_):
    return [float(i % 2) for i, _ in enumerate(completions)]


REPORTED_AS = {"logits, scored": "logits", "logits, trained": "loss", "entropy, scored in sampling": "logits"}
INFINITE = [("reward", 1e39), ("reward", -INF), ("gradient", INF)]
"""1e39 is none in float32, which rewards are."""
DEFAULT = [(e, NAN) for e in ("reward", "entropy, scored in sampling", "logits, trained", "gradient")] + INFINITE[:1]


@pytest.mark.parametrize(("entry", "value"), some([*((e, NAN) for e in ENTRIES), *INFINITE], DEFAULT))
def test_the_step_is_skipped_and_counted_and_the_next_one_trains(entry, value, tmp_path):
    trainer, weights = broken(tmp_path, entry, {2}, value=value, logging_steps=3)
    trainer.train()
    assert weights.moved() == [True, False, True, True]
    assert weights.counts == [1, 1, 2, 3]
    metrics = RunFolder(tmp_path).metrics()
    assert [line["steps/skipped"] for line in metrics] == [0, 1, 0, 0]
    assert all(x is not None for line in metrics for x in line.values())  # null is how a NaN would be written
    name = "credit_not_finite" if entry in ("reward", "advantages") else "skipped"
    alarms = [(x["alarm"], x["step"]) for x in RunFolder(tmp_path).alarms()]
    assert [alarm for alarm in alarms if alarm[0] in ("skipped", "credit_not_finite")] == [(name, 2)]
    assert all(math.isfinite(x) for log in trainer.state.log_history for x in log.values() if isinstance(x, float))


@pytest.mark.parametrize("entry", some(ENTRIES, ["reward", "advantages"]))
def test_three_in_a_row_stop_the_run_and_report_where(entry, tmp_path):
    trainer, weights = broken(tmp_path, entry, {2, 3, 4}, max_steps=8)
    with pytest.raises(EngineError, match=r"3 steps in a row(.|\n)*step 2, (.|\n)*step 4, ") as error:
        trainer.train()
    place = "reward 'has_mixed'" if entry == "reward" else REPORTED_AS.get(entry, entry)
    assert f"step 3, {place}" in str(error.value)
    assert weights.moved() == [True, False, False]
    assert RunFolder(tmp_path).run()["status"] == "failed"


def test_a_good_step_resets_the_count(tmp_path):
    trainer, weights = broken(tmp_path, "gradient", {1, 2, 4, 5}, max_steps=6, bf16=True)
    trainer.train()
    assert weights.moved() == [False, False, True, False, False, True]


def test_a_generation_counts_once_however_many_steps_are_trained_on_it(tmp_path):
    """Four steps on one generation: a single bad reward must not stop the run."""
    batch = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}
    trainer, weights = broken(tmp_path, "reward", {1}, max_steps=5, **batch)
    trainer.train()
    assert weights.moved() == [False] * 4 + [True]


def test_a_resumed_run_remembers_skipped_steps(tmp_path):
    """Killed after the second bad step: the third stops the resumed run."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    trainer, _ = broken(tmp_path, "gradient", {2, 3}, **settings)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    trainer.add_callback(Stop())
    trainer.train()
    resumed, _ = broken(tmp_path, "gradient", {4}, **settings)
    with pytest.raises(EngineError, match=r"step 2, (.|\n)*step 3, (.|\n)*step 4, "):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("prompts", "skipped"), [("02468", 0), ("0123456789", 1)])
def test_with_dynamic_sampling_only_the_groups_that_train_count(prompts, skipped, tmp_path):
    """A group with an infinite reward is dropped where its other answers are all correct."""

    def reward(prompts, completions, **_):
        bad = [prompt[0] in bad_prompts for prompt in prompts]
        return [1.0 if bad[i] and i % 4 else INF if bad[i] else float(i % 2) for i in range(len(completions))]

    bad_prompts, kwargs = prompts, {"max_rounds": 4}
    trainer = tiny.trainer(tmp_path, reward, algorithm="dapo", algorithm_kwargs=kwargs, max_steps=1)
    trainer.train()
    (metrics,) = RunFolder(tmp_path).metrics()
    assert metrics["steps/skipped"] == skipped
    assert metrics["groups/kept"] == 2 * (1 - skipped) and metrics["groups/dropped"] > 0


@pytest.mark.parametrize(
    "entry", some(["reward", "logits, scored", "logits, trained", "gradient"], ["logits, trained"])
)
def test_two_processes_skip_together(entry, tmp_path):
    """Only the second one has the value; both skip the step, and both stop at the third."""

    def run(rank):
        trainer, weights = broken(tmp_path, entry, {2, 4, 5, 6} if rank == 1 else set(), max_steps=8, records_every=0)
        with pytest.raises(EngineError) as error:
            trainer.train()
        torch.save((weights.seen[-1], weights.moved(), str(error.value)), tmp_path / f"rank{rank}.pt")

    assert tiny.in_children(run, count=2) == [0, 0]
    (first, moved, said), (second, *same) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert [moved, said] == same and torch.equal(first, second)
    assert moved == [True, False, True, False, False] and "step 6, " in said


def test_nan_weights_do_not_break_sampling(tmp_path):
    """A NaN in the weights makes every logit NaN: noise is sampled, and the third step stops the run."""
    trainer, _ = broken(tmp_path, "gradient", set())
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight.fill_(NAN)
    with pytest.raises(EngineError, match="step 1, logits"):
        trainer.train()


# ── batches without signal ──────────────────────────────────────────────────────────────────────
def answers(ids):
    def rollout(prompts, trainer):
        encoded = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": encoded, "completion_ids": [list(ids) for _ in prompts], "logprobs": None}

    return rollout


ALL_CORRECT, ALL_WRONG = (lambda completions, value=value, **_: [value] * len(completions) for value in (1.0, 0.0))
UNSCORED = lambda completions, **_: [None] * len(completions)  # noqa: E731
DEGENERATE = {
    "all correct": {"rewards": ALL_CORRECT},
    "all wrong": {"rewards": ALL_WRONG},
    "none scored": {"rewards": UNSCORED},
    "all empty": {"others": {"rollout_func": answers([1])}},
    "one token": {"max_completion_length": 1},
    "all truncated": {"others": {"rollout_func": answers([13] * 6)}},
    "all truncated and masked": {"others": {"rollout_func": answers([13] * 6)}, "mask_truncated_completions": True},
}
COMBINED = ("all wrong", "one token", "all truncated")
"""Others that run by default catch the same."""
ALGORITHMS = ["gtpo", "grpo_s", "grpo", "dapo", "forking_tokens", "entropy_advantage"]
EVERY = [(case, algorithm) for case in DEGENERATE for algorithm in ALGORITHMS]


@pytest.mark.parametrize(("case", "algorithm"), some(EVERY, [(c, "gtpo") for c in DEGENERATE if c not in COMBINED]))
def test_a_batch_without_signal_is_not_skipped(case, algorithm, tmp_path):
    settings = {"rewards": has_mixed, **DEGENERATE[case]}
    trainer = tiny.trainer(tmp_path, algorithm=algorithm, max_steps=2, records_every=1, **settings)
    before = tiny.weights(trainer.model)
    trainer.train()
    after = tiny.weights(trainer.model)
    assert after.isfinite().all()
    if settings["rewards"] is not has_mixed or "masked" in case:
        assert torch.equal(before, after)
    metrics = RunFolder(tmp_path).metrics()
    assert len(metrics) == 2 and all(x is not None for line in metrics for x in line.values())
    assert [(line["steps/skipped"], line["unscored_share"]) for line in metrics] == [(0, case == "none scored")] * 2
    assert all(math.isfinite(x) for log in trainer.state.log_history for x in log.values() if isinstance(x, float))


# ── dtypes ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("algorithm", some(["gtpo", "grpo_s"], ["gtpo"]))
def test_every_dtype_trains(kind, algorithm, tmp_path):
    policy = tiny.model(initializer_range=0.05).to(getattr(torch, kind))
    settings = {"algorithm": algorithm, "max_steps": 2, "optim": "sgd", "learning_rate": 1.0}
    trainer = tiny.trainer(tmp_path, has_mixed, policy=policy, **settings)
    weights = Weights()
    trainer.add_callback(weights)
    trainer.train()
    assert weights.seen[0].dtype == getattr(torch, kind)
    assert weights.moved() == [True, True] and weights.seen[-1].isfinite().all()
    assert [line["steps/skipped"] for line in RunFolder(tmp_path).metrics()] == [0, 0]


# ── units ───────────────────────────────────────────────────────────────────────────────────────────────
def test_overflows_of_the_loss_scaler_do_not_stop_the_run():
    """fp16: the scaler starts at 65536 and halves; its overflows are skipped and counted, and do not stop the run."""
    nonfinite = NonFinite()
    assert all(nonfinite.check(step, INF, scaled=True) for step in range(10))
    with pytest.raises(EngineError, match="step 12"):
        for step in range(10, 20):
            nonfinite.check(step, INF, scaled=False)
