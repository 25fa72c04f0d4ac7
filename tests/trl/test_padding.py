"""Aligned rows in micro-batches by tokens: loss, gradient and trained weights are those of TRL's micro-batches."""

import pytest
import torch
from datasets import Dataset

import trl_tiny as tiny
from dew.engines.trl import DewTrainer, loss
from trl_tiny import outcome

DATA = Dataset.from_list([{"prompt": "1+2="[: 1 + i % 4] + "3=" * (i % 3), "answer": str(i)} for i in range(16)])
"""Prompts of 1 to 8 tokens."""


def first_letters(completions, **_):
    """Right in few answers, so that several groups have no signal."""
    return [float("ab" in text) for text in completions]


def trained(folder, less_padding, reward=outcome, policy=None, **settings):
    """The weights after two optimizer steps, the lines of metrics, and the tokens of each pass with a gradient."""
    others = {"rollout_func": tiny.scripted}
    settings = {"less_padding": less_padding, "optim": "sgd", "learning_rate": 0.1, **settings}
    trainer = tiny.trainer(folder, reward, data=DATA, policy=policy, others=others, **settings)
    inner, tokens = trainer.model.model.forward, []

    def counted(*args, **kwargs):
        if torch.is_grad_enabled():
            tokens.append(kwargs["input_ids"].numel())
        return inner(*args, **kwargs)

    trainer.model.model.forward = counted
    trainer.train()
    weights = tiny.weights(trainer.model)
    return weights, trainer.state.log_history, tokens


BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
KL = {"algorithm_kwargs": {"dynamic_sampling": False, "kl_coef": 0.1}, "mask_truncated_completions": True}
CASES = {
    "gtpo, accumulated": {**BATCH, "gradient_accumulation_steps": 4, "gradient_checkpointing": True},
    "grpo_s, two steps a generation": {**BATCH, "algorithm": "grpo_s", "steps_per_generation": 4},
    "dapo with a KL term": {**BATCH, "algorithm": "dapo", "num_iterations": 2, **KL},
    "several generations a step": {**BATCH, "per_device_train_batch_size": 8, "steps_per_generation": 1},
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if i < 2 else pytest.mark.slow) for i, c in enumerate(CASES)]
)
def test_the_weights_are_those_of_padded_micro_batches(case, tmp_path):
    policy = None
    if "KL" in case:  # TRL loads the reference policy from a folder
        tiny.model().save_pretrained(tmp_path / "policy")
        policy = str(tmp_path / "policy")
        CASES[case]["model_init_kwargs"] = {"dtype": "float32"}
    start = tiny.weights(tiny.model())
    expected, their_log, padded = trained(tmp_path / "padded", False, policy=policy, **CASES[case])
    weights, log, tokens = trained(tmp_path / "free", True, policy=policy, **CASES[case])
    assert (expected - start).abs().max() > 1e-3, "nothing was learned, so nothing is compared"
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert sum(tokens) < sum(padded) and max(tokens) <= max(padded) and len(tokens) <= len(padded)
    for line, other in zip(log, their_log, strict=True):
        for name in ("grad_norm", "loss"):
            if name in line:
                assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_answers_without_an_advantage_are_left_out(tmp_path):
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 8}
    expected = trained(tmp_path / "padded", False, first_letters, **settings)[0]
    weights, _, tokens = trained(tmp_path / "free", True, first_letters, **settings)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    everything = trained(tmp_path / "all", True, outcome, **settings)[2]
    assert sum(tokens) < sum(everything) / 2


def test_a_subclass_changes_the_loss_of_every_micro_batch(tmp_path, monkeypatch):
    class Twice(DewTrainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_grad_norm": 1e9}
    expected = trained(tmp_path / "rate", True, learning_rate=0.2, **settings)[0]
    trainer = tiny.trainer(tmp_path / "attribute")
    assert trainer._head.aligned
    trainer.compute_loss = lambda *args, **kwargs: 2 * DewTrainer.compute_loss(trainer, *args, **kwargs)
    assert not trainer._head.aligned
    monkeypatch.setattr("dew.engines.trl.DewTrainer", Twice)
    torch.testing.assert_close(trained(tmp_path / "loss", True, **settings)[0], expected)


def test_parts_by_hand():
    """Longest first: 2·5 ≤ 10 and 3·3 ≤ 10; 3·5 > 10 with all three rows; a row above the budget is a part."""
    assert loss.token_parts([3, 5, 1, 4, 2], 10) == [[1, 3], [0, 4, 2]]
    assert loss.token_parts([5, 3, 2], 10) == [[0, 1], [2]]
    assert loss.token_parts([12, 9], 10) == [[0], [1]]
    assert loss.token_parts([0, 0], 10) == [[0, 1]]
    # 5 · 16,384 tokens would fit. 5000 is less than half of that, and 20 of 5000, where two rows keep a GPU busy
    assert loss.token_parts([20, 16_384, 3000, 5000, 9000], 100_000) == [[1, 4], [3, 2], [0]]


def test_an_answer_with_a_penalty_is_not_left_out():
    """Row 0 has an advantage, row 1 a penalty, row 2 neither, row 3 an advantage on a masked token only."""
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    advantages, penalty = torch.zeros(2, 4, 2)
    advantages[0, 1], advantages[3, 1], penalty[1, 0] = 1, 1, 0.5
    ids = torch.arange(8).view(4, 2)
    rows = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": ids, "completion_mask": mask}
    rows |= {"advantages": advantages, "penalty": penalty, "divisor": torch.tensor(7.0)}
    (part,) = loss.update_parts([rows], 4, skip=True)
    assert part["completion_ids"].tolist() == [[0, 1], [2, 3]] and part["divisor"] == 7
    assert len(loss.update_parts([rows], 4, skip=False)[0]["completion_ids"]) == 4
    nothing = {**rows, "advantages": 0 * advantages, "penalty": 0 * penalty}
    (idle,) = loss.update_parts([nothing], 4, skip=True)
    assert idle["completion_ids"].tolist() == [[6, 7]] and idle["idle"] and not part["idle"]  # the shortest


def test_no_cudnn_attention(tmp_path):
    torch.backends.cuda.enable_cudnn_sdp(True)
    tiny.trainer(tmp_path, outcome, data=DATA, less_padding=False)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.slow
def test_compiled_layers_are_not_compiled_again_for_sampling(tmp_path):
    """`generate` has a cache of its own for every layer, and so a graph: beyond eight, torch stops compiling."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tiny.trainer(tmp_path, outcome, data=DATA, **BATCH, torch_compile_backend="eager").train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_compiled_layers_train_the_same_weights(tmp_path):
    found = {}
    torch._dynamo.utils.counters.clear()
    for backend in (None, "eager"):
        torch._dynamo.reset()
        settings = {**BATCH, "torch_compile_backend": backend, "others": {"rollout_func": tiny.scripted}}
        trainer = tiny.trainer(tmp_path / str(backend), outcome, data=DATA, **settings)
        trainer.train()
        found[backend] = tiny.weights(trainer.model)
        assert all(bool(layer._compiled_call_impl) == bool(backend) for layer in trainer.model.model.layers)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # not one for each layer and length
    torch.testing.assert_close(found["eager"], found[None], rtol=1e-5, atol=1e-6)
