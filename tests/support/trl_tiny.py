"""A causal language model of some 30 k random parameters and a tokenizer of single characters, in memory."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch

from dew.engines.compat import installed

runs_trls_loss = pytest.mark.skipif(
    str(installed("trl")).startswith("1.15.") and not torch.cuda.is_available(),
    reason="TRL 1.15's own loss needs a GPU",
)
LETTERS = "0123456789abcdefghij+="
ON_A_CPU = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True}
COUNTDOWN = {**ON_A_CPU, "model_name_or_path": "tiny", "task": "countdown", "algorithm": "gtpo", "logging_steps": 1,
             "num_generations": 4, "per_device_train_batch_size": 16, "problems": 64, "max_steps": 2}  # fmt: skip
"""The settings of a run with the tiny model that comes with dew."""
TIMES = ("time", "seconds", "tokens_per_second", "step_time")


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model(seed=0, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = {"vocab_size": 3 + len(LETTERS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**{**config, **settings}))


def prompts(n=16):
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{i % 10}+{i // 10}=", "answer": str(i)} for i in range(n)])


def has_a(completions, **_):
    """A trivially learnable outcome: the answer holds an "a"."""
    return [1.0 if "a" in text else 0.0 for text in completions]


def outcome(completions, **_):
    """Right in about half of the answers: those with an "a", a "b" or a "c"."""
    return [float(any(letter in text for letter in "abc")) for text in completions]


def weights(model):
    """A copy of all parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def lasting_metrics(folder):
    """The lines of metrics without what differs between two equal runs."""
    from dew.run.folder import RunFolder

    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in RunFolder(folder).metrics()]


def config(output_dir, **settings):
    from dew.engines.trl import DewConfig

    plain = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 2}
    plain |= {"learning_rate": 1e-3, "save_strategy": "no", "logging_steps": 1, "algorithm": "gtpo", **ON_A_CPU}
    return DewConfig(**{"output_dir": str(output_dir), **plain, **settings})


def trainer(output_dir, rewards=has_a, data=None, policy=None, others=None, **settings):
    from dew.engines.trl import DewTrainer

    return DewTrainer(
        policy if policy is not None else model(),
        rewards,
        config(output_dir, **settings),
        prompts() if data is None else data,
        processing_class=tokenizer(),
        **(others or {}),
    )


def scripted(prompts, trainer, seed=0, longest=6, shortest=1):
    """A rollout function that samples nothing: row i of the whole batch always gets the same completion."""
    import random

    first = trainer.accelerator.process_index * len(prompts)
    encode = trainer.processing_class
    completions = []
    for row in range(first, first + len(prompts)):
        dice = random.Random(1000 * seed + row)
        ids = [dice.randrange(3, 3 + len(LETTERS)) for _ in range(dice.randint(shortest, longest))]
        completions.append(ids if len(ids) == longest else [*ids, 1])
    return {"prompt_ids": encode(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def ready(output_dir, rewards=outcome, others=None, **settings):
    """A trainer as in the middle of a run, whose answers are scripted."""
    others = {"rollout_func": scripted} if others is None else others
    found = trainer(output_dir, rewards, others=others, **{"records_every": 0, **settings})
    found.model.train()
    found.current_gradient_accumulation_steps = 1
    return found


def rows(trainer):
    """What the data loader hands to one process: each prompt as often as it is answered."""
    size = trainer.num_generations
    every = [trainer.train_dataset[i] for i in range(trainer.args.generation_batch_size // size) for _ in range(size)]
    share = len(every) // trainer.accelerator.num_processes
    return every[trainer.accelerator.process_index * share :][:share]


def generation(trainer):
    """What the loss reads of one generation."""
    return trainer._generate_and_score_completions(rows(trainer))


def texts(trainer, batch):
    return trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def move(model, distance):
    """Add noise to the weights, so that the policy is no longer the one that sampled."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(distance * torch.randn_like(parameter))


def in_children(function, count=1):
    """Run `function(rank)` in forked processes that form one gloo group, and return their exit codes.

    Forked, not started anew: importing TRL takes longer than these runs.
    """
    import multiprocessing
    import socket

    with socket.socket() as held:  # until they have ended, so that no other process is given this port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=_child, args=(function, rank, count, port)) for rank in range(count)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    return [child.exitcode for child in children]


def _child(function, rank, count, port):
    from accelerate.state import AcceleratorState, GradientState, PartialState

    torch.set_num_threads(1)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    if count > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), ACCELERATE_USE_CPU="true")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(rank)
