"""Sampling and evaluation with the bundled tiny model, on a CPU."""

import json
from collections import Counter

import pytest
import torch

from dew.compare import Sampling, compare_scores, evaluate, sample
from dew.errors import ConfigError, RewardError
from dew.rewards import verifier
from dew.tasks import TINY, Countdown, task

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny():
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    return tuple(kind.from_pretrained(TINY) for kind in kinds)


PROMPTS = [row["prompt"] for row in Countdown().rows(5, split="held_out")] + ["3,5>8:"]


# ── Oracle ────────────────────────────────────────────────────────────────────────────────────────────────
@torch.no_grad()
def greedy_answer(model, tokenizer, prompt: str, limit: int) -> str:
    """Token by token, without cache, batch or padding."""
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(limit):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


@pytest.fixture(scope="module")
def greedy_texts(tiny):
    return [greedy_answer(*tiny, prompt, 32) for prompt in PROMPTS]


@torch.no_grad()
def test_answers_are_sampled_from_the_plain_softmax(tiny):
    # The first character, 2,000 times: shares within four standard errors of the model's own probabilities,
    # for every character, however rare (no top-k or top-p removes it).
    model, tokenizer = tiny
    prompt, n = "13,4,8,4>21:", 2000
    chance = (model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1] / 2.0).softmax(-1)
    drawn = sample(model, tokenizer, [prompt], Sampling(k=n, temperature=2.0, max_new_tokens=1, batch_size=n))
    seen = Counter(answer.text for answer in drawn[0])
    for token, p in zip(tokenizer.convert_ids_to_tokens(range(len(tokenizer))), chance.tolist(), strict=True):
        if token not in tokenizer.all_special_tokens:
            assert abs(seen[token] / n - p) < 4 * (p * (1 - p) / n) ** 0.5 + 1 / n, token


# ── Properties ────────────────────────────────────────────────────────────────────────────────────────────
def test_seed_is_reproducible_and_does_not_touch_the_global_rng(tiny):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (
        [[a.text for a in group] for group in sample(*tiny, PROMPTS, Sampling(k=4, seed=seed, max_new_tokens=24))]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch_size", [3, 100])
def test_every_prompt_gets_k_answers_for_any_batch_size(tiny, greedy_texts, batch_size: int):
    samples = sample(*tiny, PROMPTS[:3], Sampling(k=4, batch_size=batch_size, max_new_tokens=32))
    assert [len(group) for group in samples] == [4, 4, 4]
    greedy = sample(*tiny, PROMPTS, Sampling(greedy=True, batch_size=batch_size, max_new_tokens=32))
    assert [group[0].text for group in greedy] == greedy_texts


def test_truncated_answers_are_marked(tiny):
    cut = sample(*tiny, PROMPTS[:2], Sampling(k=2, max_new_tokens=3))
    assert all(answer.truncated and answer.tokens == 3 for group in cut for answer in group)
    whole = sample(*tiny, PROMPTS[:2], Sampling(k=2, max_new_tokens=64))
    assert not any(answer.truncated for group in whole for answer in group)
    assert all(answer.tokens == len(answer.text) + 1 for group in whole for answer in group)


# ── The bundled model and a whole evaluation ──────────────────────────────────────────────────────────────
def test_bundled_model_matches_its_card(tiny):
    model, tokenizer = tiny
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 1_500_000
    assert (TINY / "README.md").exists()
    scores = evaluate(model, tokenizer, Countdown(), n_problems=32, k=16, max_new_tokens=32)
    assert 0.12 < scores["pass@1"].value < 0.30
    assert scores["pass@16"].value > 0.70
    assert scores.statuses.get("unparsable", 0) < 0.02 * 32 * 16 and scores.truncated_share < 0.02


def test_scores_contain_every_answer(tiny, tmp_path):
    rows = Countdown(numbers=3).rows(3, split="held_out")
    scores = evaluate(*tiny, rows, verifier("countdown"), k=2, max_new_tokens=32)
    scores.write(tmp_path / "kept.json")
    data = json.loads((tmp_path / "kept.json").read_text())
    assert (data["task"], data["n_problems"], data["k"]) == ("countdown", 3, 2)
    assert [problem["prompt"] for problem in data["problems"]] == [row["prompt"] for row in rows]
    again = evaluate(*tiny, rows, verifier("countdown"), k=2, max_new_tokens=32)
    assert compare_scores(scores, again)["mean@2"].equal


# ── A reward function in place of a verifier ──────────────────────────────────────────────────────────────
def scored(tiny, *values, threshold=0.5):
    """Scores of three answers to one problem with these rewards."""

    def graded(completions, prompts, answer, **_):
        assert len(completions) == 3 and prompts == [rows[0]["prompt"]] * 3 and answer == [rows[0]["answer"]] * 3
        return list(values)

    rows = Countdown().rows(1)
    return evaluate(*tiny, rows, graded, k=3, max_new_tokens=2, threshold=threshold)


def test_answers_without_a_finite_reward_count_as_zero(tiny, caplog):
    scores = scored(tiny, 0.6, None, float("nan"))
    assert scores.statuses == {"correct": 1, "unparsable": 2} and scores["reward"].value == pytest.approx(0.2)
    assert "maj@3" not in scores.scores and scores.task == "graded"  # nothing to extract or vote on
    assert scored(tiny, 0.6, 0.7, 0.9, threshold=0.8).statuses == {"correct": 1, "wrong": 2}
    assert "an infinity or a NaN for 1 of 3 answers" in caplog.text


@pytest.mark.parametrize("values", [(None, None, None), (None, float("nan"), float("-inf"))])
def test_an_evaluation_without_any_reward_is_an_error(tiny, values):
    """As when the function's process was killed: None for every answer."""
    with pytest.raises(RewardError, match="scored none of the 3 answers"):
        scored(tiny, *values)


# ── Edges ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_rows_need_prompts_and_a_verifier(tiny, tmp_path):
    (tmp_path / "math.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    for problems in (Countdown().rows(1), task(f"{tmp_path}/math.jsonl")):  # which is not the built-in task `math`
        with pytest.raises(ConfigError, match="Rows and files need a verifier"):
            evaluate(*tiny, problems)
    for rows in ([], [{"problem": "1+1"}]):
        with pytest.raises(ConfigError, match="rows are empty or have no column `prompt`"):
            evaluate(*tiny, rows, verifier("countdown"))
