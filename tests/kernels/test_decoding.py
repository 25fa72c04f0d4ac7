"""The decoder matches `generate`. On a CPU the captured steps run without graphs."""

import functools
import math
import random
from unittest import mock

import pytest
import torch
from scipy.stats import chisquare

import trl_tiny
from dew.decoding import Decoder, Draw, SamplingCopy, buffers, decoder, page_runs, prompts, refusal, replaced

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
@pytest.mark.parametrize("heads", [{}, GROUPED])
def test_greedy_answers_match_generate(heads):
    lengths = []
    for seed in (0, 2):
        model = trl_tiny.model(seed, **heads).double()
        ours = greedy(model)
        expected = generated(model, PROMPTS, 20)
        assert ours.answers(PROMPTS, 20) == expected
        assert ours.answers(PROMPTS, 20) == expected  # reuses the buffers of the first call
        assert ours.answers(PROMPTS[1:], 20) == expected[1:]
        lengths += map(len, expected)
    assert min(lengths) < 20  # some end early


@pytest.mark.parametrize(("owner", "name", "value"), [(buffers, "PAGE", 4), (prompts, "PREFILL", 7)])
def test_several_pages_and_prompts_in_several_passes(monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    model = trl_tiny.model(3, **GROUPED).double()
    assert greedy(model).answers(PROMPTS, 30) == generated(model, PROMPTS, 30)


def test_layers_that_are_compiled_for_training_are_not_called():
    model = trl_tiny.model().double()
    expected = greedy(model).answers(PROMPTS, 6)
    compiled = mock.Mock(side_effect=AssertionError)
    for layer in model.model.layers:
        layer._compiled_call_impl = compiled
    assert greedy(model).answers(PROMPTS, 6) == expected
    assert all(layer._compiled_call_impl is compiled for layer in model.model.layers)


MANY = [[5 + (i * j) % 13 for j in range(1 + i % 5)] for i in range(20)]


@pytest.fixture(scope="module")
def all_at_once():
    """A model, what it answers to MANY, and the scores of a decoder that has room for all of them."""
    model = trl_tiny.model(3, **GROUPED).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "FEWEST", 1000)
        ids, logp, entropy = greedy(model).scored(MANY, 14)
    assert ids == generated(model, MANY, 14) and len(set(map(len, ids))) > 1
    return model, ids, logp, entropy


def same_scores(ids, found, expected):
    live = torch.tensor([[i < len(row) for i in range(14)] for row in ids])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[live], y[live])


@pytest.mark.parametrize(("at_once", "fewest"), [(2, 1), (7, 1000)])
def test_ended_answers_make_room(monkeypatch, all_at_once, at_once, fewest):
    """Waiting prompts take their places, so that slots are used several times over, and in the end there are fewer
    rows; every answer is that of `generate`, with its own scores."""
    monkeypatch.setattr(decoder, "FEWEST", fewest)
    monkeypatch.setattr(buffers, "PAGE", 4)
    monkeypatch.setattr(decoder, "LOOK", 3)
    monkeypatch.setattr(prompts, "PREFILL", 12)
    model, expected, *scores = all_at_once
    ours = greedy(model)
    ids, *found = ours.scored(MANY, 14, at_once)
    assert ids == expected == ours.answers(MANY, 14, at_once)
    same_scores(ids, found, scores)
    assert (len(ours._kept) > 1) == (fewest == 1)


def test_a_longer_prompt_of_as_many_pages_needs_no_new_buffers():
    ours = greedy(trl_tiny.model())
    kept = [ours.answers([[3] * n], 2) and dict(ours._kept) for n in (1, 3)]
    assert kept[0] == kept[1]


def test_each_prompt_is_read_once(monkeypatch, all_at_once):
    """Also where the answers of one owner end sooner than those of the other."""
    for name, value in (("LOOK", 2), ("REFILL", 0.01)):
        monkeypatch.setattr(decoder, name, value)
    monkeypatch.setattr(prompts, "PREFILL", 16)
    read, run = [], prompts.Prefill._pass
    monkeypatch.setattr(prompts.Prefill, "_pass", lambda self, chosen: (read.append(chosen), run(self, chosen))[1])
    model, expected = all_at_once[:2]
    order = sorted(range(20), key=lambda i: len(expected[i]))  # the first owner's answers are the short ones
    given, owners = [MANY[i] for i in order for _ in range(2)], [0] * 20 + [1] * 20
    tokens, lengths = greedy(model).rows(given, 14, 4, owners=owners)[:2]
    found = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    assert found == [expected[i] for i in order for _ in range(2)]
    every = [prompt for chosen in read for prompt in chosen]
    assert len(every) == len(set(every)) == len(set(zip(owners, map(tuple, given), strict=True)))
    assert len(read) < 10


@pytest.mark.parametrize("gib", [0.01, 0.1, 0.7, 1, 3])
def test_buffers_fit_into_the_free_memory(monkeypatch, gib):
    """What is allocated for the rows found affordable stays within the share, and uses at least half of it."""
    ours, free = greedy(trl_tiny.model(**GROUPED)), int(gib * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 0))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    ours.device = torch.device("cuda")
    for distinct in (1, 8, math.inf):
        rows = ours.affordable(100, 200, distinct)
        pages = 1 + decoder._capacity(rows) * buffers.pages_of(200) + min(distinct, rows) * buffers.pages_of(100)
        assert decoder.FREE / 2 < math.prod(buffers.cache_shape(ours.model, pages)) * 4 / free <= decoder.FREE


@pytest.mark.parametrize(("pages", "at_once"), [(8, 7), (20, 20), (1000, 7)])
def test_pages_are_given_as_answers_grow(monkeypatch, all_at_once, pages, at_once):
    """With room for one answer of the limit, for some, and for all: answers move, wait on the host and go on."""
    monkeypatch.setattr(buffers, "PAGE", 2)
    monkeypatch.setattr(page_runs, "SHORTEST", 1)
    monkeypatch.setattr(decoder, "LOOK", 3)
    monkeypatch.setattr(decoder, "FEWEST", 4)
    model, expected, *scores = all_at_once
    prompts = 1 + min(at_once, len(set(map(tuple, MANY)))) * buffers.pages_of(max(map(len, MANY)))
    monkeypatch.setattr(Decoder, "_room", lambda self: prompts + pages)
    monkeypatch.setattr(Decoder, "affordable", lambda self, *_: at_once)
    aside, inner = [], page_runs.Runs._put_aside
    monkeypatch.setattr(page_runs.Runs, "_put_aside", lambda self, row, _: (aside.append(row), inner(self, row, _)))
    ours = greedy(model)
    ids, *found = ours.scored(MANY, 14)
    assert ids == expected and bool(aside) == (pages < 1000) and max(ours._kept) == decoder._capacity(at_once)
    same_scores(ids, found, scores)


def test_runs_of_pages_are_apart_and_all_come_back():
    """Against a table of all pages, in 300 random steps with answers that begin, grow, wait and end."""
    dice, limit = random.Random(0), 40 * buffers.PAGE
    storage = torch.zeros(1, 2, 3 + 200, 1, buffers.PAGE, 1)
    state = buffers.Buffers([mock.Mock(keys=storage[0, 0])], 12, 1, limit, PAD)
    state.start(limit)
    ours, tokens = page_runs.Runs(storage, 3, limit), {}
    for _ in range(300):
        idle = [row for row in range(12) if row not in tokens]
        fresh = dice.sample(idle, min(len(idle), dice.randint(0, 2)))
        ours.begin(fresh)
        tokens.update(dict.fromkeys(fresh, 1))
        ours.grow(state, 50)
        own = [
            range(int(state.table[row, 2]), int(state.table[row, 2]) + buffers.pages_of(min(tokens[row] + 49, limit)))
            for row in tokens
            if row not in ours.waiting
        ]
        assert len({page for run in own for page in run}) == sum(map(len, own)) and (own or not tokens)
        assert all(run[0] >= 3 and run[-1] < 203 for run in own)
        tokens = {row: n if row in ours.waiting else n + 50 for row, n in tokens.items()}
        over = [row for row, n in tokens.items() if row not in ours.waiting and (n > limit or dice.random() < 0.03)]
        ours.advance(50, over)
        tokens = {row: n for row, n in tokens.items() if row not in over}
    while tokens:
        ours.grow(state, 1)
        over = [row for row in tokens if row not in ours.waiting]
        ours.advance(1, over)
        tokens = {row: n for row, n in tokens.items() if row not in over}
    assert [len(free) for free in ours._free] == [0, 0, 5], "joined again"


def test_fewer_rows_go_on_in_buffers_of_longer_answers(monkeypatch):
    monkeypatch.setattr(decoder, "FEWEST", 4)
    monkeypatch.setattr(decoder, "LOOK", 3)
    model = trl_tiny.model(3, max_position_embeddings=256, **GROUPED).double()
    ours = greedy(model)
    ours.answers(MANY[:4], 100)
    assert ours.answers(MANY, 14) == generated(model, MANY, 14)


@pytest.mark.gpu
def test_graphs_match_generate_on_a_gpu(monkeypatch):
    model = trl_tiny.model(3, max_position_embeddings=1024, **GROUPED).double().cuda()
    expected = generated(model, PROMPTS, 600)
    assert greedy(model).answers(PROMPTS, 600) == expected
    monkeypatch.setattr(decoder, "FEWEST", 1)
    assert greedy(model).answers(PROMPTS, 600) == expected
    assert greedy(model).answers(PROMPTS, 600, at_once=2) == expected
    ours = greedy(model)
    for prompt in PROMPTS[1:4]:  # wider each time, in buffers of one size: the only graph is replaced
        assert ours.answers([prompt], 600) == generated(model, [prompt], 600)


# ── choosing a token ────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_frequencies_match_the_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    n = 40_000
    counts = torch.bincount(Draw(temperature).scored(logits.expand(n, -1), torch.rand(n, 2))[0], minlength=5)
    assert counts[4] == 0
    expected = n * (logits[:4] / temperature).softmax(-1).double()
    assert chisquare(counts[:4].numpy(), (expected * n / expected.sum()).numpy()).pvalue > 1e-4


def test_filters_come_after_the_temperature():
    """At temperature 0.5, probabilities of 1, 2, 3 and 4 tenths become 1, 4, 9 and 16 thirtieths."""
    logits, uniforms = torch.tensor([1.0, 2.0, 3.0, 4.0]).log().expand(100, -1), torch.rand(100, 2)
    uniforms[:2, 0] = torch.tensor([0.0, 1 - 2**-24])
    kept = (({"top_k": 3}, 1), ({"top_k": 99}, 0), ({"top_k": -1}, 0), ({"top_p": 0.52}, 3), ({"min_p": 0.2}, 1))
    for settings, least in kept:
        tokens = Draw(0.5, **settings).scored(logits, uniforms)[0]
        assert sorted(set(tokens.tolist())) == list(range(least, 4)), settings


def test_scores_of_an_almost_certain_token():
    # r = e^-30: logp = -ln(1 + r) = -r, entropy = ln(1 + r) + 30 r / (1 + r) = 31 r; the third token has p = 0.
    logits = torch.tensor([[0.0, -30.0, -torch.inf], [-torch.inf, 0.0, -torch.inf]])
    token, logp, entropy = Draw().scored(logits, torch.rand(len(logits), 2))
    r = math.exp(-30)
    assert token.tolist() == [0, 1] and logp[1] == entropy[1] == 0
    assert logp[0].item() == pytest.approx(-r, rel=0.01) and entropy[0].item() == pytest.approx(31 * r, rel=0.01)


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"tie_word_embeddings": True}])
def test_scores_are_those_of_a_pass_over_the_answers(settings):
    """Log-probability and entropy at the temperature, before filters, as of a pass over prompt and answer."""
    torch.manual_seed(0)
    draw = Draw(temperature=0.7, top_k=settings.pop("top_k", 0), sum_sq=True)
    model = trl_tiny.model(3, **GROUPED, **settings)
    ids, lengths, logp, entropy, squares = Decoder(model, draw, ends=[EOS], pad=PAD).rows(PROMPTS, 12)
    for prompt, row, n, q, h, w in zip(PROMPTS, ids.tolist(), lengths, logp, entropy, squares, strict=True):
        answer = row[:n]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        truth = (logits.double() / 0.7).log_softmax(-1)
        torch.testing.assert_close(q[:n].double(), truth[range(n), answer], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(h[:n].double(), -(truth.exp() * truth).sum(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(w[:n].double(), truth.exp().square().sum(-1), rtol=1e-5, atol=1e-5)


class Ending(Draw):
    """Chooses the end token where the first uniform number is above 1, and nowhere else."""

    def scored(self, logits, uniforms):
        tokens, *others = super().scored(logits, uniforms.clamp_max(0.999))
        return torch.where(uniforms[:, 0] > 1, EOS, torch.where(tokens == EOS, EOS + 1, tokens)), *others


@pytest.mark.parametrize(
    ("device", "before", "limit", "dtype", "tolerance"),
    [
        pytest.param("cpu", 16_000, 128, torch.float32, 1e-5, marks=pytest.mark.slow),
        pytest.param("cpu", 0, 16_384, torch.bfloat16, 0.02, marks=pytest.mark.slow),
        pytest.param("cuda", 0, 4096, torch.float32, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", 0, 16_384, torch.bfloat16, 0.02, marks=pytest.mark.gpu),
    ],
)
def test_an_answer_at_16k_tokens_outlives_the_others(monkeypatch, device, before, limit, dtype, tolerance):
    """It continues alone; its scores are as near to a pass in float32 at its end as at its beginning."""
    monkeypatch.setattr(decoder, "FEWEST", 1)
    if device == "cuda":  # room for the long one and few others: some wait
        monkeypatch.setattr(Decoder, "_room", lambda self: 2 + buffers.pages_of(limit) + 10)
        monkeypatch.setattr(Decoder, "affordable", lambda self, *_: 5)
    torch.manual_seed(0)
    lengths = [3, 40, limit, 7, 65]
    settings = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16}
    model = trl_tiny.model(3, max_position_embeddings=32_768, **settings).to(device, dtype)
    prompt = [3 + i % 17 for i in range(before + 5)]
    uniforms = torch.rand(len(lengths), limit, 2)
    uniforms[range(len(lengths)), [n - 1 for n in lengths]] = 2
    ours = Decoder(model, Ending(), ends=[EOS], pad=PAD)
    answers = ours.rows([prompt] * len(lengths), limit, uniforms=uniforms.to(device))
    ids, found, logp, entropy = (x.cpu() for x in answers)
    assert found.tolist() == lengths and 1 in ours._kept
    model.float().cpu()
    for i in (2, 4):
        n, answer = lengths[i], ids[i, : lengths[i]]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1 : -1]
        truth = logits.log_softmax(-1)
        drawn = answer > EOS + 1  # else the draw was changed
        gaps = (logp[i, :n] - truth[range(n), answer])[drawn], entropy[i, :n] + (truth.exp() * truth).sum(-1)
        for first, last in ((gap[:64].abs().mean(), gap[-64:].abs().mean()) for gap in gaps):
            assert last < tolerance and last < 2 * first + tolerance / 10


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
    model.lm_head.bfloat16()
    assert SamplingCopy(model).model is model and SamplingCopy(model, torch.bfloat16).model is model  # nothing to copy


def test_adapters_take_two_kernels():
    """As PEFT computes them; not those that are merged, disabled, of another kind or of another dtype."""
    pytest.importorskip("triton")
    from peft import LoraConfig, get_peft_model

    from dew.decoding.fused import lora_parts

    def adapted(**settings):
        names = ["q_proj", "down_proj"]
        model = get_peft_model(trl_tiny.model(**GROUPED), LoraConfig(r=4, target_modules=names, **settings)).double()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p)
        return model.eval()

    model, ids = adapted(lora_alpha=12, lora_dropout=0.5), torch.tensor([PROMPTS[3]])
    parts, expected = lora_parts(model), model(ids).logits
    assert len(parts) == 4
    with replaced(parts):
        torch.testing.assert_close(model(ids).logits, expected)
    with model.disable_adapter():
        assert not lora_parts(model)
    model.merge_adapter()
    assert not lora_parts(model) and not lora_parts(adapted(use_dora=True)) and not lora_parts(adapted(lora_bias=True))
    model = adapted()
    model.get_base_model().bfloat16()
    for name, p in model.named_parameters():
        p.data = p.data.float() if "lora_" in name else p.data
    assert not lora_parts(model) and len(lora_parts(SamplingCopy(model, torch.bfloat16).model)) == 4


# ── in the trainer ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def captured(monkeypatch):
    """The trainer samples with captured steps on a CPU too."""
    monkeypatch.setattr("dew.engines.trl.rollout.refusal", lambda model: None)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_samples_with_it_and_with_the_weights_of_the_step(tmp_path, monkeypatch, bf16):
    trainer = trl_tiny.trainer(tmp_path, max_steps=3, bf16=bf16, learning_rate=1e-2)
    monkeypatch.setattr(trainer.model, "generate", None)  # nobody may call it
    trainer.train()
    dtype = torch.bfloat16 if bf16 else torch.float32
    for p, q in zip(trainer.model.parameters(), trainer.sampling_model().parameters(), strict=True):
        assert q.dtype == dtype and torch.equal(p.to(dtype), q)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("error", [RuntimeError("not permitted when capturing"), Exception("out of resource")])
def test_a_failure_falls_back_to_generate_and_says_so(tmp_path, monkeypatch, caplog, error):
    monkeypatch.setattr(Decoder, "scored", mock.Mock(side_effect=error))
    trl_tiny.trainer(tmp_path, max_steps=2).train()
    warnings = [record.message for record in caplog.records if "Captured sampling failed" in record.message]
    assert len(warnings) == 1 and str(error) in warnings[0]


def test_a_failed_capture_restores_the_stream_and_the_generator(monkeypatch):
    """As PyTorch does it: the error of the step, then another when the capture ends, and nothing is restored."""
    cuda = mock.MagicMock()
    cuda.graph.return_value.__exit__.side_effect = RuntimeError("capture was invalidated")
    ours = greedy(trl_tiny.model())
    ours.answers(PROMPTS, 3)
    (kept,) = ours._kept.values()
    ours.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(kept, "_forward", mock.Mock(side_effect=RuntimeError("a synchronisation")))
    with pytest.raises(RuntimeError, match="invalidated") as error:
        kept.step(ours)
    assert str(error.value.__context__) == "a synchronisation"
    cuda.set_stream.assert_called_once_with(cuda.current_stream.return_value)
    generator = cuda.default_generators[cuda.current_stream.return_value.device_index]
    generator.graphsafe_set_state.assert_called_once_with(generator.clone_state.return_value)


@pytest.mark.gpu
def test_sampling_continues_after_a_failed_capture():
    model = trl_tiny.model().cuda()
    ours = Decoder(model, Draw(), ends=[EOS], pad=PAD)
    inner, steps = ours.logits, []

    def synchronises(**inputs):
        steps.append(torch.cuda.is_current_stream_capturing())
        found = inner(**inputs)
        return found + found.sum().item() if steps[-1] else found

    ours.logits = synchronises
    with pytest.raises(RuntimeError):
        ours.answers(PROMPTS, 8)
    assert steps[-1]
    torch.rand(3, device="cuda")
    assert len(Decoder(model, Draw(), ends=[EOS], pad=PAD).answers(PROMPTS, 8)) == len(PROMPTS)


def sampling(folder):
    """A trainer that samples with captured steps, and the scoring passes of each generation: their rows."""
    trainer = trl_tiny.trainer(folder, algorithm="gtpo", records_every=0, max_steps=3)
    passes, inner = [], trainer._get_per_token_logps_and_entropies

    def counted(model, ids, *args, **kwargs):
        if not torch.is_grad_enabled():
            passes.append(len(ids))
        return inner(model, ids, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted
    return trainer, passes


@pytest.mark.usefixtures("captured")
def test_entropy_from_sampling_replaces_the_scoring_pass(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("dew.engines.trl.rollout.COMPARED", 3)
    caplog.set_level("INFO", "dew")
    trainer, passes = sampling(tmp_path / "sampled")
    batches, inner = [], trainer._old_policy
    monkeypatch.setattr(
        trainer, "_old_policy", lambda inputs: batches.append((inputs, inner(inputs))) or batches[-1][1]
    )
    trainer.train()
    assert passes == [3], "three answers of the first generation are compared, and nothing else is scored"
    messages = [r.message for r in caplog.records if "Entropy from sampling" in r.message]
    assert len(messages) == 1 and "no scoring pass is needed" in messages[0]
    trainer, _ = sampling(tmp_path / "again")  # with the weights of the first generation
    inputs, sampled = batches[0]
    with torch.no_grad():
        passed_logp, passed, _ = trainer._forward(trainer.model, inputs)
    mask = inputs["completion_mask"].bool()
    torch.testing.assert_close(sampled.entropy[mask], passed[mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sampled.logp[mask], passed_logp[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("captured")
def test_a_sampler_that_differs_too_much_is_not_used(tmp_path, monkeypatch, caplog):
    inner = Decoder.scored

    def wrong(*args):
        ids, logp, entropy = inner(*args)
        return ids, logp, entropy + 1

    monkeypatch.setattr(Decoder, "scored", wrong)
    trainer, passes = sampling(tmp_path)
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


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_training_mode_and_attention_are_restored(attention):
    """Flash attention, which cannot run here, is only for training."""
    model, expected = trl_tiny.model().train(), greedy(trl_tiny.model()).answers(PROMPTS, 3)
    model.config._attn_implementation_internal = attention
    assert greedy(model).answers(PROMPTS, 3) == expected
    assert model.training and model.config._attn_implementation == attention


def test_unsupported_models():
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    def why_not(model):
        model.__class__ = type(type(model).__name__, (type(model),), {"device": torch.device("cuda")})
        return refusal(model)

    assert why_not(trl_tiny.model()) is None
    for attention, why in (("kernels-community/flash-attn2", None), ("mine", "its attention is mine")):
        (model := trl_tiny.model()).config._attn_implementation_internal = attention
        assert why_not(model) == why
    assert refusal(trl_tiny.model()) == "its device is cpu, not cuda"
    assert refusal(torch.nn.Linear(2, 2)) == "it is not a transformers model"
    assert "sharded" in why_not(trl_tiny.model().to("meta"))
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_key_value_heads": 2}
    assert "sliding_attention" in why_not(Qwen2ForCausalLM(Qwen2Config(vocab_size=9, **shape, **sliding)))
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=8))
    assert why_not(model) is None or "static cache" in why_not(model)


def test_owners_are_told_for_as_many_rows_as_a_step_has():
    """Also where a batch shrinks to fewer rows than the smallest buffers have."""
    model, told, seen = trl_tiny.model(), set(), set()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, x, y: seen.add(y.shape[:-1].numel()))
    ours = Decoder(
        model, Draw(), ends=[1, 2], pad=PAD, keep=True, arrange=lambda owners, tokens: told.add(len(owners) * tokens)
    )
    ours.answers([[3 + i % 20, 4] for i in range(2 * decoder.FEWEST)], 48)
    assert seen <= told and len(seen) > 2
