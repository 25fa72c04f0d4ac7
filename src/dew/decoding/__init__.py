"""Sample from a transformers model on a GPU without vLLM: each one-token step is captured as a CUDA graph."""

from dew.decoding.buffers import evaluating, replaced, uncompiled
from dew.decoding.decoder import Decoder, SamplingCopy, refusal
from dew.decoding.draw import Draw

__all__ = ["Decoder", "Draw", "SamplingCopy", "evaluating", "refusal", "replaced", "uncompiled"]
