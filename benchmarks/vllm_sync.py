"""vLLM in the trainer's process: time and memory of a step, and whether the sampler has the policy's weights.

    python benchmarks/vllm_sync.py --weights folder --data gsm8k.jsonl.gz [--steps 20]       a GPU with vLLM
    python benchmarks/vllm_sync.py --small                                                   the bundled model, on a CPU

Trains GTPO, each case in a process of its own. Columns: seconds per step (median after two), peak memory; KL divergence
between sampler and policy and mean importance ratio over the last five steps; after a last synchronisation the largest
difference between a weight matrix of vLLM and the policy's, rounded alike, in units of its largest change in training;
alarms that fired, and whether dew warned at the start.
"""

import argparse
import gzip
import json
import logging
import statistics
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trainer_step import StepTimer
from whole_step import in_a_process, on_a_cpu

from dew.engines.trl import DewConfig, DewTrainer
from dew.rewards import verifier
from dew.run.folder import RunFolder
from dew.tasks import TINY, task

# name -> (LoRA, settings, whether new weights reach vLLM)
CASES = {
    "full": (False, {}, True),
    "LoRA": (True, {}, True),
    "LoRA, never synchronised": (True, {}, False),
    "full, top_p 0.9": (False, {"top_p": 0.9}, True),
}
LAYER = "model.layers.0.mlp.down_proj"


def policy_weight(trainer):
    """A weight matrix of the policy, with the adapter merged into it."""
    layer = trainer.model.get_submodule(f"{'base_model.model.' * hasattr(trainer.model, 'peft_config')}{LAYER}")
    merged = layer.get_delta_weight("default") if hasattr(layer, "get_delta_weight") else 0
    return (layer.weight + merged).detach().float().cpu()


def sampler_weight(trainer):
    engine = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    return dict(engine.named_parameters())[f"{LAYER}.weight"].detach().float().cpu()


def measure(name, options, folder):
    """One case: metrics of its last steps, and the weights of both sides."""
    lora, settings, synchronised = CASES[name]
    if options.small:
        on_a_cpu()
        model, rows, reward = str(TINY), task("countdown").rows(256), verifier("countdown")
        sizes = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 28, "use_cpu": True}
    else:
        with gzip.open(options.data, "rt") as lines:
            texts = [json.loads(line) for line in list(lines)[:1024]]
        rows = [{"prompt": [{"role": "user", "content": t["problem"]}], "answer": t["answer"]} for t in texts]
        model, reward = options.weights, verifier("gsm8k")
        sizes = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 300, "bf16": True}
        sizes["gradient_accumulation_steps"] = 8
    args = DewConfig(
        output_dir=f"{folder}/run",
        algorithm="gtpo",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.vllm_memory,
        vllm_max_model_length=64 if options.small else 1324,
        max_steps=options.steps,
        learning_rate=(2e-3 if options.small else 1e-4) if lora else (3e-4 if options.small else 3e-6),
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        records_every=0,
        **sizes,
        **settings,
    )
    warned, timer = [], StepTimer(not options.small)
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("dew").addHandler(handler)
    adapter = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    data = Dataset.from_list(rows)
    trainer = DewTrainer(model, reward, args, data, peft_config=adapter, callbacks=[timer])
    start, sync = policy_weight(trainer), trainer.vllm_generation.sync_weights
    if not synchronised:
        trainer.vllm_generation.sync_weights = lambda: None
    at_the_start = "yes" if any("top_p" in text for text in warned) else ""
    trainer.train()
    if synchronised:
        sync()
    ours, theirs, run = policy_weight(trainer), sampler_weight(trainer), RunFolder(args.output_dir)
    kl, ratio = ([m[key] for m in run.metrics() if key in m] for key in ("sampler/kl", "sampler/ratio"))
    return {
        "seconds": statistics.median(timer.seconds[2:]),
        "peak": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan"),
        "kl": statistics.fmean(kl[-5:]),
        "ratio": statistics.fmean(ratio[-5:]),
        "series": " ".join(f"{x:.2g}" for x in kl),
        "difference": ((theirs - ours.bfloat16().float()).abs().max() / (ours - start).abs().max()).item(),
        "alarms": ", ".join(sorted({alarm["alarm"] for alarm in run.alarms() if "sampler" in alarm["alarm"]})),
        "warned": at_the_start,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--weights", help="folder with a model and its tokenizer")
    parser.add_argument("--data", help="problems with answers, .jsonl.gz")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU for vLLM (default 0.3)")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    heads = ["s/step", "peak, GiB", "KL", "ratio", "weights", "alarms", "warned"]
    lines = [f"| case | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    series = []
    for name in options.cases:
        found = in_a_process(name, lambda folder, name=name: measure(name, options, folder))
        if found is None:
            continue
        numbers = [f"{found[key]:.3g}" for key in ("seconds", "peak", "kl", "ratio", "difference")]
        lines.append(f"| {name} | {' | '.join([*numbers, found['alarms'], found['warned']])} |")
        head = f"{time.strftime('%Y-%m-%d')}, {found['machine']}, torch {torch.__version__}, {options.steps} steps"
        series.append(f"KL of each step, {name}: {found['series']}")
        print(lines[-1], series[-1], sep="\n", flush=True)
        if options.out:
            options.out.write_text("\n".join([head, "", *lines, "", *series]) + "\n")


if __name__ == "__main__":
    main()
