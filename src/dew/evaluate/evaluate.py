"""A model, problems, a verifier: Scores."""

from collections.abc import Sequence
from typing import Any

from dew.errors import ConfigError
from dew.evaluate.sampling import Sampling, sample
from dew.evaluate.scores import Problem, Scores
from dew.evaluate.vllm import is_vllm, sample_with_vllm
from dew.rewards import Verifier, verifier
from dew.tasks import Row, Task

N_PROBLEMS = 256


def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Task | Sequence[Row],
    judge: Verifier | None = None,
    *,
    n_problems: int | None = None,
    name: str | None = None,
    **sampling: Any,
) -> Scores:
    """Sample answers to held-out problems and judge them with the verifier that training uses.

    `model` is a transformers model, or the `vllm.LLM` that `load_vllm` gives.
    `problems` is a task (256 of its held-out problems, or `n_problems`; always the same ones) or rows of your
    own (all, or the first `n_problems`). A built-in task brings its verifier along; rows need `judge`.
    Further settings are those of `Sampling`: k, temperature, top_p, greedy, max_new_tokens, batch_size, seed.
    """
    rows, task_name = _rows(problems, n_problems, name or (judge.name if judge else "rows"))
    judge = judge or _own_verifier(problems)
    settings = Sampling(**sampling)
    draw = sample_with_vllm if is_vllm(model) else sample
    samples = draw(model, tokenizer, [row["prompt"] for row in rows], settings)
    answers = samples.answers
    flat_rows = [row for row, group in zip(rows, answers, strict=True) for _ in group]
    verdicts = iter(judge.verdicts([answer.text for group in answers for answer in group], flat_rows))
    judged = [
        Problem(row["prompt"], row.get("answer"), group, [next(verdicts) for _ in group])
        for row, group in zip(rows, answers, strict=True)
    ]
    return Scores(task_name, _name(model), settings, judged, samples.seconds)


def _name(model: Any) -> str:
    return str(model.llm_engine.model_config.model if is_vllm(model) else model.config._name_or_path)


def _rows(problems: Task | Sequence[Row], n: int | None, name: str) -> tuple[Sequence[Row], str]:
    if isinstance(problems, Sequence):
        if not problems:
            raise ConfigError("No problems to evaluate: the list of rows is empty.")
        return problems[:n], name
    return problems.rows(n or N_PROBLEMS, split="held_out"), problems.name


def _own_verifier(problems: Task | Sequence[Row]) -> Verifier:
    if isinstance(problems, Sequence):
        raise ConfigError("Rows need a verifier to judge the answers: evaluate(..., judge=dew.rewards.verifier(NAME)).")
    return verifier(problems.name)
