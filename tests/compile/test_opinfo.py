"""The inputs that thunder and PyTorch test these operations with, through our executor."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce

TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}
# Each sample is compiled, which takes its time: of float32 every eighth, of other dtypes fewer. PyTorch's 105 samples
# are made for 3 reductions, 5 settings and up to 9 shapes, of which each comes with each setting or reduction in turn.
STEPS = {torch.float32: 8, torch.float64: 13, torch.bfloat16: 16}
OPERATIONS = {
    "cross_entropy": F.cross_entropy,
    "nll_loss": F.nll_loss,
    "log_softmax": F.log_softmax,
    "linear": F.linear,
}


class Sample(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, of: Callable[[Tensor], Tensor]) -> "Sample":
        """The same call with other tensors."""
        change = lambda value: of(value) if isinstance(value, Tensor) else value  # noqa: E731
        return Sample(tuple(map(change, self.args)), {name: change(value) for name, value in self.kwargs.items()})

    def needing_grad(self) -> list[Tensor]:
        """Its tensors that need a gradient."""
        values = (*self.args, *self.kwargs.values())
        return [value for value in values if isinstance(value, Tensor) and value.requires_grad]

    def __str__(self) -> str:
        shapes = self.map(lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}")
        return f"{shapes.args} {shapes.kwargs}"


def _double(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _differentiated(fn: Callable, sample: Sample, *, backward: bool) -> list[Tensor]:
    """The result and, for a random gradient at it, those of what needs one."""
    result = fn(*sample.args, **sample.kwargs)
    if not backward or not sample.needing_grad():
        return [result.detach()]
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = torch.autograd.grad(result, sample.needing_grad(), grad.to(result.device, result.dtype))
    return [result.detach(), *gradients]


def _assert_agrees(
    fn: Callable, sample: Sample, dtype: torch.dtype, *, exact: Callable | None = None, backward: bool = True
) -> Callable:
    """Result and gradients, jitted with our executor, against eager PyTorch in float64; returns the jitted function.

    `exact` is the same function with its own tensors in float64; None where it has none.
    """
    jitted = thunder.jit(fn, executors=[thunder_flce.executor, *thunder.get_default_executors()])
    results = _differentiated(jitted, sample, backward=backward)
    truths = _differentiated(exact or fn, sample.map(_double), backward=backward)
    for got, right in zip(results, truths, strict=True):
        tolerance = TOLERANCES[dtype]
        # The error of a sum that cancels is relative to its largest summand.
        largest = float(right.nan_to_num(0, 0, 0).abs().max()) if right.numel() else 0.0
        torch.testing.assert_close(
            got.double(),
            right,
            rtol=tolerance,
            atol=tolerance * max(1.0, largest),
            equal_nan=True,
            msg=lambda message: f"{sample}: {message}",
        )
    return jitted


def _forward_symbols(bound_symbols: Iterable) -> set[str]:
    """Our symbol, and thunder's own, on their own or in a fusion."""
    found = set()
    for bsym in bound_symbols:
        found |= {bsym.sym.name} & {"flce_cross_entropy_fwd", "cross_entropy"}
        found |= _forward_symbols(bsym.subsymbols)
    return found


def _assert_ours(jitted: Callable, logits: Tensor, target: Tensor) -> None:
    """That our symbol ran, or our operations for class probabilities; an empty batch is left to thunder."""
    found = _forward_symbols(thunder.last_traces(jitted)[-1].bound_symbols)
    assert found == ({"flce_cross_entropy_fwd"} if logits.numel() and not target.is_floating_point() else set())


def _thunder_samples(name: str, device: str, dtype: torch.dtype) -> Iterable[Sample]:
    # Some ways to install thunder leave out its tests.
    opinfos = pytest.importorskip("thunder.tests.opinfos")

    (info,) = (info for info in opinfos.opinfos if info.name == name)
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        yield Sample(sample.args, sample.kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_samples_of_thunder(name, dtype, device):
    count = 0
    # The others have few samples.
    step = STEPS[dtype] if name == "cross_entropy" else 2
    for sample in islice(_thunder_samples(name, device, dtype), None, None, step):
        # thunder 0.2.6 has no backward for a loss of nothing.
        backward = sample.args[0].numel() > 0
        if name == "nll_loss" and dtype is torch.float32:
            # PyTorch refuses the backward that thunder has of sums: it gives their divisor as float64.
            backward &= sample.kwargs["reduction"] == "mean"
        jitted = _assert_agrees(OPERATIONS[name], sample, dtype, backward=backward)
        if name == "cross_entropy":
            _assert_ours(jitted, *sample.args)
        count += 1
    assert count >= 2


def _module_samples(device: str, dtype: torch.dtype) -> Iterable[tuple[dict[str, Any], Sample]]:
    pytest.importorskip("expecttest", reason="PyTorch's own tests need it")
    from torch.testing._internal.common_modules import module_inputs_torch_nn_CrossEntropyLoss

    for given in module_inputs_torch_nn_CrossEntropyLoss(None, device, dtype, requires_grad=True, training=True):
        settings = given.constructor_input.kwargs
        # Weights of any sign may add up to nothing, which no two ways of adding agree on.
        settings = {name: value.abs() + 0.1 if name == "weight" else value for name, value in settings.items()}
        # Probabilities that need no gradient of their own, as a softmax that is no leaf has none.
        args = (given.forward_input.args[0], given.forward_input.args[1].detach())
        yield settings, Sample(args, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_module_inputs_of_torch(dtype, device):
    count = 0
    for settings, sample in islice(_module_samples(device, dtype), None, None, STEPS[dtype]):
        exact = torch.nn.CrossEntropyLoss(**Sample((), settings).map(_double).kwargs)
        jitted = _assert_agrees(torch.nn.CrossEntropyLoss(**settings), sample, dtype, exact=exact)
        _assert_ours(jitted, *sample.args)
        count += 1
    assert count >= 100 // STEPS[dtype]
