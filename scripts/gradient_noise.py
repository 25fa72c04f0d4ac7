"""How noisy the gradient of each rule is on a language model, and how well it points where accuracy rises.

    python scripts/gradient_noise.py measure MODEL [RULE ...] [--adapter FOLDER] [--batches 24] [--write FILE]
    python scripts/gradient_noise.py page                      the tables of docs/gradient-noise.md

The plan is on that page. Batches of 16 problems x 8 answers are sampled from one policy, the model or a LoRA adapter of
it in PEFT's format. For each rule and batch, the gradient with respect to the adapter gives

    halves     the cosine between the gradients of the first and of the last 8 problems
    direction  the cosine between the gradient and the sum of the policy gradients of all other batches
    norm       its length

The policy gradient is that of the mean reward: (reward − mean of the group), equal on all tokens, not normalised.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from study_tables import with_tables
from torch import Tensor

from dew.compare.statistics import holm, t_test
from dew.compare.verdicts import markdown_table
from dew.engines.lab.arms import Team, parse_arms
from dew.engines.lab.lora import LoraPolicies, load_base
from dew.engines.lab.stack import CORRECT, Replica, Stack
from dew.engines.lab.study_settings import LoraSettings
from dew.engines.lab.tasks import Answers, Problems
from dew.engines.lab.text import TextTask
from dew.engines.lab.tiny import numerics

REFERENCE = "dr_grpo(clip_low=1.0,clip_high=1000.0)"
RULES = [
    "dapo", "gtpo", "dew", "gtpo(placebo=True)", "dew(placebo=True)", "grpo_s", "forking_tokens",
    "dew(compare=relative)", "fipo", "stare", "gepo", "otb",
]  # fmt: skip
ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "gradient-noise", ROOT / "docs" / "gradient-noise.md"
COLUMNS = ("halves", "direction", "norm")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """After each rule, what is known so far."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = LoraSettings(**json.loads(options.settings))
    base = load_base(options.model, device)
    task = TextTask(options.task, base, settings.max_new_tokens, 1)
    rules = [REFERENCE, *(options.rules or RULES)]
    algorithms = [arm.algorithm for arm in parse_arms(rules, [1e-5], controls=False)]
    n = options.batches
    rates = torch.full((n,), 1e-5, device=device)
    policies = LoraPolicies(base, task.prompts, [0] * n, rates, settings, sum_sq=True)
    if options.adapter:
        load_adapter(policies, options.adapter)
    arm = parse_arms(["dapo"], [1e-5], controls=False)[0]
    stack = Stack(task, policies, [Replica(arm, options.first_seed + i) for i in range(n)], settings, device)
    with numerics():
        problems, answers, rows = stack.sample(0)
        reference, other = None, None
        gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        found: dict[str, Any] = {"date": str(date.today()), "machine": gpu, "torch": torch.__version__}
        found |= {"model": options.model, "task": options.task, "adapter": bool(options.adapter)}
        found |= {"accuracy": float((rows["reward"] > CORRECT).float().mean()), "rules": {}}
        for name, algorithm in zip(rules, algorithms, strict=True):
            team = Team(replace(algorithm, max_tokens=task.tokens), slice(0, n), settings.group_size, task.tokens)
            halves = gradients(stack, team, problems, answers, rows)
            whole = halves[0] + halves[1]
            if reference is None or other is None:  # the sum over all batches, less each one's own
                reference, other = whole, whole.sum(0)
                continue
            found["rules"][name] = {
                "halves": cosine(*halves),
                "direction": cosine(whole, other - reference),
                "norm": whole.norm(dim=1).tolist(),
            }
            yield found


def cosine(a: Tensor, b: Tensor) -> list[float]:
    found: list[float] = torch.nn.functional.cosine_similarity(a, b, dim=1).tolist()
    return found


def load_adapter(policies: LoraPolicies, folder: Path) -> None:
    """Start all batches from an exported adapter."""
    from safetensors.torch import load_file

    weights = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, layer in policies.layers.items():
            layer.a.copy_(weights[f"base_model.model.{name}.lora_A.weight"].T.to(layer.a))
            layer.b.copy_(weights[f"base_model.model.{name}.lora_B.weight"].to(layer.b))
    policies.adam.changed()


def gradients(
    stack: Stack, team: Team, problems: Problems, answers: Answers, grouped: dict[str, Tensor]
) -> list[Tensor]:
    """(R, D) gradients of a rule's loss on either half of the problems of each batch."""
    s, policies = stack.settings, stack.policies
    credit = team.credit(grouped)
    live = answers.mask & credit["signal"].repeat_interleave(s.group_size, 1)[..., None]
    sizes = torch.stack([live.sum((1, 2)), live.any(-1).sum(1)], 1).tolist()
    divisors = torch.tensor([team.algorithm.divisor(*x) for x in sizes], device=live.device).clamp_min(1)
    trained = {name: credit[name].flatten(1, 2) for name in ("advantages", "penalty") if name in credit}
    found = []
    for half in torch.arange(s.answers, device=live.device).chunk(2):
        order = half[live[:, half].any(-1).int().argsort(1, descending=True)]
        most = int(live[:, half].any(-1).sum(1).max())
        take = torch.arange(len(live), device=live.device)[:, None]
        lengths = live.sum(-1)[take, order[:, :most]]
        prompts = problems.prompt[take, order[:, :most] // s.group_size]
        for part, asked in policies.passes(prompts, lengths):
            rows = order[:, :most][:, part]
            if not rows.numel():  # no group of this half has signal, in any batch
                continue
            token, old, mask = (x[take, rows] for x in (answers.tokens, answers.logp, live))
            logp, entropy = policies.score(asked, token, mask, entropy=True)
            given = {"mask": mask, "old_logp": old}
            if team.algorithm.needs_entropy == "current":
                given["entropy"] = entropy
            given |= {name: x[take, rows] for name, x in trained.items()}
            policies.adam.backward(team.loss(logp, given, given.pop("advantages"), divisors).sum())
        found.append(policies.adam.gradients.clone())
        policies.adam.gradients.zero_()
    return found


def tables() -> dict[str, str]:
    """By the names of the files in docs/results/gradient-noise. A star: p < 0.05, for `direction` after Holm."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        rules = json.loads(path.read_text())["rules"]
        first, *others = rules
        cells = {name: [f"`{name}`"] for name in rules}
        for column in COLUMNS:
            own = {
                name: [a - b for a, b in zip(rules[name][column], rules[first][column], strict=True)] for name in others
            }
            tests = {name: t_test(values) for name, values in own.items()}
            p = [p for _, p in tests.values()]
            starred = dict(zip(others, holm(p) if column == "direction" else p, strict=True))
            for name, values in rules.items():
                cells[name].append(f"{fmean(values[column]):.4f}")
                difference = tests.get(name)
                text = (
                    f"{difference[0].value:+.4f} ± {difference[0].high - difference[0].value:.4f}" if difference else ""
                )
                cells[name].append(text + "*" * (starred.get(name, 1) < 0.05))
        head = ["rule", *(x for column in COLUMNS for x in (column, f"− {first}"))]
        found[path.stem] = markdown_table(head, list(cells.values()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "page"])
    parser.add_argument("model", nargs="?")
    parser.add_argument("rules", nargs="*", help="the first is what the others are compared with")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--first-seed", type=int, default=600)
    parser.add_argument("--settings", default="{}", help="changes of LoraSettings, as JSON")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.command == "page":
        PAGE.write_text(with_tables(PAGE.read_text(), tables()))
        return
    began = time.perf_counter()
    for found in measure(options):
        name, values = list(found["rules"].items())[-1]
        means = ", ".join(f"{key} {fmean(of):.5f}" for key, of in values.items())
        print(f"{time.perf_counter() - began:.0f} s, {name}: {means}", flush=True)
        if options.write:
            options.write.parent.mkdir(parents=True, exist_ok=True)
            options.write.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
