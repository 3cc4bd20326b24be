"""nvFuser's definitions, run with PyTorch's operations by `fusion_interpreter`, against float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from reference import error
from thunder_flce.execution.row_kernels.interface import LogitMap, LogitsBuffer, RowCoefficients
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.planning.plan import VocabLayout

pytest.importorskip("nvfuser_direct", reason="needs nvFuser's Python package")

import fusion_interpreter
from fusion_interpreter import DataType, FusionDefinition
from thunder_flce.execution.row_kernels import nvfuser_rows as nvfuser
from thunder_flce.graph.unfused_cross_entropy import nvfuser_impl

MAPS = [LogitMap(), LogitMap(scale=-0.5), LogitMap(softcap=3.0), LogitMap(scale=2.0, softcap=30.0)]
DTYPES = {torch.float32: DataType.Float, torch.bfloat16: DataType.BFloat16, torch.float16: DataType.Half}
C = 6


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(nvfuser, "FusionDefinition", FusionDefinition)
    for name in ("moments", "gradient", "target_gradient"):
        # Not those that are cached.
        monkeypatch.setattr(nvfuser, f"_{name}", getattr(nvfuser, f"{name}_fusion"))


class Rows:
    """Products with NaN in the padding, their statistics, and all that a gradient may take; `exact` in float64."""

    def __init__(self, vocab, dtype, logit_map, *, uniform=True, entropy=True, class_weight=True):
        self.logit_map = logit_map
        layout = VocabLayout.aligned(vocab)
        padded = torch.full((C, layout.row_stride), float("nan"), dtype=dtype)
        padded[:, :vocab] = 3 * torch.randn(C, vocab)
        # Columns that are masked: their probability is 0, and 0 · -inf must not show.
        padded[:, 1] = float("-inf") * logit_map.scale if logit_map.softcap is None else 0
        self.buffer = LogitsBuffer(padded, layout)
        self.exact = LogitsBuffer(padded[:, :vocab].double(), VocabLayout.contiguous(vocab))
        self.exact_statistics = TorchRowKernels(logit_map).statistics(self.exact)
        self.statistics = type(self.exact_statistics)(*(vector.float() for vector in self.exact_statistics))
        self.class_weight = torch.rand(vocab) if class_weight else None
        vectors = [torch.randn(C) for _ in range(4)]
        self.coefficients = RowCoefficients(
            *vectors[:2], vectors[2] if uniform else None, vectors[3] if entropy else None
        )
        self.target = torch.randint(2, vocab, (C,))

    def double(self, value):
        if value is None or isinstance(value, torch.Tensor):
            return None if value is None else value.double()
        return type(value)(*map(self.double, value))


GIVEN = list(itertools.product([False, True], repeat=3))


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("logit_map", MAPS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("vocab", [40, 409])
def test_gradient(vocab, dtype, out_dtype, logit_map, given):
    uniform, entropy, class_weight = given
    rows = Rows(vocab, dtype, logit_map, uniform=uniform, entropy=entropy, class_weight=class_weight)
    # Without either term the sums come from Triton's kernel, unless the gradient takes new memory.
    column_sums = not class_weight and (uniform or entropy or out_dtype != dtype)
    products = rows.buffer.logits.clone()
    at_target = products.gather(1, rows.target[:, None]).squeeze(1)
    weight_at_target = None if rows.class_weight is None else rows.class_weight[rows.target]

    exact, exact_sums = TorchRowKernels(logit_map).gradient(
        rows.exact,
        rows.exact_statistics,
        rows.double(rows.coefficients),
        rows.double(rows.class_weight),
        dtype=torch.float64,
        column_sums=column_sums,
    )
    kernels = nvfuser.NvFuserRowKernels(logit_map)
    result, sums = kernels.gradient(
        rows.buffer, rows.statistics, rows.coefficients, rows.class_weight, dtype=out_dtype, column_sums=column_sums
    )
    eps = max(torch.finfo(out_dtype).eps, 5e-6)
    assert result.logits.dtype == out_dtype and error(result.logits, exact.logits) < eps
    if out_dtype == dtype:
        assert result is rows.buffer
    else:
        torch.testing.assert_close(rows.buffer.logits, products, rtol=0, atol=0)
    assert (sums is None) == (exact_sums is None)
    if sums is not None:
        assert sums.shape == (vocab,) and error(sums, exact_sums) < 1e-5

    exact_at_target = TorchRowKernels(logit_map).target_gradient(
        at_target.double(),
        rows.exact_statistics,
        rows.double(rows.coefficients),
        rows.double(weight_at_target),
        dtype=torch.float64,
    )
    there = kernels.target_gradient(at_target, rows.statistics, rows.coefficients, weight_at_target, dtype=out_dtype)
    assert there.dtype == out_dtype and error(there, exact_at_target) < eps


@pytest.mark.parametrize(("expected", "weighted_sum"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("logit_map", MAPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [40, 1009])
def test_moments(vocab, dtype, logit_map, class_weight, expected, weighted_sum):
    rows = Rows(vocab, dtype, logit_map, class_weight=class_weight)
    asked = {"expected": expected, "weighted_sum": weighted_sum}
    if weighted_sum:
        # A sum over masked columns is -inf.
        for buffer in (rows.buffer, rows.exact):
            buffer.logits[:, 1] = 0
        rows.exact_statistics = TorchRowKernels(logit_map).statistics(rows.exact)
        rows.statistics = type(rows.statistics)(*(vector.float() for vector in rows.exact_statistics))
    exact = TorchRowKernels(logit_map).moments(
        rows.exact, rows.exact_statistics, rows.double(rows.class_weight), **asked
    )
    moments = nvfuser.NvFuserRowKernels(logit_map).moments(rows.buffer, rows.statistics, rows.class_weight, **asked)
    for result, reference in zip(moments, exact, strict=True):
        assert (result is None) == (reference is None)
        if result is not None:
            assert result.shape == (C,) and error(result, reference) < 5e-6


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
