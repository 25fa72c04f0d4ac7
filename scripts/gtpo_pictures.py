"""Draw the five pictures of docs/gtpo.md: one group from its answers to the sign of its credit.

    PYTHONPATH=src python scripts/gtpo_pictures.py [FOLDER]        # default: docs/images

The answers and their entropies are made up; weights, rewards and advantages are computed by dew.credit.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dew.credit import grpo_advantages, gtpo_advantages, gtpo_rewards

ANSWERS = [  # correct, tokens with the entropy of the policy at each, in nats
    (True, [("2", 1.2), ("*", 0.9), ("3", 0.4), ("=6;", 0.05), ("6", 0.3), ("*", 0.8), ("1", 0.1), ("=6", 0.02)]),
    (True, [("1", 1.2), ("+", 0.5), ("2", 0.8), ("=3;", 0.06), ("3", 0.7), ("+", 0.3), ("3", 0.5), ("=6", 0.03)]),
    (False, [("3", 1.2), ("-", 0.7), ("1", 0.2), ("=2;", 0.04), ("2", 0.1), ("+", 0.2), ("2", 0.6), ("=4", 0.02)]),
    (False, [("1", 1.2), ("+", 0.3), ("3", 0.6), ("=4;", 0.02), ("4", 0.2), ("*", 0.1), ("2", 0.2), ("=8", 0.05)]),
]
CORRECT = torch.tensor([correct for correct, _ in ANSWERS])
H = torch.tensor([[h for _, h in tokens] for _, tokens in ANSWERS], dtype=torch.float64)
MASK = torch.ones_like(H, dtype=torch.bool)
BLUE, ORANGE, GREEN, INK, QUIET = "#56b4e9", "#f0a13c", "#4cb492", "#16191d", "#596068"
WIDE, LEFT, CELL, ROW = 720, 100, 74, 46


def svg(title: str, parts: Sequence[str], height: int) -> str:
    look = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" role="img" aria-label="{title}"'
    style = "font-family: system-ui, sans-serif"
    ground = f'<rect width="{WIDE}" height="{height}" fill="#ffffff"/>'
    heading = text(16, 26, title, size=16, weight=600)
    return "\n".join([f'<svg {look} style="{style}">', ground, heading, *parts, "</svg>\n"])


def text(
    x: float, y: float, words: str, *, size: int = 13, at: str = "start", fill: str = INK, weight: int = 400
) -> str:
    look = f'font-size="{size}" text-anchor="{at}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{words}</text>'


def grid(values: Tensor | None, colour: Callable[[int, float], tuple[str, float]], form: str = "{:.2f}") -> list[str]:
    """The answers, one row each; every token on a colour and above its value."""
    parts = []
    for i, (correct, tokens) in enumerate(ANSWERS):
        y = 44 + i * ROW
        parts.append(text(16, y + 20, "✓ correct" if correct else "✗ wrong", fill="#0068a8" if correct else "#a84800"))
        for t, (token, _) in enumerate(tokens):
            value = None if values is None else float(values[i, t])
            fill, depth = colour(i, 0.0 if value is None else value)
            look = f'x="{LEFT + t * CELL}" y="{y}" width="{CELL - 4}" height="{ROW - 6}" rx="4"'
            parts.append(f'<rect {look} fill="{fill}" fill-opacity="{min(1.0, depth):.2f}"/>')
            middle = LEFT + t * CELL + (CELL - 4) / 2
            parts.append(text(middle, y + (18 if values is not None else 25), token, at="middle", weight=600))
            if value is not None:
                parts.append(text(middle, y + 34, form.format(value).replace("-", "−"), size=12, at="middle"))
    return parts


def by_side(i: int, value: float) -> tuple[str, float]:
    return (BLUE if bool(CORRECT[i]) else ORANGE), 0.25


def signed(scale: float) -> Callable[[int, float], tuple[str, float]]:
    return lambda i, value: (BLUE if value > 0 else ORANGE, 0.1 + 0.9 * abs(value) / scale)


def lowest_advantages(pool: str) -> list[tuple[float, float]]:
    """The least credited token of the correct answers, as more of 16 answers of three tokens are correct."""
    found = []
    for n in range(1, 16):
        correct = torch.arange(16) < n
        entropy = torch.tensor([0.05, 0.5, 1.5], dtype=torch.float64).repeat(16, 1)
        entropy[0] = 0.01  # one answer that was written with certainty
        mask = torch.ones_like(entropy, dtype=torch.bool)
        rewards = gtpo_rewards(correct, entropy, mask)
        if pool == "outcome":
            even = grpo_advantages(correct.double())
            A = even[:, None] * rewards.abs() / 1.1
        else:
            A = gtpo_advantages(rewards, mask, pool="group")
        found.append((n / 16, float(A[correct].min())))
    return found


def sign_plot() -> list[str]:
    lines = {
        "GTPO as published (pool: group)": ("group", "#c2185b", 36),
        "pool: outcome, as in dew": ("outcome", "#0a6b8a", 56),
    }
    x = lambda share: LEFT + 560 * share  # noqa: E731
    y = lambda A: 200 - 40 * A  # noqa: E731
    parts = [f'<line x1="{LEFT}" x2="{LEFT + 560}" y1="{y(0)}" y2="{y(0)}" stroke="{QUIET}" stroke-dasharray="3 3"/>']
    for tick in (-1, 0, 1, 2, 3):
        parts.append(text(LEFT - 10, y(tick) + 4, f"{tick}".replace("-", "−"), size=12, at="end", fill=QUIET))
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(text(x(share), 266, f"{share:.0%}", size=12, at="middle", fill=QUIET))
    parts.append(text(LEFT + 280, 286, "share of correct answers in the group", size=12, at="middle", fill=QUIET))
    parts.append(text(16, 52, "least A", size=12, fill=QUIET))
    for name, (pool, colour, top) in lines.items():
        points = " ".join(f"{x(share):.1f},{y(A):.1f}" for share, A in lowest_advantages(pool))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(text(LEFT + 560, top + 8, name, at="end", fill=colour))
    parts.append(text(LEFT + 4, y(-1) + 4, "below 0: a token of a correct answer is penalised", size=12, fill=QUIET))
    return parts


def pictures() -> dict[str, str]:
    x = torch.where(CORRECT[:, None], H, 1 / H)
    mean = torch.where(CORRECT[:, None], x[CORRECT].mean(0), x[~CORRECT].mean(0))
    rewards = gtpo_rewards(CORRECT, H, MASK)
    torch.testing.assert_close(rewards.abs(), 1 + 0.1 * x / mean)  # the weight drawn is the one that is used
    A, even = gtpo_advantages(rewards, MASK), grpo_advantages(CORRECT.double())
    weight = lambda i, value: (by_side(i, value)[0], 0.1 + 0.45 * value)  # noqa: E731
    high = 44 + 4 * ROW + 8
    flat = f"(with GRPO: {even[0]:+.2f} or {even[-1]:+.2f} on all tokens)".replace("-", "−")
    return {
        "gtpo-1-group": svg("Make 6 from 1, 2 and 3: four sampled answers", grid(None, by_side), high),
        "gtpo-2-entropy": svg("Entropy of the policy at each token, in nats", grid(H, lambda _, h: (GREEN, h)), high),
        "gtpo-3-weight": svg("Weight: each token relative to its column and outcome", grid(x / mean, weight), high),
        "gtpo-4-advantage": svg(f"Advantage {flat}", grid(A, signed(1.3), "{:+.2f}"), high),
        "gtpo-5-sign": svg("When nearly all answers are correct, the sign can flip", sign_plot(), 300),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    for name, content in pictures().items():
        (folder / f"{name}.svg").write_text(content, encoding="utf-8")
