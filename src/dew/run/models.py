"""Load a model's config, tokenizer, chat template and adapter in a process with limits before loading them here.

They are only data, but a folder from someone else can still make a loader hang or run out of memory: a template with
nested loops, a regular expression in adapter_config.json, a normalizer that multiplies the text, a million layers.
"""

import hashlib
import logging
import os
import socket
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dew.errors import ConfigError, Problem, RecordError
from dew.files import cache_folder, read_whole, write_atomically
from dew.rewards.process import Process, ProcessFailed
from dew.rewards.worker import answer_requests, encode
from dew.tasks.games import BUNDLED

SECONDS, MEMORY = 60.0, 4 * 2**30
FILES = (
    "*config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
MAX_FILE = 1 << 28
"""Maximum size of one of these files in bytes. The largest tokenizers have 35 million."""
DENSEST = 16
"""Maximum number of parameters per byte of weights. 4-bit weights have two."""
TEXT = "What is 12 × 3? Think first, aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\n\n"


def check_model(name: str, folder: str | Path, revision: str | None = None) -> None:
    """Raise a ConfigError if loading a model, from a folder or the hub, hangs or takes too much memory.

    Other problems are left to the loader. Files that have passed are not checked again.
    """
    path = Path(folder)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(str(folder), revision=revision, allow_patterns=list(FILES)))
        except Exception:  # of many kinds; the loader will raise the same
            return
    if path in BUNDLED.values():
        return
    try:
        passed = cache_folder("models") / _digest(path)
        if not passed.exists():
            _try_loading(path)
            with suppress(OSError):
                write_atomically(passed, b"")
    except (ProcessFailed, RecordError) as error:
        what = f"{name}: config, tokenizer, chat template or adapter cannot be used: {error}."
        raise ConfigError(Problem(what, remedy="Get the model from its source again, or use another one.")) from None


def _digest(folder: Path) -> str:
    found = hashlib.sha256(f"{version('transformers')} {_weights(folder)}".encode())
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern)}):
        content = read_whole(path, MAX_FILE)
        found.update(f"\0{path.name}\0{len(content)}\0".encode(errors="replace") + content)
    return found.hexdigest()


def _weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _try_loading(folder: Path) -> None:
    process = Process("dew.run.models:serve", {}, memory=MEMORY)
    try:
        reply = process.ask(encode({"folder": str(folder)}), SECONDS)
    except ProcessFailed as failure:
        raise ProcessFailed(f"the process that loaded them {failure}") from None
    finally:
        process.kill()
    weights = _weights(folder)
    if "problem" in reply:
        raise ProcessFailed(reply["problem"])
    if weights and (wanted := reply["parameters"]) > DENSEST * weights:
        raise ProcessFailed(f"config.json asks for {wanted:,} parameters, the weights have {weights:,} bytes")


# ── in that process ─────────────────────────────────────────────────────────────────────────────────────────
def serve(channel: socket.socket) -> None:
    """Entry point of the process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.CRITICAL)
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: F401  before the clock starts

    channel.sendall(encode({}))
    answer_requests(channel, lambda request: load(request["folder"]))


def load(folder: str) -> dict[str, Any]:
    """Return the number of parameters, or 0 if loading fails with an error that the loader will raise again."""
    try:
        _load_tokenizer(folder)
        return {"parameters": _load_empty(folder)}
    except RecursionError:
        return {"problem": "a file is nested too deeply"}
    except Exception:
        return {"parameters": 0}


def _load_tokenizer(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    turns = [{"role": "user", "content": TEXT * 40}, {"role": "assistant", "content": TEXT}]
    for chat in (turns[:1], [{"role": "system", "content": TEXT}, *turns * 3, *turns[:1]]):
        text = chat[0]["content"]
        with suppress(Exception):  # no template, or not for this chat
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        tokenizer.decode(tokenizer(text)["input_ids"])


def _load_empty(folder: str) -> int:
    """Build the model without weights, with its adapter, and return its number of parameters (0 with an adapter)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    adapter = Path(folder, "adapter_config.json").is_file()
    if adapter:
        from peft import PeftConfig, get_peft_model

        lora = PeftConfig.from_pretrained(folder)
    config = AutoConfig.from_pretrained(lora.base_model_name_or_path if adapter else folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if adapter:
            model = get_peft_model(model, lora)
    return 0 if adapter else sum(p.numel() for p in model.parameters())
