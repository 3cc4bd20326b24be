"""`thunder_flce.linear_cross_entropy` as a function: eagerly with autograd, and inside `thunder.jit`."""

import warnings

warnings.filterwarnings("ignore", message="transformer_engine module not found")

import torch
import torch.nn.functional as F

import thunder_flce

TOKENS, HIDDEN, VOCAB = 512, 256, 16384


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def fused_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return thunder_flce.linear_cross_entropy(hidden, weight, labels)


def main() -> None:
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    weight = (torch.randn(VOCAB, HIDDEN, device=device) / HIDDEN**0.5).requires_grad_()
    labels = torch.randint(VOCAB, (TOKENS,), device=device)
    labels[::4] = -100  # Ignored, as padding is.

    losses = {
        "plain PyTorch": plain_loss,
        "fused, eager": fused_loss,
        "fused, in thunder_flce.jit": thunder_flce.jit(fused_loss),
        "plain PyTorch, in thunder_flce.jit": thunder_flce.jit(plain_loss),  # Found and fused by itself.
    }
    print(f"Expect the same loss and, up to rounding, the same gradients four times ({device}):\n")
    print(f"{'':36}{'loss':>10}{'|hidden.grad|':>16}{'|weight.grad|':>16}")
    expected = None
    for name, loss_fn in losses.items():
        loss = loss_fn(hidden, weight, labels)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        print(f"{name:36}{loss.item():10.6f}{gradients[0].norm().item():16.6f}{gradients[1].norm().item():16.6f}")
        expected = expected or (loss, *gradients)
        torch.testing.assert_close((loss, *gradients), expected, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
