"""`Options(batch_invariant=True)`: a token's log-probability has the same bits, whatever is computed beside it."""

from dataclasses import replace

import pytest
import torch

from reference import Case, error, make_case
from test_plan import H200
from test_plan import call as a_call
from thunder_flce import Options, linear_cross_entropy, linear_kl_divergence
from thunder_flce.engine.choose import choose
from thunder_flce.operation.call import Spec
from thunder_flce.options import STRATEGIES

INVARIANT = Options(batch_invariant=True)
CUDA = torch.device("cuda")
OUTPUTS = ("log_prob", "entropy", "mean_logit", "log_sum_sq_probs")
"""The last of them has no gradient"""
# V and H. On a CPU, PyTorch divides a row of more than 32768 columns among threads.
SIZES = {"cpu": [(77, 33), (1003, 72), (33000, 24)], "cuda": [(1003, 70), (32000, 1024), (128257, 4096)]}
DTYPES = {"cpu": [torch.float64, torch.bfloat16, torch.float32], "cuda": [torch.bfloat16] * 3}


def outputs_of(case: Case, rows=slice(None), *, options=INVARIANT, needs_grad=False, **settings):
    """All outputs of some rows, beside a loss: the cross-entropies or, with gradients, their mean."""
    x, weight = (operand.detach().clone().requires_grad_(needs_grad) for operand in (case.x[rows], case.weight))
    detached, reduction = (OUTPUTS[:3], "mean") if needs_grad else ((), "none")
    settings |= {"linear_bias": case.bias, "terms": [(x[rows], weight) for x, weight in case.terms]}
    settings |= {"reduction": reduction, "outputs": OUTPUTS, "detached": detached, "options": options}
    loss, *outputs = linear_cross_entropy(x, weight, case.target[rows], **settings)
    if reduction == "none":
        assert torch.equal(loss, -outputs[0])
    return torch.stack(outputs, 1).detach()


@pytest.fixture(params=range(3))
def batch(request, device):
    (vocab, hidden), dtype = SIZES[device][request.param], DTYPES[device][request.param]
    sizes = {"vocab": vocab, "hidden": hidden, "tokens": 100 if device == "cpu" else 4096, "dtype": dtype}
    case = make_case(**sizes, device=device, bias=True, scale=4.0, ignored=0.0)
    case.target[1::3] = -100
    for tensor in case.operands():
        tensor.requires_grad_(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield case
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("has_bias", "has_adapter", "settings"), [
    (False, False, {}), (True, True, {}), (True, False, {"softcap": 5.0, "logit_scale": -1.5}),
], ids=str)  # fmt: skip
def test_any_batch(batch, has_bias, has_adapter, settings):
    """Fewer tokens, at other places, in memory that is laid out in another way, in chunks, and with gradients."""
    adapter = batch.x[:, :8].contiguous(), batch.weight[:, :8].contiguous()
    case = replace(batch, bias=batch.bias if has_bias else None, terms=(adapter,) if has_adapter else ())
    expected, tokens, target = outputs_of(case, **settings), len(case.x), case.target[:, None]
    exact = case.exact_logits(**settings).log_softmax(1).gather(1, target.clamp(min=0)).masked_fill(target < 0, 0)
    assert error(expected[:, :1], exact) < 4 * torch.finfo(case.x.dtype).eps
    alone = [slice(row, row + 1) for row in (0, 7, 14, 35, tokens - 1)]
    for rows in (*alone, slice(5, 12), slice(37, 97), slice(1, None, 2)):
        assert torch.equal(outputs_of(case, rows, **settings), expected[rows])
    assert torch.equal(outputs_of(case, options=replace(INVARIANT, chunk_rows=59), **settings), expected)
    assert torch.equal(outputs_of(case, options=replace(INVARIANT, ignored_rows="compute"), **settings), expected)
    for strategy in STRATEGIES:
        options = replace(INVARIANT, strategy=strategy)
        for rows in (slice(None), slice(5, 12)):
            outputs = outputs_of(case, rows, options=options, needs_grad=True, **settings)
            assert torch.equal(outputs, expected[rows])


@pytest.mark.parametrize(("vocab", "hidden", "dtype", "is_transposed"), [
    (8, 129, torch.bfloat16, False), (7, 64, torch.float32, True),
], ids=["input in float32", "logits"])  # fmt: skip
def test_where_rows_start(vocab, hidden, dtype, is_transposed):
    """On a CPU, the order of a sum may depend on it."""
    case = make_case(vocab=vocab, hidden=hidden, dtype=dtype)
    if is_transposed:
        case.weight = case.weight.t().contiguous().t()
    options = replace(INVARIANT, logits_dtype="float32")
    assert torch.equal(outputs_of(case, slice(1, None), options=options), outputs_of(case, options=options)[1:])


@pytest.mark.parametrize(("call", "options", "device", "reason"), [
    ({"dtype": torch.float32}, {}, {}, "on CUDA it needs bfloat16 or float16, but input is torch.float32"),
    ({"teacher": 64, "teacher_input": Spec((8192, 64), torch.float32, CUDA)}, {}, {}, "teacher_input is torch."),
    ({}, {"row_kernels": "torch"}, {}, "on CUDA it needs Triton"),
    ({}, {}, {"capability": (7, 5)}, "compute capability 8.0"),
    ({"device": "xpu"}, {}, {"kind": "xpu"}, "runs on CUDA and on a CPU, but the input is on 'xpu'"),
], ids=str)  # fmt: skip
def test_what_cannot_be(call, options, device, reason):
    with pytest.raises(ValueError, match=f"batch_invariant=True: .*{reason}"):
        choose(a_call(**call), replace(INVARIANT, **options), replace(H200, **device))


@pytest.mark.parametrize(("batch", "kind"), [(0, "forward"), (1, "reverse"), (2, "jensen_shannon")], indirect=["batch"])
def test_divergences(batch, kind):
    """Of a token and its teacher: alone, in a part, in chunks, beside ignored rows, and where gradients are made."""
    # On a CPU, matmuls in bfloat16 take long.
    dtype, tokens = (batch.x.dtype, 4096) if batch.x.is_cuda else (torch.float32, 34)
    x, weight = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (batch.x[:tokens], batch.weight))
    teacher_x, teacher_weight = (tensor.detach().flip(0) for tensor in (x, weight))

    def divergences(rows=slice(None), *, reduction="none", **options):
        operands = x[rows], weight, teacher_x[rows], teacher_weight, batch.target[:tokens][rows]
        settings = {"divergence": kind, "temperature": 1.3, "cross_entropy_weight": 0.5, "reduction": reduction}
        return linear_kl_divergence(*operands, **settings, options=replace(INVARIANT, **options))

    expected = divergences().detach()
    assert expected[0] > 0 and expected[1] == 0
    assert torch.equal(divergences(slice(1, None, 2)), expected[1::2])
    assert torch.equal(divergences(chunk_rows=13), expected)
    assert torch.equal(divergences(ignored_rows="compute"), expected)
    for row, reduction in ((0, "sum"), (0, "none"), (9, "none"), (33, "none")):
        assert torch.equal(divergences(slice(row, row + 1), reduction=reduction).sum(), expected[row])
    with_gradients, without = (
        torch.autograd.grad(divergences(slice(0, 1), reduction="sum", batch_invariant=is_invariant), (x, weight))
        for is_invariant in (True, False)
    )
    torch.testing.assert_close(with_gradients, without)


def test_mixtures_of_few_columns():
    """On a CPU, an operation may compute the last elements of a tensor in another way than the others."""
    x, weight = torch.randn(200, 8), torch.randn(7, 8)

    def divergences(rows):
        settings = {"divergence": "jensen_shannon", "reduction": "none", "options": INVARIANT}
        return linear_kl_divergence(x[rows], weight, -x[rows], weight, **settings)

    alone = [divergences(slice(row, row + 1)) for row in range(len(x))]
    assert torch.equal(torch.cat(alone), divergences(slice(None)))
