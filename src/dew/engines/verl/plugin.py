"""verl's entry point `verl.plugins`: importing it registers dew's estimators and loss. verl hides an error in it, so
`dew.engines.verl.main` also has every process import it by name (`VERL_USE_EXTERNAL_MODULES`)."""

from dew.engines.compat import require
from dew.engines.verl.config import DEW_LOSS, dew_estimators
from dew.engines.verl.estimators import estimator, policy_loss


def register() -> None:
    """Register every algorithm that is not registered yet; call it again after registering algorithms of your own."""
    from verl.trainer.ppo import core_algos

    require("verl")
    for name in dew_estimators():
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(name)(estimator(name))
    if DEW_LOSS not in core_algos.POLICY_LOSS_REGISTRY:
        core_algos.register_policy_loss(DEW_LOSS)(policy_loss)


register()
