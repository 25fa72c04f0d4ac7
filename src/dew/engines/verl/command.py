"""The command that trains on verl: its words, as a person types them, and checked against verl's own configuration."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from dew.engines.verl.translate import Translation
from dew.engines.verl.words import override
from dew.errors import ConfigError

MAIN = ("-m", "dew.engines.verl.main")


def overrides(translation: Translation) -> list[str]:
    """Hydra's own log goes into the run's folder, not into the folder one happens to stand in."""
    folder = translation["algorithm.dew_run.folder"]
    own = {"hydra.run.dir": f"{folder}/hydra"}
    return [override(key, value) for key, value in {**translation.overrides, **own}.items()]


def command(translation: Translation, python: str = sys.executable) -> list[str]:
    return [python, *MAIN, *overrides(translation)]


def shown(words: list[str]) -> str:
    """For a shell, an override a line."""
    head, rest = words[: 1 + len(MAIN)], words[1 + len(MAIN) :]
    return " \\\n  ".join([shlex.join(head), *map(shlex.quote, rest)])


def verl_is_installed() -> bool:
    return find_spec("verl") is not None and find_spec("hydra") is not None


def check_against_verl(translation: Translation) -> bool:
    """Let verl's configuration judge every key, where verl is installed; False where it is not."""
    if not verl_is_installed():
        return False
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    spec = find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            compose("ppo_trainer", overrides=overrides(translation))
    except HydraException as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"verl refuses the configuration: {text} A key that verl does not know takes a leading +."
        ) from None
    return True
