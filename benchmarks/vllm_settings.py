"""Speed of vLLM's sampling by its settings, and what each part of its step costs.

    python benchmarks/vllm_settings.py --out settings.md                     Qwen2.5-0.5B's shape
    python benchmarks/vllm_settings.py --model 1.5B --settings default "one process"
    python benchmarks/vllm_settings.py --small                               a toy model on the CPU, to test the script

Every setting is an engine in a process of its own; its rows are appended to --out as soon as they are measured, the
most informative settings first. Weights are random, and no answer ends early. Milliseconds are those of one engine
step: the whole step, then what Python spends in the scheduler, in the model runner (inputs and launch), in the sampler
and in the scheduler's update, all in the engine's process, and in the outputs in the caller's. The rest of a step is
spent waiting. The GPU's share of busy time, its kernels and those that take most time are from a profile of a shorter
call, which is slower itself, and so are the Python functions that take most of the engine's time (a remark above the
table, in microseconds per answer and step without what they call).
"""

import argparse
import cProfile
import functools
import os
import platform
import pstats
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from rollout import GROUP, QWEN, SHAPES, SMALL, count, engine, timed, work

LIMIT = 240
"""Seconds for one engine."""
PROFILED = 16
"""Tokens of an answer in the profiled call."""
FUNCTIONS = 25
"""Of the engine's Python, those that take most time."""
SETTINGS = {  # name -> (arguments of the engine, environment)
    "default": ({}, {}),
    "one process": ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    "larger graphs": ({"compilation_config": "larger"}, {}),
    "second model runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "second model runner, larger graphs": ({"compilation_config": "larger"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "no asynchronous scheduling": ({"async_scheduling": False}, {}),
    "as TRL": (
        {
            "distributed_executor_backend": "external_launcher",
            "max_num_batched_tokens": 4096,
            "logprobs_mode": "processed_logprobs",
        },
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"},
    ),
    "full graphs": ({"compilation_config": {"cudagraph_mode": "FULL"}}, {}),
    "full and piecewise graphs": ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, {}),
    "65,536 tokens a step": ({"max_num_batched_tokens": 65536}, {}),
    "Triton's attention": ({"attention_config": {"backend": "TRITON_ATTN"}}, {}),
    "FlashInfer's attention": ({"attention_config": {"backend": "FLASHINFER"}}, {}),
}
ENGINE_PARTS = {
    "scheduler": [("vllm.v1.core.sched.scheduler", "Scheduler", "schedule")],
    "model runner": [
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model"),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "execute_model"),
    ],
    "sampler": [
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "sample_tokens"),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "sample_tokens"),
    ],
    "update": [("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output")],
}
CALLER_PARTS = {"outputs": [("vllm.v1.engine.output_processor", "OutputProcessor", "process_outputs")]}
COLUMNS = ["setting", "answers", "requests", "tokens/s", "s", "ms per step", *ENGINE_PARTS, *CALLER_PARTS, "GPU busy",
           "kernels per step", "most GPU time"]  # fmt: skip


def arguments(name, rows):
    """Of the engine. Larger graphs are captured up to the number of answers, instead of 512."""
    settings = SETTINGS[name][0]
    if settings.get("compilation_config") == "larger":
        return {"compilation_config": {"max_cudagraph_capture_size": max(rows)}}
    return settings


def watch(worker, parts):
    """Count calls and seconds of methods in this process. vLLM calls this in the engine's process."""
    worker.parts = {}
    for name, places in parts.items():
        worker.parts[name] = [0, 0.0]
        for module, owner, method in places:
            if module in sys.modules:
                kind = getattr(sys.modules[module], owner)
                setattr(kind, method, counted(getattr(kind, method), worker.parts[name]))


def counted(method, into):
    def call(*args, **kwargs):
        start = time.perf_counter()
        found = method(*args, **kwargs)
        into[0] += 1
        into[1] += time.perf_counter() - start
        return found

    return call


def take(worker):
    """Calls and seconds since the last time."""
    found = {name: tuple(times) for name, times in worker.parts.items()}
    for times in worker.parts.values():
        times[:] = [0, 0.0]
    return found


def start_python_profile(worker):
    worker.functions = cProfile.Profile()
    worker.functions.enable()


def stop_python_profile(worker):
    """Seconds, calls and name of the functions that take most time themselves."""
    worker.functions.disable()
    found = pstats.Stats(worker.functions).stats.items()
    names = [(own, calls, f"{Path(file).name}:{line} {name}") for (file, line, name), (_, calls, own, *_) in found]
    return sorted(names, reverse=True)[:FUNCTIONS]


def start_profile(worker):
    worker.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    worker.profile.start()


def stop_profile(worker):
    """Share of the time in which a kernel runs, kernels, and the names that take most of the time."""
    torch.cuda.synchronize()
    worker.profile.stop()
    kernels = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in worker.profile.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    busy, until, names = 0, 0, {}
    for start, end, name in sorted(kernels):
        busy, until = busy + max(0, end - max(start, until)), max(end, until)
        names[name] = names.get(name, 0) + end - start
    top = [f"{name[:40]} {names[name] / busy:.0%}" for name in sorted(names, key=lambda name: -names[name])[:4]]
    return busy / (until - min(kernels)[0]), len(kernels), "; ".join(top).replace("|", "/")


def measure(name, shape, options, write):
    """Write a row for each number of answers; for the first setting also other kinds of requests."""
    from vllm import SamplingParams

    settings = arguments(name, options.rows)
    start, cuda = time.perf_counter(), torch.cuda.is_available()
    llm = engine(shape, max(options.rows), options.prompt + options.new, options.vllm_memory, **settings)
    config, seconds = llm.llm_engine.vllm_config, time.perf_counter() - start
    scheduler, compilation = config.scheduler_config, config.compilation_config
    write(
        f"{name}: started in {seconds:.0f} s; asynchronous scheduling {scheduler.async_scheduling}, at most "
        f"{scheduler.max_num_seqs} answers and {scheduler.max_num_batched_tokens} tokens, {compilation.cudagraph_mode}"
        f", graphs up to {max(compilation.cudagraph_capture_sizes or [0])}, attention {config.attention_config.backend}"
    )
    llm.collective_rpc(watch, args=(ENGINE_PARTS,))
    caller = SimpleNamespace()
    watch(caller, CALLER_PARTS)
    alone = ["one answer", "one answer, log-probabilities"]
    for kind in [f"{GROUP} answers", *(alone if name in ("default", "as TRL") else [])]:
        for rows in options.rows:
            prompts, _ = work(shape, rows, 0, options)
            each = GROUP if kind not in alone else 1

            def call(prompts, new, _, each=each, scores=0 if "log" in kind else None):
                params = SamplingParams(n=each, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=scores)
                found = llm.generate([{"prompt_token_ids": x} for x in prompts[::each]], params, use_tqdm=False)
                return [answer.token_ids for request in found for answer in request.outputs]

            call(prompts, PROFILED, [])
            llm.collective_rpc(take), take(caller)
            seconds, answers = timed(call, prompts, options.new, [], cuda)
            parts = llm.collective_rpc(take)[0] | take(caller)
            steps = parts["update"][0] or options.new  # the worker may have a process without a scheduler
            busy = "", "", ""
            if cuda:
                llm.collective_rpc(start_profile)
                call(prompts, PROFILED, [])
                share, kernels, names = llm.collective_rpc(stop_profile)[0]
                busy = f"{share:.0%}", f"{kernels / PROFILED:.0f}", names
            if rows == max(options.rows) and each > 1:
                llm.collective_rpc(start_python_profile)
                call(prompts, PROFILED, [])
                functions = llm.collective_rpc(stop_python_profile)[0]
                scale = 1e6 / (rows * PROFILED)
                listed = ", ".join(f"{name} {scale * own:.2f} ({calls:,} calls)" for own, calls, name in functions)
                write(f"{name}, Python's functions with {rows} answers: {listed}")
            took = [seconds, *(spent for _, spent in parts.values())]
            cells = [name, rows, kind, f"{count(answers, []) / seconds:,.0f}", f"{seconds:.2f}"]
            cells += [f"{1000 * x / steps:.2f}" for x in took] + list(busy)
            write(f"| {' | '.join(map(str, cells))} |")


def python_speed():
    """Seconds of a fixed amount of Python: engines that wait for Python depend on it."""
    start = time.perf_counter()
    sum(i * i for i in range(3_000_000))
    return time.perf_counter() - start


def write_to(path, line):
    """Rows of the table and remarks, each kind together."""
    old = path.read_text().splitlines() if path.exists() else []
    head = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    rows = [x for x in [*old, line] if x.startswith("|") and x not in head]
    remarks = [x for x in [*old, line] if x and not x.startswith("|")]
    path.write_text("\n\n".join([*remarks, "\n".join(head + rows)]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--vllm-memory", type=float, default=0.5, help="share of the GPU for vLLM (default 0.5)")
    parser.add_argument("--out", type=Path, default=Path("vllm_settings.md"))
    parser.add_argument("--small", action="store_true", help="toy model, to test the script")
    parser.add_argument("--alone", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = {**QWEN, **SHAPES[options.model]}
    if options.small:
        shape, options.rows, options.prompt, options.new = SMALL, [16, 32], 16, 24
    write = functools.partial(write_to, options.out)
    if options.alone:
        measure(options.alone, shape, options, write)
        return
    options.out.unlink(missing_ok=True)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    write(
        f"{time.strftime('%Y-%m-%d')}, {machine}, torch {torch.__version__}, {options.model}: prompts of "
        f"{options.prompt} tokens, answers of {options.new}; {len(os.sched_getaffinity(0))} cores, load "
        f"{os.getloadavg()[0]:.1f}, 3 million squares in Python take {python_speed():.2f} s"
    )
    for name in options.settings:
        environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} | SETTINGS[name][1]
        log = options.out.with_suffix(".log")
        with log.open("w") as output:
            command = [sys.executable, __file__, *sys.argv[1:], "--alone", name]
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                status = f"stopped after {LIMIT} s"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            errors = [line.strip() for line in log.read_text().splitlines() if "Error" in line]
            write(f"{name}: failed ({status}), {errors[-1][:200] if errors else 'no message'}")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
