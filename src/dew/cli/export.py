"""`dew export`: a folder that any tool loads."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out
from dew.errors import ConfigError
from dew.files import stay_inside


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    to: Annotated[Path, typer.Argument(help="The folder to write; it must not hold anything.")],
) -> None:
    """Write a run's final model as a folder that loads with `from_pretrained` and generates; LoRA is merged."""
    source = run / "model"
    if not source.is_dir():
        raise ConfigError(f"{run}: no final model there. Finish the run (dew resume {run}) or give another folder.")
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to} is not empty. Name a new folder.")
    stay_inside(source)
    if (source / "adapter_config.json").is_file():
        _merge(source, to)
    else:
        shutil.copytree(source, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("training_args.bin"))
    out.print(f"{to}: loads and generates, e.g. {_try(to)!r}")


def _merge(source: Path, to: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model: Any = AutoPeftModelForCausalLM.from_pretrained(str(source), use_safetensors=True, trust_remote_code=False)
    model.merge_and_unload().save_pretrained(str(to))
    AutoTokenizer.from_pretrained(str(source), trust_remote_code=False).save_pretrained(str(to))


def _try(folder: Path) -> str:
    """Load it as a stranger would, and let it say a few tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), use_safetensors=True, trust_remote_code=False)
    ids = tokenizer("1", return_tensors="pt")
    return tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0])
