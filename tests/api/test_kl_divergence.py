"""`linear_kl_divergence` against eager PyTorch in float64."""

from functools import partial

import pytest
import thunder
import torch
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
    divergence="forward", beta=0.5, temperature=1.0, reduction="mean", ignore_index=-100,
):  # fmt: skip
    """By PyTorch's own divergence, as TRL's GKD has it; logits of 16 bits in float32."""
    logits = (F.linear(x, weight), F.linear(teacher_x, teacher_weight).detach())
    log_p, log_q = ((z.float() if z.dtype.itemsize < 4 else z).div(temperature).log_softmax(-1) for z in logits)
    kl = lambda of, log: F.kl_div(of, log, reduction="none", log_target=True).sum(-1)  # noqa: E731
    if divergence == "jensen_shannon":
        share = torch.tensor(beta, dtype=log_p.dtype, device=log_p.device)
        log_m = torch.logsumexp(torch.stack([log_p + torch.log1p(-share), log_q + share.log()]), 0)
        of_rows = beta * kl(log_m, log_q) + (1 - beta) * kl(log_m, log_p)
    else:
        of_rows = kl(log_p, log_q) if divergence == "forward" else kl(log_q, log_p)
    valid = torch.ones_like(of_rows, dtype=torch.bool) if target is None else target != ignore_index
    of_rows = torch.where(valid, of_rows, 0)
    if reduction == "none":
        return of_rows
    return of_rows.sum() / (valid.sum() if reduction == "mean" else 1)


OPTIONS = (
    None, Options(chunk_rows=5), Options(chunk_rows=4, ignored_rows="compute"), Options(memory_budget=1),
    Options(expected_gradient=0.3),
)  # fmt: skip


def check_call(number: int, *, dtype=torch.float64, is_compiled=False) -> None:
    """What needs no gradient gets none, and the teacher's weight none even if it requires one."""
    one_of = chooser(number)
    *tensors, target = operands(dtype, tokens=one_of(*[T] * 7, 0))
    settings = {"reduction": one_of("mean", "sum", "none"), "divergence": one_of(*KINDS)}
    settings |= {"beta": one_of(0.5, 0.3), "temperature": one_of(1.0, 1.7), "ignore_index": one_of(-100, 0)}
    options, needed = one_of(*OPTIONS), one_of((True, True), (True, False), (False, True), (False, False))
    for tensor, is_needed in zip(tensors[:2], needed, strict=True):
        tensor.requires_grad_(is_needed)
    tensors[3] = torch.nn.Parameter(tensors[3])
    target = one_of(*[target] * 5, None, None, torch.full_like(target, settings["ignore_index"]))
    if target is not None and settings["ignore_index"] == 0:
        target = target.clamp(min=0)
    call = partial(linear_kl_divergence, options=options, **settings)
    if is_compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    exact = tuple(map(doubled, tensors))
    close = {} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-6, "check_dtype": False}
    close["equal_nan"] = True
    with named((number, settings, options, needed, target is None)):
        loss, right = call(*tensors, target), composed(*exact, target, **settings)
        torch.testing.assert_close(loss, right, **close)
        assert loss.requires_grad == any(needed)
        upstream = torch.randn_like(loss)
        needing, of_exact = ([each for each in of[:2] if each.requires_grad] for of in (tensors, exact))
        if needing:
            got = torch.autograd.grad(loss, needing, upstream, retain_graph=True)
            torch.testing.assert_close(got, torch.autograd.grad(right, of_exact, upstream.double()), **close)
            loss.backward(upstream)
            assert [tensor.grad is not None for tensor in tensors] == [*needed, False, False]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "torch.compile"])
def test_any_call(is_compiled):
    for number in range(10 if is_compiled else 150):
        check_call(number, is_compiled=is_compiled)


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_error_beside_pytorchs(dtype, divergence, device):
    """Also of a wider logits' dtype, and where the teacher's is another."""
    *tensors, target = operands(dtype, device, tokens=25, vocab=1009)
    settings, upstream = {"divergence": divergence, "temperature": 1.3}, torch.tensor(1024.0, device=device)
    for teacher_dtype, options in ((dtype, None), (torch.bfloat16, Options(chunk_rows=32, logits_dtype="float32"))):
        found = []
        for run in (partial(linear_kl_divergence, options=options), composed, composed):
            of = [*tensors[:2], *(tensor.to(teacher_dtype) for tensor in tensors[2:])]
            of = [*map(doubled, of)] if len(found) == 2 else of
            loss = run(*of, target, **settings)
            found.append((loss, *torch.autograd.grad(loss, of[:2], upstream.to(loss.dtype))))
        assert found[0][0].dtype == torch.float32
        for got, eager, right in zip(*found, strict=True):
            assert got.dtype == eager.dtype
            assert error(got, right) <= 1.25 * error(eager, right) + 2e-6


INPUT, WEIGHT, TEACHER_INPUT, TEACHER_WEIGHT, TARGET = operands()


@pytest.mark.parametrize(("change", "kind", "message"), [
    ({"teacher_weight": TEACHER_WEIGHT[:50]}, ValueError, r"teacher_weight must be \(V, H'\) with V = 101"),
    ({"teacher_weight": TEACHER_WEIGHT[:, :5]}, ValueError, r"teacher_input must be \(3, 7, 5\)"),
    ({"teacher_input": TEACHER_INPUT[0]}, ValueError, r"teacher_input must be \(3, 7, 24\)"),
    ({"teacher_weight": TEACHER_WEIGHT.float()}, TypeError, "teacher_weight must have teacher_input's dtype, flo"),
    ({"linear_weight": WEIGHT.float()}, TypeError, "linear_weight must have input's dtype, float64"),
    ({"teacher_input": TEACHER_INPUT.clone().requires_grad_()}, ValueError, "teacher_input must not require a gr"),
    ({"teacher_input": 1.0}, TypeError, "teacher_input must be a tensor, but got float"),
    ({"input": torch.nested.nested_tensor([*INPUT]), "target": None}, TypeError, "input must be a dense tensor, but"),
    ({"target": TARGET + 3 * V}, IndexError, r"target has 21 of 21 values that are neither in \[0, 101\)"),
    ({"target": TARGET[0]}, ValueError, "target must have input's shape without its last dimension"),
    ({"divergence": "kl"}, ValueError, "divergence must be one of"),
    ({"beta": 1.0}, ValueError, "beta must be between 0 and 1, both excluded, but got 1.0"),
    ({"temperature": 0}, ValueError, "temperature must be positive and finite, but got 0"),
    ({"reduction": "batchmean"}, ValueError, "reduction must be one of"),
    ({"options": Options(strategy="save_logits")}, ValueError, "options.strategy must be None"),
    ({"options": Options(row_kernels="nvfuser")}, ValueError, 'row_kernels="nvfuser"'),
])  # fmt: skip
def test_bad_input(change, kind, message):
    given = {"input": INPUT, "linear_weight": WEIGHT, "target": TARGET}
    given |= {"teacher_input": TEACHER_INPUT, "teacher_weight": TEACHER_WEIGHT}
    with pytest.raises(kind, match=message):
        linear_kl_divergence(**given | change)


def test_inside_thunder():
    with pytest.raises(NotImplementedError, match="does not run inside thunder.jit"):
        thunder.jit(linear_kl_divergence)(*operands())
