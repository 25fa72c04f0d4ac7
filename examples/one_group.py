"""One problem, six answers: the advantage that GRPO, GTPO and GRPO-S give to each token.

    python examples/one_group.py             # needs rich: pip install -e ".[cli]"

Prints a table with one row per token. GRPO gives all tokens of an answer the same advantage; GRPO-S changes it from
answer to answer, GTPO from token to token. Nothing is trained, and the entropies (in nats) are made up.
"""

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dew import Rollouts, get_algorithm

PROBLEM = "Reach 16 with 3, 5 and 2, each as often as you like."
ANSWERS = [  # correct?, (token, entropy) ...
    (True, [("3+5", 1.9), ("=8;", 0.02), ("8*2", 0.8), ("=16", 0.01)]),
    (True, [("5+3", 1.9), ("=8;", 0.02), ("8*2", 0.1), ("=16", 0.01)]),
    (True, [("3*2", 2.4), ("=6;", 0.05), ("6+5", 1.1), ("=11;", 0.1), ("11+5", 1.6), ("=16", 0.3)]),
    (False, [("3*5", 1.2), ("=15;", 0.03), ("15+2", 0.2), ("=17", 0.02)]),
    (False, [("3+2", 2.0), ("=5;", 0.04), ("5*5", 0.05), ("=16", 1.4)]),
    (False, [("5*2", 1.6), ("=10;", 0.02), ("10+3", 0.3), ("=13", 0.02)]),
]


def rollouts() -> Rollouts:
    T = max(len(tokens) for _, tokens in ANSWERS)
    entropy, mask = torch.full((len(ANSWERS), T), float("nan")), torch.zeros(len(ANSWERS), T, dtype=torch.bool)
    for i, (_, tokens) in enumerate(ANSWERS):
        entropy[i, : len(tokens)] = torch.tensor([H for _, H in tokens])
        mask[i, : len(tokens)] = True
    reward = torch.tensor([float(correct) for correct, _ in ANSWERS])
    return Rollouts.from_rows([0] * len(ANSWERS), mask=mask, reward=reward, entropy=entropy)


def coloured(value: float, largest: float) -> Text:
    """Colour a value: blue if positive, orange if negative, deeper if larger."""
    depth = min(abs(value) / largest, 1) ** 2  # squared, to make small differences visible
    full = (40, 100, 220) if value >= 0 else (215, 95, 0)
    r, g, b = (round(255 - (255 - c) * depth) for c in full)
    return Text(f"{value:+.3f}", style=f"{'white' if depth > 0.6 else 'black'} on rgb({r},{g},{b})")


def main() -> None:
    batch = rollouts()
    names = {"GRPO": "grpo", "GRPO-S": "grpo_s", "GTPO": "gtpo"}
    credit = {title: get_algorithm(name).advantages(batch)[0] for title, name in names.items()}
    largest = max(float(A.abs().max()) for A in credit.values())

    table = Table(title=f"{PROBLEM}  Which token gets how much credit?", title_justify="left")
    for column in ("answer", "token", "entropy", *names):
        table.add_column(column, justify="left" if column in ("answer", "token") else "right")
    for i, (correct, tokens) in enumerate(ANSWERS):
        for t, (token, H) in enumerate(tokens):
            label = f"{i + 1} {'✓ correct' if correct else '✗ wrong'}" if t == 0 else ""
            cells = [coloured(float(A[i, t]), largest) for A in credit.values()]
            table.add_row(label, token, f"{H:.2f}", *cells, end_section=t == len(tokens) - 1)
    console = Console()
    console.print(table)
    console.print(
        "GRPO gives every token of an answer the same advantage. GRPO-S weights whole answers by their mean entropy.\n"
        "GTPO compares each token with the same position in the other answers of the same outcome: in correct\n"
        "answers, uncertain tokens get the largest reward; in wrong answers, confident tokens the largest penalty."
    )


if __name__ == "__main__":
    main()
