"""Values, not times: attention that skips padding (whole_step.py), and dew's sampler with flex attention.

    python benchmarks/attention_check.py MODEL        a folder or hub name; on a GPU if there is one

Prints how far log-probabilities (nats) and gradients of padded sequences of random tokens are from those of the default
attention in float32; then whether dew's sampler returns the same lengths, log-probabilities and entropies for the model
loaded with flex attention as with PyTorch's.
"""

import argparse

import torch
import whole_step  # registers the attention "unpadded"  # noqa: F401
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, AutoTokenizer

from dew.decoding import Decoder, Draw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, PADDED = 700, [(0, 0), (40, 300), (7, 650), (90, 5)]
"""Tokens of padding on the left and on the right of each sequence."""
SUMS = [(1, 2), (17, 25), (100, 3), (42, 58)]


def load(name, attention, dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention).to(DEVICE)


def scored(model):
    """Log-probabilities of the tokens after the first, and the gradient of their mean."""
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (len(PADDED), WIDTH)).to(DEVICE)
    place, (left, right) = torch.arange(WIDTH), torch.tensor(PADDED).T[..., None]
    mask = ((place >= left) & (place < WIDTH - right)).to(DEVICE)
    z = model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1].float()
    found = z.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0][mask[:, 1:] & mask[:, :-1]]
    found.mean().backward()
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return found.detach(), torch.cat([x.double().flatten() for x in gradient])


def sampled(model, tokenizer):
    prompts = [tokenizer(f"{a}+{b}=", add_special_tokens=False)["input_ids"] for a, b in SUMS for _ in range(4)]
    torch.manual_seed(1)
    uniforms = torch.rand(len(prompts), 64, 2).to(DEVICE)
    end = tokenizer.eos_token_id
    decoder = Decoder(model.eval().requires_grad_(False), Draw(), ends=[end], pad=end)
    return decoder.rows(prompts, 64, uniforms=uniforms)[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    name = parser.parse_args().model
    logp, gradient = scored(load(name, "sdpa", torch.float32))
    for attention in ("sdpa", "unpadded"):
        own, of = scored(load(name, attention))
        off = (own - logp).abs()
        cosine = cosine_similarity(of, gradient, dim=0)
        print(f"{attention}: nats {off.mean():.4f} in the mean, {off.max():.2f} at most; cosine {cosine:.4f}")
    tokenizer = AutoTokenizer.from_pretrained(name)
    plain, flex = (sampled(load(name, attention), tokenizer) for attention in ("sdpa", "flex_attention"))
    equal = [torch.equal(x, y) for x, y in zip(plain, flex, strict=True)]
    print(f"flex attention: same lengths, log-probabilities, entropies: {equal}")


if __name__ == "__main__":
    main()
