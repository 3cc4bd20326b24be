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
from thunder_flce.operation.divergence import KINDS
from thunder_flce.options import STRATEGIES

INVARIANT = Options(batch_invariant=True)
CUDA = torch.device("cuda")
OUTPUTS = ("log_prob", "entropy", "mean_logit", "log_sum_sq_probs")
"""The last of them has no gradient"""
SIZES = {"cpu": [(77, 33), (1003, 72), (33000, 24)], "cuda": [(1003, 70), (32000, 1024), (128257, 4096)]}


def log_probs(case: Case, rows=slice(None), *, options=INVARIANT, needs_grad=False, **settings):
    """Those of some rows, and other sums: beside a loss whose gradients may be computed in the forward, if needed.

    A token loss and label smoothing have theirs of them.
    """
    x, weight = (each.clone().requires_grad_(needs_grad) for each in (case.x[rows], case.weight))
    detached, reduction = (OUTPUTS[:3], "mean") if needs_grad else ((), "none")
    settings |= {"linear_bias": case.bias, "terms": [(of_x[rows], of_weight) for of_x, of_weight in case.terms]}
    settings |= {"reduction": reduction, "outputs": OUTPUTS, "detached": detached, "options": options}
    loss, *found = linear_cross_entropy(x, weight, case.target[rows], **settings)
    if reduction == "none":
        assert torch.equal(loss, -found[0])
    return torch.stack(found, 1).detach()


@pytest.fixture(params=range(3))
def batch(request, device):
    dtypes = [torch.float64, torch.float32, torch.bfloat16] if device == "cpu" else [torch.bfloat16] * 3
    on_cuda = device != "cpu"
    vocab, hidden = SIZES["cuda" if on_cuda else "cpu"][request.param]
    sizes = {"vocab": vocab, "hidden": hidden, "tokens": 4096 if on_cuda else 140, "dtype": dtypes[request.param]}
    case = make_case(**sizes, device=device, bias=True, scale=4.0, ignored=0.0)
    case.target[1::3] = -100
    for tensor in case.operands():
        tensor.requires_grad_(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield case
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("has_bias", "has_adapter", "settings"), [
    (False, False, {}), (True, False, {}), (True, True, {}), (False, False, {"softcap": 5.0, "logit_scale": -1.5}),
], ids=str)  # fmt: skip
def test_any_batch(batch, has_bias, has_adapter, settings):
    """Fewer tokens, at other places, in memory that is laid out in another way, in chunks, and with gradients."""
    adapter = batch.x[:, :8].contiguous(), batch.weight[:, :8].contiguous()
    case = replace(batch, bias=batch.bias if has_bias else None, terms=(adapter,) if has_adapter else ())
    expected, tokens, target = log_probs(case, **settings), len(case.x), case.target[:, None]
    exact = case.exact_logits(**settings).log_softmax(1).gather(1, target.clamp(min=0)).masked_fill(target < 0, 0)
    assert error(expected[:, :1], exact) < 4 * torch.finfo(case.x.dtype).eps
    alone = [slice(row, row + 1) for row in (*range(0, 60, 7), tokens - 1)]
    for rows in (*alone, slice(5, 12), slice(37, 137), slice(1, None, 2)):
        assert torch.equal(log_probs(case, rows, **settings), expected[rows])
    assert torch.equal(log_probs(case, options=replace(INVARIANT, chunk_rows=59), **settings), expected)
    assert torch.equal(log_probs(case, options=replace(INVARIANT, ignored_rows="compute"), **settings), expected)
    for strategy in STRATEGIES:
        options = replace(INVARIANT, strategy=strategy)
        assert torch.equal(log_probs(case, options=options, needs_grad=True, **settings), expected)
        assert torch.equal(log_probs(case, slice(5, 12), options=options, needs_grad=True, **settings), expected[5:12])


@pytest.mark.parametrize(("changes", "options", "on", "reason"), [
    ({"dtype": torch.float32}, {}, {}, "on CUDA it needs bfloat16 or float16, but input is torch.float32"),
    ({"teacher": 64, "teacher_input": Spec((8192, 64), torch.float32, CUDA)}, {}, {}, "teacher_input is torch."),
    ({}, {"row_kernels": "torch"}, {}, "on CUDA it needs Triton"),
    ({}, {}, {"capability": (7, 5)}, "compute capability 8.0"),
    ({"device": "xpu"}, {}, {"kind": "xpu"}, "runs on CUDA and on a CPU, but the input is on 'xpu'"),
], ids=str)  # fmt: skip
def test_what_cannot_be(changes, options, on, reason):
    with pytest.raises(ValueError, match=f"batch_invariant=True: .*{reason}"):
        choose(a_call(**changes), replace(INVARIANT, **options), replace(H200, **on))


@pytest.mark.parametrize(("batch", "kind"), list(enumerate(KINDS)), indirect=["batch"])
def test_divergences(batch, kind):
    """Of a token and its teacher: alone, in a part, in chunks, beside ignored rows, and where gradients are made."""
    # On a CPU, matmuls in bfloat16 take long.
    dtype, tokens = (batch.x.dtype, 4096) if batch.x.is_cuda else (torch.float32, 34)
    x, weight = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (batch.x[:tokens], batch.weight))
    teacher_x, teacher_weight = (tensor.detach().flip(0) for tensor in (x, weight))

    def found(rows, *, reduction="none", **options):
        of = x[rows], weight, teacher_x[rows], teacher_weight, batch.target[:tokens][rows]
        chosen = replace(INVARIANT, **options)
        return linear_kl_divergence(*of, divergence=kind, temperature=1.3, reduction=reduction, options=chosen)

    expected = found(slice(None)).detach()
    assert expected[0] > 0 and expected[1] == 0
    assert torch.equal(found(slice(1, None, 2)), expected[1::2])
    assert torch.equal(found(slice(None), chunk_rows=13), expected)
    assert torch.equal(found(slice(None), ignored_rows="compute"), expected)
    for row, reduction in zip((0, *range(0, 34, 3)), ("sum", *["none"] * 12), strict=True):
        assert torch.equal(found(slice(row, row + 1), reduction=reduction).sum(), expected[row])
    with_gradients = torch.autograd.grad(found(slice(0, 1), reduction="sum"), (x, weight))
    right = torch.autograd.grad(found(slice(0, 1), reduction="sum", batch_invariant=False), (x, weight))
    torch.testing.assert_close(with_gradients, right)
