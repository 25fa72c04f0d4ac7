"""Sampling where vLLM is missing: one-token steps of a transformers model, captured as CUDA graphs and replayed."""

from dew.decoding.copies import SamplingCopy
from dew.decoding.decoder import Decoder, refusal
from dew.decoding.draw import Draw

__all__ = ["Decoder", "Draw", "SamplingCopy", "refusal"]
