"""Sample with vLLM: the same questions, the same settings, many more answers per second on a GPU."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from dew.errors import EngineError
from dew.evaluate.sampling import Sampled, Samples, Sampling, prompt_text


def load_vllm(folder: str, **settings: Any) -> Any:
    """A `vllm.LLM` of that model; `evaluate` takes it in the place of a transformers model."""
    try:
        from vllm import LLM
    except ImportError:
        raise EngineError(
            "engine vllm: vLLM is not installed. It pins its own transformers, so give it an environment of its own "
            "(locks/vllm.txt), or sample with transformers."
        ) from None
    return LLM(model=folder, **settings)


def is_vllm(model: Any) -> bool:
    return hasattr(model, "llm_engine")


def sample_with_vllm(llm: Any, tokenizer: Any, prompts: Sequence[Any], sampling: Sampling) -> Samples:
    """Answers to every prompt (text, or a list of chat messages)."""
    from vllm import SamplingParams

    start = perf_counter()
    # A chat template has already written the special tokens.
    ids = [tokenizer(prompt_text(tokenizer, p), add_special_tokens=isinstance(p, str))["input_ids"] for p in prompts]
    settings = SamplingParams(
        n=1 if sampling.greedy else sampling.k,
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=0,
        repetition_penalty=1.0,
        max_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
    )
    results = llm.generate([{"prompt_token_ids": row} for row in ids], settings, use_tqdm=False)
    answers = [
        [Sampled(one.text, len(one.token_ids), one.finish_reason == "length") for one in result.outputs]
        for result in results
    ]
    return Samples(answers, perf_counter() - start)
