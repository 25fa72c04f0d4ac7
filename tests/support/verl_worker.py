"""Batches as verl's trainer and its workers hold them, for tests. Needs verl."""

import torch
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig

from dew.engines.verl.estimators import TOKENS_PER_ROW


def proto(rewards, mask, uids):
    return DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uids}
    )


def nested(x, lengths):
    return torch.nested.as_nested_tensor([row[:n] for row, n in zip(x, lengths, strict=True)], layout=torch.jagged)


def actor(mode="dew", **settings):
    return ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=1,
        policy_loss={"loss_mode": mode}, **settings,
    )  # fmt: skip


def worker_batch(seed=0, B=4, P=2, T=5):
    """A mini-batch as verl's workers hold it: prompts of P tokens, ragged answers, log-probabilities of both."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    lengths[0] = T
    mask = torch.arange(T) < lengths[:, None]
    old, A, H = (torch.rand(B, T, generator=g) for _ in range(3))
    old, A = -old * mask, (A - 0.5) * mask
    logp = (old + 0.4 * torch.randn(B, T, generator=g)) * mask
    return lengths, mask, old, A, H * mask, logp


def model_output(x, lengths, P=2):
    """verl's log-probabilities stand one to the left, over prompt and answer."""
    whole = [torch.cat([x.new_zeros(P - 1), row[:n], x.new_zeros(1)]) for row, n in zip(x, lengths, strict=True)]
    return torch.nested.as_nested_tensor(whole, layout=torch.jagged)


def td(rows_, lengths, mask, old, A, whole_tokens, whole_rows, dp=1, P=2, per_row=None, **more):
    part = TensorDict(
        {
            "prompts": nested(torch.ones(len(rows_), P, dtype=torch.long), [P] * len(rows_)),
            "responses": nested(torch.ones(len(rows_), mask.shape[1], dtype=torch.long), lengths[rows_]),
            "response_mask": nested(mask[rows_].long(), lengths[rows_]),
            "old_log_probs": nested(old[rows_], lengths[rows_]),
            "advantages": nested(A[rows_], lengths[rows_]),
            **{name: nested(x[rows_], lengths[rows_]) for name, x in more.items()},
        },
        batch_size=len(rows_),
    )
    part["attention_mask"] = nested(torch.ones(len(rows_), mask.shape[1] + P, dtype=torch.long), lengths[rows_] + P)
    sizes = {"dp_size": dp, "batch_num_tokens": whole_tokens, "global_batch_size": whole_rows}
    for name, value in {**sizes, TOKENS_PER_ROW: per_row or whole_tokens / whole_rows}.items():
        tu.assign_non_tensor_data(part, name, value)
    return part
