"""Checks of a run on verl."""

from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dew.engines.compat import trl_beside_verl
from dew.engines.verl.data import Data, load_tokenizer, prepare_data, write_data
from dew.engines.verl.launch import Launch, check_with_verl, prepare
from dew.errors import DewError
from dew.preflight import EMPTY_REMEDY, Check, from_problem, graded, guarded, ok, skipped
from dew.preflight.machine import check_folder, check_versions, gpus
from dew.run.config import Run, verifier_of
from dew.run.permission import check_permission


def check_run(run: Run, typed: Collection[str] = (), untrusted: bool = False) -> list[Check]:
    conflict = trl_beside_verl()
    checks = [check_versions("verl") if conflict is None else from_problem("versions", conflict)]
    try:
        check_permission(run, typed, untrusted)
        launch = prepare(run)
        composed = check_with_verl(launch)
    except DewError as error:
        checks += [from_problem("settings", problem) for problem in error.problems]
        return [*checks, skipped("the rest", "Data and GPUs are checked once the settings are valid.")]
    by = "verl accepts all of them." if composed else "verl is not installed here, so its own keys are not checked."
    checks.append(ok("settings", f"{len(launch.overrides)} overrides; {by}"))
    checks.append(ok("batches", f"{launch.batches}."))
    checks += guarded("gpus", lambda: check_gpus(launch, gpus()))
    checks += guarded("folder", check_folder, Path(launch["algorithm.dew_run.folder"]))
    checks += guarded("data", check_data, launch)
    return [*checks, skipped("answers", "No answers are sampled on verl.")]


def check_gpus(launch: Launch, found: Sequence[dict[str, Any]]) -> Check:
    """Compare this machine's GPUs with those of one node of the run; other nodes are not visible from here."""
    n, nodes, wanted = len(found), launch["trainer.nnodes"], launch["trainer.n_gpus_per_node"]
    says = f"The run asks for {nodes} x {wanted} GPUs; this machine has {n}."
    remedy = f"Run it on a node of the cluster, or set trainer.n_gpus_per_node={n}." if n else "Run it on the cluster."
    return graded("gpus", says, remedy, warn=n != wanted)


def check_data(launch: Launch) -> list[Check]:
    data = prepare_data(launch, load_tokenizer(launch))
    with TemporaryDirectory() as folder:
        write_data(data, Path(folder))
    says = f"{len(data.train):,} training problems, {len(data.validation):,} validation problems"
    says += f"; {data.too_long} left out because their prompts are too long." if data.too_long else "."
    checks = [ok("data", says)]
    return checks + guarded("verifier", check_verifier, launch, data)


def check_verifier(launch: Launch, data: Data) -> Check:
    """Call the verifier on empty answers and, if it reads nothing but the gold answer, on boxed gold answers."""
    verifier = None if launch.own_reward else verifier_of(launch.run)
    if verifier is None:
        return skipped("verifier", "Your own reward function is not called here.")
    rows = [row["extra_info"] for row in data.train[:64]]
    boxed = [rf"\boxed{{{row['answer']}}}" for row in rows] if verifier.columns == ("answer",) else []
    good, empty = (
        sum(x.correct for x in verifier.verdicts(texts, rows[: len(texts)])) for texts in (boxed, [""] * len(rows))
    )
    gold = f"{good} of {len(boxed)} gold answers and " if boxed else ""
    says = f"{verifier.name} accepts {gold}{empty} of {len(rows)} empty answers."
    remedy = EMPTY_REMEDY if empty else "Correct or remove those rows."
    return graded("verifier", says, remedy, warn=good < len(boxed), fail=empty > 0)
