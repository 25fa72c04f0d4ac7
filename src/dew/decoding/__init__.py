"""Sampling without vLLM on a GPU: one-token steps of a transformers model, captured as CUDA graphs."""

from dew.decoding.buffers import replaced, uncompiled
from dew.decoding.decoder import Decoder, SamplingCopy, refusal
from dew.decoding.draw import Draw

__all__ = ["Decoder", "Draw", "SamplingCopy", "refusal", "replaced", "uncompiled"]
