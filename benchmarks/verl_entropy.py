"""Accuracy of the old policy's entropy for the different ways in which verl computes it. Needs verl.

    python benchmarks/verl_entropy.py [--device cuda] [--vocab 152064] [--tokens 512]

Logits like those of a trained model: one token is ahead by 2 to 30, the rest is noise, all in bf16, under autocast as
in verl's FSDP engine. The truth is float64 on the same logits. GTPO uses H on correct answers and 1/H on wrong ones, so
the relative error matters.
"""

import argparse

import torch
from verl.utils import torch_functional as verl_F

WAYS = {
    "verl's default": verl_F.entropy_from_logits,
    "entropy_from_logits_with_chunking": verl_F.entropy_from_logits_with_chunking,
}


def logits(tokens: int, vocab: int, device: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(tokens, vocab, generator=g)
    x[torch.arange(tokens), torch.randint(vocab, (tokens,), generator=g)] += torch.linspace(2, 30, tokens)
    return x.bfloat16().to(device)


def show(name: str, found: torch.Tensor, truth: torch.Tensor) -> None:
    error = (found.double() - truth).abs() / truth
    print(
        f"{name:36} {found.dtype!s:15} exactly 0: {(found == 0).double().mean():6.1%}   below 0: "
        f"{(found < 0).double().mean():6.1%}   relative error, median "
        f"{error.median():9.2e}, 90 % {error.quantile(0.9):9.2e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    x = logits(args.tokens, args.vocab, args.device)
    truth = torch.cat([verl_F.entropy_from_logits(part.double()) for part in x.split(32)])
    print(f"torch {torch.__version__} on {args.device}, {args.tokens} tokens, vocabulary of {args.vocab}")
    with torch.autocast(args.device, torch.bfloat16), torch.no_grad():
        for name, way in WAYS.items():
            show(name, way(x), truth)


if __name__ == "__main__":
    main()
