"""Tokens per second of sampling: transformers' own methods, dew's decoder, and vLLM where it is installed.

    python benchmarks/rollout.py                             Qwen2.5-0.5B's shape, 128 and 1,024 answers at once
    python benchmarks/rollout.py --model 1.5B --rows 256     another shape
    python benchmarks/rollout.py --mean-length 0 200         answers of one length, then of different ones
    python benchmarks/rollout.py --rows 4096 --mean-length 200       more answers than fit at a time (--at-once)
    python benchmarks/rollout.py --model tiny --rows 256 --prompt 20 --new 40      the bundled model's shape, for a CPU
    python benchmarks/rollout.py --small                     a toy model on the CPU, to test the script

Weights are random, which does not affect timing. No answer ends early, so all methods do the same work; with
--mean-length, one token in as many ends an answer. Prompts are random tokens with 16 answers each. The extra time of
the first call (compilation, capture) is listed separately. On a CPU, seconds are CPU seconds of one torch thread, and
methods without preparation run in turn: the best speed, and median and range of the ratio to the first in each turn.
vLLM runs with its default settings, and tuned: CUDA graphs up to the number of answers. Each has a process of its own
for all of a model's rows, since vLLM keeps its memory.
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

from dew.decoding import Decoder, Draw
from dew.decoding.buffers import GATHERED

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
PREPARED = ("generate, static cache, compiled", "dew, captured steps", "dew, PyTorch's attention",
            "dew, compiled and captured", "vLLM", "vLLM, tuned")  # fmt: skip
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


def engine(shape, rows, length, memory, **settings):
    """vLLM with weights of its own."""
    if not torch.cuda.is_available():  # in this process, whose CPU time is measured
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        settings = {"enforce_eager": True, "dtype": "float32"}  # compiling takes minutes; not every CPU has bfloat16
    from vllm import LLM

    config = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(Qwen2Config(**shape, **config).to_dict() | config))
    return LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=length, gpu_memory_utilization=memory,
        max_num_seqs=max(rows, 256), disable_log_stats=True, **{"dtype": "bfloat16"} | settings,
    )  # fmt: skip


def vllm(shape, rows, length, memory, **settings):
    llm = engine(shape, rows, length, memory, **settings)
    from vllm import SamplingParams

    def call(prompts, new, ends):
        stop = {"stop_token_ids": ends} if ends else {"ignore_eos": True}
        params = SamplingParams(n=GROUP, temperature=1.0, max_tokens=new, detokenize=False, **stop)
        texts = [{"prompt_token_ids": ids} for ids in prompts[::GROUP]]
        found = llm.generate(texts, params, use_tqdm=False)
        return [answer.token_ids for request in found for answer in request.outputs]

    return call


def vllm_tuned(shape, rows, length, memory):
    """With CUDA graphs up to the number of answers."""
    sizes = [1, 2, 4, *range(8, rows + 1, max(8, rows // 32))]
    return vllm(shape, rows, length, memory, compilation_config={"cudagraph_capture_sizes": sizes})


def ways(model, at_once):
    """A function that makes each sampler of this process."""

    def dew(ends, compiled=False, attention=None):
        decoder = Decoder(model, Draw(), ends=ends or [-1], pad=PAD)
        decoder.attention = attention or decoder.attention
        if compiled:
            decoder.forward = torch.compile(decoder.forward, dynamic=False)
        return lambda prompts, new, _: decoder.answers(prompts, new, at_once)

    static = {"cache_implementation": "static"}
    found = {
        "generate": lambda _: functools.partial(generate, model),
        "generate, static cache": lambda _: functools.partial(generate, model, **static, disable_compile=True),
        "generate, static cache, compiled": lambda _: functools.partial(generate, model, **static),
        "dew, captured steps": dew,
        "dew, compiled and captured": functools.partial(dew, compiled=True),
    }
    if model.device.type == "cuda":  # on a CPU the first is what "captured steps" use, the second far slower
        found["dew, PyTorch's attention"] = functools.partial(dew, attention=GATHERED)
        found["generate_batch"] = lambda _: functools.partial(generate_batch, model)
    return found


def timed(call, prompts, new, ends, cuda):
    if cuda:
        torch.cuda.synchronize()
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    answers = call(prompts, new, ends)
    if cuda:
        torch.cuda.synchronize()
    return clock() - start, answers


def count(answers, ends):
    """Tokens up to and including the end token."""
    ends = set(ends)
    return sum(next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in answers)


def work(shape, rows, mean_length, options):
    """Prompts and end tokens."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, shape["vocab_size"], (-(-rows // GROUP), options.prompt), generator=generator).tolist()
    ends = list(range(1, shape["vocab_size"], mean_length)) if mean_length else []
    return [ids for ids in texts for _ in range(GROUP)][:rows], ends


def measure(name, shape, options, outside):
    """Print a row per number of answers, length and method. `outside`: the measurements of vLLM."""
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
    with torch.device("cuda" if cuda else "cpu"):
        model = Qwen2ForCausalLM(Qwen2Config(**shape)).eval().requires_grad_(False)
    torch.set_default_dtype(before)
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    methods = {
        way: make for way, make in ways(model, options.at_once).items() if not options.ways or way in options.ways
    }
    for rows, mean_length in cases(options):
        prompts, ends = work(shape, rows, mean_length, options)
        label = f"{name} | {rows} | {mean_length or 'fixed'}"
        made = {way: make(ends) for way, make in methods.items()}
        found = {}
        for turn in range(1 if cuda else TURNS):
            for way, call in made.items():
                if turn and (way in PREPARED or way not in found):
                    continue
                try:
                    measured = time_one(call, prompts, options.new, ends, way, cuda)
                except Exception as error:  # not supported on this machine
                    print(f"| {label} | {way} | {type(error).__name__}: {str(error)[:80]!r} | | | |", flush=True)
                    continue
                found.setdefault(way, []).append(measured)
                if cuda:
                    show(label, way, found)
        for way in {} if cuda else found:
            show(label, way, found)
        for way, measured in outside.items():
            if isinstance(measured, str):
                print(f"| {label} | {way} | {measured} | | | |", flush=True)
            else:
                found[way] = [measured[cases(options).index((rows, mean_length))]]
                show(label, way, found)


def cases(options):
    return [(rows, mean_length) for rows in options.rows for mean_length in options.mean_length]


def show(label, way, found):
    """Print a row: best speed, and the speed of each turn relative to the first method's in the same turn."""
    first, second, _, peak = found[way][0]
    base, *_ = found.values()
    speeds = [[tokens / seconds for _, seconds, tokens, _ in turns] for turns in (base, found[way])]
    ratios = sorted(own / other for other, own in zip(*speeds, strict=False))
    spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else ""
    ready = f"{first - second:.1f}" if way in PREPARED else ""
    relative = f"{statistics.median(ratios):.2f}{spread}"
    print(f"| {label} | {way} | {max(speeds[1]):,.0f} | {relative} | {ready} | {peak:.1f} |", flush=True)


def time_one(call, prompts, new, ends, way, cuda):
    """Seconds of the first and of a later call, the tokens of the later one, and peak memory in GiB."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    first, _ = timed(call, prompts, new if way in PREPARED else 8, ends, cuda)
    second, answers = timed(call, prompts, new, ends, cuda)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    return first, second, count(answers, ends), peak


def in_a_process(way):
    """The measurements of `alone`, from another process; a message if it failed."""
    if importlib.util.find_spec("vllm") is None:
        return "skipped: vLLM is not installed"
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "numbers.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", way, str(numbers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not numbers.exists():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
            return repr(lines[-1][:160]) if lines else f"exit status {done.returncode}"
        return json.loads(numbers.read_text())


def alone(way, shape, options):
    """All of vLLM's measurements. Its memory is not measured: it takes what it is given."""
    call = VLLM[way](shape, min(max(options.rows), options.at_once), options.prompt + options.new, options.vllm_memory)
    cuda, found = torch.cuda.is_available(), []
    for rows, mean_length in cases(options):
        prompts, ends = work(shape, rows, mean_length, options)
        found.append([*time_one(call, prompts, options.new, ends, way, cuda)[:3], float("nan")])
    return found


VLLM = {"vLLM": vllm, "vLLM, tuned": vllm_tuned}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--at-once", type=int, default=1024, help="answers that dew and vLLM sample at a time")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument(
        "--mean-length", type=int, nargs="+", default=[0], help="one token in as many ends an answer; 0: none does"
    )
    parser.add_argument("--ways", nargs="*", help="methods to measure (default: all)")
    parser.add_argument("--vllm-memory", type=float, default=0.5, help="share of the GPU for vLLM (default 0.5)")
    parser.add_argument("--small", action="store_true", help="toy model, to test the script")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    name, shape = options.model, {**QWEN, **SHAPES[options.model]}
    if options.small:
        name, shape, options.rows, options.prompt, options.new = "toy", SMALL, [32], 16, 32
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if options.alone:
        way, numbers = options.alone
        Path(numbers).write_text(json.dumps(alone(way, shape, options)))
        return
    outside = {way: in_a_process(way) for way in VLLM if not options.ways or way in options.ways}
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{time.strftime('%Y-%m-%d')}, {machine}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"prompts of {options.prompt} tokens, answers of {options.new}\n")
    print("| model | answers | mean length | method | tokens/s | relative to the first | preparation, s | peak, GiB |")
    print("|---|---|---|---|---|---|---|---|")
    measure(name, shape, options, outside)


if __name__ == "__main__":
    main()
