"""Sampling without vLLM: one-token steps of a transformers model, captured as CUDA graphs or, on a CPU, written out."""

from typing import Any

from dew.decoding.cpu import CpuDecoder, cpu_refusal
from dew.decoding.decoder import Decoder, SamplingCopy, refusal
from dew.decoding.draw import Draw

__all__ = ["CpuDecoder", "Decoder", "Draw", "SamplingCopy", "cpu_refusal", "decoder_for", "refusal"]


def decoder_for(model: Any) -> type[Decoder] | type[CpuDecoder] | str:
    """The decoder for a model where it is, or why there is none and `generate` has to sample."""
    kind = model.device.type
    if kind == "cuda":
        return refusal(model) or Decoder
    return (cpu_refusal(model) or CpuDecoder) if kind == "cpu" else f"there is no decoder for {kind}"
