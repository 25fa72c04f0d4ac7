"""Learned credit on made-up hidden states: predictions along an answer, and the weights of its tokens.

    python examples/learned_credit.py

Answers have 8 tokens. A slip at one of them, in half of the answers, makes the answer wrong and shows in the hidden
states after it, under noise. A head learns to predict the outcome, generation by generation, and tokens that move its
prediction towards the outcome get more of the answer's credit. Prints both for a correct and a wrong answer: the
predicted chance drops after the slip, and the slip gets most of the blame. To train a model with learned weights:

    dew train tiny/countdown --algorithm dapo --algorithm_kwargs '{"token_weight": "learned"}'
"""

import torch

from dew import Rollouts, get_algorithm
from dew.credit.learned import OutcomeHead

PROBLEMS, GROUP, TOKENS, WIDTH = 16, 8, 8, 32


def generation(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states before each token (P·G, T, D), rewards (P·G,), and where the slip is (T: nowhere)."""
    random = torch.Generator().manual_seed(seed)
    slip = torch.randint(0, 2 * TOKENS, (PROBLEMS * GROUP,), generator=random).clamp_max(TOKENS)
    hidden = torch.randn(PROBLEMS * GROUP, TOKENS, WIDTH, generator=random)
    hidden[..., 0] += 4.0 * (torch.arange(TOKENS) > slip[:, None])
    return hidden, (slip == TOKENS).float(), slip


def main() -> None:
    head, algorithm = OutcomeHead(WIDTH), get_algorithm("dapo", token_weight="learned")
    for seed in range(60):
        hidden, reward, slip = generation(seed)
        value = head.predict(hidden[None])[0]  # first predict, then learn from the same answers
        grouped = reward.view(PROBLEMS, GROUP)
        side = (grouped - grouped.mean(1, keepdim=True)).sign().flatten()
        head.fit(hidden[None], side[None])

    shape = (PROBLEMS, GROUP, TOKENS)
    rollouts = Rollouts(mask=torch.ones(shape).bool(), reward=grouped, value=value.view(shape))
    advantages = algorithm.advantages(rollouts).flatten(0, 1)
    for row in (int((slip == TOKENS).nonzero()[0]), int((slip == 3).nonzero()[0])):
        words = "correct" if reward[row] else f"wrong, slip at token {int(slip[row]) + 1}"
        print(f"{words}\n  chance of success {' '.join(f'{v:6.2f}' for v in value[row])}")
        print(f"  advantage         {' '.join(f'{a:+6.2f}' for a in advantages[row])}")


if __name__ == "__main__":
    main()
