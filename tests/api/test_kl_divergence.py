"""`linear_kl_divergence` against eager PyTorch in float64."""

import math
from functools import partial

import pytest
import thunder
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from random_calls import chooser, named
from reference import doubled, error
from thunder_flce import Options, linear_kl_divergence
from thunder_flce.operation.divergence import KINDS

ON_EVERY_BACKEND = True
B, T, H, G, V = 3, 7, 16, 24, 101


def operands(dtype=torch.float64, device="cpu", *, tokens=T, vocab=V, scale=0.5):
    """The student's and the teacher's hidden states and heads, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, tokens, H), (vocab, H), (B, tokens, G), (vocab, G))
    floating = [torch.randn(shape, generator=generator).mul(scale).to(device, dtype) for shape in shapes]
    for tensor in floating[:2]:
        tensor.requires_grad_()
    target = torch.randint(vocab, (B, tokens), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.3] = -100
    return (*floating, target.to(device))


def composed(
    x, weight, teacher_x, teacher_weight, target, *,
    divergence="forward", beta=0.5, temperature=1.0, cross_entropy_weight=0.0, reduction="mean", ignore_index=-100,
):  # fmt: skip
    """By PyTorch's own divergence, as TRL's GKD has it; logits of 16 bits in float32."""
    logits = (F.linear(x, weight), F.linear(teacher_x, teacher_weight).detach())
    logits = [z.float() if z.dtype.itemsize < 4 else z for z in logits]
    log_p, log_q = (z.div(temperature).log_softmax(-1) for z in logits)
    kl = partial(F.kl_div, reduction="none", log_target=True)
    if divergence == "jensen_shannon":
        share = torch.tensor(beta, dtype=log_p.dtype, device=log_p.device)
        log_m = torch.logsumexp(torch.stack([log_p + torch.log1p(-share), log_q + share.log()]), 0)
        row_losses = (beta * kl(log_m, log_q) + (1 - beta) * kl(log_m, log_p)).sum(-1)
    elif divergence == "cross_entropy":
        row_losses = -(log_q.exp() * log_p).sum(-1)
    else:
        row_losses = (kl(log_p, log_q) if divergence == "forward" else kl(log_q, log_p)).sum(-1)
    valid = torch.ones_like(row_losses, dtype=torch.bool) if target is None else target != ignore_index
    if cross_entropy_weight:
        labels = torch.where(valid, target, 0)
        losses = F.cross_entropy(logits[0].movedim(-1, 1), labels, reduction="none")
        row_losses = row_losses + cross_entropy_weight * losses
    row_losses = torch.where(valid, row_losses, 0)
    if reduction == "none":
        return row_losses
    return row_losses.sum() / (valid.sum() if reduction == "mean" else 1)


OPTIONS = (
    None, Options(chunk_rows=5), Options(chunk_rows=4, ignored_rows="compute"), Options(memory_budget=1),
    Options(expected_gradient=0.3),
)  # fmt: skip


def check_call(number: int, *, dtype: torch.dtype = torch.float64, is_compiled: bool = False) -> None:
    """Also that what needs no gradient gets none, and the teacher's weight none even if it requires one."""
    one_of = chooser(number)
    *tensors, target = operands(dtype, tokens=one_of(*[T] * 7, 0))
    settings = {"reduction": one_of("mean", "sum", "none"), "divergence": one_of(*KINDS)}
    settings |= {"beta": one_of(0.5, 0.3), "temperature": one_of(1.0, 1.7), "ignore_index": one_of(-100, 0)}
    options, needs_grad = one_of(*OPTIONS), one_of((True, True), (True, False), (False, True), (False, False))
    for tensor, is_needed in zip(tensors[:2], needs_grad, strict=True):
        tensor.requires_grad_(is_needed)
    tensors[3] = torch.nn.Parameter(tensors[3])
    target = one_of(*[target] * 5, None, None, torch.full_like(target, settings["ignore_index"]))
    settings["cross_entropy_weight"] = 0.0 if target is None else one_of(0.0, 0.7, 2)
    if target is not None and settings["ignore_index"] == 0:
        target = target.clamp(min=0)
    call = partial(linear_kl_divergence, options=options, **settings)
    if is_compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    exact_tensors = tuple(map(doubled, tensors))
    close = {} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-6, "check_dtype": False}
    with named((number, settings, options, needs_grad, target is None)):
        loss, exact = call(*tensors, target), composed(*exact_tensors, target, **settings)
        torch.testing.assert_close(loss, exact, equal_nan=True, **close)
        assert loss.requires_grad == any(needs_grad)
        upstream = torch.randn_like(loss)
        if loss.requires_grad:
            loss.backward(upstream, retain_graph=True)
            loss.backward(upstream)
            exact.backward(2 * upstream.double())
        for tensor, exact_tensor, is_needed in zip(tensors, exact_tensors, (*needs_grad, False, False), strict=True):
            assert (tensor.grad is not None) == is_needed
            if is_needed:
                torch.testing.assert_close(tensor.grad, exact_tensor.grad, equal_nan=True, **close)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "torch.compile"])
def test_any_call(is_compiled):
    for number in range(10 if is_compiled else 150):
        check_call(number, is_compiled=is_compiled)


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_error_beside_pytorchs(dtype, divergence, device):
    """Also with logits in float32, and with a teacher of another dtype."""
    *tensors, target = operands(dtype, device, tokens=25, vocab=1009)
    upstream = torch.tensor(1024.0, device=device)
    settings = {"divergence": divergence, "temperature": 1.3, "cross_entropy_weight": 0.5}

    def results(function, tensors):
        loss = function(*tensors, target, **settings)
        return loss, *torch.autograd.grad(loss, tensors[:2], upstream.to(loss.dtype))

    for teacher_dtype, options in ((dtype, None), (torch.bfloat16, Options(chunk_rows=32, logits_dtype="float32"))):
        tensors[2:] = (tensor.to(teacher_dtype) for tensor in tensors[2:])
        ours = results(partial(linear_kl_divergence, options=options), tensors)
        eager, exact = results(composed, tensors), results(composed, [*map(doubled, tensors)])
        assert ours[0].dtype == torch.float32
        for result, peer, right in zip(ours, eager, exact, strict=True):
            assert result.dtype == peer.dtype
            assert error(result, right) <= 1.25 * error(peer, right) + 2e-6


INPUT, WEIGHT, TEACHER_INPUT, TEACHER_WEIGHT, TARGET = operands()


@pytest.mark.parametrize(("change", "exception", "message"), [
    ({"teacher_weight": TEACHER_WEIGHT[:50]}, ValueError, r"teacher_weight must be \(V, H'\) with V = 101"),
    ({"teacher_input": TEACHER_INPUT[0]}, ValueError, r"teacher_input must be \(3, 7, 24\)"),
    ({"teacher_weight": TEACHER_WEIGHT.float()}, TypeError, "teacher_weight must have teacher_input's dtype, flo"),
    ({"teacher_input": TEACHER_INPUT.clone().requires_grad_()}, ValueError, "teacher_input must not require a gr"),
    ({"input": INPUT.detach().numpy(), "cross_entropy_weight": 2}, TypeError, "input must be a tensor, but got nd"),
    ({"input": torch.nested.nested_tensor([*INPUT]), "target": None}, TypeError, "input must be a dense tensor, but"),
    ({"target": TARGET + 3 * V}, IndexError, r"target has 21 of 21 values that are neither in \[0, 101\)"),
    ({"divergence": "kl"}, ValueError, "divergence must be one of"),
    ({"beta": 1.0}, ValueError, "beta must be between 0 and 1, both excluded, but got 1.0"),
    ({"temperature": 0}, ValueError, "temperature must be positive and finite, but got 0"),
    ({"cross_entropy_weight": math.nan}, ValueError, "cross_entropy_weight must be between -3.4e38 and 3.4e38, but"),
    ({"cross_entropy_weight": 1e300}, ValueError, "cross_entropy_weight must be between -3.4e38 and 3.4e38, but got 1"),
    ({"cross_entropy_weight": 2, "target": TARGET.to_sparse()}, TypeError, "target must be a dense tensor, but has"),
    ({"cross_entropy_weight": 0.5, "target": None}, ValueError, "target must be given with a cross_entropy_weight"),
    ({"options": Options(strategy="save_logits")}, ValueError, "options.strategy must be None"),
    ({"options": Options(row_kernels="nvfuser")}, ValueError, 'row_kernels="nvfuser"'),
])  # fmt: skip
def test_bad_argument(change, exception, message):
    arguments = {"input": INPUT, "linear_weight": WEIGHT, "target": TARGET}
    arguments |= {"teacher_input": TEACHER_INPUT, "teacher_weight": TEACHER_WEIGHT}
    with pytest.raises(exception, match=message):
        linear_kl_divergence(**arguments | change)


@pytest.mark.parametrize("kind", [int, float])
def test_weights_that_change_between_calls(kind):
    """The program is compiled once for all weights of the cross-entropy, such as those of a schedule."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_kl_divergence, backend=counter, fullgraph=True)
    tensors = operands()
    for number in (3, 5, 8, 20):
        weight = {"cross_entropy_weight": kind(number)}
        torch.testing.assert_close(compiled(*tensors, **weight), composed(*tensors, **weight))
    assert counter.frame_count == 2


def test_inside_thunder():
    with pytest.raises(NotImplementedError, match="does not run inside thunder.jit"):
        thunder.jit(linear_kl_divergence)(*operands())
