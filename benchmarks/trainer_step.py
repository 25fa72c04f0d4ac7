"""Time and peak memory of one update in dew and in plain TRL, on the same batch.

    python benchmarks/trainer_step.py                  a Qwen2-like model of 0.5 B parameters on one GPU
    python benchmarks/trainer_step.py --model 1.5B     Qwen2.5-1.5B's shape
    python benchmarks/trainer_step.py --completion 16384 --rows 16 --micro-batch 1 [--lora 16] [--no-checkpointing]
    python benchmarks/trainer_step.py --completion 8192 --rows 128 --log-normal    answers of different lengths
    python benchmarks/trainer_step.py --longest --rows 2 --answers 2 --micro-batch 1 --model 7B --lora 16
    python benchmarks/trainer_step.py --small          a toy model on the CPU, to test the script

Sampling is not included, since it is the same for both: completions are random tokens, and the step is everything after
that: rewards, the forward pass of the old policy if needed, credit, loss, backward, optimizer. They have the length
--completion, with --log-normal at most that: half are longer than a quarter of it (long_answers.py). Weights are
random, which does not affect timing. This does not measure learning. --longest doubles --completion until a step does
not fit into memory. Padding does not count in tokens/s. The use of the GPU (MFU) is that of 989 TFLOP/s by the update's
products: 6 operations per weight and token, 4 if the weight is frozen, and attention.
"""

import argparse
import gc
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from long_answers import lengths_of
from peft import LoraConfig
from rollout import QWEN, SHAPES, SMALL
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from dew.engines.trl import DewConfig, DewTrainer

PEAK, END = 989e12, 1

# name -> (dew's algorithm, or None for plain TRL; passes over each generation; whose head)
CASES = {
    "TRL GRPO": (None, 1, "trl"),
    "dew GRPO": ("grpo", 1, "dew"),
    "dew GTPO": ("gtpo", 1, "dew"),
    "dew GTPO, entropy from sampling": ("gtpo", 1, "dew"),
    "dew GTPO, TRL's head": ("gtpo", 1, "trl"),
    "TRL GRPO, 2 passes": (None, 2, "trl"),
    "dew GTPO, 2 passes": ("gtpo", 2, "dew"),
    "dew GTPO, 2 passes, TRL's head": ("gtpo", 2, "trl"),
    "dew GRPO-S, 2 passes": ("grpo_s", 2, "dew"),
    "dew GRPO, 2 passes": ("grpo", 2, "dew"),
}


class StepTimer(TrainerCallback):
    def __init__(self, cuda):
        self.cuda, self.seconds = cuda, []

    def _now(self):
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args, state, control, **_):
        self.start = self._now()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(self._now() - self.start)


def tokenizer():
    inner = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def completions_of(prompt_tokens, lengths, vocabulary, scored):
    """Random tokens, different in every row, but the same in every case and step. `lengths`: tokens of each completion.

    If `scored`, with log-probabilities and entropies, as dew's sampler returns them.
    """

    def sample(prompts, trainer):
        generator = torch.Generator().manual_seed(0)
        shape = (len(prompts), prompt_tokens + max(lengths))
        ids = torch.randint(3, vocabulary, shape, generator=generator).tolist()
        answers = [row[prompt_tokens : prompt_tokens + n] for row, n in zip(ids, lengths, strict=True)]
        for answer in answers:
            if len(answer) < max(lengths):
                answer[-1] = END
        if scored:
            random = torch.rand(len(ids), max(lengths), generator=generator)
            trainer._capture.sampled.append((answers, random, random))
            trainer._captured_sampling._exact = True
        return {"prompt_ids": [row[:prompt_tokens] for row in ids], "completion_ids": answers, "logprobs": None}

    return sample


def alternating(completions, **_):
    return [float(i % 2) for i in range(len(completions))]


def measure(name, options, shape, folder):
    algorithm, passes, head = CASES[name]
    cuda = not options.small
    fixed = [options.completion] * options.rows
    lengths = lengths_of(options.rows, options.completion) if options.log_normal else fixed
    torch.manual_seed(0)
    settings = {
        "output_dir": str(Path(folder) / re.sub(r"\W+", "_", f"{name} {options.completion}")),
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.rows // options.micro_batch,
        "num_generations": options.answers,
        "num_iterations": passes,
        "max_completion_length": options.completion,
        "max_steps": (options.warm_up + options.steps) * passes,
        "learning_rate": 1e-6,
        "gradient_checkpointing": options.checkpointing,
        "bf16": cuda,
        "use_cpu": options.small,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1000,
        "disable_tqdm": True,
    }
    if algorithm is None:
        kind, args = GRPOTrainer, GRPOConfig(loss_type="grpo", **settings)
    else:
        kind = DewTrainer
        exact = head == "dew"
        args = DewConfig(algorithm=algorithm, records_every=0, exact_head=exact, **settings)
    timer = StepTimer(cuda)
    with torch.device("cuda" if cuda else "cpu"):
        model = Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=options.prompt + options.completion))
    if options.lora and cuda:
        model = model.to(torch.bfloat16)
    if options.compile:
        compile_layers(model)
    trainer = kind(
        model,
        alternating,
        args,
        Dataset.from_list([{"prompt": "x"}] * (options.rows // options.answers)),
        processing_class=tokenizer(),
        callbacks=[timer],
        peft_config=adapters(options.lora),
        rollout_func=completions_of(options.prompt, lengths, shape["vocab_size"], "from sampling" in name),
    )
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    steps = timer.seconds[options.warm_up * passes :]
    # With two passes a generation has two optimizer steps, and only the first scores answers: use their mean.
    per_step = [statistics.mean(steps[i : i + passes]) for i in range(0, len(steps), passes)]
    found = {"seconds": statistics.median(per_step), "least": min(per_step), "most": max(per_step), "peak_gib": peak}
    sequences = [options.prompt + n for n in lengths]
    found["tokens/s"] = sum(sequences) / found["seconds"]
    found["mfu"] = sum(n * operations(trainer.model, n) for n in sequences) / found["seconds"] / PEAK
    if algorithm is not None:
        lines = [json.loads(line) for line in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()]
        sampled = [line for line in lines if "seconds/credit" in line][options.warm_up :]
        for phase in ("scoring", "credit"):
            found[f"{phase}_seconds"] = statistics.median(line[f"seconds/{phase}"] for line in sampled)
    return found


def compile_layers(model):
    """Each layer in place, once for all of them and for all lengths."""
    for layer in model.model.layers:
        layer.compile(dynamic=True)


def adapters(rank):
    """Of all linear layers but the head; None without a rank."""
    return rank and LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def operations(model, length):
    """Of one token of a sequence, in products: forward and backward, half of attention's hidden."""
    config, weights = model.config, sum(4 * p.numel() + 2 * p.numel() * p.requires_grad for p in model.parameters())
    return weights + 6 * config.num_hidden_layers * config.hidden_size * length


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, default=64, help="completions of a step")
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action="store_true", help="compile the layers of all cases")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters; the base is in bfloat16")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completion", type=int, default=2048)
    parser.add_argument("--log-normal", action="store_true", help="completions of different lengths")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--longest", action="store_true", help="double --completion while a step fits into memory")
    parser.add_argument("--out", type=Path)
    if "--small" in sys.argv:
        parser.set_defaults(rows=8, answers=4, micro_batch=4, prompt=8, completion=32)
    options = parser.parse_args()
    shape = SMALL if options.small else QWEN | SHAPES[options.model]

    results, first = {}, options.completion
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            label, options.completion = name, first
            while (found := fitting(name, options, shape, folder)) is not None:
                label = f"{name}, {options.completion:,} tokens" if options.longest else name
                results[label] = found
                shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items() if value is not None)
                print(f"{label}: {shown}", flush=True)
                if not options.longest:
                    break
                options.completion *= 2
            else:
                print(f"{name}: {options.completion:,} tokens do not fit into memory", flush=True)
    machine = platform.processor() if options.small else torch.cuda.get_device_name()
    print(f"\n{machine}, torch {torch.__version__}, {vars(options)}\n")
    print(table(results))
    if options.out:
        options.out.write_text(table(results) + "\n")


def fitting(name, options, shape, folder):
    """What `measure` returns, or None if it runs out of memory."""
    try:
        return measure(name, options, shape, folder)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if not options.small:
            torch.cuda.empty_cache()


def table(results):
    """Markdown; every row relative to the first."""
    first = next(iter(results.values()))
    columns = ["s per optimizer step", "relative to the first", "credit, s", "tokens/s", "MFU", "peak, GiB"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, found in results.items():
        spread = f"{found['seconds']:.2f} ({found['least']:.2f} to {found['most']:.2f})"
        credit = f"{found['credit_seconds']:.3f}" if "credit_seconds" in found else ""
        peak = "" if found["peak_gib"] is None else f"{found['peak_gib']:.2f}"
        speed = f"{found['tokens/s']:,.0f} | {found['mfu']:.1%}"
        lines.append(f"| {name} | {spread} | {found['seconds'] / first['seconds']:.3f} | {credit} | {speed} | {peak} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
