"""From a model's logits to the loss of an algorithm: one step of your own training loop. Needs only `pip install -e .`

python examples/logits_to_loss.py [ALGORITHM]            # gtpo (the default), grpo_s, dew, dapo, ...
"""

import sys

import torch

from dew import Rollouts, get_algorithm
from dew.algorithms import Part, give_credit

P, G, T, V = 4, 8, 32, 50  # problems, answers to each, tokens of the longest answer, vocabulary
PROMPT, EOS, TEMPERATURE = 3, 0, 1.0  # tokens of a prompt (pad shorter ones on the left), end of sequence
torch.manual_seed(0)
algorithm = get_algorithm(*sys.argv[1:] or ["gtpo"])  # with settings: get_algorithm("gtpo", alpha2=0.2)
model = torch.nn.Sequential(torch.nn.Embedding(V, 64), torch.nn.Linear(64, V))  # in place of a language model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def score(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, T) log-probabilities of the answers' tokens, and entropies in nats, both in float32 and at the
    sampling temperature. The logits at one position predict the next token."""
    logp = (model(ids)[:, PROMPT - 1 : -1].float() / TEMPERATURE).log_softmax(-1)
    return logp.gather(-1, ids[:, PROMPT:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


# 1. Sample G answers to each prompt, and keep the sampling policy's log-probabilities and entropies.
prompt = torch.arange(P).repeat(G)  # (B,) the problem of each row: rows may be in any order
ids = torch.randint(1, V, (P, PROMPT))[prompt]
with torch.no_grad():
    for _ in range(T):
        token = torch.distributions.Categorical(logits=model(ids)[:, -1] / TEMPERATURE).sample()
        ids = torch.cat([ids, token[:, None]], dim=1)
    old_logp, entropy = score(ids)
eos = (ids[:, PROMPT:] == EOS).long()
mask = eos.cumsum(-1) - eos == 0  # (B, T): True up to the first EOS token, which is included
reward = (torch.rand(P * G) < 0.4).float()  # (B,): your verifier's reward, not normalised
print(f"mean −log π {-old_logp[mask].mean():.3f}, mean entropy {entropy[mask].mean():.3f}: should be about equal")

# 2. Compute credit once, on whole groups: the rows with the same `prompt`.
rollouts = Rollouts.from_rows(prompt, mask=mask, reward=reward, entropy=entropy, logp=old_logp)
credit = give_credit(algorithm, rollouts)
advantages = rollouts.to_rows(credit.advantages)  # (P, G, T) -> (B, T), in the order of your rows
print(f"{credit.signal.float().mean():.0%} of the groups have answers to learn from")

# 3. Update on micro-batches of any rows. With `count`, their losses add up to the loss of the batch.
count = algorithm.divisor(int(mask.sum()), len(mask))
for rows in torch.randperm(P * G).split(8):
    logp, _ = score(ids[rows])
    part = Part(mask=mask[rows], old_logp=old_logp[rows])
    loss, stats = algorithm.loss(logp, part, advantages[rows], count=count)
    loss.backward()
optimizer.step()
print(f"{algorithm.name}: loss of the last micro-batch {loss.item():+.4f}, ratio {stats['ratio/mean']:.3f}")
