"""Time of one whole training step, sampling included: TRL's GRPO and dew's GTPO, with and without vLLM.

    python benchmarks/whole_step.py                             Qwen2.5-0.5B's shape: 16 groups of 8, up to 300 tokens
    python benchmarks/whole_step.py --model 1.5B --cases "dew GTPO"
    python benchmarks/whole_step.py --weights folder --data gsm8k.jsonl.gz      real weights and prompts
    python benchmarks/whole_step.py --limits 2048 4096 8192 --steps 2           long answers of given lengths
    python benchmarks/whole_step.py --lora 16 --optimizer-steps 4               adapters, 4 updates per generation
    python benchmarks/whole_step.py --liger [no-rope]           with Liger's kernels in the layers of all cases
    python benchmarks/whole_step.py --compile                   with compiled layers
    python benchmarks/whole_step.py --trace folder              also a Chrome trace of each case's last step
    python benchmarks/whole_step.py --small                     a toy model on the CPU, to test the script
    python benchmarks/whole_step.py --figure benchmarks/results/whole_step-h200.md > docs/images/whole-step.svg

Without --weights the weights are random. Then one token in --mean-length ends an answer, so that lengths vary as those
of a trained model do (geometric, cut at --completion); prompts are random tokens of 60 to 180. With --limits all cases
but `generate`, which cannot do this, get the same lengths, log-normal as in long_answers.py. --steps and --warm-up are
then for each limit, in turns, and answers of warm-up steps end early, as in that script. With --lora the base is in
bfloat16. All cases get the same prompts, and each runs in a process of its own, forked before CUDA starts; the table is
written after every case. Phases are measured alike in both trainers, each ending with a device synchronisation, nested
ones excluded:

    sample     from prompts to token ids
    reward     reward functions
    score      the rest of a generation: padding, passes of the old policy, metrics
    credit     advantages (dew; part of "score" in TRL)
    update     forward, backward, optimizer

"floor" is what the step's bytes and operations take at the measured ceilings of an H200 (4.3 TB/s, 790 TFLOP/s):
sampling reads the weights and the cache once per token position, an update takes 6 operations per weight and token,
4 if the weight is frozen. A trace shows the phases above the operators and kernels; open it in chrome://tracing or
ui.perfetto.dev.
"""

import argparse
import functools
import importlib.util
import json
import multiprocessing
import os
import random
import re
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a look for GPUs must not start CUDA before a fork

import torch
from datasets import Dataset
from long_answers import END, Ending, lengths_of
from rollout import QWEN, SHAPES, SMALL
from torch.profiler import ProfilerActivity, profile, record_function
from trainer_step import StepTimer, adapters, alternating, compile_layers, tokenizer
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from trl import GRPOConfig, GRPOTrainer

import dew.engines.trl.trainer as dew_trainer
from dew.decoding import Decoder
from dew.engines.trl import DewConfig, DewTrainer, rollout
from dew.tasks import task

UNPADDED = ", unpadded attention"
"""Ends the names of cases whose attention skips padding."""
# name -> (dew's algorithm, or None for plain TRL; settings)
CASES = {
    "TRL GRPO, generate": (None, {}),
    "TRL GRPO, vLLM": (None, {"use_vllm": True}),
    f"TRL GRPO, vLLM{UNPADDED}": (None, {"use_vllm": True}),
    "dew GTPO": ("gtpo", {}),
    f"dew GTPO{UNPADDED}": ("gtpo", {}),
    "dew DAPO": ("dapo", {"algorithm_kwargs": {"dynamic_sampling": False}}),
    "dew GTPO, TRL's micro-batches": ("gtpo", {"less_padding": False}),
    "dew GTPO, vLLM": ("gtpo", {"use_vllm": True}),
    "dew GTPO, dynamic sampling": ("gtpo", {"algorithm_kwargs": {"dynamic_sampling": True, "oversample": 2.5}}),
}
DYNAMIC = "dew GTPO, dynamic sampling"
"""Samples 2.5 times as many prompts, of which three in five have signal, and trains on as many as the others."""
BANDWIDTH, OPERATIONS = 4.3e12, 790e12


PHASES = ("sample", "reward", "score", "credit", "update")
METHODS = {"_generate": "sample", "_calculate_rewards": "reward", "_generate_and_score_completions": "score"}


class Phases(StepTimer):
    """Seconds of the phases of every step, which has `updates` optimizer steps, and a trace of the last one."""

    def __init__(self, cuda, updates, last, trace, lengths):
        super().__init__(cuda)
        self.steps, self.nested, self.updates, self.last, self.trace = [], 0.0, updates, last, trace
        self.profile, self.lengths = None, lengths

    def watch(self, trainer):
        for name, phase in METHODS.items():
            setattr(trainer, name, self._timed(phase, getattr(trainer, name)))
        dew_trainer.give_credit = self._timed("credit", dew_trainer.give_credit)

    def on_step_begin(self, args, state, control, **_):
        if state.global_step % self.updates:
            return
        self.steps.append(dict.fromkeys(PHASES, 0.0) | {"lengths": [], "limit": self.lengths.next()})
        if self.trace and len(self.steps) == self.last:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            self.profile = profile(activities=kinds)
            self.profile.start()
        super().on_step_begin(args, state, control)

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.updates:
            return
        super().on_step_end(args, state, control)
        self.steps[-1]["update"] = self.seconds[-1] - sum(self.steps[-1][phase] for phase in PHASES)
        print({name: self.steps[-1][name] for name in ("limit", *PHASES)}, flush=True)
        if self.profile is not None:
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.trace))

    def _timed(self, phase, method):
        def timed(*args, **kwargs):
            start, outer, self.nested = self._now(), self.nested, 0.0
            with record_function(phase):
                found = method(*args, **kwargs)
                elapsed = self._now() - start
            self.steps[-1][phase] += elapsed - self.nested
            self.nested = outer + elapsed
            if phase == "sample":
                self.steps[-1]["lengths"] += [(len(p), len(c)) for p, c in zip(found[0], found[1], strict=True)]
                if self.lengths.drawn and self.lengths.drawn != [c for _, c in self.steps[-1]["lengths"]]:
                    raise SystemExit("the answers do not have the lengths that were asked for")
            return found

        return timed


class Lengths:
    """Makes both samplers end their answers at given lengths, if there are `limits`: they take turns."""

    def __init__(self, options):
        self.rows, self.limits, self.drawn = options.prompts * options.answers, options.limits, None
        self.early, self.turns = len(self.limits) * options.warm_up, 0
        if not self.limits:
            return
        rows = Decoder.rows

        def of_length(decoder, prompts, _, at_once=None):
            uniforms = torch.rand(len(prompts), self.limit, 2, device=decoder.model.device)
            uniforms[torch.arange(len(prompts)), torch.tensor(self.drawn) - 1] = 2
            return rows(decoder, prompts, self.limit, at_once, uniforms=uniforms)

        Decoder.rows, rollout.Draw = of_length, Ending
        if options.small:
            rollout.refusal = lambda _: None  # dew's own sampler on a CPU, too

    def next(self):
        """The limit of the next step, or None."""
        if not self.limits:
            return None
        self.limit, self.turns = self.limits[self.turns % len(self.limits)], self.turns + 1
        self.drawn = lengths_of(self.rows, min(32, self.limit) if self.turns <= self.early else self.limit)
        return self.limit

    def force_on_vllm(self):
        from trl.generation import vllm_generation

        given = self

        class OfLength(vllm_generation.LLM):
            def generate(self, prompts, sampling_params, **others):
                params = [sampling_params.clone() for _ in prompts]
                for param, param.max_tokens in zip(params, given.drawn, strict=True):
                    param.ignore_eos = True
                return super().generate(prompts, sampling_params=params, **others)

        vllm_generation.LLM = OfLength


def on_a_cpu():
    """vLLM on a CPU repacks weights when it loads them and accepts no new ones; this switches it off. In float32, since
    not every CPU has bfloat16."""
    from trl.generation import vllm_generation
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def unpadded_attention(module, query, key, value, mask, scaling=None, **_):
    """Causal attention of real tokens only, with torch's flash kernel. `attn_implementation: flash_attention_2` does so
    with that of the package flash-attn."""
    batch, _, longest, _ = query.shape
    if mask is None:
        mask = torch.ones(batch, longest, dtype=torch.bool, device=query.device)
    kept, lengths = mask.flatten().nonzero().squeeze(1), mask.sum(1)
    heads = [x.transpose(1, 2).flatten(0, 1)[kept].to(value.dtype) for x in (query, key, value)]
    if query.is_cuda:
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max())
        call = torch.ops.aten._flash_attention_forward
        found = call(*heads, starts, starts, longest, longest, 0.0, True, False, scale=scaling)[0]
    else:  # one answer at a time
        given = zip(*(x.transpose(0, 1).split(lengths.tolist(), 1) for x in heads), strict=True)
        call = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        found = torch.cat([call(*(x[None] for x in answer), scale=scaling)[0] for answer in given], 1).transpose(0, 1)
    whole = found.new_zeros(batch * mask.shape[1], *found.shape[1:]).index_copy(0, kept, found)
    return whole.unflatten(0, mask.shape), None


AttentionInterface.register("unpadded", unpadded_attention)
AttentionMaskInterface.register("unpadded", flash_attention_mask)


def base_dtype(options):
    return torch.bfloat16 if options.lora and not options.small else torch.float32


def problem(options, shape):
    """A tokenizer, prompts as token ids in text, and what makes a model."""
    if options.weights:
        reader = AutoTokenizer.from_pretrained(options.weights)
        rows = task("gsm8k", path=options.data).rows(options.prompts * 8, split="train")
        dtype = base_dtype(options)
        prompts = [row["prompt"] for row in rows]
        return reader, prompts, lambda: AutoModelForCausalLM.from_pretrained(options.weights, dtype=dtype)
    dice = random.Random(0)
    reader = tokenizer()
    words = [f"w{i}" for i in range(200)]
    reader.add_tokens(words)
    lengths = (8, 16) if options.small else (60, 180)
    prompts = [" ".join(dice.choices(words, k=dice.randint(*lengths))) for _ in range(options.prompts * 8)]

    def build():
        torch.manual_seed(0)
        with torch.device("cpu" if options.small else "cuda"):
            model = Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=options.completion + 1024))
        model = model.to(base_dtype(options))
        ends = [END] if options.limits else list(range(300, shape["vocab_size"], options.mean_length))
        model.generation_config.eos_token_id = ends
        model.generation_config.pad_token_id = 0
        return model

    return reader, prompts, build


def in_three_of_five(prompts, **_):
    """Alternating in three of five groups, 0 in the others."""
    return [float(i % 2 and len(str(prompt)) % 5 < 3) for i, prompt in enumerate(prompts)]


def measure(name, options, shape, folder):
    """Medians over the measured steps of one case, for each limit of --limits, or for ""."""
    algorithm, settings = CASES[name]
    turns, lengths = max(1, len(options.limits)), Lengths(options)
    reader, prompts, build = problem(options, shape)
    cuda = not options.small
    rows = options.prompts * options.answers
    common = {
        "output_dir": str(Path(folder) / name.replace(" ", "_")),
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": rows // options.micro_batch // options.optimizer_steps,
        "steps_per_generation": rows // options.micro_batch,
        "num_generations": options.answers,
        "max_completion_length": options.completion,
        "max_steps": (options.warm_up + options.steps) * turns * options.optimizer_steps,
        "learning_rate": 1e-6,
        "gradient_checkpointing": options.checkpointing,
        "use_liger_kernel": options.liger is not None,
        "liger_kernel_config": {"rope": False} if options.liger == "no-rope" else None,
        "bf16": cuda,
        "use_cpu": options.small,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1000,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        **settings,
    }
    if settings.get("use_vllm"):
        common |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.vllm_memory}
        common["vllm_max_model_length"] = options.completion + 1024
        attention = {"attn_implementation": "unpadded"} if name.endswith(UNPADDED) else {}
        common["model_init_kwargs"] = {"dtype": base_dtype(options), **attention}
        if options.limits:
            lengths.force_on_vllm()
        if options.small:
            on_a_cpu()
    if algorithm is None:
        kind, args = GRPOTrainer, GRPOConfig(loss_type="grpo", **common)
    else:
        kind, args = DewTrainer, DewConfig(algorithm=algorithm, records_every=0, **common)
    last = (options.warm_up + options.steps) * turns
    trace = options.trace and options.trace / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json.gz"
    timer, model = Phases(cuda, options.optimizer_steps, last, trace, lengths), build()
    if name.endswith(UNPADDED):
        model.set_attn_implementation("unpadded")
        rollout.refusal = lambda _: None  # dew's sampler does not know its name
    if options.compile:
        compile_layers(model)
    if settings.get("use_vllm"):  # vLLM loads the weights from a folder
        start = str(Path(folder) / "start")
        model.save_pretrained(start)
        reader.save_pretrained(start)
        model = start
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    reward = in_three_of_five if name == DYNAMIC else alternating
    more = {"callbacks": [timer], "peft_config": adapters(options.lora)}
    trainer = kind(model, reward, args, data, processing_class=reader, **more)
    timer.watch(trainer)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    steps = timer.steps[options.warm_up * turns : last - bool(trace and options.steps > 1)]  # a traced step is slower
    limits = options.limits or [None]
    found = {f"{x:,}" if x else "": medians([s for s in steps if s["limit"] == x], trainer.model, rows) for x in limits}
    if cuda:
        for numbers in found.values():
            numbers["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            numbers["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


def medians(steps, model, rows):
    whole = [sum(step[phase] for phase in PHASES) for step in steps]
    found = {"step": statistics.median(whole), "least": min(whole), "most": max(whole)}
    found |= {phase: statistics.median(step[phase] for step in steps) for phase in PHASES}
    found["tokens"] = statistics.median(sum(c for _, c in step["lengths"]) for step in steps)
    found["floor"] = statistics.median(floor(model, step["lengths"], rows) for step in steps)
    found["tokens/s"] = found["tokens"] / found["sample"]
    return found


def floor(model, lengths, trained):
    """Seconds that the bytes of sampling in bf16 and the operations of the update (of as many answers) take."""
    config, weights = model.config, sum(p.numel() for p in model.parameters())
    cache = 4 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    reads = 2 * weights * max(c for _, c in lengths) + cache * sum(c * p + c * c // 2 for p, c in lengths)
    operations = sum(4 * p.numel() + 2 * p.numel() * p.requires_grad for p in model.parameters())
    update = operations * sum(p + c for p, c in lengths) * trained / len(lengths)
    return reads / BANDWIDTH + update / OPERATIONS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--weights", help="folder with a model and its tokenizer")
    parser.add_argument("--data", help="problems, .jsonl.gz; with --weights")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--optimizer-steps", type=int, default=1, help="updates per generation, which is a step here")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of all linear layers but the head")
    parser.add_argument("--completion", type=int, default=300)
    parser.add_argument("--mean-length", type=int, default=200)
    parser.add_argument("--limits", type=int, nargs="*", default=[], help="in tokens, instead of --completion")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile the layers of cases without vLLM")
    parser.add_argument("--liger", nargs="?", const="all", choices=["all", "no-rope"], help="Liger's kernels in layers")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU for vLLM (default 0.3)")
    parser.add_argument("--trace", type=Path, help="folder for a Chrome trace of each case's last step")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--figure", type=Path, help="print an SVG of the first table in this file, and measure nothing")
    options = parser.parse_args()
    if options.figure:
        print(figure(options.figure.read_text()), end="")
        return
    shape = QWEN | SHAPES[options.model]
    if options.small:
        shape = SMALL  # heads of 32, the least that vLLM has on a CPU
        options.prompts, options.answers, options.micro_batch = 2, 4, 4
        options.completion, options.mean_length = 24, 16
    options.completion = max([options.completion, *options.limits])

    if options.trace:
        options.trace.mkdir(parents=True, exist_ok=True)
    used = {key: value for key, value in vars(options).items() if value is not None}
    results = {}
    for name in options.cases:
        if "vLLM" in name and importlib.util.find_spec("vllm") is None:
            print(f"{name}: skipped, vLLM is not installed", flush=True)
            continue
        if (found := in_a_process(name, lambda folder, name=name: measure(name, options, shape, folder))) is None:
            continue
        head = f"{time.strftime('%Y-%m-%d')}, {found.pop('machine')}, torch {torch.__version__}, {used}\n\n"
        for limit, numbers in found.items():
            results[name, limit] = numbers
            print(f"{name} {limit}: {', '.join(f'{key} {x:.4g}' for key, x in numbers.items())}", flush=True)
        if options.out:
            options.out.write_text(head + table(results) + "\n")
    if results:
        print(f"\n{head}{table(results)}")


def in_a_process(name, measure):
    """What `measure` returns, from a process of its own: vLLM keeps its memory, and a failure ends only this case."""
    with tempfile.TemporaryDirectory() as folder:
        numbers, log = Path(folder) / "numbers.json", Path(folder) / "log"

        def run():
            for stream in (1, 2):
                os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
            machine = {"machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}
            numbers.write_text(json.dumps(measure(folder) | machine))

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        if numbers.exists():
            return json.loads(numbers.read_text())
        print(f"{name}: failed\n" + "\n".join(log.read_text().splitlines()[-30:]), flush=True)
        return None


def table(results):
    """Markdown; every row relative to the first of its limit."""
    first, limits = {}, list(dict.fromkeys(limit for _, limit in results))
    columns = ["step, s", "relative to the first", *PHASES, "tokens/s", "step / floor", "peak, GiB", "range, s"]
    if limits != [""]:
        columns.insert(0, "limit")
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for (name, limit), found in sorted(results.items(), key=lambda x: limits.index(x[0][1])):
        relative = found["step"] / first.setdefault(limit, found["step"])
        phases = " | ".join(f"{found[phase]:.3f}" for phase in PHASES)
        memory = f"{found['peak_gib']:.1f} ({found['reserved_gib']:.1f} reserved)" if "peak_gib" in found else ""
        spread = f"{found['least']:.3f} to {found['most']:.3f}"
        speed = f"{found['tokens/s']:,.0f} | {found['step'] / found['floor']:.1f}"
        label = f"{name} | {limit}" if limit else name
        lines.append(f"| {label} | {found['step']:.3f} | {relative:.2f} | {phases} | {speed} | {memory} | {spread} |")
    return "\n".join(lines)


def newest(section):
    """Rows of the tables with limits, by limit and case; of a case measured twice the later."""
    found = {}
    for lines in re.findall(r"^\| \| limit .*?(?=\n\n)", section, re.MULTILINE | re.DOTALL):
        heads, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines())
        for row in rows:
            found.setdefault(row[1], {})[row[0]] = dict(zip(heads, row, strict=True))
    return [cases[case] for cases in found.values() for case in CASES if case in cases]


def figure(text):
    """An SVG of the tables with limits in a results file: a panel for each model, a bar for each case and limit."""
    gpu = re.search(r" on an (\S+),", text)[1]
    left, top, height, longest = 310, 66, 24, 420
    colours = ("#2864dc", "#888888", "#d75f00")

    def label(x, y, words, size=13):
        return f'<text x="{x:.1f}" y="{y}" font-size="{size}">{words}</text>'

    def bar(x, y, width, size, colour):
        return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{size}" fill="{colour}"/>'

    parts = [label(16, 24, f"One training step on an {gpu}, seconds, by the limit of its 128 answers in tokens", 15)]
    for x, name, colour in zip((0, 100, 250), ("sampling", "scoring and credit", "update"), colours, strict=True):
        parts += [bar(left + x, 36, 12, 12, colour), label(left + x + 18, 47, name)]
    y = top
    for model, section in re.findall(r"^### (\S+ B)\b(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL):
        cases = newest(section)
        scale, last = longest / max(float(case["step, s"]) for case in cases), ""
        parts.append(label(16, y + 16, f"{model} parameters", 14))
        y += height
        for case in cases:
            y += 8 * (last not in ("", case["limit"]))
            if case["limit"] != last:
                parts.append(label(16, y + 14, case["limit"]))
            last, x = case["limit"], left
            sample, *others, update = (scale * float(case[phase]) for phase in PHASES)
            parts.append(label(76, y + 14, case[""]))
            for width, colour in zip((sample, sum(others), update), colours, strict=True):
                parts.append(bar(x, y, width, 18, colour))
                x += width
            parts.append(label(x + 6, y + 14, f"{float(case['step, s']):.1f}"))
            y += height
        y += height // 2
    size = f'width="840" height="{y}"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
