"""Entry point `verl.plugins`: importing this module registers dew's estimators and loss. verl hides errors in plugins,
so `dew.engines.verl.main` also makes every process import it by name (`VERL_USE_EXTERNAL_MODULES`)."""

from dew.engines.compat import require
from dew.engines.verl.config import DEW_LOSS, dew_estimators
from dew.engines.verl.estimators import estimator, policy_loss


def register() -> None:
    """Register every algorithm that verl does not know yet. Call it again after registering your own algorithms."""
    from verl.trainer.ppo import core_algos

    require("verl")
    for name in dew_estimators():
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(name)(estimator(name))
    if DEW_LOSS not in core_algos.POLICY_LOSS_REGISTRY:
        core_algos.register_policy_loss(DEW_LOSS)(policy_loss)


register()
