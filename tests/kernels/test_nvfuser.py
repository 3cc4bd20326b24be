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
C = 6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype, ignore_index, reduction):
    vocab = 11
    logits, target = (3 * torch.randn(C, vocab)).to(dtype), torch.tensor([0, 3, 10, 7, 3, 1])
    target[1] = ignore_index
    grad = torch.randn(C if reduction == "none" else ()).to(dtype)
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact, target, ignore_index=ignore_index, reduction=reduction)
    loss.backward(grad.double())

    value, *saved = _run(nvfuser_impl.forward_fusion, dtype, ignore_index, reduction, logits, target)
    (dlogits,) = _run(nvfuser_impl.backward_fusion, dtype, ignore_index, reduction, grad, logits, target, *saved)
    row_max, row_log_sum, valid_count = saved
    eps = max(torch.finfo(dtype).eps, 1e-6)
    assert value.dtype == dlogits.dtype == dtype
    assert error(value, loss) < eps and error(dlogits, exact.grad) < 2 * eps
    assert error(row_max + row_log_sum, exact.logsumexp(1)) < 1e-6
    assert valid_count == (target != ignore_index).sum()


@pytest.mark.parametrize("wrong", [-1, 11, 2**40])
def test_a_target_out_of_range_is_nan(wrong):
    logits, target = torch.randn(C, 11), torch.tensor([0, wrong, 10, -100, 3, 1])
    value, *saved = _run(nvfuser_impl.forward_fusion, torch.float32, -100, "none", logits, target)
    (dlogits,) = _run(nvfuser_impl.backward_fusion, torch.float32, -100, "none", torch.ones(C), logits, target, *saved)
    assert value.isnan().tolist() == dlogits.isnan().all(1).tolist() == [False, True, False, False, False, False]


def _run(translation, dtype, ignore_index, reduction, *tensors):
    types = {**DTYPES, torch.int64: DataType.Int}
    rows, vocab = next(tensor.shape for tensor in tensors if tensor.ndim == 2)
    settings = {"rows": rows, "vocab": vocab, "ignore_index": ignore_index, "reduction": reduction}
    with FusionDefinition() as fd:
        sizes = [{"shape": list(t.shape), "contiguity": [True] * t.ndim} for t in tensors]
        inputs = [fd.define_tensor(**of, dtype=types[t.dtype]) for of, t in zip(sizes, tensors, strict=True)]
        outputs = translation(fd, *inputs, dtype=DTYPES[dtype], **settings)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            fd.add_output(output)
    return fd.execute(tensors)


def test_the_interpreter_has_the_names_that_nvfuser_has():
    import nvfuser_direct

    with nvfuser_direct.FusionDefinition() as fd:
        assert all(hasattr(fd.ops, name) for name in fusion_interpreter.OPERATIONS)
