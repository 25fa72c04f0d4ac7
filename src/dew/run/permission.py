"""What a config file from somebody else may not do without approval: run code, send data away, write elsewhere.

Your own file is trusted. With `--untrusted`, these settings work only if they are repeated on the command line
(`--push_to_hub true`). A secret is refused in either case: settings are saved in the run's folder and its report.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dew.errors import ConfigError, Problem
from dew.files import write_atomically
from dew.rewards.user_function import is_user_function
from dew.run.config import Run, to_yaml

RUNS_CODE = {
    "trust_remote_code": "runs code that comes with a model",
    "custom_generate": "runs code that comes with a model",
    "use_kernels": "loads compiled code from the hub",
    "allow_all_kernels": "loads compiled code from the hub",
    "external_lib": "runs code",
    "_target_": "runs code",
}
"""At any depth, also inside other settings."""
CODE_PATHS = ("pkg://", "file://")
"""How verl's settings name modules: reward functions, data sets, samplers."""
SAFE_LOADING = ("use_safetensors", "weights_only")
"""Turned off, weights may be pickles, which run code when loaded."""
SENDS = {
    "push_to_hub": "uploads the model",
    "log_completions_hub_repo": "uploads the completions",
    "trackio_space_id": "uploads metrics",
    "trackio_bucket_id": "uploads metrics",
    "trackio_static_space_id": "uploads metrics",
    "deepspeed": "may write files anywhere",
    "overwrite_output_dir": "deletes an earlier run",
}
LOGGERS, LOCAL_LOGGERS = ("report_to", "verl.trainer.logger"), ("none", "tensorboard", "console", "file")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
APPROVE = "Repeat the setting on the command line to approve it, or run without --untrusted."
OFF = ("", "0", "false", "no", "n", "f", "off", "none")


def check_permission(run: Run, typed: Collection[str], untrusted: bool) -> None:
    """Refuse secrets, and in an untrusted file every setting that needs approval.

    `typed` holds the names given on the command line, verl's keys as `verl.trainer.nnodes`; those are approved.
    """
    if "hub_token" in run.settings or "hub_token" in typed:
        why = "Secrets do not belong in settings, which are saved in the run's folder and its report."
        raise ConfigError(Problem("hub_token:", why, "Set HF_TOKEN in the environment, or run `hf auth login`."))
    if not untrusted:
        return
    every = {**run.settings, "verl": run.verl, "env": run.env}
    settings = {key: value for key, value in every.items() if key not in typed}
    problems = [
        Problem(f"{name}: {effect}.", remedy=APPROVE)
        for name, effect in needs_approval(settings, Path(run.source or ".").parent)
        if name not in typed
    ]
    if problems:
        raise ConfigError(problems, source=f"{run.source} requests actions that need your approval")


def remember(run: Run, typed: Collection[str], folder: Path) -> None:
    """Store what was approved for the run in `folder`, outside of it: the folder may be somebody else's."""
    with suppress(OSError):  # without a home to write to, resuming asks again
        write_atomically(_approvals(folder), json.dumps({"run": _fingerprint(run), "typed": list(typed)}).encode())


def remembered(run: Run, folder: Path) -> list[str]:
    """What was approved when the run in `folder` started, if its settings have not changed since."""
    try:
        stored = json.loads(_approvals(folder).read_bytes())
    except (OSError, ValueError):
        return []
    return stored["typed"] if stored["run"] == _fingerprint(run) else []


def _approvals(folder: Path) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "dew" / "approved" / f"{sha256(str(folder.resolve()).encode()).hexdigest()}.json"


def _fingerprint(run: Run) -> str:
    return sha256(to_yaml(replace(run, settings={**run.settings, "output_dir": ""})).encode()).hexdigest()


def needs_approval(settings: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """(name, effect) of every setting that needs approval in a file from `folder`."""
    if code := [name for name in _texts(settings.get("reward_funcs")) if is_user_function(name)]:
        yield "reward_funcs", f"runs code ({', '.join(code)})"
    if ":" in str(settings.get("algorithm")):
        yield "algorithm", f"runs code ({settings['algorithm']})"
    if settings.get("env"):
        yield "env", f"sets environment variables ({', '.join(map(str, settings['env']))})"
    for name in ("guide", "vllm_server_base_url", "vllm_server_host"):
        if host := _remote_host(name, str(settings.get(name) or "")):
            yield name, f"connects to {host}"
    for name, value in _walk("", settings):
        last, text = name.rpartition(".")[2], str(value)
        on = text.strip().lower() not in OFF
        remote = [logger for logger in _texts(value) if logger.lower() not in LOCAL_LOGGERS]
        if remote and name.replace("+", "") in LOGGERS:
            yield name, f"sends metrics to {', '.join(remote)}"
        elif on and (last in RUNS_CODE or name in SENDS):
            yield name, RUNS_CODE.get(last) or SENDS[name]
        elif last == "path" and (text.startswith(CODE_PATHS) or text.endswith(".py")):
            yield name, "runs code"
        elif last in SAFE_LOADING and not on:
            yield name, "allows weights in pickle files, which run code when loaded"
        elif last == "attn_implementation" and "/" in text:
            yield name, "loads compiled code from the hub"
        elif re.fullmatch(r"output_dir|verl\..*[._]dir", name) and value is not None and not _is_below(text, folder):
            yield name, f"{text} is neither below the current folder nor below the file's own"


def _walk(above: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every setting at any depth, also inside JSON, by its dotted name."""
    for key, value in settings.items():
        yield f"{above}{key}", value
        inner = value
        if isinstance(value, str) and value.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                inner = json.loads(value)
        if isinstance(inner, Mapping):
            yield from _walk(f"{above}{key}.", inner)


def _texts(value: Any) -> list[str]:
    return [str(x) for x in (value if isinstance(value, list) else [value]) if x is not None]


def _remote_host(name: str, text: str) -> str | None:
    """The host of an address, unless it is this machine."""
    if name == "guide" and not text.startswith(("http://", "https://")):
        return None
    try:
        host = urlsplit(text).hostname if "//" in text else text
    except ValueError:
        return text
    return host if host not in LOCAL_HOSTS else None


def _is_below(path: str, folder: Path) -> bool:
    """Below the current folder or the file's own, and not in a hidden one. TRL expands `~`."""
    try:
        target = Path(path).expanduser().resolve()
        bases = [base.resolve() for base in (Path.cwd(), folder)]
    except (OSError, ValueError, RuntimeError):
        return False
    inside = [target.relative_to(base).parts for base in bases if target.is_relative_to(base)]
    return any(parts and not any(part.startswith(".") for part in parts) for parts in inside)
