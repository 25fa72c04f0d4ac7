"""verl's entry point `verl.plugins`: estimators and policy losses by name, in every process that imports verl.

Importing this module registers; verl loads an entry point and never calls it. A failure there is hidden at DEBUG level,
so what cannot work is registered too and says why when it is used. `dew.engines.verl.main` has every process import
this module by name as well (`VERL_USE_EXTERNAL_MODULES`), where a failure is loud.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from dew.engines.verl.contract import require_verl
from dew.engines.verl.estimators import estimator
from dew.engines.verl.losses import LOSSES, loss
from dew.engines.verl.settings import OURS
from dew.errors import EngineError


def register() -> None:
    """Once per process; again does nothing."""
    from verl.trainer.ppo import core_algos

    try:
        require_verl()
        refusal = None
    except EngineError as error:
        refusal = _refusal(str(error))
    for name in OURS:
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(name)(refusal or estimator(name))
    for name in LOSSES:
        if name not in core_algos.POLICY_LOSS_REGISTRY:
            core_algos.register_policy_loss(name)(refusal or loss(name))


def _refusal(reason: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise EngineError(reason)

    return refuse


register()
