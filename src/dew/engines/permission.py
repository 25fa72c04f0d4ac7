"""What a file may not bring about by itself: run code, send anything away, or write where it does not belong.

A recipe is data, whoever wrote it. A setting that makes more of it counts where the user typed it, as a setting
(`--trust_remote_code`) or by name (`--allow trust_remote_code`). Runs made in Python are their author's own.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dew.config import Run
from dew.errors import ConfigError
from dew.rewards.user_function import is_user_function

RUNS_CODE = {
    "trust_remote_code": "runs code that comes with a model",
    "custom_generate": "runs code that comes with a model",
    "use_kernels": "loads compiled code from the hub",
    "allow_all_kernels": "loads compiled code from the hub",
    "external_lib": "runs code",
}
"""Wherever they stand, also inside other settings."""
CODE_BY_PATH = ("pkg://", "file://")
"""How verl's settings name modules: reward functions, data sets, samplers."""
SAFE = ("use_safetensors", "weights_only")
"""Switched off, weights are read as pickles, which are programs."""
SENDS = {
    "push_to_hub": "uploads the model",
    "log_completions_hub_repo": "uploads the answers",
    "trackio_space_id": "sends metrics away",
    "trackio_bucket_id": "sends metrics away",
    "trackio_static_space_id": "sends metrics away",
    "deepspeed": "may write wherever it is told to",
}
AT_HOME = ("none", "tensorboard")
"""What `report_to` may name: nothing of it leaves the run's folder."""
LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
OFF = ("", "0", "false", "no", "n", "f", "off", "none")


def check_permission(run: Run, typed: Collection[str], allowed: Collection[str]) -> None:
    """Refuse what the file wants and nobody typed, all of it at once, with what to type."""
    if "hub_token" in run.settings or "hub_token" in typed:
        raise ConfigError(
            "hub_token: a secret does not belong into settings, which are written into the run's folder and its "
            "report. Set HF_TOKEN in the environment, or run `hf auth login`."
        )
    if run.source is None:
        return
    settings = {key: value for key, value in {**run.settings, "verl": run.verl}.items() if key not in typed}
    wanted = {name: why for name, why in wishes(settings, Path(run.source).parent) if name not in allowed}
    if wanted:
        listed = "".join(f"\n- {name}: {why}" for name, why in wanted.items())
        words = " ".join(f"--allow {name}" for name in wanted)
        raise ConfigError(f"{run.source} asks for more than a file may do by itself:{listed}\nTo allow it: {words}")


def wishes(settings: Mapping[str, Any], home: Path) -> Iterator[tuple[str, str]]:
    """(name, what it brings about) of everything that must be allowed."""
    for reward in _listed(settings.get("reward_funcs")):
        if is_user_function(str(reward)):
            yield str(reward), "runs code"
    for name, value in settings.items():
        yield from _inside(name, value)
        if name in SENDS and _on(value):
            yield name, SENDS[name]
    if away := [str(r) for r in _listed(settings.get("report_to")) if str(r).lower() not in AT_HOME]:
        yield "report_to", f"sends metrics to {', '.join(away)}"
    for name in ("guide", "vllm_server_base_url", "vllm_server_host"):
        if host := _elsewhere(name, settings.get(name)):
            yield name, f"talks to {host}"
    for name, value in _leaves("verl", settings.get("verl") or {}):
        if name.endswith("_dir") and not _belongs(str(value), home):
            yield name, f"{value} is neither below the current folder nor below the file's own"
    folder = settings.get("output_dir")
    if folder is not None and not _belongs(str(folder), home):
        yield "output_dir", f"{folder} is neither below the current folder nor below the file's own"


def _inside(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The same for a setting and everything in it, be it a mapping or JSON."""
    last = name.rpartition(".")[2]
    if last in RUNS_CODE and _on(value):
        yield name, RUNS_CODE[last]
    elif last == "path" and str(value).startswith(CODE_BY_PATH) | str(value).endswith(".py"):
        yield name, "runs code"
    elif last in SAFE and not _on(value):
        yield name, "lets weights be read as pickles, which are programs"
    elif last == "attn_implementation" and "/" in str(value):
        yield name, "loads compiled code from the hub"
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _inside(f"{name}.{key}", part)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, part in value.items():
        yield from _leaves(f"{name}.{key}", part)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _on(value: Any) -> bool:
    return str(value).strip().lower() not in OFF


def _elsewhere(name: str, value: Any) -> str | None:
    """The host of an address, if that is not this machine."""
    text = str(value or "")
    if name == "guide" and not text.startswith(("http://", "https://")):
        return None
    try:
        host = urlsplit(text).hostname if "//" in text else text
    except ValueError:
        return text
    return host if host and host not in LOCAL else None


def _belongs(folder: str, home: Path) -> bool:
    """Below the current folder or the file's own, and not in a hidden one."""
    try:
        path = Path(folder).resolve()
        bases = [base.resolve() for base in (Path.cwd(), home)]
    except (OSError, ValueError, RuntimeError):
        return False
    below = [path.relative_to(base) for base in bases if path != base and path.is_relative_to(base)]
    return any(not any(part.startswith(".") for part in inner.parts) for inner in below)
