"""`python -m dew.engines.verl.main <overrides>` replaces `python -m verl.trainer.main_ppo`, with the same keys.

A configuration that cannot work is reported before Ray starts. To train your own algorithm, register it
(`dew.register_algorithm`) in a module that every process can import, and name the module in
`VERL_USE_EXTERNAL_MODULES` or `actor_rollout_ref.model.external_lib`.
"""

import logging
import os
import sys
from typing import Any

from dew.engines.compat import require
from dew.errors import DewError

try:  # before the imports from verl, which may fail with another release
    require("verl")
except DewError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"dew: {error}")

import hydra
import ray
from omegaconf import OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from dew.engines.verl import plugin
from dew.engines.verl.config import (
    EXTERNAL,
    changed_by_verl,
    check,
    check_folder,
    import_modules,
    plain,
    read_run_settings,
)
from dew.engines.verl.data import check_sources


class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's task runner, with the user's algorithms and dew's trainer modes imported first."""

    def run(self, config: Any) -> None:
        import_modules(plain(config.actor_rollout_ref.model.external_lib))
        from dew.engines.verl import trainer  # noqa: F401

        super().run(config)


def prepare(config: Any) -> None:
    import_modules(plain(config.actor_rollout_ref.model.external_lib))
    plugin.register()
    algorithm = check(config, estimators=ADV_ESTIMATOR_REGISTRY, losses=POLICY_LOSS_REGISTRY)
    for problem in changed_by_verl(algorithm):
        logging.getLogger("dew").warning("%s", problem)
    if (run := read_run_settings(config)) is not None:
        check_folder(config, run.folder)
    check_sources(config)
    modules = [name for name in os.environ.get(EXTERNAL, "").split(",") if name and name != plugin.__name__]
    variable = f"ray_kwargs.ray_init.runtime_env.env_vars.{EXTERNAL}"
    with open_dict(config):
        if run is not None:
            config.algorithm.dew_run.folder = run.folder
        OmegaConf.update(config, variable, ",".join([*modules, plugin.__name__]), force_add=True)


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
        sys.exit("\n".join(f"dew: {problem}" for problem in error.problems))


if __name__ == "__main__":
    main()
