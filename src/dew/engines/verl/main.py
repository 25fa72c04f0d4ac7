"""`python -m dew.engines.verl.main <overrides>`: verl's own configuration and start, with dew's trainer modes.

In place of `python -m verl.trainer.main_ppo`; every key of verl's `ppo_trainer` configuration means what it means
there. A configuration that cannot work is told before Ray starts.
"""

import os
import sys
from typing import Any

import hydra
import ray
from omegaconf import OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from dew.engines.verl import plugin
from dew.engines.verl.contract import require_verl
from dew.engines.verl.settings import check, run_settings_of
from dew.errors import DewError

PLUGIN = plugin.__name__
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"


class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's, in a process that knows dew's trainer modes."""

    def run(self, config: Any) -> None:
        from dew.engines.verl import trainer  # noqa: F401

        super().run(config)


def prepare(config: Any) -> None:
    """Check everything, and have every process of the run import the plug-in: loudly, which an entry point is not."""
    require_verl()
    check(config, known=ADV_ESTIMATOR_REGISTRY)
    run = run_settings_of(config)
    modules = [name for name in os.environ.get(EXTERNAL, "").split(",") if name and name != PLUGIN]
    with open_dict(config):
        if run is not None:
            config.algorithm.dew_run.folder = run.folder
        OmegaConf.update(
            config, f"ray_kwargs.ray_init.runtime_env.env_vars.{EXTERNAL}", ",".join([*modules, PLUGIN]), force_add=True
        )


def start(config: Any) -> None:
    auto_set_device(config)
    prepare(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, ray.remote(Runner))


@hydra.main(  # type: ignore[untyped-decorator]
    config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None
)
def main(config: Any) -> None:
    try:
        start(config)
    except DewError as error:
        sys.exit(f"dew: {error}")


if __name__ == "__main__":
    main()
