"""The engine as it is on a GPU, with Triton's kernels for rows and vectors, and padded logits: in the interpreter.

What the tests of kernels one by one do not show: that the engine hands them what they take.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton", reason="needs Triton")

import random_calls
from interpreted import INTERPRETED, prepare_row_kernels
from random_calls import Call
from reference import Recorder, make_case, results_of
from test_kl_divergence import check_call
from test_pointwise import FUNCTIONS
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.device import ABSENT_DEVICE
from thunder_flce.engine import plan
from thunder_flce.engine.kernels import interface, scaling, triton_rows, triton_tokens, triton_vectors
from thunder_flce.engine.kernels.triton_rows import TritonRowKernels
from thunder_flce.engine.primitives import Region

CALLS = 24
ONE_MULTIPROCESSOR = replace(ABSENT_DEVICE, multiprocessors=1)
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """For calls on a CPU; PyTorch's matmuls run."""
    prepare_row_kernels(monkeypatch)
    # Of vectors, several blocks for each program, and for gradients several programs.
    for name, value in (("_BLOCK", 16), ("_SCALE_BLOCK", 512)):
        monkeypatch.setattr(triton_vectors, name, value)
    monkeypatch.setattr(triton_vectors, "Device", SimpleNamespace(of=lambda device: ONE_MULTIPROCESSOR))
    row_stride = interface.row_stride
    for module in (interface, plan):
        stride = lambda vocab, *, dtype, **_: row_stride(vocab, dtype=dtype, device_type="cuda")  # noqa: E731
        monkeypatch.setattr(module, "row_stride", stride)
    prepare = Region.__init__

    def prepare_for_cuda(region, *arguments, **settings):
        prepare(region, *arguments, **settings)
        region.device_type = "cuda"

    monkeypatch.setattr(Region, "__init__", prepare_for_cuda)
    monkeypatch.setattr(Region, "kernels", property(lambda region: TritonRowKernels(region.call.loss.logit_map)))
    monkeypatch.setattr(scaling, "library", lambda dtype, device: "Triton" if dtype.itemsize < 8 else "PyTorch")


def with_kernels(call: Call) -> Call:
    """Float64 itself has other kernels."""
    if call.dtype is torch.float64:
        call = replace(call, dtype=torch.float32, class_weight=call.class_weight and torch.float32)
    if call.token_weights is torch.float64:
        call = replace(call, token_weights=torch.float32)
    ignored_rows = "skip" if call.options.ignored_rows == "auto" else call.options.ignored_rows
    return replace(call, options=replace(call.options, row_kernels="auto", ignored_rows=ignored_rows))


def test_any_call():
    for number in range(CALLS):
        call = random_calls.numbered(number, "cpu", way="ranks")  # Of small vocabularies.
        with_kernels(call).run("cpu")


def test_any_divergence():
    for number in range(8):
        check_call(number, dtype=torch.float32)


def test_no_valid_target():
    """Zeros, even for an upstream gradient of NaN; and an error for what is no target."""
    case = make_case(tokens=5, ignored=1.0)
    linear_cross_entropy(case.x, case.weight, case.target).backward(torch.tensor(float("nan")))
    assert not case.x.grad.any() and not case.weight.grad.any()
    case.target[3:] = 101
    with pytest.raises(IndexError, match=r"target has 2 of 5 values .*\[0, 101\)"):
        linear_cross_entropy(case.x, case.weight, case.target, options=Options(ignored_rows="skip"))


# What starts nothing on a device, matmuls, and "fill_", which poisons memory. "to" is nothing here.
QUIET = ("empty", "empty_like", "new_empty", "split_with_sizes", "unbind", "select", "slice", "t", "view", "detach")
QUIET += ("expand", "mm", "fill_", "to")
TOKEN_LOSS = {"token_loss": FUNCTIONS["bounds"], "token_inputs": (torch.rand(5),)}
LOGGED = ("log_prob", "log_sum_exp")


@pytest.mark.parametrize(("settings", "row_kernels"), [
    ({}, ["_one_pass_kernel"]),
    ({"outputs": LOGGED, "detached": LOGGED}, ["_one_pass_kernel"]),
    (TOKEN_LOSS, ["_statistics_kernel", "_moments_kernel", "token_kernel", "_gradient_kernel"]),
], ids=["plain", "logged", "token loss"])  # fmt: skip
def test_no_operations_beside_the_kernels(settings, row_kernels, monkeypatch):
    """Each takes the host as long as the launch of a kernel. And the tests above are of these kernels."""
    launched = []

    def launch(kernel, *arguments, run=triton_rows.launch):
        launched.append(getattr(kernel, "__name__", str(kernel)))
        # The interpreter has operations of its own.
        with _disable_current_modes():
            run(kernel, *arguments)

    for module in (triton_rows, triton_tokens, triton_vectors):
        monkeypatch.setattr(module, "launch", launch)
    case = make_case(tokens=5)
    with Recorder() as recorder:
        loss = results_of(case, options=Options(ignored_rows="compute"), **settings)
    names = [function.overloadpacket.__name__ for function, _ in recorder.calls if function.namespace == "aten"]
    assert [name for name in names if name not in QUIET] == ["_assert_async"]
    (loss if isinstance(loss, torch.Tensor) else loss[0]).backward()
    assert launched == ["_prepare_kernel", *row_kernels, "_finish_kernel", "_scale_kernel", "_scale_kernel"]
