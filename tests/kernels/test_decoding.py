"""Captured decoding matches `generate`. On a CPU the same steps run without graphs."""

import functools

import pytest
import torch
from scipy.stats import chisquare
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import trl_tiny
from dew.decoding import Decoder, Draw, SamplingCopy, decoder, refusal
from dew.engines.trl import DewTrainer, rollout

PAD, EOS = 0, 1
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13], [5, 6]]


def generated(model, prompts, new):
    """Greedy answers of transformers' generate, each cut after its end token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts], device=model.device)
    live = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    output = model.generate(input_ids=ids, attention_mask=live, do_sample=False, max_new_tokens=new, pad_token_id=PAD)
    rows = output[:, width:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def greedy(model, **kwargs):
    return Decoder(model, Draw(greedy=True), ends=[EOS], pad=PAD, **kwargs)


# ── oracle: generate ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("heads", [{}, GROUPED])
def test_greedy_answers_match_generate(seed, heads):
    model = trl_tiny.model(seed, **heads).double()
    ours = greedy(model)
    expected = generated(model, PROMPTS, 20)
    assert ours.answers(PROMPTS, 20) == expected
    assert ours.answers(PROMPTS, 20) == expected  # reuses the buffers of the first call
    assert ours.answers(PROMPTS[1:], 20) == expected[1:]
    assert any(len(row) < 20 for seed in range(6) for row in generated(trl_tiny.model(seed, **heads), PROMPTS, 20))


def test_growing_number_of_visible_slots(monkeypatch):
    monkeypatch.setattr(decoder, "VISIBLE", 4)
    model = trl_tiny.model(3, **GROUPED).double()
    assert greedy(model).answers(PROMPTS, 30) == generated(model, PROMPTS, 30)


def test_prefill_in_several_parts(monkeypatch):
    monkeypatch.setattr(decoder, "PREFILL", 7)
    model = trl_tiny.model(3, **GROUPED).double()
    assert greedy(model).answers(PROMPTS, 12) == generated(model, PROMPTS, 12)


def test_new_weights_give_new_answers():
    model, other = trl_tiny.model(0).double(), trl_tiny.model(1).double()
    ours = greedy(model)
    before = ours.answers(PROMPTS, 12)
    model.load_state_dict(other.state_dict())
    assert ours.answers(PROMPTS, 12) == generated(other, PROMPTS, 12) != before


@pytest.mark.gpu
def test_graphs_match_generate_on_a_gpu():
    model = trl_tiny.model(3, max_position_embeddings=1024, **GROUPED).double().cuda()
    assert greedy(model).answers(PROMPTS, 600) == generated(model, PROMPTS, 600)


# ── choosing a token ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_frequencies_match_the_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    n = 40_000
    counts = torch.bincount(Draw(temperature=temperature)(logits.expand(n, -1)), minlength=5)
    assert counts[4] == 0
    expected = n * (logits[:4] / temperature).softmax(-1).double()
    assert chisquare(counts[:4].numpy(), (expected * n / expected.sum()).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("settings", "warper"),
    [
        ({"top_k": 3}, TopKLogitsWarper(3)),
        ({"top_k": 99}, TopKLogitsWarper(99)),
        ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
        ({"top_p": 0.01}, TopPLogitsWarper(0.01)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
    ],
)
def test_filters_match_transformers(settings, warper, temperature):
    torch.manual_seed(0)
    logits = torch.randn(64, 20) * 3
    ours = Draw(temperature=temperature, **settings).filter(logits)
    theirs = warper(None, logits / temperature)
    assert torch.equal(ours.isinf(), theirs.isinf())


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"tie_word_embeddings": True}])
def test_scores_are_those_of_a_pass_over_the_answers(settings):
    """Log-probability and entropy at the temperature, before filters, as of a pass over prompt and answer."""
    torch.manual_seed(0)
    draw = Draw(temperature=0.7, top_k=settings.pop("top_k", 0))
    model = trl_tiny.model(3, **GROUPED, **settings)
    ids, logp, entropy = Decoder(model, draw, ends=[EOS], pad=PAD).scored(PROMPTS, 12)
    for prompt, answer, q, h in zip(PROMPTS, ids, logp, entropy, strict=True):
        assert len(answer) == len(q) == len(h)
        with torch.no_grad():
            truth = (model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double() / 0.7).log_softmax(
                -1
            )
        torch.testing.assert_close(torch.tensor(q).double(), truth[range(len(q)), answer], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.tensor(h).double(), -(truth.exp() * truth).sum(-1), rtol=1e-5, atol=1e-5)


# ── the sampling copy ───────────────────────────────────────────────────────────────────────────────────


def test_copy_is_refreshed_in_its_own_dtype():
    model = trl_tiny.model(0, tie_word_embeddings=True)
    sampler = SamplingCopy(model, torch.bfloat16)
    copied = sampler.model
    assert copied.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert copied.lm_head.weight is copied.get_input_embeddings().weight
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    kept = copied.lm_head.weight
    assert sampler.refresh() is copied and copied.lm_head.weight is kept  # in place: graphs refer to addresses
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q)


def test_copy_does_not_call_the_original_model():
    model, ids = trl_tiny.model(0), torch.tensor([PROMPTS[3]])
    inner = model.forward

    @functools.wraps(inner)
    def wrapped(*args, **kwargs):  # as accelerate does
        return inner(*args, **kwargs)

    model.forward = wrapped
    sampler = SamplingCopy(model, torch.bfloat16).model
    before = sampler(ids).logits
    assert before.dtype == torch.bfloat16
    torch.testing.assert_close(before.float(), model(ids).logits, atol=0.1, rtol=0.1)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(sampler(ids).logits, before)


def test_copy_shares_parameters_of_the_right_dtype():
    model = trl_tiny.model(0).bfloat16()
    model.lm_head.float()  # like adapters on a frozen base
    copied = SamplingCopy(model, torch.bfloat16).model
    inner, outer = dict(copied.named_parameters()), dict(model.named_parameters())
    assert {name for name in inner if inner[name] is not outer[name]} == {"lm_head.weight"}


def test_model_of_the_right_dtype_is_not_copied():
    model = trl_tiny.model(0)
    assert SamplingCopy(model).model is model
    assert SamplingCopy(model, torch.float32).model is model


# ── in the trainer ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_samples_with_it_and_with_the_weights_of_the_step(tmp_path, monkeypatch, bf16):
    inner = rollout.why_not_captured
    monkeypatch.setattr(rollout, "why_not_captured", lambda trainer: None)  # pretend that there is a GPU
    args = trl_tiny.config(tmp_path, max_steps=3, bf16=bf16, learning_rate=1e-2)
    trainer = DewTrainer(
        trl_tiny.model(), trl_tiny.has_a, args, trl_tiny.prompts(), processing_class=trl_tiny.tokenizer()
    )
    assert inner(trainer) == "there is no GPU"
    monkeypatch.setattr(trainer.model, "generate", None)  # nobody may call it
    trainer.train()
    dtype = torch.bfloat16 if bf16 else torch.float32
    for p, q in zip(trainer.model.parameters(), trainer.sampling_model().parameters(), strict=True):
        assert q.dtype == dtype and torch.equal(p.to(dtype), q)


def test_a_failure_falls_back_to_generate_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rollout, "why_not_captured", lambda trainer: None)

    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Decoder, "scored", fails)
    args = trl_tiny.config(tmp_path, max_steps=2)
    trainer = DewTrainer(
        trl_tiny.model(), trl_tiny.has_a, args, trl_tiny.prompts(), processing_class=trl_tiny.tokenizer()
    )
    trainer.train()
    warnings = [record.message for record in caplog.records if "Captured sampling failed" in record.message]
    assert len(warnings) == 1 and "not permitted" in warnings[0]


def sampling(folder, monkeypatch, **settings):
    """A trainer that samples with captured steps, and the scoring passes of each generation: their rows."""
    monkeypatch.setattr(rollout, "why_not_captured", lambda trainer: None)
    trainer = trl_tiny.trainer(folder, algorithm="gtpo", records_every=0, max_steps=3, **settings)
    passes, inner = [], trainer._get_per_token_logps_and_entropies

    def counted(model, ids, *args, **kwargs):
        if not torch.is_grad_enabled():
            passes.append(len(ids))
        return inner(model, ids, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted
    return trainer, passes


def test_entropy_from_sampling_replaces_the_scoring_pass(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rollout, "COMPARED", 3)
    caplog.set_level("INFO", "dew")
    trainer, passes = sampling(tmp_path / "sampled", monkeypatch)
    batches, inner = [], trainer._old_policy
    monkeypatch.setattr(
        trainer, "_old_policy", lambda inputs: batches.append((inputs, *inner(inputs))) or batches[-1][1:]
    )
    trainer.train()
    assert passes == [3], "three answers of the first generation are compared, and nothing else is scored"
    messages = [r.message for r in caplog.records if "Entropy from sampling" in r.message]
    assert len(messages) == 1 and "no scoring pass is needed" in messages[0]
    trainer, _ = sampling(tmp_path / "again", monkeypatch)  # with the weights of the first generation
    inputs, entropy, logp, _ = batches[0]
    with torch.no_grad():
        passed_logp, passed, _ = trainer._forward(trainer.model, inputs)
    mask = inputs["completion_mask"].bool()
    torch.testing.assert_close(entropy[mask], passed[mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp[mask], passed_logp[mask], rtol=1e-5, atol=1e-5)


def test_a_sampler_without_entropies_says_so_once(tmp_path, caplog):
    caplog.set_level("INFO", "dew")
    trl_tiny.trainer(tmp_path, algorithm="gtpo", captured_sampling=False).train()
    assert len([r for r in caplog.records if "Sampling gives no entropies" in r.message]) == 1


def test_a_sampler_that_differs_too_much_is_not_used(tmp_path, monkeypatch, caplog):
    inner = Decoder.scored

    def wrong(*args):
        ids, logp, entropy = inner(*args)
        return ids, logp, [[h + 1 for h in row] for row in entropy]

    monkeypatch.setattr(Decoder, "scored", wrong)
    trainer, passes = sampling(tmp_path, monkeypatch)
    trainer.train()
    assert passes == [8, 8, 8, 8]  # the comparison, and one pass per generation
    warnings = [r.message for r in caplog.records if "every generation makes a scoring pass" in r.message]
    assert len(warnings) == 1 and "1.00000 nats" in warnings[0]


# ── edges ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_buffers_are_reused_for_similar_sizes():
    model, many = trl_tiny.model(), [[5, 6]] * 33
    ours = greedy(model)
    for n in (33, 31, 32, 9, 30, 10, 33):
        ours.answers(many[:n], 2)
    assert sorted(ours._kept) == [12, 32, 48]
    assert all(rows <= decoder._capacity(rows) < 2 * rows for rows in range(2, 2000))


def test_no_prompts():
    assert greedy(trl_tiny.model()).answers([], 5) == []


def test_single_token():
    model = trl_tiny.model(2).double()
    assert greedy(model).answers(PROMPTS, 1) == generated(model, PROMPTS, 1)


def test_training_mode_and_attention_are_restored():
    model = trl_tiny.model().train()
    greedy(model).answers(PROMPTS, 3)
    assert model.training and model.config._attn_implementation == trl_tiny.model().config._attn_implementation


def test_unsupported_models():
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    assert refusal(trl_tiny.model()) is None
    assert refusal(torch.nn.Linear(2, 2)) == "it is not a transformers model"
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_key_value_heads": 2}
    assert "sliding_attention" in refusal(Qwen2ForCausalLM(Qwen2Config(**small, **sliding)))
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=8))
    assert refusal(model) is None or "static cache" in refusal(model)
