"""Token losses as Triton kernels, against PyTorch's operations, by which every device can compute them.

On a GPU and, in a process of its own, in Triton's interpreter.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from interpreted import DEVICE, INTERPRETED, on_device, prepare_row_kernels
from test_pointwise import FUNCTIONS
from thunder_flce.engine import row_loss
from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.engine.row_loss import RowResults
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import LogitMap, Loss
from thunder_flce.token_losses import token_loss_of

ROWS, V = 700, 50
LEFT_TO_PYTORCH = (
    "softplus", "nan_to_num", "pow", "where", "masks", "rare", "lerp", "activations", "integers", "logic", "casts",
    "numbers", "sums of masks", "dtypes",
)  # fmt: skip
"""Sums of masks are masks again; of other dtypes, and of powers such as x⁰, the kernels know nothing."""
IN_KERNELS = {
    "sigmoids": lambda p, e, a, *_: F.logsigmoid(p - a) * torch.sigmoid(e) + F.relu(p + 2) + torch.square(e),
    "fractions": lambda p, e, a, *_: 1 / p + a / (e + 1) - p.reciprocal() * torch.rsqrt(e + 2),
    "choices": lambda p, e, a, b, *_: torch.where((p < a) & ~(e >= b) | (p != p), p * e, e).masked_fill(p > -1, 0.5),
    "floats": lambda p, e, a, *_: (p > a).float() * p + (e.to(torch.float64) > 3).double() * e * torch.sign(a),
    "inputs": lambda p, e, a, o, m, k: torch.where(m, p * a, e) * (k + 2) + p * m + torch.max(a, 2 - p) * o,
    "methods": lambda p, e, a, *_: p.where(p < a, e * 2) + (p > a).type_as(p) * e,
}


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    prepare_row_kernels(monkeypatch)


def _inputs():
    """Two numbers of each token, a mask and a positive integer."""
    generator = torch.Generator().manual_seed(3)
    first, second, third = (torch.randn(ROWS, generator=generator) - 1 for _ in range(3))
    inputs = [first, second, third > -1, 1 + torch.arange(ROWS) % 5]
    return [each.to(DEVICE) for each in inputs], generator


@on_device
@pytest.mark.parametrize("name", [*FUNCTIONS, *IN_KERNELS])
def test_functions(name):
    from thunder_flce.engine.kernels.triton_tokens import kernel_for

    function, (inputs, generator) = (FUNCTIONS | IN_KERNELS)[name], _inputs()
    row_max, log_sum, expected, s = torch.rand(4, ROWS, generator=generator).mul(3).to(DEVICE)
    s[::5] = 0
    z_y, expected = row_max - 4 * torch.rand(ROWS, generator=generator).to(DEVICE), -expected
    kernel = kernel_for(token_loss_of(function, inputs), tuple(each.dtype for each in inputs), LogitMap())
    if name in LEFT_TO_PYTORCH:
        assert kernel is None
        return
    loss = Loss(token_loss=token_loss_of(function, inputs))
    call = Call(tensors={"input": torch.empty(ROWS, 0)}, loss=loss)
    ops = SimpleNamespace(
        call=SimpleNamespace(loss=loss, whole_vocab=V, row_dtype=call.row_dtype), logit_map=lambda z: z
    )
    sums = {"expected": expected, "shifted_sum": V * (expected - 1)}
    found = RowResults(RowStatistics(row_max, log_sum), z_y, {name: sums[name] for name in loss.moments})
    value, coefficients = row_loss.token_loss(ops, found, inputs, s)
    got, others = kernel(found.statistics, z_y, found.moments, s, inputs, columns=V)
    torch.testing.assert_close(got, value, rtol=2e-5, atol=2e-5)
    for ours, right in zip(others, coefficients, strict=True):
        assert (ours is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=2e-5)
    assert not others.one_hot[::5].any()
