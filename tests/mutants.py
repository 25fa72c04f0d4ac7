"""Break the credit functions and the losses on purpose, and see a test fail each time.

    make mutants            all of them, two at a time
    python tests/mutants.py forking   those whose line mentions a word

Each mutant is one small mistake that somebody could make, written as (file, what stands there, what stands there
instead, what the mistake is). The tests run on a copy of the package with that one change; a mutant that survives
is a hole in the tests, and the exit code says so.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [
    "core/test_golden",
    "core/test_preferences",
    "core/test_gtpo",
    "core/test_turns",
    "core/test_grpo_s",
    "core/test_outcome_pool",
    "core/test_baseline_credit",
    "core/test_losses",
    "core/test_rollouts",
    "core/test_learned",
    "core/test_rules",
    "core/test_algorithms",
]

RULES = ("credit/group_credit.py", "credit/covariance.py", "credit/token_baseline.py", "credit/steer.py",
         "credit/learned.py", "algorithms/token_weighted.py", "algorithms/baselines.py")  # fmt: skip
"""Files that only the last three of these touch."""

VERL_TESTS = [
    "verl/test_credit",
    "verl/test_losses",
    "verl/test_settings",
    "verl/test_records",
    "verl/test_own_algorithm",
]
"""For mutants of the verl engine, which the tests above do not touch."""

MUTANTS = [
    # Dynamic Entropy Weighting
    ("credit/weighting.py", "torch.where(correct, H, 1 / H)", "torch.where(correct, 1 / H, H)", "swap H and 1/H"),
    ("credit/weighting.py", "torch.where(correct, H, 1 / H)", "H", "no 1/H on wrong answers"),
    ("credit/weighting.py", "for side in (correct, ~correct))", "for side in (live, live))", "compare across polarities"),
    ("credit/weighting.py", "torch.where(correct, mean_won, mean_lost)", "torch.where(correct, mean_lost, mean_won)", "compare with the other side"),
    ("credit/weighting.py", "torch.where(correct, r, -r)", "r", "wrong answers are rewarded"),
    ("credit/weighting.py", "torch.where(live, torch.where(correct, r, -r), 0)", "torch.where(correct, r, -r)", "credit on padding"),
    ("credit/weighting.py", "alpha1 + alpha2 * weight", "alpha2 + alpha1 * weight", "swap α₁ and α₂"),
    ("credit/weighting.py", "H_FLOOR = 1e-6", "H_FLOOR = 1e-2", "a floor that is felt"),
    ("credit/weighting.py", ".clamp_min(H_FLOOR)\n", "\n", "no floor: 1/0"),
    ("ops.py", "return torch.where(mask, x, 0).sum(dim, keepdim=True)", "return (x * mask).sum(dim, keepdim=True)", "padding is read"),
    ("credit/weighting.py", "H if clip is None else H.clamp(*clip)", "H", "the clip is forgotten"),
    ("credit/weighting.py", "if average == \"geometric\" else x", "if average == \"never\" else x", "geometric is the exponential of a mean"),
    ("credit/weighting.py", "return mean.exp() if average == \"geometric\" else mean", "return mean", "geometric is a mean of logarithms"),
    ("ops.py", "torch.where(mask, values, 0).double().flatten(-2))", "values.nan_to_num().double().flatten(-2))", "tool output enters the mean of a turn"),
    ("ops.py", "return mean.gather(-1, key).view_as(x)", "return mean[..., :1].expand_as(key).reshape(x.shape)", "every turn has the mean of the first"),
    ("ops.py", "mask & ~torch.nn.functional.pad(mask, (1, 0))[..., :-1]", "mask", "every token is a turn of its own"),
    ("ops.py", "mask & ~torch.nn.functional.pad(mask, (1, 0))[..., :-1]", "~mask", "every token of tool output starts a turn"),
    ("ops.py", "(first.cumsum(-1) - 1).clamp_min(0)", "(first.cumsum(-1) > 1).long()", "all turns after the first are one"),
    ("credit/gtpo.py", "turn_numbers(mask) if compare == \"turn\"", "turn_numbers(mask) * 0 if compare == \"turn\"", "turn is matrix"),
    ("credit/weighting.py", "live if pool == \"group\" else won", "won", "statistics over one polarity, O⁺"),
    ("credit/weighting.py", "live if pool == \"group\" else lost", "lost", "statistics over one polarity, O⁻"),
    ("credit/weighting.py", "live if pool == \"group\" else won", "live", "pool=sign is pool=group"),
    ("credit/weighting.py", "torch.where(won, positive, negative)", "positive + negative", "sides leak into each other"),
    ("credit/weighting.py", "if pool == \"joint\":", "if pool == \"never\":", "pool=joint is pool=sign"),
    ("credit/gtpo.py", "\"column\": -2, \"row\": -1", "\"column\": -1, \"row\": -2", "wrong axis"),
    ("credit/gtpo.py", "\"matrix\": (-2, -1)", "\"matrix\": -2", "matrix is column"),
    ("credit/gtpo.py", "pooled(r, won, mask & ~won, (-2, -1), pool)", "pooled(r, won, mask & ~won, -1, pool)", "normalise per answer"),
    ("credit/gtpo.py", "torch.where(mask, at_least_float32(extra).unsqueeze(-1), 0)", "0", "the charge is forgotten"),
    ("credit/gtpo.py", "won = correct.unsqueeze(-1) & mask", "won = r > 0", "polarity by sign although told"),
    ("credit/grpo_s.py", "mask, -1, average).squeeze(-1)", "mask, -1, \"arithmetic\").squeeze(-1)", "Ĥ stays arithmetic"),
    ("credit/grpo_s.py", "live = mask.any(-1)", "live = torch.ones_like(correct)", "empty answers count"),
    ("credit/grpo_s.py", "pooled(r, won, present & ~won, -1, pool)", "pooled(r, won, ~won, -1, pool)", "absent answers count"),
    ("ops.py", "x.detach().to(", "x.to(", "gradient through entropy"),
    ("ops.py", "(mask.sum(dim, keepdim=True) - 1).clamp_min(1)", "mask.sum(dim, keepdim=True).clamp_min(1)", "biased std"),
    ("ops.py", "STD_EPS = 1e-4", "STD_EPS = 1e-8", "another ε"),
    ("ops.py", "/ mask.sum(dim, keepdim=True).clamp_min(1)", "/ mask.size(dim if isinstance(dim, int) else dim[0])", "mean over padding"),
    ("ops.py", "torch.promote_types(x.dtype, torch.float32)", "x.dtype", "computed in half precision"),
    # Preference pairs
    ("credit/preferences.py", "floored(entropy, (floor, float(\"inf\")))", "floored(entropy, None)", "the floor is forgotten"),
    ("credit/preferences.py", "mask, -1, \"arithmetic\"", "mask, -2, \"arithmetic\"", "compare across answers"),
    ("credit/preferences.py", "1 - alpha, alpha, \"both\"", "1.0, alpha, \"both\"", "weights above 1 on average"),
    ("credit/preferences.py", "1 - alpha, alpha, \"both\"", "1 - alpha, alpha, \"correct\"", "rejected answers are not weighted"),
    ("credit/preferences.py", "shaped(H, preferred,", "shaped(H, ~preferred,", "chosen and rejected are swapped"),
    ("credit/preferences.py", "\"both\").abs()", "\"both\")", "signed weights"),
    ("credit/preferences.py", "not 0 <= alpha <= 1", "not 0 <= alpha", "negative weights are allowed"),
    # Baselines and peers
    ("credit/grpo.py", "standardize(r, present, -1, scale=scale)", "standardize(r, present, -1)", "Dr. GRPO is scaled"),
    ("credit/grpo.py", "standardize(r, present, -1, scale=scale)", "standardize(r, torch.ones_like(present), -1, scale=scale)", "absent answers count"),
    ("credit/dapo.py", "& (~correct & present).any(-1)", "", "all-correct groups have signal"),
    ("credit/dapo.py", "(correct & present).any(-1) & (~", "(correct).any(-1) & (~", "absent answers have signal"),
    ("credit/dapo.py", ".clamp(-1, 0)", ".clamp(max=0)", "no bottom"),
    ("credit/group_overlong.py", "torch.where(easy | (n > m), won, lost)", "won", "the wrong never pay"),
    ("credit/group_overlong.py", "& (easy | ~hard)", "", "hard groups pay"),
    ("credit/group_overlong.py", ".clamp(0, 1)", ".clamp(max=1)", "short answers are paid"),
    ("credit/group_overlong.py", "torch.maximum((shortest + longest) / 2, masked_mean(length, over, -1))", "(shortest + longest) / 2", "knee without the mean"),
    ("credit/forking.py", "live.numel() - kept + 1", "kept", "keep the lowest entropies"),
    ("credit/forking.py", "entropy.detach() >= threshold", "entropy.detach() > threshold", "ties are dropped"),
    ("credit/forking.py", "keep * live.numel() - 1e-9", "keep * entropy.numel()", "padding counts"),
    ("credit/entropy_shaped.py", "torch.minimum(", "torch.maximum(", "bonus above its cap"),
    ("credit/entropy_shaped.py", "A.abs() / kappa", "A / kappa", "cap with a sign"),
    # Rules of other papers
    ("credit/group_credit.py", "(r - mean) / torch.where(mean > 0, mean, 1)", "(r - mean)", "MaxRL without its divisor"),
    ("credit/group_credit.py", "present & (mean > 0)", "present", "MaxRL trains groups without reward"),
    ("credit/group_credit.py", "torch.where(present, r, torch.inf).sort", "r.sort", "padding has a quantile"),
    ("credit/group_credit.py", "(quantile * size - 1e-6).ceil()", "((1 - quantile) * size - 1e-6).ceil()", "the other quantile"),
    ("credit/group_credit.py", "(quantile * size - 1e-6).ceil()", "(quantile * size).floor()", "a quantile one too low"),
    ("credit/group_credit.py", "(size - 1).clamp_min(1)", "size", "QAE's std is biased"),
    ("credit/group_credit.py", "device=correct.device), -1.0)", "device=correct.device), 0.0)", "W-REINFORCE spares the wrong"),
    ("credit/group_credit.py", "tuple(range(mask.ndim)))", "(-2, -1))", "REINFORCE++ normalises each group"),
    ("credit/group_credit.py", "standardize(r, present, -1, scale=False).unsqueeze(-1)", "r.unsqueeze(-1)", "REINFORCE++ without baseline"),
    ("credit/covariance.py", "(A - A.mean())", "A", "advantages that are not centred"),
    ("credit/covariance.py", "(log_pi - log_pi.mean())", "(log_pi.mean() - log_pi)", "covariance with another sign"),
    ("credit/covariance.py", "(cov > low) & (cov < high)", "(cov > low)", "Clip-Cov without an upper bound"),
    ("credit/covariance.py", "torch.randperm(len(candidates), generator=generator)", "torch.randperm(len(candidates))", "every process draws its own tokens"),
    ("credit/covariance.py", "max(1, int(share * len(cov) + 1e-9))", "int(share * len(cov) + 1e-9)", "short batches choose no token"),
    ("credit/covariance.py", "cov.topk(", "(-cov).topk(", "KL-Cov takes the smallest covariances"),
    ("credit/token_baseline.py", "1 - 2 * at_least_float32(logp).exp()", "1 - at_least_float32(logp).exp()", "another energy"),
    ("credit/token_baseline.py", ".clamp_min(0).cumsum(-1)", ".clamp_min(0)", "energy of one token only"),
    ("credit/token_baseline.py", "torch.where(alone, 0, B)", "B", "a lone answer is its own baseline"),
    ("credit/token_baseline.py", "masked_sum(r * W, mask, -2) / (masked_sum(W, mask, -2)", "masked_sum(r * W, mask, -1) / (masked_sum(W, mask, -1)", "a baseline per answer"),
    ("credit/steer.py", "-log_pi.expm1()", "log_pi.exp()", "π for 1 − π"),
    ("credit/steer.py", "(log_pi + H)", "log_pi", "without the entropy"),
    ("credit/steer.py", "(-k * change).exp()", "(k * change).exp()", "STEER amplifies"),
    ("credit/steer.py", ".clamp_min(LEAST)", "", "tiny changes are stretched"),
    ("credit/learned.py", "- V, 0)\n    p =", "+ V, 0)\n    p =", "the prediction instead of its change"),
    ("credit/learned.py", ".sign() * change).clamp_min(0)", ".sign() * change).abs()", "moves away from the outcome count"),
    ("credit/learned.py", "(torch.where(mask, advantages, 0).sign() * change)", "change", "wrong answers are credited for hope"),
    ("credit/learned.py", "(count * p - P) / P.clamp_min(1)", "(count * p - P) / P.clamp_min(1e-6)", "noise is stretched to full strength"),
    ("credit/learned.py", "(count * p - P) / P.clamp_min(1)", "(mask.shape[-1] * p - P) / P.clamp_min(1)", "padding counts as tokens"),
    ("credit/learned.py", "[..., 1:].flip(-1)", "[..., :-1].flip(-1)", "a token's own prediction is the next one"),
    ("credit/learned.py", "mask & (after < T)", "mask", "the end of an answer is compared with padding"),
    ("credit/learned.py", "finite & (side != 0)[..., None]", "finite", "answers without an outcome train the head"),
    ("credit/learned.py", "torch.where(finite[..., None], features, 0)", "features", "a NaN stays in the head"),
    ("credit/learned.py", "target = (side > 0)", "target = (side < 0)", "the head predicts failure"),
    ("credit/learned.py", "masked_mean(losses, used, 1).sum()", "masked_mean(losses, used, (0, 1)).sum()", "replicas share a loss"),
    ("credit/learned.py", "torch.where(worse, x, torch.inf)", "x", "every answer is among the worse"),
    ("credit/learned.py", "torch.searchsorted(others, x, right=True)", "torch.searchsorted(others, x)", "ties count as lost"),
    ("credit/learned.py", "mask.sum(-1, keepdim=True).clamp_min(1)\n    found", "mask.shape[-1]\n    found", "thirds of the padded answer"),
    ("algorithms/baselines.py", "return A * learned_weights(", "return learned_weights(", "weights without the credit"),
    ("algorithms/baselines.py", "share=self.learned_share", "share=0.5", "κ is not a setting"),
    ("algorithms/token_weighted.py", "**bounds), 0, A)", "**bounds), A, 0)", "Clip-Cov keeps what it should drop"),
    ("algorithms/token_weighted.py", "self.cov_coef * chosen", "chosen", "KL-Cov without its coefficient"),
    ("algorithms/token_weighted.py", "torch.where((highest > lowest)[:, None, None], A, 0)", "A", "OTB trains groups of equal rewards"),
    ("algorithms/baselines.py", "credit + extra * torch.where(correct, self.positive, 1.0)", "credit", "W-REINFORCE drops other rewards"),
    ("algorithms/baselines.py", "quantile=self.quantile", "quantile=0.4", "the quantile is not a setting"),
    ("algorithms/base.py", "surrogate=self.surrogate", "surrogate=\"clip\"", "every loss clips"),
    ("algorithms/base.py", "penalty=part.penalty", "penalty=None", "penalties are lost"),
    ("losses.py", "-clipped.detach() * A * logp", "-clipped * A * logp", "CISPO's weight has a gradient"),
    ("losses.py", "-clipped.detach() * A * logp", "-w.detach() * A * logp", "CISPO without a clip"),
    ("losses.py", "torch.where(A > 0, tau_pos, tau_neg)", "torch.where(A > 0, tau_neg, tau_pos)", "swap τ"),
    ("losses.py", "-4 / tau * torch.sigmoid", "-4 * torch.sigmoid", "SAPO's slope at 1 is not 1"),
    ("losses.py", "torch.sigmoid(tau * (w - 1))", "torch.sigmoid(tau * w)", "SAPO's gate is not centred"),
    ("losses.py", "torch.where(mask, penalty, 0) * log_w.abs()", "torch.where(mask, penalty, 0) * log_w", "the penalty rewards a falling ratio"),
    # Losses
    ("losses.py", "-torch.minimum(w * A, clipped * A)", "-torch.maximum(w * A, clipped * A)", "optimistic clip"),
    ("losses.py", "-torch.minimum(w * A, clipped * A)", "torch.minimum(w * A, clipped * A)", "ascent"),
    ("losses.py", "-torch.minimum(w * A, clipped * A)", "-w * A", "no clip"),
    ("losses.py", "w.clamp(1 - clip_low, 1 + clip_high)", "w.clamp(1 - clip_high, 1 + clip_low)", "swap ε"),
    ("losses.py", "masked_mean(log_w.exp(), mask, -1)", "masked_mean(log_w, mask, -1).exp()", "GRPO-S's ratio is geometric"),
    ("losses.py", "return masked_mean(log_w, mask, -1).exp()", "return masked_mean(log_w.exp(), mask, -1)", "GSPO's ratio is arithmetic"),
    ("losses.py", "own.clamp_min(1) if count is None else count", "own.clamp_min(1)", "the global count is ignored"),
    ("losses.py", "masked_mean(token_loss, mask, -1).sum(), mask.any(-1).sum()", "token_loss.mean(-1).sum(), mask.any(-1).sum()", "mean over padding"),
    ("losses.py", "torch.where(mask, advantages.detach(), 0)", "torch.where(mask, advantages, 0)", "gradient through credit"),
    ("losses.py", "return d.exp() - d - 1", "return d.square() / 2", "k2 for k3"),
    ("losses.py", "token_loss + kl_coef * k3", "token_loss - kl_coef * k3", "KL pushes away"),
    ("losses.py", "torch.where(mask, ref_logp, 0) - logp)", "logp - torch.where(mask, ref_logp, 0))", "KL the other way round"),
    ("losses.py", "(w < 1 - clip_low) & (A < 0)", "(w < 1 - clip_low)", "clip fraction without the sign"),
    ("losses.py", "        token_loss = token_loss * torch.where(mask, weight, 0)\n", "        pass\n", "the sampler's correction is lost"),
    ("losses.py", "torch.where(mask, weight, 0)", "weight", "the sampler's correction is read where nothing trains"),
    ("losses.py", ".clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)\n    w", "\n    w", "a broken token is inf"),
    # What the algorithms do with them
    ("algorithms/entropy_weighted.py", "torch.where(self.signal(rollouts)[:, None, None], advantages", "torch.where(rollouts.mask, advantages", "shape groups of one outcome"),
    ("algorithms/entropy_weighted.py", "scoped if self.scope == \"group\" else scoped.as_one_group()", "scoped", "scope is ignored"),
    ("algorithms/entropy_weighted.py", "mask=rollouts.mask & (relative != 0).unsqueeze(-1)", "mask=rollouts.mask", "answers at the mean count as wrong"),
    ("algorithms/entropy_weighted.py", ".abs() / self._total_weight()", "", "the outcome pool multiplies signs"),
    ("algorithms/entropy_weighted.py", "shaped, scoped).abs() / self._total_weight()", "shaped, scoped).abs()", "the outcome pool's weight has another mean"),
    ("algorithms/entropy_weighted.py", "scoped.correct(0.0) if self.pool == \"outcome\" else self.correct(scoped)", "self.correct(scoped)", "polarity by threshold although graded"),
    ("algorithms/entropy_weighted.py", "group_relative(rollouts.reward + self.extra(rollouts), rollouts.present)", "group_relative(rollouts.reward, rollouts.present)", "other rewards are lost in the outcome pool"),
    ("algorithms/entropy_weighted.py", "((self._relative(rollouts) != 0) & rollouts.live).any(-1)", "super().signal(rollouts)", "graded groups have no signal"),
    ("algorithms/entropy_weighted.py", "by_entropy: 0.0}", "by_entropy: 0.1}", "the control is weighted"),
    ("credit/weighting.py", "correct == (spread == \"correct\")", "correct == (spread == \"wrong\")", "spread on the other side"),
    ("credit/grpo.py", "abs() > 1e-5 * size", "abs() > 0", "rounding is a signal"),
    ("credit/grpo.py", ".unsqueeze(-1) < 0", ".unsqueeze(-1) <= 0", "no credit is a wrong sign"),
    ("algorithms/base.py", "has_signal(self.correct(rollouts), rollouts.live)", "has_signal(self.correct(rollouts), rollouts.present)", "masked answers have signal"),
    ("algorithms/entropy_peers.py", "super().advantages(rollouts) * scale", "super().advantages(rollouts)", "divide by all tokens"),
    ("rollouts.py", "x.flatten(0, 1)[rows.argsort()[(rows == PADDING).sum() :]]", "x.flatten(0, 1)[rows != PADDING]", "rows come back in another order"),
    # Inside verl
    ("engines/verl/estimators.py", "extra=total - score", "extra=total - acc", "a score of −1 is taken for a charge"),
    ("engines/verl/estimators.py", "outcome=acc", "outcome=total", "penalties decide who is right"),
    ("engines/verl/estimators.py", "ids.setdefault(index[b], len(ids)) for b in last]", "b // 4 for b in last]", "a group is a stride"),
    ("engines/verl/estimators.py", "conversations.split(credit.advantages, mask.shape[1])", "credit.advantages", "answers are not split back into rows"),
    ("engines/verl/estimators.py", "key=lambda b: int(names[b][2])", "key=lambda b: b", "rows are joined as they come"),
    ("engines/verl/estimators.py", "start += self.lengths[b]", "start += 0", "rows lie on top of one another"),
    ("engines/verl/estimators.py", "if live.numel() and not live.any():", "if False:", "zeros are an entropy"),
    ("engines/verl/estimators.py", "live = entropy[mask.bool()]", "live = entropy[mask.bool() | True]", "padding is read"),
    ("engines/verl/estimators.py", "CURRENT.reset(token)", "pass", "a context outlives its batch"),
    ("engines/verl/estimators.py", "if entropy.shape != mask.shape:", "if entropy.ndim != mask.ndim:", "any shape is an entropy"),
    ("engines/verl/estimators.py", "for_records=context.recorded", "for_records=True", "shape every batch twice"),
    ("engines/verl/losses.py", "algorithm.divisor(tokens, sequences) / processes", "algorithm.divisor(tokens, sequences)", "the gradient shrinks with the processes"),
    ("engines/verl/losses.py", "algorithm.divisor(tokens, sequences)", "algorithm.divisor(sequences, tokens)", "swap the divisors"),
    ("engines/verl/losses.py", "value, stats = algorithm.loss(", "value, stats = Algorithm.loss(algorithm, ", "an algorithm's own loss is not used"),
    ("engines/verl/losses.py", "weight=rollout_is_weights", "weight=None", "the sampler's correction is lost"),
    ("engines/verl/estimators.py", "returns = conversations.split(credit.penalty", "conversations.split(credit.penalty", "penalties never reach the workers"),
    ("engines/verl/config.py", "not in (\"fp32\", \"float32\")", "== \"bf16\"", "Σπ² of rounding errors"),
    ("engines/verl/config.py", "and metric != \"acc\"", "and metric is None", "filter by the penalised reward"),
    ("engines/verl/config.py", " and read(config, f\"{MODEL}.use_remove_padding\")", "", "chunks that verl does not make"),
    ("engines/verl/config.py", "vars(cls).get(\"verl_estimator\")", "cls.verl_estimator", "a subclass trains its base class"),
    ("engines/verl/recorder.py", "(numbers[\"accuracy\"] * kept + solved) / (kept + dropped)", "numbers[\"accuracy\"]", "dropped groups do not count"),
]  # fmt: skip


def survives(mutant: tuple[str, str, str, str]) -> str | None:
    """Why the mutant was not caught, or None."""
    file, old, new, _ = mutant
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "dew"
        shutil.copytree(ROOT / "src" / "dew", package, ignore=shutil.ignore_patterns("__pycache__"))
        source = (package / file).read_text()
        if old not in source:
            return f"{old!r} no longer stands in {file}: update the mutant"
        (package / file).write_text(source.replace(old, new, 1))
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "mutants"}
        names = VERL_TESTS if file.startswith("engines/verl/") else TESTS[-3:] if file in RULES else TESTS
        tests = [str(ROOT / "tests" / f"{name}.py") for name in names]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if result.returncode == 1:  # pytest's code for "tests ran and some failed"
        return None
    return "no test fails" if result.returncode == 0 else f"the tests did not run: {result.stdout[-300:]}"


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if all(any(word in part for part in m) for word in words)]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        verdicts = list(zip(chosen, pool.map(survives, chosen), strict=True))
    for (file, _, _, mistake), reason in verdicts:
        print(
            f"{'caught  ' if reason is None else 'SURVIVED'}  {file}: {mistake}{'' if reason is None else ' -- ' + reason}"
        )
    caught = sum(reason is None for _, reason in verdicts)
    print(f"{caught} of {len(verdicts)} mutants caught")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
