"""The truth that tests compare with: eager PyTorch in float64, and its own error in the dtype under test."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_flce import Options, linear_cross_entropy


@dataclass
class Case:
    """Inputs of one loss; `bias` may be None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor

    def operands(self) -> list[Tensor]:
        """The tensors that may need a gradient."""
        return [t for t in (self.x, self.weight, self.bias) if t is not None]

    def needing_grad(self) -> list[Tensor]:
        """The tensors that need one."""
        return [t for t in self.operands() if t.requires_grad]


def make_case(
    *,
    tokens: int = 37,
    hidden: int = 24,
    vocab: int = 101,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = False,
    ignored: float = 0.3,
    ignore_index: int = -100,
    scale: float = 1.0,
) -> Case:
    """Random inputs, logits of standard deviation about `scale`, and a fraction of the targets ignored."""

    def randn(*shape, factor=1.0):
        return (torch.randn(*shape, device=device, dtype=torch.float32) * factor).to(dtype).requires_grad_()

    target = torch.randint(0, vocab, (tokens,), device=device)
    target[torch.rand(tokens, device=device) < ignored] = ignore_index
    return Case(
        randn(tokens, hidden),
        randn(vocab, hidden, factor=scale * hidden**-0.5),
        randn(vocab, factor=scale) if bias else None,
        target,
    )


@dataclass
class Result:
    """A loss and the gradients of what needs one, in the order of `Case.needing_grad`."""

    loss: Tensor
    gradients: tuple[Tensor, ...]


def ours(case: Case, grad: Tensor | None = None, *, options: Options | None = None, **settings) -> Result:
    """The loss and gradients that this project computes."""
    loss = linear_cross_entropy(case.x, case.weight, case.target, linear_bias=case.bias, options=options, **settings)
    return _differentiate(loss, case.needing_grad(), grad)


def eager(case: Case, grad: Tensor | None = None, **settings) -> Result:
    """What eager PyTorch computes in the case's dtype, with logits converted to float32 as models do it."""
    logits = F.linear(case.x, case.weight, case.bias)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return _differentiate(F.cross_entropy(logits, case.target.long(), **settings), case.needing_grad(), grad)


def truth(case: Case, grad: Tensor | None = None, **settings) -> Result:
    """Eager PyTorch in float64."""

    def double(tensor):
        return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)

    exact = Case(double(case.x), double(case.weight), double(case.bias), case.target)
    return eager(exact, None if grad is None else grad.double(), **settings)


def _differentiate(loss: Tensor, inputs: list[Tensor], grad: Tensor | None) -> Result:
    if not inputs:
        return Result(loss, ())
    return Result(loss.detach(), torch.autograd.grad(loss, inputs, torch.ones_like(loss) if grad is None else grad))


def error(result: Tensor, exact: Tensor) -> float:
    """‖result − exact‖ / ‖exact‖."""
    difference = torch.linalg.vector_norm(result.double() - exact.double())
    size = torch.linalg.vector_norm(exact.double())
    return (difference / size).item() if size else difference.item()


def assert_as_exact_as_eager(case: Case, grad: Tensor | None = None, *, factor: float = 1.25, options=None, **settings):
    """Asserts that loss and gradients err at most `factor` times as much as eager PyTorch does.

    A few units of the dtype's rounding are always allowed: eager's error can be zero by luck.
    """
    result, peer, exact = (
        ours(case, grad, options=options, **settings),
        eager(case, grad, **settings),
        truth(case, grad, **settings),
    )
    row_dtype = torch.float64 if case.x.dtype == torch.float64 else torch.float32
    assert result.loss.dtype == row_dtype
    assert error(result.loss, exact.loss) <= factor * error(peer.loss, exact.loss) + 4 * torch.finfo(row_dtype).eps
    for number, (got, theirs, right) in enumerate(
        zip(result.gradients, peer.gradients, exact.gradients, strict=True), start=1
    ):
        assert got.dtype == theirs.dtype and got.shape == theirs.shape
        bound = factor * error(theirs, right) + 8 * torch.finfo(row_dtype).eps
        assert error(got, right) <= bound, f"gradient {number}: {error(got, right):.2e} > {bound:.2e}"
