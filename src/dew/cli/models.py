"""Load a model to sample from: a model folder, the final model of a run, a bundled model or one from the hub."""

import json
from pathlib import Path
from typing import Any

from dew import tasks
from dew.errors import ConfigError, Problem, not_loaded
from dew.run.config import find_model
from dew.run.folder import RunFolder
from dew.run.models import check_model

ENGINES = ("transformers", "vllm")
LATEST = "latest_checkpointed_iteration.txt"
"""The file in which verl names its last complete checkpoint."""


def load_model(name: str, engine: str = "transformers") -> tuple[Any, Any]:
    """Model and tokenizer from a model folder, a run folder (its final model) or the hub. LoRA weights are merged.

    Mixed-precision training keeps weights in float32 and samples in bfloat16; so does this on a GPU, and vLLM.
    """
    path, tokenizer = load_tokenizer(name, engine)
    import torch

    from dew.compare import load_vllm
    from dew.decoding import SamplingCopy

    if engine == "vllm":
        return load_vllm(str(path)), tokenizer
    model = load_weights(path).requires_grad_(False)
    if not torch.cuda.is_available():
        return model, tokenizer
    cast = torch.bfloat16 if model.dtype == torch.float32 else None
    return SamplingCopy(model.to("cuda"), cast).model, tokenizer


def load_tokenizer(name: str, engine: str = "transformers") -> tuple[Path, Any]:
    """(where the model is: a folder or a hub name, its tokenizer). Adapters of the lab have that of their base."""
    if engine not in ENGINES:
        raise ConfigError(Problem(f"engine: {engine!r} is unknown.", remedy=f"Choose one of: {', '.join(ENGINES)}."))
    from transformers import AutoTokenizer

    found = RunFolder(tasks.model_folder(name)).model()
    if found is None and Path(name, "run.json").is_file():
        raise ConfigError(no_model(Path(name)))
    path = found or Path(find_model(name, "model"))
    if found:
        check_model(name, found)
    adapter, source = path / "adapter_config.json", str(path)
    if engine == "vllm" and adapter.is_file():
        what = f"{name}: LoRA weights, which have to be merged for vLLM."
        raise ConfigError(Problem(what, remedy=f"Write `dew export {name} FOLDER`, then evaluate FOLDER."))
    try:
        if adapter.is_file() and not any(path.glob("tokenizer*")):
            source = find_model(str(json.loads(adapter.read_bytes())["base_model_name_or_path"]), str(adapter))
        return path, AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(not_loaded("model", name, error)) from None


def load_weights(folder: Path) -> Any:
    """A model with the precision of its weights; LoRA weights are merged."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        if (folder / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM as Peft

            return Peft.from_pretrained(str(folder), trust_remote_code=False, use_safetensors=True).merge_and_unload()
        return AutoModelForCausalLM.from_pretrained(
            str(folder), trust_remote_code=False, use_safetensors=True, dtype="auto"
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(not_loaded("model", str(folder), error)) from None


def no_model(folder: Path) -> Problem:
    if (folder / "checkpoints").is_dir() and RunFolder(folder).run().get("engine") == "verl":
        remedy = f"Merge its checkpoint first: {merge_command(folder / 'checkpoints', folder)}"
        return Problem(f"{folder}: verl saved its model in parts.", remedy=remedy)
    remedy = "Give the folder of a run with a model. `dew resume` finishes a run; in Python: trainer.save_model()."
    lacks = "holds no final model and no checkpoint" if folder.is_dir() else "does not exist"
    return Problem(f"{folder} {lacks}.", remedy=remedy)


def merge_command(checkpoints: Path, folder: Path) -> str:
    latest = checkpoints / LATEST
    step = latest.read_text().strip() if latest.is_file() else "N"
    shards = checkpoints / f"global_step_{step}" / "actor"
    return f"python -m verl.model_merger merge --backend fsdp --local_dir {shards} --target_dir {folder}/model"
