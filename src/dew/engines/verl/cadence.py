"""Batches and steps: TRL counts completions and optimizer steps, verl prompts and generations."""

from dew.engines.verl.batches import Batches
from dew.engines.verl.keys import ACTOR, OPTIM, ROLLOUT
from dew.engines.verl.reading import Reader
from dew.engines.verl.words import Overrides

PROMPT_LIMIT = 2048
"""data.max_prompt_length where a recipe names none; TRL has no such key."""
MICRO_BATCH = 16384
"""Tokens of a micro-batch on one GPU where a recipe names none: verl's own default."""


def batches_of(read: Reader) -> tuple[Batches, Overrides]:
    """Prompts of a step: verl's own number where `verl:` has it, else TRL's arithmetic with a process per GPU."""
    nodes, per_node = read.whole("trainer.nnodes", 1), read.whole("trainer.n_gpus_per_node", 1)
    G, per_device = read.count("num_generations"), read.count("per_device_train_batch_size")
    accumulation = read.count("gradient_accumulation_steps")
    at_once = per_device * nodes * per_node
    generation = read("steps_per_generation", int) or accumulation
    if read("steps_per_generation") is None and read("generation_batch_size", int):
        generation = max(1, read("generation_batch_size", int) // at_once)
    if G < 2:
        read.problems.append(f"num_generations={G}: credit compares the answers to one prompt; at least 2.")
    if generation % accumulation:
        read.problems.append(
            f"steps_per_generation={generation} is not a multiple of gradient_accumulation_steps={accumulation}."
        )
    prompts = _prompts(read, at_once, generation, G)
    mini = read.whole(f"{ACTOR}.ppo_mini_batch_size", max(1, prompts * accumulation // max(generation, accumulation)))
    batches = Batches(
        prompts=prompts,
        mini=mini,
        answers=G,
        passes=read.count("num_iterations"),
        nodes=nodes,
        gpus_per_node=per_node,
        tensor_parallel=read.whole(f"{ROLLOUT}.tensor_model_parallel_size", read.count("vllm_tensor_parallel_size")),
        sequence_parallel=read.whole(f"{ACTOR}.ulysses_sequence_parallel_size", 1),
    )
    return batches, {
        "data.train_batch_size": batches.prompts,
        f"{ACTOR}.ppo_mini_batch_size": batches.mini,
        f"{ROLLOUT}.n": batches.answers,
        f"{ACTOR}.ppo_epochs": batches.passes,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": max(
            MICRO_BATCH,
            read.whole("data.max_prompt_length", PROMPT_LIMIT) + read.count("max_completion_length"),
        ),
        "trainer.nnodes": batches.nodes,
        "trainer.n_gpus_per_node": batches.gpus_per_node,
    }


def _prompts(read: Reader, at_once: int, generation: int, G: int) -> int:
    if "data.train_batch_size" in read.own:
        return read.whole("data.train_batch_size", 1)
    completions = at_once * generation
    if completions % G:
        near = completions // G * G or G
        read.problems.append(
            f"{at_once} completions at once on all GPUs x {generation} micro-batches = {completions}, which is not a "
            f"whole number of groups of {G}. Write verl: {{data.train_batch_size: {max(1, near // G)}}}, the prompts "
            "of a step."
        )
    return max(1, completions // G)


def cadence(read: Reader, batches: Batches) -> Overrides:
    """TRL counts optimizer steps, verl generations."""
    per_step = batches.optimizer_steps
    max_steps = read("max_steps", int)
    found: Overrides = {}
    if max_steps > 0:
        steps = _converted(read, "max_steps", max_steps, per_step)
        found["trainer.total_training_steps"] = steps
        found["trainer.total_epochs"] = steps  # an epoch has at least one step, so this never ends a run early
    else:
        epochs = read.number("num_train_epochs")
        if epochs != int(epochs):
            read.problems.append(f"num_train_epochs={epochs}: verl counts whole epochs. Write max_steps instead.")
        found["trainer.total_epochs"] = int(epochs)
    warmup = read.number("warmup_steps")
    if warmup >= 1:
        found[f"{OPTIM}.lr_warmup_steps"] = _converted(read, "warmup_steps", int(warmup), per_step)
    elif warmup > 0:
        found[f"{OPTIM}.lr_warmup_steps_ratio"] = warmup
    return found | _cadences(read, per_step, found.get("trainer.total_training_steps"))


def _cadences(read: Reader, per_step: int, steps: int | None) -> Overrides:
    """When to save and when to evaluate. `scores:` become verl's validation before, after and at eval_steps."""
    found: Overrides = {"trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.val_before_train": False}
    saves, evals = str(read("save_strategy")), str(read("eval_strategy"))
    for name, value in (("save_strategy", saves), ("eval_strategy", evals)):
        if value not in ("no", "steps"):
            read.problems.append(f"{name}={value!r}: verl counts steps. Write steps or no.")
    if saves == "steps":
        found["trainer.save_freq"] = _converted(read, "save_steps", read.number("save_steps"), per_step)
    if evals == "steps":
        every = read.number("eval_steps") or read.number("save_steps")
        found["trainer.test_freq"] = _converted(read, "eval_steps", every, per_step)
    scoring = read.run.scores
    if scoring is not None:
        found["trainer.val_before_train"] = True
        if found["trainer.test_freq"] == -1:
            found["trainer.test_freq"] = steps or found["trainer.save_freq"]
        found |= {
            f"{ROLLOUT}.val_kwargs.n": scoring.k,
            f"{ROLLOUT}.val_kwargs.do_sample": scoring.temperature > 0,
            f"{ROLLOUT}.val_kwargs.temperature": scoring.temperature,
        }
        limit = read("max_completion_length", int)
        if scoring.max_new_tokens not in (None, limit):
            read.problems.append(
                f"scores.max_new_tokens={scoring.max_new_tokens}: verl validates with max_completion_length={limit}; "
                "leave it out, and use dew eval for other lengths."
            )
    elif read("num_generations_eval", int):
        found[f"{ROLLOUT}.val_kwargs.n"] = read.count("num_generations_eval")
    if read("eval_on_start"):
        found["trainer.val_before_train"] = True
    return found


def _converted(read: Reader, name: str, value: float, per_step: int) -> int:
    """Optimizer steps -> steps of verl's, rounded up aloud."""
    if value < 1:
        read.problems.append(f"{name}={value}: a share of the run is not known to verl. Write a number of steps.")
        return 1
    steps = -(-int(value) // per_step)
    if steps * per_step != value:
        read.notes.append(f"{name}={value:g} optimizer steps become {steps} steps of {per_step} each")
    return steps


def length_problems(overrides: Overrides) -> list[str]:
    longest = overrides["data.max_prompt_length"] + overrides["data.max_response_length"]
    room = overrides[f"{ACTOR}.ppo_max_token_len_per_gpu"] * overrides.get(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
    if room < longest:
        return [
            f"{ACTOR}.ppo_max_token_len_per_gpu={room}: a prompt and its answer may have {longest} tokens and must fit "
            "one micro-batch. Raise it, or shorten them."
        ]
    return []
