"""Token losses as Triton kernels, against PyTorch's operations, by which every device can compute them.

On a GPU and, in a process of its own, in Triton's interpreter.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from interpreted import DEVICE, INTERPRETED, needs_compiler, on_device, prepare_row_kernels, run_in_the_interpreter
from test_token_loss import FUNCTIONS, TWO, clipped
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine import row_loss
from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.engine.row_loss import RowResults
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import Loss
from thunder_flce.token_losses import token_loss_of

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
    found = RowResults(RowStatistics(row_max, log_sum), z_y, {"expected": expected})
    value, coefficients = row_loss.token_loss(ops, found, inputs, s)
    got, others = kernel(found.statistics, z_y, expected if "expected" in loss.moments else None, s, inputs)
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
    run(RowStatistics(vector, vector), vector, vector, vector, [vector] * 3)
    block = triton_rows._Block(math.inf, triton_tokens._BLOCK, triton_tokens._THREADS)
    compiler = Compiler("bf16", SimpleNamespace(scale=1.0, softcap=None))
    assert ".local" not in compiler.ptx(given[0], block)


@needs_compiler
def test_what_there_is_no_expression_for():
    inputs = [torch.empty(4)] * 3
    assert _kernel_for(FUNCTIONS["clipped ratio"], inputs) is not None
    assert _kernel_for(lambda p, e, *_: p * torch.sin(e), inputs) is None
    assert _kernel_for(lambda p, e, *_: p ** TWO.item() + torch.floor(e), inputs) is None


@needs_compiler
def test_in_the_interpreter():
    """The tests above without a GPU."""
    run_in_the_interpreter(__file__)
