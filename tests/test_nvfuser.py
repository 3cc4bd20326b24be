"""What only nvFuser's definitions have, and those of the unfused cross-entropy against float64.

`fusion_interpreter` runs them with PyTorch's operations. Results of the row kernels: test_row_kernels.
"""

import pytest
import torch
import torch.nn.functional as F

from reference import error
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.row_kernels.interface import LogitMap, RowWork

pytest.importorskip("nvfuser_direct", reason="needs nvFuser's Python package")

import fusion_interpreter
from fusion_interpreter import DataType, FusionDefinition
from thunder_flce.execution.row_kernels import nvfuser_rows
from thunder_flce.graph.unfused_cross_entropy import nvfuser_impl

DTYPES = {torch.float32: DataType.Float, torch.bfloat16: DataType.BFloat16, torch.float16: DataType.Half}
C = 6


@pytest.mark.parametrize(
    ("row_stride", "parts"),
    [(64, 1), (16384, 1), (32000, 2), (50304, 4), (128256, 8), (151936, 16), (256000, 16), (300032, 32), (128264, 1)],
)
def test_parts_of_a_row(row_stride, parts):
    """As few as fit in registers, each of a multiple of 16 bytes; the whole row where there are no such ones."""
    assert nvfuser_rows.parts_of(row_stride) == parts
    assert parts == 1 or (row_stride % (8 * parts) == 0 and row_stride // parts <= 16384)


@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(scale=-0.5), LogitMap(scale=0.0), LogitMap(softcap=3.0)])
def test_padding_is_masked_only_where_a_fill_does_not_do(logit_map):
    (text, without_padding) = (
        str(nvfuser_rows.fusion(nvfuser_rows.part_statistics, logit_map, torch.bfloat16, -1, VocabLayout.aligned(v)))
        for v in (1003, 1000)
    )
    assert ("iota" in text) == (logit_map.softcap is not None or logit_map.scale == 0)
    assert "iota" not in without_padding


def test_the_gradient_has_no_broadcast():
    """With one, nvFuser would copy the whole chunk before it writes in place."""
    work = RowWork(
        method="gradient",
        layouts=(VocabLayout.aligned(1003),),
        dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
        optional=("uniform", "entropy", "class_weight"),
    )
    (fusion,) = nvfuser_rows.definitions(work, LogitMap(softcap=3.0)).values()
    assert "broadcast" not in str(fusion)


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_no_fusion_sums_float32_rows_and_writes_over_them(dtype, fused):
    """On a GPU, gradients of few such rows came out wrong."""
    layouts = (VocabLayout.aligned(1003),)
    work = RowWork(method="gradient", layouts=layouts, dtype=dtype, out_dtype=dtype, column_sums=True)
    definitions = nvfuser_rows.definitions(work, LogitMap())
    assert list(definitions) == (["gradient_with_column_sums"] if fused else ["column_sums", "gradient"])
    texts = [str(definition) for definition in definitions.values()]
    assert [text.count("add_output") for text in texts] == ([2] if fused else [1, 1])
    assert [text.count("ops.sum") for text in texts] == ([1] if fused else [1, 0])


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
        inputs = [
            fd.define_tensor(shape=list(t.shape), contiguity=[True] * t.ndim, dtype=types[t.dtype]) for t in tensors
        ]
        outputs = translation(fd, *inputs, dtype=DTYPES[dtype], **settings)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            fd.add_output(output)
    return fd.execute(tensors)


def test_the_interpreter_has_the_names_that_nvfuser_has():
    import nvfuser_direct

    operations = [name for name in vars(fusion_interpreter.Operations) if not name.startswith("_")]
    operations += [*fusion_interpreter.Operations._UNARY, *fusion_interpreter.Operations._BINARY]
    with nvfuser_direct.FusionDefinition() as fd:
        assert all(hasattr(fd.ops, name) for name in operations)
