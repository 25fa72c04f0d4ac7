"""Compare the entropy that reached the estimator in a verl run with dew's kernel on the same tokens.

    python benchmarks/verl_records.py RUN --model FOLDER [--step 1] [--out FILE] [--device cuda]

RUN is a run folder with token records; FOLDER holds the weights that scored the step, for step 1 those of the start.
dew's kernel scores the recorded answers in bf16, as verl does, and in float32, which serves as the reference.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dew.kernels import Head, linear_logprob_entropy, plain_head
from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord

FLOOR = 1e-3
"""Relative errors are taken where the float32 entropy is above this."""


def recorded_answers(groups: list[GroupRecord], tokenizer: Any) -> Iterator[tuple[list[int], list[int], AnswerRecord]]:
    """Ids of the prompt and of the answer. Records hold texts: an answer with a token whose text is not unique (part of
    a character) is left out."""
    ids: dict[str, int | None] = {}
    for i, text in enumerate(tokenizer.batch_decode([[i] for i in range(len(tokenizer))])):
        ids[text] = None if text in ids else i
    for group in groups:
        prompt = tokenizer(group.prompt, add_special_tokens=False)["input_ids"]
        for answer in group.answers:
            found = [ids.get(text) for text in answer.tokens]
            if answer.entropy is not None and answer.logp is not None and None not in found:
                yield prompt, [i for i in found if i is not None], answer


@torch.no_grad()
def score(model: Any, prompt: list[int], answer: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """dew's log-probability and entropy of each token of the answer."""
    head = plain_head(model)
    assert isinstance(head, Head), head
    ids = torch.tensor([prompt + answer], device=model.device)
    hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    logp, entropy = linear_logprob_entropy(
        hidden, head.weight, ids[0, len(prompt) :], bias=head.bias, softcap=head.softcap,
        temperature=head.temperature * temperature,
    )  # fmt: skip
    return logp.cpu(), entropy.cpu()


def compare(run: Path, folder: str, step: int, device: str, temperature: float) -> tuple[dict[str, list[Tensor]], int]:
    """Log-probabilities and entropies of all tokens by way of computing them, and how many answers were left out."""
    groups = [group for group in RunFolder(run).records() if group.step == step]
    rows = list(recorded_answers(groups, AutoTokenizer.from_pretrained(folder)))
    if not rows:
        raise SystemExit(f"{run} has no recorded answer of step {step} with entropies.")
    found = {"verl": [torch.tensor([x for *_, a in rows for x in getattr(a, name)]) for name in ("logp", "entropy")]}
    for name, dtype in (("dew bf16", torch.bfloat16), ("dew float32", torch.float32)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        scores = [score(model, prompt, answer, temperature) for prompt, answer, _ in rows]
        found[name] = [torch.cat(part) for part in zip(*scores, strict=True)]
        del model
    return found, sum(len(group.answers) for group in groups) - len(rows)


def table(found: dict[str, list[Tensor]]) -> str:
    """Each way against another: absolute differences of both numbers, relative error of the entropy."""
    columns = "entropy | exactly 0 | difference, median | 99 % | relative error, median | 90 % | logp, median | 99 %"
    text = [f"| | {columns} |", "|---" * 9 + "|"]
    for name, other in (("verl", "dew bf16"), ("verl", "dew float32"), ("dew bf16", "dew float32")):
        (logp, entropy), (true_logp, truth) = found[name], found[other]
        error, off = (entropy - truth).abs(), (logp - true_logp).abs()
        relative = (error / truth)[truth > FLOOR]
        shown = [error.median(), error.quantile(0.99), relative.median(), relative.quantile(0.9)]
        numbers = " | ".join(f"{x:.2e}" for x in [*shown, off.median(), off.quantile(0.99)])
        zero = (entropy == 0).double().mean()
        text.append(f"| {name}, against {other} | {entropy.mean():.4f} | {zero:.1%} | {numbers} |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0, help="the run's sampling temperature")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found, left_out = compare(args.run, args.model, args.step, args.device, args.temperature)
    text = f"{len(found['verl'][0])} tokens of step {args.step}; {left_out} answers left out\n\n{table(found)}"
    if args.out:
        args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
