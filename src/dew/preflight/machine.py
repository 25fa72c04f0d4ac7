"""Checks of the machine: `dew doctor`, and the memory and disk that a run on TRL needs. Does not import TRL.

Memory is estimated for one process with the longest prompt and answers of maximum length, without fragmentation or
sharding. P parameters, P′ of them trained; L layers of width D and feed-forward width I; w bytes per weight, c per
activation:

    weights        w P               twice with a reference policy; + c P for copies in mixed precision
    gradients      w P′
    optimizer      2 w P′            AdamW; 2 P′ for 8-bit optimizers
    activations    A L               per token, A = c (13 D + 4 I); with gradient checkpointing c D L + A
    vllm           its share of the GPU, if it runs on the same one

dew's sampler uses what is free at the time.
"""

import math
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from dew.engines.compat import SUPPORTED, installed, supported
from dew.errors import loading
from dew.files import existing, try_writing
from dew.memory import free_memory
from dew.preflight import Check, failed, graded, guarded, ok, warning
from dew.run.config import find_model
from dew.run.folder import occupied

if TYPE_CHECKING:
    from dew.engines.trl.config import DewConfig
    from dew.engines.trl.launch import Parsed

GB = 1e9
NEEDED = {"trl": ("transformers", "trl", "accelerate", "datasets"), "verl": ("verl", "ray", "TransferQueue")}
PACKAGES = ("torch", *NEEDED["trl"], "peft", "math-verify", "triton", "vllm", *NEEDED["verl"], "tensordict")


def size(nbytes: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes / 1e3:.3g} kB"


def gpus() -> list[dict[str, Any]]:
    found = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    memory = [torch.cuda.mem_get_info(i) for i in found]
    return [{"name": torch.cuda.get_device_name(i), "free": memory[i][0], "total": memory[i][1]} for i in found]


def free_disk(path: Path) -> int:
    return shutil.disk_usage(existing(path)).free


def check_folder(folder: Path) -> Check:
    parent = existing(folder)
    try:
        try_writing(parent)
    except OSError as error:
        says = f"output_dir={str(folder)!r}: cannot write to {parent} ({error.strerror})."
        return failed("folder", says, "Choose another output_dir, or fix the permissions.")
    if problem := occupied(folder):
        return warning("folder", problem.what, problem.remedy)
    return ok("folder", f"output_dir={str(folder)!r} is writable.")


# ── dew doctor ──────────────────────────────────────────────────────────────────────────────────────────────
def doctor() -> list[Check]:
    """Check the installation. A check fails only if something is broken or not supported."""
    checks = (check_torch, check_versions, check_gpu, check_free)
    return [result for check in checks for result in guarded(check.__name__.removeprefix("check_"), check)]


def versions() -> list[dict[str, str | None]]:
    ranges = {name: releases for name, (releases, _) in SUPPORTED.items()}
    if installed("verl"):  # verl chooses its own transformers; the range in the table is TRL's
        del ranges["transformers"]
    return [{"package": name, "installed": installed(name), "supported": ranges.get(name)} for name in PACKAGES]


def check_versions(engine: str | None = None) -> Check:
    """Check that supported releases of an engine's packages are installed (default: of the installed engine)."""
    engine = engine or ("verl" if installed("verl") else "trl")
    found = {name: installed(name) for name in NEEDED[engine]}
    releases = {name: number for name, number in found.items() if number is not None and name in SUPPORTED}
    newest = {name: SUPPORTED[name][1] for name in releases}
    install = f"pip install {' '.join(f'{name}=={number}' for name, number in newest.items())}"
    if broken := [f"{name} {number}" for name, number in releases.items() if not supported(name, number)]:
        return failed("versions", f"Not supported: {', '.join(broken)}.", install)
    if missing := [name for name in found if found[name] is None]:
        says = f"To train on {engine}, install: {', '.join(missing)}."
        return warning("versions", says, f"pip install 'dew-rl[{engine}]'.")
    newer = any(Version(number) > Version(newest[name]) for name, number in releases.items())
    here, tried = (", ".join(f"{name} {number}" for name, number in x.items()) for x in (releases, newest))
    return graded("versions", f"{here}; tested up to {tried}.", install, warn=newer)


def check_torch() -> Check:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    given, n, cores = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), os.cpu_count()
    says = f"torch {torch.__version__} ({built}), Python {platform.python_version()} on {platform.platform()}; "
    says += f"OMP_NUM_THREADS={given or 'not set'}: {n} thread{'s' * (n != 1)} per process, {cores} cores."
    remedy = "export OMP_NUM_THREADS=1 if several processes share the cores."
    warn = given is None and n > 1 and not torch.cuda.is_available()
    return graded("torch", says, remedy, warn=warn)


def check_gpu() -> Check:
    if found := gpus():
        shown = "; ".join(f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free" for gpu in found)
        return ok("gpu", f"{shown}.")
    if Path("/proc/driver/nvidia/version").exists():
        says = f"An NVIDIA driver is installed, but torch {installed('torch')} finds no GPU."
        return warning("gpu", says, "Install a CUDA build of torch, and run nvidia-smi.")
    return ok("gpu", "None. The tiny recipes run on a CPU; larger models need a GPU.")


def check_free() -> list[Check]:
    memory, disk, here = free_memory(), free_disk(Path.cwd()), Path.cwd()
    remedy = "Close other programs: training the tiny model takes about 1 GB."
    return [
        graded("memory", f"{size(memory)} of memory free.", remedy, warn=memory < 1.5 * GB),
        graded("disk", f"{size(disk)} free in {here}.", "Free some space.", warn=disk < GB),
    ]


# ── memory and disk of a run on TRL ─────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Model:
    parameters: int
    trained: int
    layers: int
    width: int
    inner: int
    context: int | None
    weight_bytes: float
    """Bytes per parameter; 0.5 if quantized to 4 bits."""


def model_of(parsed: "Parsed") -> Model:
    """Read sizes from the model's config, with the run's precision and LoRA adapters, without loading weights."""
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import get_peft_config

    model, args = parsed.model, parsed.args
    name, trusted = model.model_name_or_path, args.trust_remote_code
    with loading("model_name_or_path", name):
        revision = model.model_revision
        folder = find_model(name, revision=revision)
        config = AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=trusted)
        with torch.device("meta"):  # takes no memory
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
            empty = get_peft_model(empty, get_peft_config(model)) if model.use_peft else empty
    dtype = str((args.model_init_kwargs or {}).get("dtype") or model.dtype or "float32").removeprefix("torch.")
    kind = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype, None)
    stored = 0.5 if model.load_in_4bit else 1.0 if model.load_in_8bit else (kind or torch.float32).itemsize
    text = config.get_text_config()
    experts, inner = getattr(text, "moe_intermediate_size", None), getattr(text, "intermediate_size", None)
    return Model(
        parameters=sum(p.numel() for p in empty.parameters()),
        trained=sum(p.numel() for p in empty.parameters() if p.requires_grad),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        inner=experts * text.num_experts_per_tok if experts else inner or 4 * text.hidden_size,
        context=getattr(text, "max_position_embeddings", None),
        weight_bytes=stored,
    )


def check_model(parsed: "Parsed", rows: list[dict[str, Any]]) -> list[Check]:
    from transformers import AutoTokenizer

    from dew.compare.sampling import prompt_text, with_template_settings

    model, wanted, args = model_of(parsed), parsed.model, parsed.args
    revision, trusted = wanted.model_revision, args.trust_remote_code
    folder = find_model(wanted.model_name_or_path, revision=revision)
    tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=trusted)
    tokenizer = with_template_settings(tokenizer, args.chat_template_kwargs)
    texts = sorted((prompt_text(tokenizer, row["prompt"]) for row in rows), key=len)[-256:]
    prompt = max(len(ids) for ids in tokenizer(texts)["input_ids"])
    gpu = None if args.use_cpu else next(iter(gpus()), None)
    device, free = (gpu["name"], gpu["free"]) if gpu else (NO_GPU, free_memory())
    terms, unsaved = (estimate(model, args, prompt, free, saves) for saves in (args.gradient_checkpointing, False))
    problem = args.context_problem(prompt, model.context)
    fits = f"The longest prompt has {prompt} tokens; an answer of max_completion_length fits into the context."
    return [
        failed("context", problem.says, problem.remedy) if problem else ok("context", fits),
        check_memory(terms, args, prompt, device, free, sum(unsaved.values()), model.parameters),
        check_disk(args, model),
    ]


def optimizer_bytes(args: "DewConfig", model: Model) -> float:
    return model.trained * (2 if "8bit" in args.optim else 2 * max(model.weight_bytes, 2))


def estimate(
    model: Model, args: "DewConfig", prompt: int, device_total: float, checkpointing: bool
) -> dict[str, float]:
    w, reference = model.weight_bytes, args.build_algorithm().kl_coef and model.trained == model.parameters
    c = 2 if args.bf16 or args.fp16 or w <= 2 else 4
    layer, inputs = c * (13 * model.width + 4 * model.inner), c * model.width * model.layers
    per_token = inputs + layer if checkpointing else layer * model.layers
    shared = args.use_vllm and args.vllm_mode == "colocate" and not args.vllm_enable_sleep_mode
    return {
        "weights": ((2 if reference else 1) * w + (c if c < w else 0)) * model.parameters,
        "gradients": max(w, 2) * model.trained,
        "optimizer": optimizer_bytes(args, model),
        "activations": args.per_device_train_batch_size * (prompt + int(args.max_completion_length or 0)) * per_token,
        "vllm": args.vllm_gpu_memory_utilization * device_total if shared else 0.0,
    }


NO_GPU = "this machine"
ROOMY, TIGHT = 0.7, 0.85
"""Shares of the free memory: an estimate below the first certainly fits, one above the second might not."""


SMALL, LARGE = 2e9, 5e9
"""Parameters up to which dew's sampler was faster than vLLM on one GPU, and from which vLLM often was (docs/trl.md)."""


def faster(args: "DewConfig", parameters: int) -> str:
    """Settings that were faster on one GPU where they were measured."""
    says = "" if args.torch_compile else " torch_compile: true makes updates faster."
    if args.use_vllm and args.vllm_mode == "colocate" and parameters < SMALL:
        says += " use_vllm: false samples faster at this size, and saves a scoring pass."
    if not args.use_vllm and parameters > LARGE:
        says += " use_vllm: true may sample faster at this size."
    return says


def check_memory(
    terms: dict[str, float], args: "DewConfig", prompt: int, device: str, free: float, unsaved: float, parameters: int
) -> Check:
    """Compare the estimate with free memory. `unsaved`: the estimate in bytes without gradient checkpointing."""
    total, largest = sum(terms.values()), max(terms, key=lambda term: terms[term])
    says = f"About {size(total)} at full length, {terms[largest] / total:.0%} of it {largest}; "
    says += f"{device} has {size(free)} free."
    several, smaller = args.per_device_train_batch_size > 1, "Use a smaller model."
    halve = "Halve per_device_train_batch_size and double gradient_accumulation_steps; the result is the same."
    remedy = {
        "vllm": "Lower vllm_gpu_memory_utilization, or run vLLM as a server on a separate GPU.",
        "activations": (halve if several else smaller)
        if args.gradient_checkpointing
        else "Set gradient_checkpointing: true.",
    }.get(largest, "Set use_peft: true (LoRA), or use a smaller model.")
    share = 1 - (total - TIGHT * free) / terms["activations"]  # of the tokens of prompt and answer
    longest = int(share * (prompt + int(args.max_completion_length or 0))) - prompt
    remedy += f" Or lower max_completion_length to {longest}: that fits." * (longest > 0)
    if args.gradient_checkpointing and unsaved < ROOMY * free:
        says += f" gradient_checkpointing: false needs about {size(unsaved)} and is faster."
    if device != NO_GPU and not (args.deepspeed or args.fsdp):
        says += faster(args, parameters)
    fail = total > free and not (args.deepspeed or args.fsdp)  # with those the run may still fit
    return graded("memory", says, remedy, warn=total > TIGHT * free, fail=fail)


def check_disk(args: "DewConfig", model: Model) -> Check:
    """Check for space for the model and two checkpoints: the newest, and the next one while it is written."""
    weights = max(model.weight_bytes, 2) * model.trained
    each = weights + (0.0 if args.save_only_model else optimizer_bytes(args, model))
    free, saves = free_disk(Path(args.output_dir)), args.save_strategy != "no"
    needed = weights + 2 * each * saves
    says = f"The model takes {size(weights)}{f', a checkpoint {size(each)}' * saves}; {size(free)} free."
    remedy = "Choose an output_dir on a larger disk; set save_total_limit: 1 or save_only_model: true."
    return graded("disk", says, remedy, warn=needed > 0.9 * free, fail=needed > free)


def plan(parsed: "Parsed") -> dict[str, str]:
    """Return what `dew train --dry-run` prints, as {heading: text}."""
    args, batches = parsed.args, parsed.args.batches
    found = {"model": parsed.model.model_name_or_path, "data": parsed.data}
    found |= {"algorithm": args.build_algorithm().label, "batches": str(batches)}
    steps, most = int(args.max_steps), ""
    if steps <= 0 and parsed.run.task:  # a file may have fewer problems than the run asks for
        passes = args.num_train_epochs * args.num_iterations
        steps, most = math.ceil(passes * parsed.run.problems * batches.answers / batches.trained), "at most "
    if steps > 0:  # otherwise it depends on the data
        generations = math.ceil(steps / batches.optimizer_steps)
        found["length"] = f"{most}{steps:,} optimizer steps on {generations:,} generations: "
        found["length"] += f"{generations * batches.sampled:,} answers of at most {args.max_completion_length} tokens"
    return found
