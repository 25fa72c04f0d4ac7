"""A run on verl before it trains: what can be known on the machine that one types on, and what cannot."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dew.config import Run
from dew.engines.problems import judge_of
from dew.engines.verl.data import Data, load_tokenizer, prepare_data
from dew.engines.verl.launch import Launch, check_with_verl, prepare
from dew.engines.verl.plan import GPUS, USABLE, Gpu, fit, plan_of
from dew.engines.verl.recipe import Batches
from dew.engines.verl.settings import MODEL
from dew.engines.verl.words import with_words
from dew.errors import DewError
from dew.preflight import versions
from dew.preflight.check import Check, failed, from_text, guarded, ok, skipped, warning
from dew.preflight.folder import check_folder
from dew.preflight.machine import gpus, size

PROBED = 64
"""Rows whose gold and empty answers the verifier is asked about."""
NOT_LOOKED_AT = skipped(
    "answers", "On verl no answers are sampled beforehand: truncation, mixed groups and entropy show at the first step."
)


def preflight_verl(run: Run, words: Sequence[str] = (), allowed: Collection[str] = ()) -> list[Check]:
    """Versions, settings, batches, GPUs, memory, folder, data, verifier."""
    checks = [versions.check("verl")]
    try:
        run = with_words(run, words, allowed)
        launch = prepare(run)
        judged = check_with_verl(launch)
    except DewError as error:
        problems = [line for line in str(error).splitlines() if line.startswith("- ")] or [str(error)]
        checks += [from_text("settings", problem) for problem in problems]
        return [*checks, skipped("the rest", "Data, GPUs and memory are looked at when the settings are right.")]
    by = "verl's own configuration knows every key." if judged else "verl is not installed here to judge its own keys."
    checks.append(ok("settings", f"{len(launch.overrides)} overrides; {by}", notes=launch.notes))
    checks.append(ok("batches", f"{launch.batches}.", **vars(launch.batches)))
    checks += guarded("gpus", lambda: [check_gpus(launch.batches, gpus())])
    checks += guarded("memory", lambda: [check_memory(launch, gpus())])
    checks += guarded("folder", lambda: [check_folder(Path(launch["algorithm.dew_run.folder"]))])
    checks += guarded("data", lambda: _of_the_data(launch))
    return [*checks, NOT_LOOKED_AT]


def check_gpus(batches: Batches, found: Sequence[dict[str, Any]]) -> Check:
    """This machine against one node of the plan; a cluster's other nodes are not seen from here."""
    n, wanted = len(found), batches.gpus_per_node
    says = f"{batches.nodes} x {wanted} GPUs are asked for, and this machine has {n}."
    facts = {"nodes": batches.nodes, "per_node": wanted, "here": n}
    if n >= wanted:
        return ok("gpus", says, **facts)
    remedy = f"Run it on a node of the cluster, or set trainer.n_gpus_per_node={n}." if n else "Run it on the cluster."
    return warning("gpus", says, remedy, **facts)


def check_memory(launch: Launch, here: Sequence[dict[str, Any]]) -> Check:
    """The plan's arithmetic for the GPUs of this machine, or for both kinds that the plan knows."""
    job = plan_of(launch).job
    if job is None:
        return skipped("memory", f"The measures of {launch[f'{MODEL}.path']} are not known here.")
    kinds = [Gpu(here[0]["name"], here[0]["total"], 1.0, 1.0)] if here else list(GPUS)
    fits = [fit(job, gpu) for gpu in kinds]
    says = " ".join(
        f"{found.gpu.name}: training {size(found.training)}, sampling {size(found.generation)}"
        f"{'' if found.fits else f', which does not fit {USABLE:.0%} of it'}."
        for found in fits
    )
    facts = {found.gpu.name: {"training": found.training, "generation": found.generation} for found in fits}
    if any(found.fits for found in fits):
        return ok("memory", f"By arithmetic, on each of {job.gpus} GPUs: {says}", **facts)
    remedy = {
        "logits": "Lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu.",
        "activations": "Lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu.",
    }.get(fits[-1].largest, "Take more GPUs, or actor_rollout_ref.actor.fsdp_config.offload_policy=true.")
    return warning("memory", f"By arithmetic, on each of {job.gpus} GPUs: {says}", remedy, **facts)


def _of_the_data(launch: Launch) -> list[Check]:
    data = prepare_data(launch, load_tokenizer(launch))
    says = f"{len(data.train):,} problems to train on, {len(data.validation):,} to validate with"
    says += f"; {data.too_long} left out, their prompts being too long." if data.too_long else "."
    checks = [ok("data", says, train=len(data.train), validation=len(data.validation), too_long=data.too_long)]
    return checks + guarded("verifier", lambda: [check_verifier(launch, data)])


def check_verifier(launch: Launch, data: Data) -> Check:
    """On gold answers in a box, and on nothing at all."""
    if launch.own_reward:
        return skipped("verifier", "A reward function of your own is not probed here.")
    judge = judge_of(launch.run)
    assert judge is not None
    rows = [row["extra_info"] for row in data.train[:PROBED]]
    empty = sum(verdict.correct for verdict in judge.verdicts([""] * len(rows), rows))
    if empty:
        remedy = "Let it return 0 where there is no answer: else saying nothing is the best policy."
        return failed("verifier", f"{judge.name} accepts {empty} of {len(rows)} empty answers.", remedy)
    if judge.columns != ("answer",):
        return ok("verifier", f"{judge.name} accepts none of {len(rows)} empty answers.")
    boxed = [rf"\boxed{{{row['answer']}}}" for row in rows]
    good = sum(verdict.correct for verdict in judge.verdicts(boxed, rows))
    says = f"{judge.name} accepts {good} of {len(rows)} gold answers and no empty one."
    if good == len(rows):
        return ok("verifier", says, gold=good, rows=len(rows))
    return warning("verifier", says, "Correct those rows or leave them out.", gold=good, rows=len(rows))
