"""Sampling without vLLM: single-token steps of a transformers model, captured as CUDA graphs and replayed."""

from dew.decoding.decoder import Decoder, Draw, SamplingCopy, refusal

__all__ = ["Decoder", "Draw", "SamplingCopy", "refusal"]
