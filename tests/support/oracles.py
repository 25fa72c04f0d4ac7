"""The formulas again, as loops over ragged lists straight from the papers. Shares nothing with the library."""

import math
import statistics

FLOOR, EPS = 1e-6, 1e-4


def mean(xs, average="arithmetic"):
    xs = list(xs)
    if average == "geometric":
        return math.exp(sum(math.log(x) for x in xs) / len(xs))
    return sum(xs) / len(xs)


def clamp(h, clip):
    h = max(h, FLOOR)
    return h if clip is None else min(max(h, clip[0]), clip[1])


def gtpo_rewards(correct, entropy, alpha1=1.0, alpha2=0.1, compare="column", average="arithmetic", entropy_clip=None):
    H = [[clamp(h, entropy_clip) for h in row] for row in entropy]
    out = []
    for i, row in enumerate(H):
        value = (lambda h: h) if correct[i] else (lambda h: 1 / h)
        peers = [k for k in range(len(H)) if correct[k] == correct[i]]
        shaped = []
        for t, h in enumerate(row):
            if compare == "column":
                against = [value(H[k][t]) for k in peers if t < len(H[k])]
            elif compare == "row":
                against = [value(x) for x in row]
            elif compare == "relative":
                tenth = 10 * t // len(row)
                against = [value(x) for k in peers for s, x in enumerate(H[k]) if 10 * s // len(H[k]) == tenth]
            else:
                against = [value(x) for k in peers for x in H[k]]
            share = value(h) / mean(against, average)
            shaped.append((1 if correct[i] else -1) * (alpha1 + alpha2 * share))
        out.append(shaped)
    return out


def gtpo_turn_rewards(correct, answers, alpha1=1.0, alpha2=0.1, average="arithmetic"):
    """compare="turn": answers[i][k] holds the entropies of the k-th turn of answer i."""
    out = []
    for i, turns in enumerate(answers):
        value = (lambda h: max(h, FLOOR)) if correct[i] else (lambda h: 1 / max(h, FLOOR))
        out.append([])
        for k, turn in enumerate(turns):
            peers = [a[k] for j, a in enumerate(answers) if correct[j] == correct[i] and k < len(a)]
            usual = mean([value(h) for other in peers for h in other], average)
            out[i].append([(1 if correct[i] else -1) * (alpha1 + alpha2 * value(h) / usual) for h in turn])
    return out


def grpo_s_rewards(correct, entropy, beta1=1.0, beta2=0.1, average="arithmetic", entropy_clip=None):
    H = [mean([clamp(h, entropy_clip) for h in row], average) for row in entropy]
    out = []
    for i, h in enumerate(H):
        value = (lambda x: x) if correct[i] else (lambda x: 1 / x)
        against = [value(H[k]) for k in range(len(H)) if correct[k] == correct[i]]
        out.append((1 if correct[i] else -1) * (beta1 + beta2 * value(h) / mean(against, average)))
    return out


def standardized(x, over):
    if len(over) < 2:
        return 0.0
    return (x - statistics.fmean(over)) / (statistics.stdev(over) + EPS)


def pooled(rewards, won, pool):
    """Flat lists: the signed rewards and the polarity of each."""
    out = []
    for r, w in zip(rewards, won, strict=True):
        if pool == "joint":
            over = rewards
        elif pool == "sign":
            over = [x for x, v in zip(rewards, won, strict=True) if v == w]
        else:
            over = [x if v == w else 0.0 for x, v in zip(rewards, won, strict=True)]
        out.append(standardized(r, over))
    return out


def gtpo_advantages(correct, rewards, pool="group"):
    flat = [r for row in rewards for r in row]
    won = [c for c, row in zip(correct, rewards, strict=True) for _ in row]
    result = iter(pooled(flat, won, pool))
    return [[next(result) for _ in row] for row in rewards]


def grpo_advantages(rewards, scale=True):
    if scale:
        return [standardized(r, rewards) for r in rewards]
    return [r - statistics.fmean(rewards) for r in rewards]


def group_overlong(lengths, correct, gamma=0.75):
    n, G = sum(correct), len(correct)

    def knee(xs):
        return max((min(xs) + max(xs)) / 2, sum(xs) / len(xs))

    def charge(x, L):
        return 0.0 if x < L else -0.5 * (x - L) / L if x < 2 * L else -0.5

    if n / G >= gamma:
        L, charged = knee([x for x, c in zip(lengths, correct, strict=True) if c]), True
    elif n / G <= 1 - gamma:
        return [0.0] * G
    else:
        L, charged = knee(lengths), n > G - n
    return [charge(x, L) if c == charged else 0.0 for x, c in zip(lengths, correct, strict=True)]


def forking_mask(entropy, keep=0.2):
    flat = sorted((h for row in entropy for h in row), reverse=True)
    threshold = flat[math.ceil(keep * len(flat) - 1e-9) - 1]
    return [[h >= threshold for h in row] for row in entropy]


def policy_loss(logp, old_logp, advantages, ratio="token", reduce="tokens", clip_low=0.2, clip_high=0.28):
    """Ragged lists; one advantage per token."""
    per_sequence, total, tokens = [], 0.0, 0
    for new, old, A in zip(logp, old_logp, advantages, strict=True):
        w = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
        if ratio == "sequence_mean":
            w = [sum(w) / len(w)] * len(w)
        elif ratio == "sequence_geometric":
            w = [math.exp(sum(math.log(x) for x in w) / len(w))] * len(w)
        terms = [-min(x * a, min(max(x, 1 - clip_low), 1 + clip_high) * a) for x, a in zip(w, A, strict=True)]
        per_sequence.append(sum(terms) / len(terms))
        total, tokens = total + sum(terms), tokens + len(terms)
    return total / tokens if reduce == "tokens" else sum(per_sequence) / len(per_sequence)


def token_baseline(rewards, logp, squares):
    """OTB on ragged lists."""
    energy = [[1 - 2 * math.exp(lp) + s for lp, s in zip(*row, strict=True)] for row in zip(logp, squares, strict=True)]
    W = [[sum(max(w, 0) for w in row[: t + 1]) for t in range(len(row))] for row in energy]
    A = []
    for r, row in zip(rewards, W, strict=True):
        A.append([])
        for t in range(len(row)):
            alive = [i for i in range(len(W)) if t < len(W[i])]
            total = sum(W[i][t] for i in alive) + 1e-8
            baseline = sum(rewards[i] * W[i][t] for i in alive) / total if len(alive) > 1 else 0
            A[-1].append(r - baseline)
    return A


def covariances(advantages, logp):
    """Of every token, in order, on ragged lists."""
    A, lp = ([x for row in rows for x in row] for rows in (advantages, logp))
    return [(a - sum(A) / len(A)) * (x - sum(lp) / len(lp)) for a, x in zip(A, lp, strict=True)]
