"""The policy that all runs of a task start from, trained on demonstrations until it solves some problems; cached."""

import hashlib
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dew.engines.lab.stack import solve
from dew.engines.lab.study_settings import TinySettings
from dew.engines.lab.tasks import PAD, GeneratedTask, generator, uniforms
from dew.engines.lab.tiny import Parameters, deterministic, forward, new_policy, sample
from dew.files import write_atomically

WarmStart = tuple[Parameters, dict[str, Any]]
"""The parameters, and facts about them: digest (runs are comparable if theirs are equal), pass@1 and pass@16 on
held-out problems, and the number of supervised steps."""
TARGET = 0.12
"""Training stops at this pass@1: low enough to leave something to learn, high enough for most groups to have signal."""
MAX_STEPS, CHECK, BATCH, RATE = 4000, 100, 256, 1e-3
DEMONSTRATIONS, PROBED, TESTED = 100_000, 128, 256
"""Number of problems to train on, to decide when to stop, and to report pass@1 and pass@16 on."""
FORMAT = 2
"""Part of the file name. Increase it with every change that affects the policy: tasks, sizes, training."""


def warm_start(
    task: GeneratedTask, settings: TinySettings, device: str, folder: Path, say: Callable[[str], None]
) -> WarmStart:
    """Load the warm start from the cache in `folder`, or train it and store it there."""
    number = f"-start{settings.start}" if settings.start else ""
    path = folder / f"{task.name}-width{settings.width}-depth{settings.depth}{number}-format{FORMAT}.pt"
    if path.exists():
        found = _read(path)
        if found is not None:
            return found
        say(f"{path} is damaged (its checksum differs). Training the warm start again.")
    folder.mkdir(parents=True, exist_ok=True)  # fail now, not after training
    say(f"{task.name}: training the policy that all runs start from, once per task and size; cached in {folder}.")
    say(f"Most tasks take 700 to {MAX_STEPS:,} steps.")
    parameters, scores = _train(task, settings, device, say)
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in parameters.values())).hexdigest()[:12]
    content = io.BytesIO()
    torch.save(parameters, content)
    write_atomically(path, content.getvalue())
    facts = {"digest": digest, "file": hashlib.sha256(content.getvalue()).hexdigest(), "scores": scores}
    write_atomically(path.with_suffix(".json"), json.dumps(facts, indent=1).encode())
    return parameters, {"digest": digest, **scores}


def _read(path: Path) -> WarmStart | None:
    """Load a cached warm start; None if anything is wrong with the files."""
    try:
        facts, content = json.loads(path.with_suffix(".json").read_text()), path.read_bytes()
        if facts["file"] != hashlib.sha256(content).hexdigest():
            return None
        return torch.load(io.BytesIO(content), weights_only=True), {"digest": facts["digest"], **facts["scores"]}
    except (OSError, ValueError, KeyError, RuntimeError):
        return None


def _train(task: GeneratedTask, settings: TinySettings, device: str, say: Callable[[str], None]) -> WarmStart:
    key, length = (task.name, settings.start) if settings.start else (task.name,), task.prompt_length + task.tokens
    parameters = new_policy(settings.width, settings.depth, length, generator(*key, "weights"))
    parameters = {name: p.to(device).requires_grad_() for name, p in parameters.items()}
    adam = torch.optim.Adam(parameters.values(), lr=RATE, betas=(0.9, 0.99), fused=device != "cpu")
    problems = task.problems(DEMONSTRATIONS, generator("demonstrations"), device=device)[0]
    rows = torch.cat([problems.prompt, problems.demonstration], 1)
    order = generator(*key, "order", device=device)
    probe = task.problems(PROBED, generator("probe"), device=device)[0]
    answers = partial(sample, parameters)

    def noise(number: int, purpose: str, rows: int) -> Tensor:
        return uniforms([(task.name, purpose, number)], rows, task.tokens, device=device)

    for step in range(1, MAX_STEPS + 1):
        adam.param_groups[0]["lr"] = RATE * min(1, step / 100) * max(0.05, 1 - step / MAX_STEPS)
        ids = rows[torch.randint(len(rows), (BATCH,), generator=order, device=device)][None]
        logits = forward(parameters, ids[..., :-1], last=task.tokens)
        target = ids[..., task.prompt_length :].flatten()
        adam.zero_grad()
        with deterministic():
            F.cross_entropy(logits.flatten(0, 2), torch.where(target == PAD, -100, target)).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        adam.step()
        if step % CHECK == 0:
            now = solve(task, answers, probe, 4, 512, partial(noise, step)).float().mean().item()
            say(f"{task.name}: step {step} of at most {MAX_STEPS:,}, pass@1 {now:.3f} (stops at {TARGET})")
            if now >= TARGET:
                break
    solved = solve(task, answers, task.held_out(TESTED, device), 16, 512, partial(noise, 0))
    scores = {"pass@1": solved.float().mean().item(), "pass@16": solved.any(2).float().mean().item(), "steps": step}
    return {name: p.detach().cpu() for name, p in parameters.items()}, scores
