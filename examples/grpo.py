"""GRPO on a tiny language model, with the loss in plain PyTorch and fused: the same losses, no logits when fused.

The loss is written out, as in trainers. `thunder_flce.jit` finds the linear, the log-probabilities and the pointwise
operations on them, and computes the gradients for one chunk of logits at a time.

    python examples/grpo.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_flce
from gain import print_gain

VOCAB, HIDDEN = 8192, 64
PROMPTS, GROUP, LENGTH = 4, 16, 12
STEPS, UPDATES = 6, 2


class Policy(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layer = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns hidden states (B, T, H) of tokens (B, T)."""
        return self.layer(self.embedding(tokens))[0]


def log_probabilities(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Returns log-probabilities (B, T) of the next tokens."""
    return F.log_softmax(F.linear(hidden, weight), -1).gather(-1, tokens[..., None]).squeeze(-1)


def grpo_loss(
    hidden: Tensor, weight: Tensor, tokens: Tensor, old: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the loss (arXiv:2402.03300), and the fraction of tokens whose ratio is clipped."""
    log_probs = log_probabilities(hidden, weight, tokens)
    ratio = torch.exp(log_probs - old)
    gains = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    loss = -((gains * mask).sum(-1) / mask.sum(-1)).mean()
    is_clipped = (ratio.detach() - 1).abs() > 0.2
    return loss, (is_clipped * mask).sum() / mask.sum()


@torch.no_grad()
def completions(policy: Policy) -> Tensor:
    """Returns tokens (PROMPTS * GROUP, 1 + LENGTH): prompts of one token, each with a group of sampled completions."""
    tokens = torch.arange(PROMPTS).repeat_interleave(GROUP)[:, None]
    for _ in range(LENGTH):
        logits = policy.head(policy(tokens)[:, -1])
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return tokens


def rewards(tokens: Tensor) -> Tensor:
    """Returns the fraction of each completion's tokens that are in the first eighth of the vocabulary."""
    return (tokens[:, 1:] < VOCAB // 8).float().mean(1)


def train(loss_fn: Callable[..., tuple[Tensor, Tensor]]) -> list[tuple[float, float, float]]:
    """Trains a policy; returns the mean reward, the loss and the clipped fraction of each update."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    found = []
    for _ in range(STEPS):
        tokens = completions(policy)
        reward = rewards(tokens)
        groups = reward.view(PROMPTS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        # Completions end after their first token of the last fortieth of the vocabulary.
        mask = (tokens[:, 1:-1] < VOCAB - VOCAB // 40).float().cumprod(1)
        mask = torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
        with torch.no_grad():
            old = log_probabilities(policy(tokens[:, :-1]), policy.head.weight, tokens[:, 1:])
        for _ in range(UPDATES):
            hidden = policy(tokens[:, :-1])
            loss, clipped = loss_fn(hidden, policy.head.weight, tokens[:, 1:], old, advantages, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append((reward.mean().item(), loss.item(), clipped.item()))
    return found


def main() -> None:
    fused_loss = thunder_flce.jit(grpo_loss, strict=True)
    plain, fused = train(grpo_loss), train(fused_loss)
    print(f"{'':8}{'plain PyTorch':>30}{'thunder_flce.jit':>30}")
    print(f"{'update':8}" + f"{'reward':>10}{'loss':>10}{'clipped':>10}" * 2)
    for number, (left, right) in enumerate(zip(plain, fused, strict=True)):
        print(f"{number:<8}" + "".join(f"{value:10.4f}" for value in (*left, *right)))
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-3, atol=1e-4)
    (decision,) = thunder_flce.explain(fused_loss)[-1].decisions
    print(f"\nThe {decision.kind} was {str(decision).partition(': ')[2]}.")

    shape = PROMPTS * GROUP, LENGTH
    hidden, weight = (torch.randn(*size, HIDDEN, requires_grad=True) for size in (shape, (VOCAB,)))
    batch = torch.randint(VOCAB, shape), torch.full(shape, -9.0), torch.randn(shape[0]), torch.ones(shape)
    steps = {
        name: lambda loss_fn=loss_fn: torch.autograd.grad(loss_fn(hidden, weight, *batch)[0], (hidden, weight))
        for name, loss_fn in {"plain PyTorch": grpo_loss, "thunder_flce.jit": fused_loss}.items()
    }
    print_gain(f"the loss alone, {batch[0].numel()} tokens", steps, "cpu")


if __name__ == "__main__":
    main()
