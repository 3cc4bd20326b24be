"""Token losses as Triton kernels, against PyTorch's operations, by which every device can compute them.

On a GPU and, in a process of its own, in Triton's interpreter.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from interpreted import DEVICE, INTERPRETED, needs_compiler, on_device, prepare_row_kernels
from test_token_loss import TWO, clipped
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine import row_loss
from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.engine.row_loss import RowResults
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import Loss
from thunder_flce.token_losses import token_loss_of


def without_gradients(tensor):
    with torch.no_grad():
        return tensor * 2


def with_z_loss(log_prob, entropy, a, *_, log_sum_exp):
    return -log_prob * a + 0.1 * log_sum_exp**2 - entropy * log_sum_exp.tanh()


def smoothed(log_prob, entropy, a, *_, log_sum_exp, mean_logit):
    return -log_prob * a + a * (log_sum_exp - mean_logit) + entropy * mean_logit.tanh()


FUNCTIONS = {
    "label smoothing": smoothed,
    "mean logit alone": lambda p, e, *_, mean_logit: mean_logit**2,
    "clipped ratio": clipped,
    "z-loss": with_z_loss,
    "z-loss alone": lambda p, e, *_, log_sum_exp: log_sum_exp**2,
    "focal": lambda p, e, *_: -((1 - p.exp()) ** 2) * p,
    "fractions": lambda p, e, a, *_: 1 / p + a / (e + 1) - p.reciprocal() * torch.rsqrt(e + 2),
    "unary": lambda p, e, *_: p.expm1() + torch.log1p(e) * e.sqrt() + p.abs() * p.tanh() - (e + 3).log(),
    "sigmoids": lambda p, e, a, *_: F.logsigmoid(p - a) * torch.sigmoid(e) + F.relu(p + 2) + torch.square(e),
    "ties": lambda p, e, *_: torch.maximum(p, p.detach()) * 3 + torch.minimum(2 * e, e + e) + p.clamp(min=-3),
    "bounds": lambda p, e, a, *_: p.clamp(max=-1).clip(-9, -2) * a - e.clamp_min(0.5) + p.clamp_max(-0.5),
    "choices": lambda p, e, a, b, *_: torch.where((p < a) & ~(e >= b) | (p != p), p * e, e).masked_fill(p > -1, 0.5),
    "casts": lambda p, e, a, *_: (p > a).float() * p + (e.to(torch.float64) > 3).double() * e * torch.sign(a),
    "larger": lambda p, e, a, *_: torch.maximum(p, a) * e + torch.max(a, 2 - p),
    "without gradients": lambda p, e, *_: p * without_gradients(p.exp() * e),
    "constant": lambda p, e, a, *_: p * 0 + a,
    "identity": lambda p, e, *_: p,
    "infinities": lambda p, e, a, *_: p.masked_fill(p > a - 3, -math.inf).exp() + e.clamp(0.1, math.inf) * p,
    "methods": lambda p, e, a, *_: p.where(p < a, e * 2) + (p > a).type_as(p) * e,
    "dtypes": lambda p, e, a, *_: (p < a).to(e.dtype) * p + e.type_as(p < a).to(p) + (e > a).type_as(p),
    "sums of masks": lambda p, e, a, *_: (
        p * (e > 1) + p * (a > -1) + e * ((p > -2) + (a > 0)) + p * ((e > 1) * (a > -1))
    ),
    "choices of masks": lambda p, e, a, *_: p * torch.where(a > 0, e > 1, True) + p * torch.maximum(e > 1, a > -1),
    "captured": lambda p, e, *_: torch.minimum(p * TWO, -TWO) + torch.max(TWO, e) + p**TWO + p * (torch.tensor(3) - e),
    "captured conditions": lambda p, e, *_: torch.where(TWO > 1, p, e) * e.masked_fill(TWO > 1, 0.5) * p**TWO,
    "numbers": lambda p, e, *_: (p - p.detach()) ** 0 + p * np.float64(2) - e * np.float32(0.5),
}

ROWS, V = 700, 50
LEFT_TO_PYTORCH = ("sums of masks", "dtypes", "captured", "captured conditions", "numbers")
"""Sums of masks are masks again; of other dtypes, and of powers such as x⁰, the kernels know nothing."""


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    prepare_row_kernels(monkeypatch)


def _kernel_for(function, inputs, *logit_map):
    from thunder_flce.engine.kernels.triton_tokens import kernel_for
    from thunder_flce.operation.loss import LogitMap

    return kernel_for(token_loss_of(function, inputs), tuple(each.dtype for each in inputs), LogitMap(*logit_map))


def _inputs():
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(ROWS, generator=generator) - 1 for _ in range(3)]
    return [each.to(DEVICE) for each in inputs], generator


@on_device
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    inputs, generator = _inputs()
    _check(name, FUNCTIONS[name], inputs, generator)


@on_device
def test_masks_and_integers():
    inputs, generator = _inputs()
    inputs[1:] = [inputs[1] > -1, (inputs[2] * 3).long()]
    _check("", lambda p, e, old, mask, count: torch.where(mask, p * old, e) * (count + 2) + p * mask, inputs, generator)


def _check(name, function, inputs, generator):
    row_max, log_sum, expected, s = torch.rand(4, ROWS, generator=generator).mul(3).to(DEVICE)
    s[::5] = 0
    z_y, expected = row_max - 4 * torch.rand(ROWS, generator=generator).to(DEVICE), -expected
    kernel = _kernel_for(function, inputs)
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


@on_device
def test_a_call(monkeypatch):
    """Of several chunks, skipping rows; the kernel takes part."""
    from thunder_flce.engine.kernels import triton_tokens

    if INTERPRETED:
        pytest.skip("`test_engine_interpreted` has the engine")
    launches, launch = [], triton_tokens.launch
    monkeypatch.setattr(triton_tokens, "launch", lambda *given: (launches.append(given), launch(*given)))
    inputs, generator = _inputs()
    x, weight = torch.randn(ROWS, 16, generator=generator), torch.randn(V, 16, generator=generator)
    target = torch.randint(V, (ROWS,), generator=generator).masked_fill(torch.arange(ROWS) % 7 == 0, -100)
    found = []
    for row_kernels in ("auto", "torch"):
        operands = [each.to(DEVICE).requires_grad_() for each in (x, weight)]
        options = Options(chunk_rows=256, ignored_rows="skip", row_kernels=row_kernels)
        loss = linear_cross_entropy(
            *operands, target.to(DEVICE), token_loss=clipped, token_inputs=inputs, options=options
        )
        found.append([loss, *torch.autograd.grad(loss, operands)])
    assert len(launches) == 3
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("name", ["clipped ratio", "sigmoids", "infinities"])
def test_compiled(name, monkeypatch):
    """For a GPU that is not there."""
    from test_triton_rows import Compiler
    from thunder_flce.engine.kernels import triton_rows, triton_tokens

    given = []
    monkeypatch.setattr(triton_tokens, "launch", lambda kernel, *others: given.append(kernel))
    vector = torch.empty(4)
    run = triton_tokens.kernel_for.__wrapped__(
        token_loss_of(FUNCTIONS[name], [vector] * 3), (torch.float32,) * 3, SimpleNamespace(scale=1.0, softcap=None)
    )
    moments = {"expected": vector, "shifted_sum": vector}
    run(RowStatistics(vector, vector), vector, moments, vector, [vector] * 3, columns=V)
    block = triton_rows._Block(math.inf, triton_tokens._BLOCK, triton_tokens._THREADS)
    compiler = Compiler("bf16", SimpleNamespace(scale=1.0, softcap=None))
    assert ".local" not in compiler.ptx(given[0], block)


@needs_compiler
def test_what_there_is_no_expression_for():
    inputs = [torch.empty(4)] * 3
    assert _kernel_for(FUNCTIONS["clipped ratio"], inputs) is not None
    assert _kernel_for(lambda p, e, *_: p * torch.sin(e), inputs) is None
    assert _kernel_for(lambda p, e, *_: p ** TWO.item() + torch.floor(e), inputs) is None
