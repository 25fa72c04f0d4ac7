"""Tokens per second of sampling long answers of different lengths: dew's decoder, and vLLM where it is installed.

    python benchmarks/long_answers.py                                  Qwen2.5-0.5B's shape, limits of 2k to 16k tokens
    python benchmarks/long_answers.py --model 7B --limits 16384 --rows 128
    python benchmarks/long_answers.py --setting "one process"          vLLM with a setting of vllm_settings.py
    python benchmarks/long_answers.py --small                          a toy model on the CPU, to test the script

Lengths are log-normal: half of the answers are longer than a quarter of the limit, and one in twelve reaches it, where
it is cut. Both samplers get the same lengths: vLLM as the limit of each request, dew as random numbers above 1, which
make the draw choose the end token. Weights are random. Both give the log-probability of each token, dew also the
entropy. A first call, whose answers end at once, captures graphs and is not measured. vLLM runs first, in a process of
its own. Updates on long answers: trainer_step.py with --completion.
"""

import argparse
import functools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a look for GPUs must not start CUDA: vLLM forks

import torch
from rollout import QWEN, SHAPES, SMALL, engine, timed, work
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from vllm_settings import SETTINGS, arguments

from dew.decoding import Decoder, Draw

END, PAD = 1, 0
SPREAD = 1.0
"""Standard deviation of the logarithm of the lengths."""
BELOW_ONE = 1 - 2**-24


@dataclass(frozen=True)
class Ending(Draw):
    """Chooses the end token where the first uniform number is above 1, and nowhere else."""

    def scored(self, logits, uniforms):
        tokens, *others = super().scored(logits, uniforms.clamp_max(BELOW_ONE))
        tokens = torch.where(tokens == END, END + 1, tokens)
        return torch.where(uniforms[:, 0] > 1, END, tokens), *others


def lengths_of(rows, limit):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(rows, generator=generator) * SPREAD + math.log(limit / 4)
    return drawn.exp().long().clamp(1, limit).tolist()


def dew(model):
    decoder = Decoder(model, Ending(), ends=[END], pad=PAD)

    def call(prompts, limit, lengths):
        uniforms = torch.rand(len(prompts), limit, 2, device=model.device)
        uniforms[torch.arange(len(prompts)), torch.tensor(lengths) - 1] = 2
        return decoder.rows(prompts, limit, uniforms=uniforms)[1].tolist()

    return call


def vllm(llm):
    from vllm import SamplingParams

    def call(prompts, _, lengths):
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0) for n in lengths]
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [len(request.outputs[0].token_ids) for request in found]

    return call


def measure(call, shape, options, write):
    """Seconds of each call, tokens and peak memory in GiB for each limit and number of answers."""
    cuda = torch.cuda.is_available()
    for limit in options.limits:
        for rows in options.rows:
            prompts, _ = work(shape, rows, 0, options)
            call(prompts, limit, [32] * rows)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            lengths = lengths_of(rows, limit)
            calls = [timed(call, prompts, limit, lengths, cuda) for _ in range(options.repeats)]
            if any(found != lengths for _, found in calls):
                raise SystemExit("the answers do not have the lengths that were asked for")
            memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
            write(limit, rows, [seconds for seconds, _ in calls], sum(lengths), memory)


def in_a_process(show, options):
    """vLLM's measurements, shown as they come."""
    with tempfile.TemporaryDirectory() as folder:
        numbers, log = Path(folder) / "numbers", (options.out or Path(folder) / "vllm.md").with_suffix(".log")
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", str(numbers)]
        with log.open("w") as output:
            environment = os.environ | SETTINGS[options.setting][1]
            status = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
        for line in numbers.read_text().splitlines() if numbers.exists() else []:
            show("vLLM", *json.loads(line))
        errors = [line for line in log.read_text().splitlines() if "Error: " in line]
        if status:  # the first error is the engine's own, the last that of the process that waits for it
            print(f"vLLM: failed, {errors[0][:300] if errors else status}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--limits", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="tokens of an answer")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=2, help="calls of each kind, all shown (default 2)")
    parser.add_argument("--ways", nargs="+", choices=["vLLM", "dew"], default=["vLLM", "dew"])
    parser.add_argument("--setting", choices=SETTINGS, default="default", help="of vLLM (default: its own)")
    parser.add_argument("--vllm-memory", type=float, default=0.8, help="share of the GPU for vLLM (default 0.8)")
    parser.add_argument("--out", type=Path, help="file for the table, written after every row")
    parser.add_argument("--small", action="store_true", help="toy model, to test the script")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape, cuda = {**QWEN, **SHAPES[options.model]}, torch.cuda.is_available()
    if options.small:
        shape, options.rows, options.limits, options.prompt = SMALL, [32], [64, 128], 16
    if options.alone:
        settings, longest = arguments(options.setting, options.rows), options.prompt + max(options.limits)
        llm = engine(shape, max(options.rows), longest, options.vllm_memory, **settings)
        with options.alone.open("a", buffering=1) as file:
            measure(vllm(llm), shape, options, lambda *found: file.write(json.dumps(found) + "\n"))
        return
    machine = torch.cuda.get_device_name() if cuda else platform.machine()
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {machine}, torch {torch.__version__}, prompts of {options.prompt} tokens\n",
        "| model | limit | answers | tokens | method | s | tokens/s | peak, GiB |\n|---|---|---|---|---|---|---|---|",
    ]

    def show(method, limit, rows, seconds, tokens, memory):
        times, speeds = " / ".join(f"{s:.1f}" for s in seconds), " / ".join(f"{tokens / s:,.0f}" for s in seconds)
        cells = options.model, limit, rows, f"{tokens:,}", method, times, speeds
        lines.append(f"| {' | '.join(map(str, cells))} | {memory:.1f} |".replace(" 0.0 |", "  |"))
        print(lines[-1], flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")

    print("\n".join(lines))
    if "vLLM" in options.ways:
        in_a_process(show, options)
    if "dew" in options.ways:
        torch.manual_seed(0)
        with torch.device("cuda" if cuda else "cpu"):
            kind = torch.bfloat16 if cuda else torch.float32
            model = Qwen2ForCausalLM._from_config(Qwen2Config(**shape, max_position_embeddings=32768), dtype=kind)
        model.eval().requires_grad_(False).generation_config = GenerationConfig(pad_token_id=PAD)
        measure(dew(model), shape, options, functools.partial(show, "dew"))


if __name__ == "__main__":
    main()
