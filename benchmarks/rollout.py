"""Tokens per second of sampling without vLLM: transformers' own methods and dew's decoders.

    python benchmarks/rollout.py                             Qwen2.5-0.5B's shape, 128 and 1,024 answers at once
    python benchmarks/rollout.py --model 1.5B --rows 256     another shape
    python benchmarks/rollout.py --model tiny --rows 256 --prompt 20 --new 40      the bundled model's shape, for a CPU
    python benchmarks/rollout.py --small                     a toy model on the CPU, to test the script

Weights are random, which does not affect timing; no answer ends early, so all methods do the same work. Prompts are
random tokens with 16 answers each. On a CPU the seconds are CPU seconds, with one torch thread. The extra time of the
first call (compilation, capture) is listed separately.
"""

import argparse
import gc
import platform
import time

import torch
import transformers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from dew.decoding import CpuDecoder, Decoder, Draw

SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 4, "vocab_size": 21},
}  # fmt: skip
QWEN = {"num_key_value_heads": 2, "vocab_size": 151936}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
GROUP = 16
PREPARED = ("generate, static cache, compiled", "dew, captured steps", "dew, compiled and captured")
"""Methods whose first call compiles or captures for its shapes."""
PAD = 0


def generate(model, prompts, new, **settings):
    """transformers' generate."""
    ids = torch.tensor(prompts, device=model.device)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=PAD, **settings)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)


def generate_batch(model, prompts, new):
    """transformers' continuous batching."""
    own = model.config._attn_implementation
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=PAD, eos_token_id=-1)
    try:
        answers = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    finally:
        model.set_attn_implementation(own)
    assert sum(len(a.generated_tokens) for a in answers.values()) == len(prompts) * new


def ways(model):
    plain = Decoder(model, Draw(), ends=[-1], pad=PAD)
    compiled = Decoder(model, Draw(), ends=[-1], pad=PAD)
    compiled.forward = torch.compile(model, dynamic=False)
    found = {
        "generate": lambda p, n: generate(model, p, n),
        "generate, static cache": lambda p, n: generate(
            model, p, n, cache_implementation="static", disable_compile=True
        ),
        "generate, static cache, compiled": lambda p, n: generate(model, p, n, cache_implementation="static"),
        "generate_batch": lambda p, n: generate_batch(model, p, n),
        "dew, captured steps": plain.answers,
        "dew, compiled and captured": compiled.answers,
    }
    if model.device.type == "cpu":
        found["dew, written-out steps"] = CpuDecoder(model, Draw(), ends=[-1], pad=PAD).answers
    return found


def timed(call, prompts, new, cuda):
    if cuda:
        torch.cuda.synchronize()
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    call(prompts, new)
    if cuda:
        torch.cuda.synchronize()
    return clock() - start


def measure(name, shape, rows, prompt, new, only):
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).to(device, dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    texts = torch.randint(1, shape["vocab_size"], (-(-rows // GROUP), prompt)).tolist()
    prompts = [ids for ids in texts for _ in range(GROUP)][:rows]
    base = None
    for way, call in ways(model).items():
        if only and way not in only:
            continue
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            warm_up = new if way in PREPARED else 8
            first = timed(call, prompts, warm_up, cuda)
            second = min(timed(call, prompts, new, cuda) for _ in range(1 if cuda else 3))
        except Exception as error:  # not supported on this machine
            print(f"| {name} | {rows} | {way} | {type(error).__name__}: {str(error)[:80]!r} | | | |", flush=True)
            continue
        speed = rows * new / second
        base = base or speed
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
        ready = f"{first - second:.1f}" if way in PREPARED else ""
        print(f"| {name} | {rows} | {way} | {speed:,.0f} | {speed / base:.2f} | {ready} | {peak:.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--ways", nargs="*", help="methods to measure (default: all)")
    parser.add_argument("--small", action="store_true", help="toy model, to test the script")
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
        measure(name, shape, rows, 16 if args.small else args.prompt, 32 if args.small else args.new, args.ways)


if __name__ == "__main__":
    main()
