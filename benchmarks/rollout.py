"""Tokens per second of sampling: transformers' own methods, dew's decoders, and vLLM where it is installed.

    python benchmarks/rollout.py                             Qwen2.5-0.5B's shape, 128 and 1,024 answers at once
    python benchmarks/rollout.py --model 1.5B --rows 256     another shape
    python benchmarks/rollout.py --mean-length 200           answers of different lengths
    python benchmarks/rollout.py --model tiny --rows 256 --prompt 20 --new 40      the bundled model's shape, for a CPU
    python benchmarks/rollout.py --small                     a toy model on the CPU, to test the script

Weights are random, which does not affect timing. No answer ends early, so all methods do the same work; with
--mean-length, one token in as many ends an answer. Prompts are random tokens with 16 answers each. The extra time of
the first call (compilation, capture) is listed separately. On a CPU, seconds are CPU seconds of one torch thread, and
methods without preparation run in turn: the best speed, and median and range of the ratio to the first in each turn.
vLLM runs with its default settings, and tuned: CUDA graphs up to the number of answers, each in a process of its own.
"""

import argparse
import functools
import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from dew.decoding import CpuDecoder, Decoder, Draw

SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 4, "vocab_size": 21},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
QWEN = {"tie_word_embeddings": True, "num_key_value_heads": 2, "vocab_size": 151936}
SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip
GROUP = 16
PREPARED = ("generate, static cache, compiled", "dew, captured steps", "dew, compiled and captured", "vLLM",
            "vLLM, tuned")  # fmt: skip
"""Methods whose first call compiles or captures for its shapes."""
PAD = 0
TURNS = 10
"""Calls of each method on a CPU."""


def generate(model, prompts, new, ends, **settings):
    """transformers' generate."""
    ids = torch.tensor(prompts, device=model.device)
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=PAD, eos_token_id=ends or None, **settings
    )
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return output[:, ids.shape[1] :].tolist()


def generate_batch(model, prompts, new, ends):
    """transformers' continuous batching."""
    own = model.config._attn_implementation
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=PAD, eos_token_id=ends or -1)
    try:
        answers = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    finally:
        model.set_attn_implementation(own)
    return [a.generated_tokens for a in answers.values()]


def vllm(shape, rows, length, ends, folder, **settings):
    """vLLM with weights of its own."""
    if not torch.cuda.is_available():  # in this process, whose CPU time is measured
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        settings = {"enforce_eager": True}  # compiling takes minutes
    from vllm import LLM, SamplingParams

    config = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
    (Path(folder) / "config.json").write_text(json.dumps(Qwen2Config(**shape, **config).to_dict() | config))
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length,
        gpu_memory_utilization=0.5, max_num_seqs=max(rows, 256), disable_log_stats=True, **settings,
    )  # fmt: skip

    def call(prompts, new):
        stop = {"stop_token_ids": ends} if ends else {"ignore_eos": True}
        params = SamplingParams(n=GROUP, temperature=1.0, max_tokens=new, detokenize=False, **stop)
        texts = [{"prompt_token_ids": ids} for ids in prompts[::GROUP]]
        found = llm.generate(texts, params, use_tqdm=False)
        return [answer.token_ids for request in found for answer in request.outputs]

    return call


def ways(model, shape, rows, length, ends, folder):
    """A method that makes each sampler; vLLM's takes memory as soon as it exists."""

    def dew(compiled):
        decoder = Decoder(model, Draw(), ends=ends or [-1], pad=PAD)
        if compiled:
            decoder.forward = torch.compile(decoder.forward, dynamic=False)
        return decoder.answers

    static = {"cache_implementation": "static"}
    graphs = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, *range(8, rows + 1, max(8, rows // 32))]}}
    found = {
        "generate": lambda: lambda p, n: generate(model, p, n, ends),
        "generate, static cache": lambda: lambda p, n: generate(model, p, n, ends, **static, disable_compile=True),
        "generate, static cache, compiled": lambda: lambda p, n: generate(model, p, n, ends, **static),
        "generate_batch": lambda: lambda p, n: generate_batch(model, p, n, ends),
        "dew, captured steps": lambda: dew(False),
        "dew, compiled and captured": lambda: dew(True),
        "vLLM": lambda: vllm(shape, rows, length, ends, folder),
        "vLLM, tuned": lambda: vllm(shape, rows, length, ends, folder, **graphs),
    }
    if model.device.type == "cpu":
        found["dew, written-out steps"] = lambda: CpuDecoder(model, Draw(), ends=ends or [-1], pad=PAD).answers
    return found


def timed(call, prompts, new, cuda):
    if cuda:
        torch.cuda.synchronize()
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    answers = call(prompts, new)
    if cuda:
        torch.cuda.synchronize()
    return clock() - start, answers


def count(answers, ends):
    """Tokens up to and including the end token."""
    ends = set(ends)
    return sum(next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in answers)


def measure(name, shape, rows, prompt, new, only, mean_length, alone):
    """Print a row per method. `alone`: the file for the numbers of a vLLM method, in its own process."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape)).to(device, dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    texts = torch.randint(1, shape["vocab_size"], (-(-rows // GROUP), prompt)).tolist()
    prompts = [ids for ids in texts for _ in range(GROUP)][:rows]
    folder, found = tempfile.mkdtemp(), {}
    ends = list(range(1, shape["vocab_size"], mean_length)) if mean_length else []
    methods = ways(model, shape, rows, prompt + new, ends, folder)
    if not cuda:  # keep them between turns
        methods = {way: functools.cache(make) for way, make in methods.items()}
    for turn in range(1 if cuda else TURNS):
        for way, make in methods.items():
            if (only and way not in only) or (turn and (way in PREPARED or way not in found)):
                continue
            if "vLLM" in way and importlib.util.find_spec("vllm") is None:
                print(f"| {name} | {rows} | {way} | skipped: vLLM is not installed | | | |", flush=True)
                continue
            try:
                if "vLLM" in way and alone is None:
                    measured = in_a_process(rows, way)
                else:
                    measured = time_one(make, prompts, new, ends, way, cuda)
            except Exception as error:  # not supported on this machine
                print(f"| {name} | {rows} | {way} | {type(error).__name__}: {str(error)[:80]!r} | | | |", flush=True)
                continue
            if alone is not None:
                alone.write_text(json.dumps(measured))
            found.setdefault(way, []).append(measured)
            if cuda:
                show(name, rows, way, found)
    for way in {} if cuda else found:
        show(name, rows, way, found)


def show(name, rows, way, found):
    """Print a row: best speed, and the speed of each turn relative to the first method's in the same turn."""
    first, second, _, peak = found[way][0]
    base, *_ = found.values()
    speeds = [[tokens / seconds for _, seconds, tokens, _ in turns] for turns in (base, found[way])]
    ratios = sorted(own / other for other, own in zip(*speeds, strict=False))
    spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else ""
    ready = f"{first - second:.1f}" if way in PREPARED else ""
    relative = f"{statistics.median(ratios):.2f}{spread}"
    print(f"| {name} | {rows} | {way} | {max(speeds[1]):,.0f} | {relative} | {ready} | {peak:.1f} |", flush=True)


def time_one(make, prompts, new, ends, way, cuda):
    """Seconds of the first and of a later call, the tokens of the later one, and peak memory in GiB."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    call = make()
    first, _ = timed(call, prompts, new if way in PREPARED else 8, cuda)
    second, answers = timed(call, prompts, new, cuda)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    return first, second, count(answers, ends), peak


def in_a_process(rows, way):
    """What `time_one` returns, from another process: vLLM keeps its memory as long as its process lives."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "numbers.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--rows", str(rows), "--ways", way, "--alone", str(numbers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not numbers.exists():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
            raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
        return json.loads(numbers.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument(
        "--mean-length", type=int, default=0, help="one token in as many ends an answer (default: none)"
    )
    parser.add_argument("--ways", nargs="*", help="methods to measure (default: all)")
    parser.add_argument("--small", action="store_true", help="toy model, to test the script")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{time.strftime('%Y-%m-%d')}, {machine}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"prompts of {args.prompt} tokens, answers of {args.new}\n")
    print("| model | answers | method | tokens/s | relative to the first | preparation, s | peak, GiB |")
    print("|---|---|---|---|---|---|---|")
    name, shape = ("toy", SMALL) if args.small else (args.model, {**QWEN, **SHAPES[args.model]})
    for rows in [32] if args.small else args.rows:
        measure(
            name,
            shape,
            rows,
            16 if args.small else args.prompt,
            32 if args.small else args.new,
            args.ways,
            args.mean_length,
            args.alone,
        )


if __name__ == "__main__":
    main()
