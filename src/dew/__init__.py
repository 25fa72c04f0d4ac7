"""dew: Dynamic Entropy Weighting, token-level credit for reinforcement learning of language models."""
