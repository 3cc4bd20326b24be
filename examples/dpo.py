"""DPO on a tiny language model, with the loss in plain PyTorch and fused: the same losses, no logits when fused.

A preference loss sums the log-probabilities of a sequence inside a log-sigmoid, so that no token's gradient is known
before all sequences are done. If the head is trained, the gradients of the log-probabilities wait for the backward. If
the head is frozen, as in LoRA training with adapters in the layers only, they need not wait: the loss runs two matmuls
instead of three, and keeps no logits.

    python examples/dpo.py
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_flce
from gain import print_gain

VOCAB, HIDDEN = 8192, 64
PAIRS, LENGTH = 32, 12
STEPS = 8
BETA = 0.1


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


def sequence_log_probabilities(hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Returns the sums (B,) of the log-probabilities of the next tokens where the mask is 1."""
    log_probs = F.log_softmax(F.linear(hidden, weight), -1).gather(-1, tokens[..., None]).squeeze(-1)
    return (log_probs * mask).sum(-1)


def dpo_loss(hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss (arXiv:2305.18290) and the reward margins; the first half of the sequences is preferred."""
    chosen, rejected = (sequence_log_probabilities(hidden, weight, tokens, mask) - reference).chunk(2)
    margins = BETA * (chosen - rejected)
    return -F.logsigmoid(margins).mean(), margins.detach()


def preferences() -> tuple[Tensor, Tensor]:
    """Returns tokens (2 PAIRS, 1 + LENGTH), preferred completions of random prompts first, and their masks."""
    prompts = torch.randint(VOCAB, (PAIRS, 1))
    chosen, rejected = torch.randint(VOCAB // 2, (PAIRS, LENGTH)), torch.randint(VOCAB, (PAIRS, LENGTH))
    tokens = torch.cat([torch.cat([prompts, chosen], 1), torch.cat([prompts, rejected], 1)])
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (2 * PAIRS, 1))
    return tokens, (torch.arange(LENGTH) < lengths).float()


def train(loss_fn: Callable[..., tuple[Tensor, Tensor]], *, frozen_head: bool) -> list[tuple[float, float]]:
    """Trains a policy; returns the loss and the mean margin of each step."""
    torch.manual_seed(0)
    policy = Policy()
    reference = copy.deepcopy(policy)
    policy.head.requires_grad_(not frozen_head)
    optimizer = torch.optim.Adam([each for each in policy.parameters() if each.requires_grad], lr=0.01)
    found = []
    for _ in range(STEPS):
        tokens, mask = preferences()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        with torch.no_grad():
            of_reference = sequence_log_probabilities(reference(inputs), reference.head.weight, labels, mask)
        loss, margins = loss_fn(policy(inputs), policy.head.weight, labels, mask, of_reference)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), margins.mean().item()))
    return found


def main() -> None:
    for head in ("trained", "frozen"):
        fused_loss = thunder_flce.jit(dpo_loss, strict=True)
        plain, fused = (train(loss_fn, frozen_head=head == "frozen") for loss_fn in (dpo_loss, fused_loss))
        print(f"{head + ' head':14}{'plain PyTorch':>20}{'thunder_flce.jit':>20}")
        print(f"{'step':14}" + f"{'loss':>10}{'margin':>10}" * 2)
        for number, (left, right) in enumerate(zip(plain, fused, strict=True)):
            print(f"{number:<14}" + "".join(f"{value:10.4f}" for value in (*left, *right)))
        torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-3, atol=1e-4)
        (decision,) = thunder_flce.explain(fused_loss)[-1].decisions
        print(f"The {decision.kind} was {str(decision).partition(': ')[2]}.")

        hidden = torch.randn(2 * PAIRS, LENGTH, HIDDEN, requires_grad=True)
        weight = torch.randn(VOCAB, HIDDEN, requires_grad=head == "trained")
        trained = [tensor for tensor in (hidden, weight) if tensor.requires_grad]
        batch = torch.randint(VOCAB, hidden.shape[:2]), torch.ones(hidden.shape[:2]), torch.zeros(2 * PAIRS)
        steps = {
            name: partial(gradients, partial(loss_fn, hidden, weight, *batch), trained)
            for name, loss_fn in {"plain PyTorch": dpo_loss, "thunder_flce.jit": fused_loss}.items()
        }
        print_gain(f"the loss alone, {batch[0].numel()} tokens", steps, "cpu")
        print()


def gradients(loss_fn: Callable[[], tuple[Tensor, Tensor]], trained: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_fn()[0], trained)


if __name__ == "__main__":
    main()
