"""GEPO, group entropy-controlled policy optimization: Cheng et al. 2026, arXiv:2607.16850."""

from jaxtyping import Bool, Float
from torch import Tensor

from dew.checks import check_by_token
from dew.ops import at_least_float32, masked_mean, standardize


def entropy_bands(
    logp: Float[Tensor, "P G T"], mask: Bool[Tensor, "P G T"], *, low: float = 0.2, high: float = 0.3
) -> tuple[Bool[Tensor, " P"], Bool[Tensor, " P"]]:
    """Which groups have low and which have high entropy.

        H_g = −Σᵢₜ log πᵢₜ / Σᵢ lenᵢ          the group's entropy, estimated from its own tokens (Eq. 4)
        low: H_g < μ − low · σ                high: H_g > μ + high · σ (Eq. 8)

    μ and σ are those of the groups that are passed. The paper smooths the thresholds over training (Eq. 9).
    """
    check_by_token(mask, logp=logp)
    live = mask.flatten(1).any(-1)
    H = -masked_mean(at_least_float32(logp), mask, (-2, -1)).flatten()
    centred = standardize(H, live, 0, scale=False)
    sigma = (centred.square().sum() / (live.sum() - 1).clamp_min(1)).sqrt()
    return live & (centred < -low * sigma), live & (centred > high * sigma)
