"""`thunder_flce.linear_cross_entropy` as a function: the same loss and gradients as PyTorch's, in less memory.

python examples/functional.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce
from gain import print_gain

TOKENS, HIDDEN, VOCAB = 1024, 128, 32768


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def fused_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return thunder_flce.linear_cross_entropy(hidden, weight, labels)


def main() -> None:
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    weight = (torch.randn(VOCAB, HIDDEN, device=device) / HIDDEN**0.5).requires_grad_()
    labels = torch.randint(VOCAB, (TOKENS,), device=device)
    labels[::4] = -100  # Ignored, like padding

    def step(loss_of):
        loss = loss_of(hidden, weight, labels)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    losses = {
        "plain PyTorch": plain_loss,
        "linear_cross_entropy": fused_loss,
        "plain PyTorch, in thunder_flce.jit": thunder_flce.jit(plain_loss),  # finds and fuses the loss automatically
    }
    expected = step(plain_loss)
    for loss_of in losses.values():
        torch.testing.assert_close(step(loss_of), expected, rtol=1e-4, atol=1e-6)
    print(f"The same loss, {expected[0].item():.4f}, and gradients from all of these, up to rounding.")
    steps = {name: lambda loss_of=loss_of: step(loss_of) for name, loss_of in losses.items()}
    print_gain(f"{TOKENS} × {VOCAB} × {HIDDEN}, {device}", steps, device)


if __name__ == "__main__":
    main()
