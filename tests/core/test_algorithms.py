import ast
import inspect
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dew
import oracles
from dew import Rollouts, get_algorithm, list_algorithms
from dew.algorithms import _BY_NAME, GRPO, Algorithm, register_algorithm, source_digest
from dew.algorithms.base import Part
from dew.algorithms.credit import advantages_of, give_credit
from dew.credit import grpo_s_advantages, gtpo_advantages
from dew.errors import ConfigError, ShapeError
from dew.losses import policy_loss
from groups import ONE_GROUP, POOL, batches, rollouts

NAMES = ["dew", "gtpo", "grpo_s", "grpo", "dapo", "dr_grpo", "gspo", "forking_tokens", "entropy_advantage", "cispo",
         "sapo", "maxrl", "qae", "w_reinforce", "reinforce_pp", "clip_cov", "kl_cov", "steer", "otb",
         "gmpo", "dppo", "gepo", "stare", "fipo", "trl"]  # fmt: skip
DEFAULTS = {
    "clip_cov": {"cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0}, "kl_cov": {"cov_share": 2e-4, "cov_coef": 1.0},
    "stare": {"share": 0.1, "target_entropy": 0.3}, "fipo": {"half_life": 32.0, "most_weight": 1.2},
    "dapo": {"max_rounds": 4, "oversample": 1.0}, "qae": {"quantile": 0.4}, "gepo": {"low_band": 0.2, "high_band": 0.3},
}  # fmt: skip


# ---- the table of papers -----------------------------------------------------------------------
def test_names_and_defaults_match_the_papers():
    assert list_algorithms() == NAMES
    gtpo, grpo_s = get_algorithm("gtpo"), get_algorithm("grpo_s")
    assert (gtpo.alpha1, gtpo.alpha2, gtpo.compare, gtpo.average) == (1.0, 0.1, "column", "arithmetic")
    assert (gtpo.scope, gtpo.pool, gtpo.entropy_clip) == ("group", "group", None)
    assert (grpo_s.beta1, grpo_s.beta2) == (1.0, 0.1)
    for name, settings in DEFAULTS.items():
        assert {key: getattr(get_algorithm(name), key) for key in settings} == settings
    clips = {n: (get_algorithm(n).clip_low, get_algorithm(n).clip_high) for n in NAMES}
    assert clips == {
        **dict.fromkeys(NAMES, (0.2, 0.28)),
        **dict.fromkeys(("grpo", "dr_grpo", "sapo", "reinforce_pp", "gepo", "trl"), (0.2, 0.2)),
        "gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4), "dppo": (0.15, 0.15), "cispo": (1.0, 4.0), "clip_cov": (1.0, 1.0),
        "kl_cov": (1.0, 1e6),
    }  # fmt: skip
    ratios = {n: get_algorithm(n).ratio for n in NAMES}
    assert ratios == {**dict.fromkeys(NAMES, "token"), "grpo_s": "sequence_mean", "gspo": "sequence_geometric"}
    by_sequence = {n for n in NAMES if get_algorithm(n).reduce == "sequences"}
    assert by_sequence == {"grpo_s", "grpo", "gspo", "sapo", "gmpo", "gepo"}
    sampled_once = {"gtpo", "grpo_s", "grpo", "dr_grpo", "gspo", "sapo", "w_reinforce", "reinforce_pp", "trl"}
    sampled_once |= {"gmpo", "dppo", "gepo"}
    assert {n for n in NAMES if not get_algorithm(n).dynamic_sampling} == sampled_once
    reads = {"needs_logp": "clip_cov kl_cov steer otb gepo stare", "needs_sum_sq": "otb", "penalises": "kl_cov",
             "fixed_divisor": "dr_grpo dppo", "engine_loss": "trl"}  # fmt: skip
    for fact, names in reads.items():
        assert {n for n in NAMES if getattr(get_algorithm(n), fact)} == set(names.split()), fact
    for credit in ("maxrl", "qae", "w_reinforce", "reinforce_pp"):
        assert get_algorithm(credit).credit == credit and get_algorithm("dapo").credit == "grpo"
    assert get_algorithm("grpo_s", average="geometric").ratio == "sequence_geometric"
    assert get_algorithm("gtpo(alpha2=0.5)", pool="joint") == get_algorithm("gtpo", alpha2=0.5, pool="joint")
    own_loss = {"entropy_advantage", "fipo"}
    other = {"grpo_s", "gspo", "cispo", "sapo", "gmpo", "dppo", "dr_grpo", "kl_cov", "otb", "trl", *own_loss}
    assert {n for n in NAMES if not get_algorithm(n).plain_loss} == other
    assert {n for n in NAMES if not get_algorithm(n).no_loss_without_advantage} == own_loss
    assert not get_algorithm("grpo", kl_coef=0.1).no_loss_without_advantage
    signals = {"gtpo": ["entropy"], "steer": ["entropy", "logp"], "otb": ["logp", "sum_sq"], "entropy_advantage": []}
    assert {n: get_algorithm(n).signals for n in signals} == signals


def test_labels_have_the_settings_that_differ():
    assert get_algorithm("dapo", max_tokens=9).label == "dapo"
    assert get_algorithm("gtpo", alpha2=0.5, entropy_clip=(0.1, 2)).label == "gtpo(entropy_clip=(0.1,2),alpha2=0.5)"


@pytest.mark.parametrize("spelling", ["GRPO-S", "grpos", "grpo_s", "Grpo_S"])
def test_spelling_is_lenient(spelling):
    assert isinstance(get_algorithm(spelling), dew.GRPOS)


# ---- credit ------------------------------------------------------------------------------------
@given(batches(), st.sampled_from(["group", "batch"]), POOL)
def test_gtpo_of_a_batch_matches_the_loops(batch, scope, pool):
    """Rows in any order, groups of any size; groups of one outcome get nothing."""
    ids, rewards, rows = batch
    grouped = rollouts(batch)
    actual = grouped.to_rows(get_algorithm("gtpo", scope=scope, pool=pool).advantages(grouped))
    scopes = [[i for i in range(len(ids)) if scope == "batch" or ids[i] == g] for g in dict.fromkeys(ids)]
    for members in scopes:
        correct = [rewards[i] > 0.5 for i in members]
        shaped = oracles.gtpo_rewards(correct, [rows[i] for i in members])
        for i, expected in zip(members, oracles.gtpo_advantages(correct, shaped, pool), strict=True):
            mixed = len({rewards[k] for k in range(len(ids)) if ids[k] == ids[i]}) == 2
            got = actual[i, : len(rows[i])].tolist()
            assert got == pytest.approx(expected if mixed else [0.0] * len(expected), rel=1e-9, abs=1e-9)


@given(batches(), st.sampled_from([name for name in NAMES if name != "w_reinforce"]))
def test_groups_of_one_outcome_have_zero_advantage(batch, name):
    ids, _, rows = batch
    all_wrong = rollouts((ids, [0.0] * len(ids), rows))
    assert not get_algorithm(name, max_tokens=5).advantages(all_wrong).any()


@given(batches(), st.sampled_from(NAMES))
def test_masked_tokens_get_zero(batch, name):
    grouped = rollouts(batch)
    algorithm = get_algorithm(name)
    for given_ in (algorithm.rewards(grouped), algorithm.advantages(grouped)):
        assert given_.shape == grouped.mask.shape
        assert given_.isfinite().all() and not given_[~grouped.mask].any()


@given(batches(), st.sampled_from([0.2, 0.01]))
def test_forking_tokens_divide_by_the_kept_tokens(batch, keep):
    """The loss over all tokens equals DAPO's over the kept ones alone."""
    grouped = rollouts(batch)
    logp = torch.linspace(-1, 0, grouped.mask.numel(), dtype=torch.float64).reshape(grouped.mask.shape)
    old = logp.flip(-1)
    kept = dew.credit.forking_mask(grouped.entropy, grouped.mask, keep=keep)
    expected, _ = policy_loss(logp, old, get_algorithm("dapo").advantages(grouped), kept)
    algorithm = get_algorithm("forking_tokens", keep=keep)
    assert get_algorithm("forking_tokens").keep == 0.2  # the paper's share
    actual, _ = algorithm.loss(logp, Part(mask=grouped.mask, old_logp=old), algorithm.advantages(grouped))
    torch.testing.assert_close(actual, expected)


def test_other_rewards_change_the_credit_but_not_correctness():
    plain, paid = rollouts(ONE_GROUP), rollouts(ONE_GROUP, extra=[0.0, -0.4, 0.0, 5.0])
    for name in ("gtpo", "grpo_s", "grpo", "dapo"):
        algorithm = get_algorithm(name)
        assert algorithm.correct(paid).equal(algorithm.correct(plain))
        assert algorithm.signal(paid).equal(algorithm.signal(plain))
        moved = algorithm.rewards(paid) - algorithm.rewards(plain)
        assert moved[0, [1, 3], 0].tolist() == pytest.approx([-0.4, 5.0])
        assert not algorithm.advantages(paid).equal(algorithm.advantages(plain))
    dapo = get_algorithm("dapo").advantages(paid)
    assert dapo[0, :, 0].argmax() == 3
    torch.testing.assert_close(get_algorithm("dew", alpha1=1.0, alpha2=0.0).advantages(paid), dapo)
    correct = paid.correct(0.5)  # the wrong answer's reward is positive
    gtpo, grpo_s = get_algorithm("gtpo"), get_algorithm("grpo_s")
    torch.testing.assert_close(gtpo.advantages(paid), gtpo_advantages(gtpo.rewards(paid), paid.mask, correct=correct))
    expected = grpo_s_advantages(grpo_s.rewards(paid)[..., 0], correct=correct)
    torch.testing.assert_close(grpo_s.advantages(paid)[..., 0], expected)


def test_graded_rewards_below_the_threshold_are_a_signal_for_dew_alone():
    graded, equal = (rollouts(([0, 0], rewards, [[1.0], [1.0]])) for rewards in ([0.1, 0.3], [0.3, 0.3]))
    signals = {name: get_algorithm(name).signal(graded).item() for name in ("dew", "grpo", "gtpo", "dapo")}
    assert signals == {"dew": True, "grpo": True, "gtpo": False, "dapo": False}
    assert not get_algorithm("dew").signal(equal).any() and not get_algorithm("grpo").signal(equal).any()


@pytest.mark.parametrize(
    ("name", "settings", "outcomes", "says"),
    [
        ("gtpo", {}, [0, 1, float("nan"), 1 + 3e-6], None),
        ("gtpo", {}, [1, 1], None),  # maybe the other comes later
        ("grpo", {}, [0, 0.5, 1], None),  # reads the differences
        ("gtpo", {}, [0, 0.3], ["2 different values (0, 0.3); the threshold is 0.5", "gtpo(pool=outcome)`"]),
        ("gtpo", {"alpha2": 0.5}, [0.6, 1], ["(0.6, 1)", "0.5,pool=outcome)`", "0.5,threshold=0.6)`"]),
        ("gtpo", {"threshold": 0.05}, [0, 0.1, 0.2], ["(0, 0.1, 0.2)", "gtpo(threshold=0.05)`"]),
        ("gtpo", {"threshold": 0.15}, [0, 0.1, 0.2], ["(0, 0.1, 0.2)", "gtpo(threshold=0.15)`"]),
        ("dapo", {}, [0, 0.1, 0.2, 1], ["(0, 0.1, 0.2, 1)", "To keep them, write `algorithm: dapo(dynamic_sam"]),
        ("maxrl", {}, [-1, 1], ["negative", "Return 0 for wrong answers"]),
        ("maxrl", {}, [0, 1], None),
        ("dapo", {"overlong": "group"}, [0, 0.1, 0.2, 0.3, 1], ["(0, 0.1, 0.2, 0.3, ...)", "write `algorithm: dew`"]),
    ],
)
def test_graded_rewards_are_lost_on_rules_that_only_tell_correct_from_wrong(name, settings, outcomes, says):
    found = get_algorithm(name, **settings).graded(torch.tensor(outcomes))
    assert (found is None) == (says is None)
    assert found is None or (says[0] in found.what and all(part in found.remedy for part in says[1:]))


@pytest.mark.parametrize("name", ["gtpo", "dew", "forking_tokens"])
def test_a_placebo_keeps_the_distribution_of_the_weights(name):
    given = rollouts(([0] * 3, [1.0, 0.0, 1.0], [[0.1 * (i + 1) ** t for t in range(9 - i)] for i in range(3)]))
    rule, permuted = get_algorithm(name), get_algorithm(name, placebo=True)
    true, placebo, again = (give_credit(x, given).advantages for x in (rule, permuted, permuted))
    torch.testing.assert_close(true[given.mask], rule.advantages(given)[given.mask])
    live = [x.masked_fill(~given.mask, 99.0).sort(-1).values for x in (true, placebo)]
    assert torch.equal(*live) and torch.equal(placebo, again) and not placebo[~given.mask].any()
    assert not torch.equal(true, placebo)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s", "dapo"])
def test_overlong_penalties_are_added(name):
    batch = rollouts(ONE_GROUP)
    free = get_algorithm(name).rewards(batch)
    soft = get_algorithm(name, overlong="soft", max_tokens=2, overlong_buffer=1).rewards(batch)
    # lengths 2 1 2 1: those of 2 tokens stand at the limit and pay 1
    torch.testing.assert_close((free - soft)[0, :, 0], torch.tensor([1.0, 0, 1, 0], dtype=torch.float64))
    group = get_algorithm(name, overlong="group").rewards(batch)
    # n = m: the wrong pay beyond the knee max(1.5, 1.5): −½ · .5/1.5
    torch.testing.assert_close((free - group)[0, :, 0], torch.tensor([0, 0, 0.5 / 3, 0], dtype=torch.float64))
    easy = get_algorithm(name, overlong="group", overlong_gamma=0.5).rewards(batch)  # then the correct pay
    torch.testing.assert_close((free - easy)[0, :, 0], torch.tensor([0.5 / 3, 0, 0, 0], dtype=torch.float64))


# ---- loss --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_sum_to_the_batch(name):
    batch = rollouts(([0, 0, 1, 1, 0], [1.0, 0, 1, 0, 1], [[1.0, 3.0], [3.0], [1.0, 2.0], [3.0], [1.0, 1.0]]))
    algorithm = get_algorithm(name, max_tokens=4)
    rows, mask = batch.to_rows(algorithm.advantages(batch)), batch.to_rows(batch.mask)
    entropy, penalty = batch.to_rows(batch.entropy), torch.zeros_like(rows)
    if algorithm.penalises:
        penalty = batch.to_rows(algorithm.penalties(batch, algorithm.advantages(batch)))
    generator = torch.Generator().manual_seed(0)
    logp, old = torch.rand(2, *mask.shape, generator=generator, dtype=torch.float64).neg()
    given = {"mask": mask, "old_logp": old, "entropy": entropy, "penalty": penalty}
    total, _ = algorithm.loss(logp, Part(**given), rows)
    count = algorithm.divisor(int(mask.sum()), len(mask))
    parts = [
        algorithm.loss(logp[i], Part(**{name: x[i] for name, x in given.items()}), rows[i], count=count)[0]
        for i in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    torch.testing.assert_close(sum(parts), total)
    given["mask"] = torch.zeros_like(mask)
    assert algorithm.loss(logp, Part(**given), rows)[0] == 0  # nothing to train on


def test_dr_grpo_divides_by_the_budget():
    # one sequence, A = 1, w = 1: −2 tokens / (budget 8 · 1 sequence)
    zero, ones = torch.zeros(1, 2), torch.ones(1, 2)
    loss, _ = get_algorithm("dr_grpo", max_tokens=8).loss(zero, Part(mask=ones.bool(), old_logp=zero), ones)
    assert loss.item() == pytest.approx(-0.25)
    assert get_algorithm("dr_grpo", max_tokens=8).divisor(tokens=5, sequences=2) == 16


def test_entropy_bonus_uses_the_current_policy():
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    algorithm = get_algorithm("entropy_advantage")
    part = Part(mask=mask, old_logp=zero, entropy=torch.tensor([[1.0, 9.0]]))
    loss, stats = algorithm.loss(zero, part, torch.ones(1, 2))
    assert loss.item() == pytest.approx(-(1.4 + 1.5) / 2) and stats["credit/bonus"].item() == pytest.approx(0.45)
    # one live token of two answers: A = 1 + min(.1 · 9, ¼), or 2 + min(.9, 2/4); without any there is no bonus
    algorithm, nan = get_algorithm("entropy_advantage", alpha=0.1, kappa=4.0), float("nan")
    for i, H, bonus in ((0, 9.0, 0.25), (1, 9.0, 0.5), (1, 1.0, 0.1)):
        entropy = torch.full((2, 3), nan)
        entropy[i, 0] = H
        live = Part(mask=(~entropy.isnan()).long(), old_logp=torch.zeros(2, 3), entropy=entropy)
        _, stats = algorithm.loss(torch.zeros(2, 3), live, torch.tensor([1.0, 2.0]))
        assert stats["credit/bonus"].item() == pytest.approx(bonus)
    nothing = Part(mask=torch.zeros(2, 3).bool(), old_logp=torch.zeros(2, 3), entropy=entropy)
    assert algorithm.loss(torch.zeros(2, 3), nothing, torch.ones(2))[1]["credit/bonus"] == 0
    with pytest.raises(ShapeError, match="current policy's entropy"):
        algorithm.loss(zero, Part(mask=mask, old_logp=zero), torch.ones(1, 2))


def test_kl_term_needs_a_coefficient():
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    rows = Part(mask=mask, old_logp=zero, ref_logp=zero + 1)
    without, stats = get_algorithm("grpo").loss(zero, rows, torch.ones(1, 2))
    with_kl, stats_kl = get_algorithm("grpo", kl_coef=0.1).loss(zero, rows, torch.ones(1, 2))
    assert "kl/ref" not in stats and stats_kl["kl/ref"].item() == pytest.approx(2.718281828 - 2)
    assert (with_kl - without).item() == pytest.approx(0.1 * (2.718281828 - 2))


# ---- settings ----------------------------------------------------------------------------------
def test_every_field_has_a_docstring():
    """The docstring under each field is its help text: `ast` finds one under each."""
    classes = {ancestor for cls in _BY_NAME.values() for ancestor in cls.__mro__ if issubclass(ancestor, Algorithm)}
    for cls in classes:
        body = ast.parse(inspect.getsource(cls)).body[0].body
        for node, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                assert isinstance(below, ast.Expr), f"{cls.__name__}.{node.target.id} has no docstring"


def test_all_problems_are_listed():
    with pytest.raises(ConfigError) as error:
        get_algorithm("gtpo", alpha2=-0.1, compare="diagonal", pool="none", clip_low=2, max_rounds=0, oversample=0.5)
    text = str(error.value)
    given = ["alpha2=-0.1", "compare='diagonal'", "pool='none'", "clip_low=2", "max_rounds", "oversample"]
    assert all(word in text for word in (*given, "rewarded for being sure"))
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("gtop", {}, "Did you mean 'gtpo'"),
        ("qqq", {}, "Choose one of: dew, gtpo"),
        ("gtpo", {"alpah2": 0.2}, "Did you mean 'alpha2'"),
        ("gtpo", {"scope": "world"}, "group, batch"),
        ("gtpo", {"average": "median"}, "arithmetic, geometric"),
        ("gtpo", {"alpha1": 0, "alpha2": 0}, "every advantage would be 0"),
        ("gtpo", {"entropy_clip": [0.3, 0.2]}, "low <= high"),
        ("gtpo", {"entropy_clip": 0.3}, "low <= high"),
        ("gtpo", {"entropy_clip": [0.3, "high"]}, "low <= high"),
        ("grpo_s", {"beta2": -1}, "beta2=-1"),
        ("dapo", {"dynamic_sampling": 1}, "dynamic_sampling=1 is not true or false"),
        ("grpo", {"clip_high": -1}, "clip_high=-1"),
        ("grpo", {"kl_coef": -1}, "kl_coef=-1"),
        ("dapo", {"overlong": "hard"}, "none, soft, group"),
        ("dapo", {"overlong": "soft"}, "overlong_buffer"),
        ("dapo", {"overlong": "soft", "max_tokens": 4, "overlong_buffer": 5}, "0 < overlong_buffer <= max_tokens"),
        ("dapo", {"overlong_gamma": 0.2}, "0.5 to 1"),
        ("dapo", {"overlong_gamma": 1.1}, "0.5 to 1"),
        ("forking_tokens", {"keep": 0}, "0 < keep <= 1"),
        ("forking_tokens", {"keep": 1.5}, "0 < keep <= 1"),
        ("entropy_advantage", {"alpha": -1}, "alpha=-1"),
        ("entropy_advantage", {"kappa": 1}, "kappa=1"),
        ("gtpo", {"surrogate": "ppo"}, "clip, cispo, sapo"),
        ("sapo", {"tau_neg": 0}, "numbers > 0"),
        ("dapo", {"credit": "rloo"}, "grpo, maxrl, qae, w_reinforce, reinforce_pp"),
        ("qae", {"quantile": 1.0}, "0 < quantile < 1"),
        ("w_reinforce", {"positive": -0.1}, "penalises correct answers"),
        ("clip_cov", {"cov_share": 0}, "0 < cov_share <= 1"),
        ("kl_cov", {"cov_share": 1.5}, "0 < cov_share <= 1"),
        ("clip_cov", {"cov_low": 5}, "low < high"),
        ("kl_cov", {"cov_coef": -1}, "cov_coef=-1"),
        ("steer", {"least_weight": 0}, "0 < least_weight <= 1"),
        ("steer", {"least_weight": 1.5}, "0 < least_weight <= 1"),
        ("otb", {"credit": "maxrl"}, "a credit of its own"),
        ("stare", {"share": 0}, "0 < share <= 1"),
        ("stare", {"share": 1.5}, "0 < share <= 1"),
        ("stare", {"negative_weight": 0}, "sign of an advantage"),
        ("stare", {"positive_weight": 0}, "sign of an advantage"),
        ("fipo", {"half_life": 0}, "half_life=0"),
        ("fipo", {"least_weight": 1.1}, "least_weight=1.1"),
        ("fipo", {"least_weight": 0}, "least_weight=0"),
        ("fipo", {"most_weight": 0.9}, "most_weight=0.9"),
        ("gepo", {"low_weight": 1.1}, "low_weight=1.1"),
        ("gepo", {"high_weight": -0.1}, "high_weight=-0.1"),
        ("gepo", {"high_weight": 1.1}, "high_weight=1.1"),
        ("gepo", {"low_band": -1}, "low and high entropy at once"),
        ("gepo", {"high_band": -1}, "low and high entropy at once"),
    ],
)
def test_invalid_settings(name, settings, says):
    with pytest.raises(ConfigError, match=says) as error:
        get_algorithm(name, **settings)
    assert len(error.value.problems) == 1


def test_own_rules_in_files_of_the_same_name_keep_their_source(tmp_path):
    code = "from dew.algorithms import DAPO\n\nclass Rule(DAPO):\n    name = '{}'\n"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rule.py").write_text(code.format(name))
    first = type(rule := get_algorithm(f"{tmp_path}/a/rule.py:Rule"))
    assert type(get_algorithm(rule.text(max_rounds=8))) is first and "rule.py" not in rule.label  # as alarms advise
    digest, _ = source_digest(first), get_algorithm(f"{tmp_path}/b/rule.py:Rule")
    assert source_digest(first) == digest


def test_comments_and_other_rules_are_not_part_of_a_rules_source(tmp_path):
    path, rule = tmp_path / "rule.py", "class Rule(DAPO):\n    name = 'mine'\n    x = 1\n"

    def digest(code):
        path.write_text(f"from dew.algorithms import DAPO\n{code}")
        return source_digest(type(get_algorithm(f"{path}:Rule")))

    assert digest(rule) == digest(f"# a comment\n\n{rule}  # another\nclass Other(DAPO):\n    name = 'other'\n")
    assert digest(rule) != digest(rule.replace("x = 1", "x = 2"))
    assert digest(rule) != digest(f"C = 3\n{rule}")


def test_a_rule_that_cannot_be_imported_says_where_it_fails(tmp_path):
    (tmp_path / "rule.py").write_text("\nimport no_such_module\n")
    with pytest.raises(ConfigError, match=r"'no_such_module' at rule.py, line 2\)\.$"):
        get_algorithm(f"{tmp_path}/rule.py:Rule")
    with pytest.raises(ConfigError, match=r"Write module:Class or file\.py:Class\.$"):
        get_algorithm(f"{tmp_path}/missing.py:Rule")


def test_lists_become_tuples_where_a_setting_is_one(algorithm_registry):
    @register_algorithm
    @dataclass(frozen=True, kw_only=True)
    class Bounded(GRPO):
        name = "bounded"
        bounds: tuple[float, float] = (0.0, 1.0)
        steps: list[int] | None = None

    assert get_algorithm("gtpo", entropy_clip=[0.2, 0.28]).entropy_clip == (0.2, 0.28)
    found = get_algorithm("bounded", bounds=[0.1, 0.2], steps=[1])
    assert found.bounds == (0.1, 0.2) and found.steps == [1]


def test_missing_columns_and_missing_budget():
    batch = Rollouts(mask=torch.ones(1, 2, 3).bool(), reward=torch.tensor([[0.0, 1.0]]))
    with pytest.raises(ShapeError, match="gtpo needs the sampling policy's entropy"):
        get_algorithm("gtpo").advantages(batch)
    for name in ("clip_cov", "otb"):
        with pytest.raises(ShapeError, match=f"{name} needs the sampling policy's log-probability"):
            get_algorithm(name).advantages(batch)
    with pytest.raises(ShapeError, match="sum of squared probabilities"):
        get_algorithm("otb").advantages(replace(batch, logp=torch.zeros(1, 2, 3)))
    with pytest.raises(ConfigError, match=r"dppo: .* Set max_tokens"):
        get_algorithm("dppo").divisor(1, 1)
    with pytest.raises(ConfigError, match="max_tokens and overlong_buffer"):
        get_algorithm("dapo", overlong="soft", overlong_buffer=2).advantages(batch)


def test_mistakes_in_advantages_are_explained():
    batch = rollouts(ONE_GROUP)
    for wrong, error, says in (
        (lambda given: given.entropies, ShapeError, "mine: rollouts has no 'entropies'"),
        (lambda given: 2 * given.entropy, ShapeError, "so they are None: entropy"),  # the batch has it; not declared
        (lambda given: given.mask.zero_().sum(-1), ShapeError, r"returned shape \(1, 4\); expected .* \(1, 4, 2\)"),
        (lambda given: [], ShapeError, "returned list, not a tensor"),
        (lambda given: given.mask.entropies, AttributeError, "'Tensor' object has no attribute"),
    ):
        with pytest.raises(error, match=says):
            advantages_of(SimpleNamespace(name="mine", advantages=wrong, placebo=False, signals=[]), batch)
    assert batch.mask.any()  # a rule that writes to its rollouts only changes a copy
