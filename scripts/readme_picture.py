"""Draw docs/images/credit.svg, the picture of README.md: one answer to a problem of GSM8K under GRPO and under GTPO.

    PYTHONPATH=src python scripts/readme_picture.py                  # draw
    PYTHONPATH=src python scripts/readme_picture.py --sample MODEL   # sample again, with any transformers model

The group is a real one: 8 answers of Qwen2.5-Coder-0.5B-Instruct to the first training problem of GSM8K (weights of a
4-bit file, temperature 1, seed 0), with the policy's entropy at each token. dew.credit computes both advantages.
"""

import sys
from html import escape
from pathlib import Path

import torch

from dew.credit import grpo_advantages, gtpo_advantages, gtpo_rewards
from dew.run.records import AnswerRecord, GroupRecord, read_records, record_path, write_records

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = DOCS / "results" / "readme-group"
PROBLEM = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
GOLD = "72"
ASK = "\nAnswer in one or two short sentences, and put your final answer within \\boxed{}."
WIDE, CHAR, LINE = 860, 7.9, 26


def sample(model: str) -> None:
    """Sample the group and write it as token records."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dew.rewards.math import math_verdicts

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chat = [{"role": "user", "content": PROBLEM + ASK}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    draw = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "num_return_sequences": 8}
    out = policy.generate(**ids, **draw, max_new_tokens=128, output_logits=True, return_dict_in_generate=True)
    rows = out.sequences[:, ids["input_ids"].shape[1] :].tolist()
    entropy = torch.stack([torch.distributions.Categorical(logits=x).entropy() for x in out.logits], dim=1).tolist()
    lengths = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row) for row in rows]
    texts = [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(rows, lengths, strict=True)]
    answers = [
        AnswerRecord(
            tokens=[tokenizer.decode([token]) for token in row[:n]],
            correct=verdict.status == "correct",
            reward=float(verdict.status == "correct"),
            verdict=verdict.status,
            extracted=verdict.extracted,
            truncated=row[n - 1] != tokenizer.eos_token_id,
            entropy=H[:n],
        )
        for row, n, verdict, H in zip(rows, lengths, math_verdicts(texts, [GOLD] * 8), entropy, strict=True)
    ]
    write_records(RECORDS, 1, [GroupRecord(1, 0, PROBLEM + ASK, answers, gold=GOLD, algorithm="gtpo")])


def credit(group: GroupRecord, i: int) -> tuple[list[float], list[float]]:
    """The advantages of answer i's tokens under GRPO and under GTPO."""
    lengths = [len(answer.tokens) for answer in group.answers]
    correct = torch.tensor([answer.correct for answer in group.answers])
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    H = torch.zeros(mask.shape, dtype=torch.float64)
    H[mask] = torch.tensor([x for answer in group.answers for x in answer.entropy or ()], dtype=torch.float64)
    gtpo = gtpo_advantages(gtpo_rewards(correct, H, mask), mask)[i]
    grpo = grpo_advantages(correct.double())[i].expand_as(gtpo)
    return grpo[: lengths[i]].tolist(), gtpo[: lengths[i]].tolist()


def paragraph(tokens: list[str], values: list[float], low: float, high: float, top: int) -> tuple[list[str], int]:
    """The tokens as running text from `top` on, each on its colour; and where the text ends."""
    parts, x, y = [], 16.0, top
    for token, value in zip(tokens, values, strict=True):
        shown = token.replace("\n", "⏎")
        width = len(shown) * CHAR
        if x + width > WIDE - 16:
            x, y = 16.0, y + LINE
        deep = 0.15 + 0.85 * (value - low) / (high - low) if high > low else 0.5
        fill = f'fill="#56b4e9" fill-opacity="{deep:.2f}"'
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width - 1:.1f}" height="{LINE - 5}" rx="2" {fill}/>')
        look = f'x="{x:.1f}" y="{y + 15}" textLength="{width - 1:.1f}" lengthAdjust="spacingAndGlyphs"'
        parts.append(f'<text {look} xml:space="preserve">{escape(shown)}</text>')
        x = x + width
        if token.endswith("\n"):
            x, y = 16.0, y + LINE
    return parts, y + LINE


def picture() -> str:
    (group,) = read_records(record_path(RECORDS, 1))
    right = [i for i, answer in enumerate(group.answers) if answer.correct]
    i = min(right, key=lambda k: len(group.answers[k].tokens))  # the shortest correct answer
    tokens = [token for token in group.answers[i].tokens if not token.startswith("<|")]
    grpo, gtpo = (values[: len(tokens)] for values in credit(group, i))
    low, high = min(gtpo), max(gtpo)
    said = f"One of {len(right)} correct answers among {len(group.answers)}:"
    titles = {
        f"GRPO: A = {grpo[0]:.2f} for every token": [(low + high) / 2] * len(tokens),
        f"GTPO: A from {low:.2f} to {high:.2f}, more where the policy was uncertain": gtpo,
    }
    told, _, asked = PROBLEM.partition(" How")
    lines = [told, f"How{asked} {said}"]
    parts = [f'<text class="q" x="16" y="{24 + 18 * k}">{escape(line)}</text>' for k, line in enumerate(lines)]
    y = 72
    for title, values in titles.items():
        parts.append(f'<text class="h" x="16" y="{y}">{escape(title)}</text>')
        found, y = paragraph(tokens, values, low, high, y + 10)
        parts, y = [*parts, *found], y + 26
    style = (
        "text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #16191d } "
        ".h, .q { font-family: system-ui, sans-serif } .h { font-weight: 600; font-size: 15px } .q { fill: #596068 }"
    )
    look = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {y - 20}" role="img"'
    ground = f'<rect width="{WIDE}" height="{y - 20}" fill="#ffffff"/>'
    start = [f'<svg {look} aria-label="One answer under GRPO and GTPO">', f"<style>{style}</style>", ground]
    return "\n".join([*start, *parts, "</svg>\n"])


if __name__ == "__main__":
    if "--sample" in sys.argv:
        sample(sys.argv[sys.argv.index("--sample") + 1])
    (DOCS / "images" / "credit.svg").write_text(picture(), encoding="utf-8")
