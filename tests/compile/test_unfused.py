"""Losses without a linear, and what a loss is made of, through our executor: the numbers of float64."""

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_flce
from front_ends import symbols
from random_calls import chooser, named
from reference import doubled

COUNT, OURS = 60, "flce_cross_entropy_fwd"
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


def drawn(number, device):
    """A call: logits, targets or their probabilities, class weights or None, and the other arguments."""
    one_of, generator = chooser(number), torch.Generator().manual_seed(number)
    dtype = one_of(*TOLERANCES)
    shape = one_of((6, 9), (9,), (3, 9, 4), (2, 9, 3, 2), (0, 9), (1, 9))
    of_rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    rand = lambda *size: torch.rand(size, generator=generator)  # noqa: E731
    logits = (rand(*shape) * 8 - 4).to(device, dtype).requires_grad_()
    target = torch.randint(9, of_rows, generator=generator)
    settings = {"reduction": one_of("mean", "sum", "none"), "label_smoothing": one_of(0.0, 0.0, 0.3)}
    if one_of(True, True, False):
        settings["ignore_index"] = one_of(-100, 4, -1)
        target = target.masked_fill(rand(*of_rows) < 0.3, settings["ignore_index"]).to(device)
    else:
        target = rand(*shape).to(device, dtype)
    weight = (rand(9) + 0.1).to(device, dtype) if one_of(False, True) else None
    return logits, target, weight, settings


def check(program, tensors):
    """Results and gradients, jitted and in float64; returns our symbol, or thunder's own, on its own or in a fusion."""
    jitted = thunder.jit(program, executors=[thunder_flce.executor, *thunder.get_default_executors()])
    found, upstream = [], None
    for function, of in ((jitted, tensors), (program, tuple(map(doubled, tensors)))):
        result = function(*of)
        upstream = torch.randn_like(result) if upstream is None else upstream
        needing = [each for each in of if each is not None and each.requires_grad]
        gradients = torch.autograd.grad(result, needing, upstream.to(result.dtype)) if needing else ()
        found.append([each.detach().double() for each in (result, *gradients)])
    tolerance = TOLERANCES[tensors[0].dtype]
    for got, right in zip(*found, strict=True):
        # The error of a sum that cancels is relative to its largest summand.
        largest = float(right.nan_to_num(0, 0, 0).abs().max()) if right.numel() else 0.0
        torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance * max(1.0, largest), equal_nan=True)
    return {bsym.sym.name for bsym in symbols(thunder.last_traces(jitted)[-1])} & {OURS, "cross_entropy"}


def test_cross_entropies(device):
    """By our symbol, but for probabilities as targets, which are operations of ours."""
    for number in range(COUNT):
        logits, target, weight, settings = drawn(number, device)
        with named((number, logits.shape, logits.dtype, target.dtype, weight is not None, settings)):
            found = check(lambda x, y, w, of=settings: F.cross_entropy(x, y, w, **of), (logits, target, weight))
            assert found == (set() if target.is_floating_point() else {OURS})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "program",
    [
        lambda x, w, y: F.log_softmax(x, 0) * 2,
        lambda x, w, y: F.log_softmax(x, -1),
        lambda x, w, y: F.linear(x, w),
        lambda x, w, y: F.linear(x, w, w[:, 0]),
        lambda x, w, y: F.nll_loss(x, y, w[:7, 0].abs() + 1, ignore_index=2),
    ],
)
def test_operations_that_are_no_loss(program, dtype, device):
    x, w = torch.randn(5, 7, dtype=dtype, device=device), torch.randn(11, 7, dtype=dtype, device=device)
    check(program, (x.requires_grad_(), w, torch.tensor([0, 2, 6, 2, 1], device=device)))
