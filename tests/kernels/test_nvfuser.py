"""nvFuser's definitions of the unfused cross-entropy against float64; those of the row kernels: test_row_kernels.

`fusion_interpreter` runs them with PyTorch's operations.
"""

import pytest
import torch
import torch.nn.functional as F

from reference import error

pytest.importorskip("nvfuser_direct", reason="needs nvFuser's Python package")

import fusion_interpreter
from fusion_interpreter import DataType, FusionDefinition
from thunder_flce.graph.unfused_cross_entropy import nvfuser_impl

DTYPES = {torch.float32: DataType.Float, torch.bfloat16: DataType.BFloat16, torch.float16: DataType.Half}
ROWS, VOCAB = 6, 11


def _run(fusion, *tensors, dtype, **settings):
    types = {**DTYPES, torch.int64: DataType.Int}
    with FusionDefinition() as fd:
        inputs = [
            fd.define_tensor(shape=[*tensor.shape], contiguity=[True] * tensor.ndim, dtype=types[tensor.dtype])
            for tensor in tensors
        ]
        outputs = fusion(fd, *inputs, rows=ROWS, vocab=VOCAB, dtype=DTYPES[dtype], **settings)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            fd.add_output(output)
    return fd.execute(tensors)


def _forward_and_backward(logits, target, grad, **settings):
    """The loss, the gradient of the logits, and what the forward saves."""
    settings["dtype"] = logits.dtype
    loss, *saved = _run(nvfuser_impl.forward_fusion, logits, target, **settings)
    (dlogits,) = _run(nvfuser_impl.backward_fusion, grad, logits, target, *saved, **settings)
    return loss, dlogits, saved


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("dtype", "ignore_index"), [*zip(DTYPES, (-100, 3, -100), strict=True)], ids=str)
def test_cross_entropy(dtype, ignore_index, reduction):
    logits, target = (3 * torch.randn(ROWS, VOCAB)).to(dtype), torch.tensor([0, 3, 10, 7, 3, 1])
    target[1] = ignore_index
    grad = torch.randn(ROWS if reduction == "none" else ()).to(dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, ignore_index=ignore_index, reduction=reduction)
    expected.backward(grad.double())

    settings = {"reduction": reduction, "ignore_index": ignore_index}
    loss, dlogits, (row_max, row_log_sum, valid_count) = _forward_and_backward(logits, target, grad, **settings)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    assert loss.dtype == dlogits.dtype == dtype
    assert error(loss, expected) < eps and error(dlogits, exact.grad) < 2 * eps
    assert error(row_max + row_log_sum, exact.logsumexp(1)) < 1e-6
    assert valid_count == (target != ignore_index).sum()


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**40])
def test_a_target_out_of_range_is_nan(wrong):
    logits, target = torch.randn(ROWS, VOCAB), torch.tensor([0, wrong, 10, -100, 3, 1])
    settings = {"reduction": "none", "ignore_index": -100}
    loss, dlogits, _ = _forward_and_backward(logits, target, torch.ones(ROWS), **settings)
    assert loss.isnan().tolist() == dlogits.isnan().all(1).tolist() == [False, True, False, False, False, False]


def test_the_interpreter_has_the_names_that_nvfuser_has():
    import nvfuser_direct

    with nvfuser_direct.FusionDefinition() as fd:
        assert all(hasattr(fd.ops, name) for name in fusion_interpreter.OPERATIONS)
