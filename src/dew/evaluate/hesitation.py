"""Where a model hesitated: the entropy of its next-token distribution at every token of an answer."""

from typing import Any

from dew.evaluate.sampling import prompt_text


def token_entropy(model: Any, tokenizer: Any, prompt: Any, answer: str) -> tuple[list[str], list[float]]:
    """The answer's tokens, and at each the entropy (in nats) of the distribution that it was drawn from.

    Hₜ = − Σᵥ pₜᵥ · log pₜᵥ
    """
    import torch

    before = tokenizer(prompt_text(tokenizer, prompt), add_special_tokens=isinstance(prompt, str))["input_ids"]
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([before + ids], device=model.device)).logits[0, len(before) - 1 : -1]
        logp = logits.float().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
    return [tokenizer.decode([i]) for i in ids], entropy.tolist()
