"""Compute GTPO's loss from a model's logits with only `dew.credit` and `dew.losses`, for your own trainer.

python examples/logits_to_loss.py
"""

import torch

from dew.credit import gtpo_advantages, gtpo_rewards, has_signal
from dew.losses import policy_loss

P, G, T, V = 4, 8, 32, 1000  # problems, answers per problem, tokens, vocabulary
torch.manual_seed(0)
head = torch.nn.Linear(64, V)  # in place of a language model
hidden = torch.randn(P * G, T, 64)
mask = (torch.arange(T) < torch.randint(8, T + 1, (P * G, 1))).long()  # (P·G, T): 1 on tokens of the answer


def score(temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (P·G, T) log-probabilities of the sampled tokens, and entropies, at the sampling temperature."""
    logp = (head(hidden) / temperature).log_softmax(-1)
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


# 1. Sample, and keep the sampling policy's log-probabilities and entropies.
with torch.no_grad():
    tokens = torch.distributions.Categorical(logits=head(hidden)).sample()
    old_logp, entropy = score()
correct = torch.rand(P * G) < 0.4  # your verifier's verdicts

# 2. Compute credit once, on whole groups. The answers to one prompt are a group: (P·G, ...) -> (P, G, ...).
groups = [x.view(P, G, *x.shape[1:]) for x in (correct, entropy, mask)]
rewards = gtpo_rewards(*groups)
advantages = gtpo_advantages(rewards, groups[2]) * has_signal(groups[0], groups[2].any(-1))[:, None, None]
advantages = advantages.view(P * G, T)

# 3. Update on micro-batches of rows, which may mix groups. With `count`, their losses add up to the batch's loss.
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
for rows in torch.randperm(P * G).split(8):
    logp, _ = score()
    loss, stats = policy_loss(logp[rows], old_logp[rows], advantages[rows], mask[rows], count=float(mask.sum()))
    loss.backward()
optimizer.step()
print(f"loss of the last micro-batch {loss.item():+.4f}, ratio {stats['ratio/mean']:.3f}")
