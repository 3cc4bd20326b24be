"""`linear_kl_divergence` for PyTorch: distillation from a teacher's hidden states and head, without whole logits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thunder_flce import inductor, operators
from thunder_flce.autograd import check_needed, requires_grad
from thunder_flce.execution import distillation, engine
from thunder_flce.execution.distillation import DivergenceResult, Teacher
from thunder_flce.execution.operands import Operands, Term
from thunder_flce.execution.plan import GradientsInForward, LossOnly, RecomputeLogits
from thunder_flce.functional import autocast, one_call, plain
from thunder_flce.operation.arguments import check_linear_kl_divergence
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import NOTHING_IGNORED, Loss
from thunder_flce.operators import Settings
from thunder_flce.options import Options, as_options
from thunder_flce.planning.choose import cached_plan

_NO_THUNDER = "linear_kl_divergence does not run inside thunder.jit: call it outside, or compile with torch.compile"
_NO_TRANSFORMS = "linear_kl_divergence has no transforms of torch.func: call backward, or torch.autograd.grad"
_NO_SECOND_DERIVATIVE = "linear_kl_divergence has no second derivative; call backward without create_graph=True"


@one_call
def linear_kl_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    options: Options | None = None,
) -> Tensor:
    """Divergence of a student's distribution over the vocabulary from a teacher's, for distillation.

    The logits of both, ``linear(input, linear_weight)`` and ``linear(teacher_input, teacher_weight)``, exist a chunk of
    tokens at a time. For their rows z and z′,

        p = softmax(z / temperature),   q = softmax(z′ / temperature),   m = beta · q + (1 − beta) · p
        "forward"         KL(q‖p) = Σ q log(q / p)
        "reverse"         KL(p‖q) = Σ p log(p / q)
        "jensen_shannon"  beta · KL(q‖m) + (1 − beta) · KL(p‖m)

    The last is the generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649), with TRL's and Liger's convention
    for beta. Nothing is multiplied by temperature². The gradients for "mean" and "sum" are computed in the forward;
    those for "none", and for float16 without `Options(expected_gradient=)`, in the backward, which computes the logits
    again. Works eagerly and in torch.compile, where it is one operator; not in `thunder.jit`.

    Args:
        input: (..., H) float16, bfloat16, float32 or float64: the student's hidden states.
        linear_weight: (V, H), input's dtype and device.
        teacher_input: (..., H′) floating point, on input's device: the teacher's hidden states. They must not require
            a gradient: compute them under `torch.no_grad`.
        teacher_weight: (V, H′), teacher_input's dtype. A constant: it gets no gradient, even if it requires one.
        target: (...) integers in [0, V), or ignore_index in the rows that take no part; None: all rows do.
        divergence: "forward", "reverse" or "jensen_shannon".
        beta: between 0 and 1, both excluded; of "jensen_shannon" alone.
        temperature: positive.
        ignore_index: targets of this value leave their row out; may lie in [0, V).
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        options: choices about time and memory. The memory budget is for both logits; there is no choice of a strategy.
            `batch_invariant` asks for the same of teacher_input as of input.

    Returns:
        The loss, float32 (float64 for float64 input): () or, for reduction "none", (...), 0 in ignored rows. With
        "mean" and no valid target, NaN, with gradients of zeros.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index.
        TypeError, ValueError: see `arguments.check_linear_kl_divergence`; and for options that cannot be.
        NotImplementedError: inside `thunder.jit` and in transforms of torch.func.
        RuntimeError: for second derivatives.
    """
    # thunder's interpreter has isinstance take its proxies for tensors.
    if hasattr(input, "shape") and not issubclass(type(input), Tensor):
        raise NotImplementedError(_NO_THUNDER)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_NO_TRANSFORMS)
    options = as_options(options)
    loss = Loss(reduction=reduction, ignore_index=plain(ignore_index))
    kind = Divergence(kind=divergence, beta=plain(beta), temperature=plain(temperature))
    input, linear_weight = autocast((input, linear_weight))
    teacher_input, teacher_weight = autocast((teacher_input, teacher_weight))
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    teacher = {"teacher_input": teacher_input, "teacher_weight": teacher_weight}
    check_linear_kl_divergence(tensors, teacher, kind, loss=loss)
    if target is None:
        loss = replace(loss, ignore_index=NOTHING_IGNORED)
    is_recorded = torch.is_grad_enabled()
    if is_recorded and requires_grad(teacher_input):
        raise ValueError(
            "teacher_input must not require a gradient: there is none with respect to the teacher; compute it under "
            "torch.no_grad(), or pass teacher_input.detach()"
        )
    if options.strategy is not None:
        raise ValueError(f"linear_kl_divergence has no choice of a strategy, but options has {options.strategy!r}")
    student = {"input": input, "linear_weight": linear_weight}
    needs_grad = tuple(name for name, tensor in student.items() if is_recorded and requires_grad(tensor))
    strategy = LossOnly.strategy
    if needs_grad:
        # Rows have upstream gradients of their own, or a loss scale comes that is not known yet.
        waits = reduction == "none" or (input.dtype is torch.float16 and options.expected_gradient is None)
        strategy = RecomputeLogits.strategy if waits else GradientsInForward.strategy
    options = replace(options, **{name: plain(value) for name, value in options.non_defaults().items()})
    settings = Settings(loss=loss, needs_grad=needs_grad, strategy=strategy, options=options, divergence=kind)
    shape = input.shape[:-1]
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (input, teacher_input)]
    flat_target = None if target is None else target.reshape(-1)
    loss_value = _LinearKLDivergence.apply(
        str(settings), flat[0], linear_weight, flat[1], teacher_weight.detach(), flat_target
    )[0]
    return loss_value.reshape(shape) if reduction == "none" else loss_value


def _run(settings: Settings, tensors: Sequence[Tensor | None], upstream: Tensor | None) -> DivergenceResult:
    """A run of the engine on (input, linear_weight, teacher_input, teacher_weight, target)."""
    x, weight, teacher_x, teacher_weight, target = tensors
    assert x is not None and weight is not None and teacher_x is not None and teacher_weight is not None
    assert settings.divergence is not None
    needs = settings.needs_grad if upstream is not None else ()
    if target is None:
        target = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    term = Term(x=x, weight=weight, input_grad="input" in needs, weight_grad="linear_weight" in needs)
    operands = Operands(terms=(term,), bias=None, target=target, loss=settings.loss)
    options = replace(settings.options, strategy=None if upstream is None else GradientsInForward.strategy)
    # The plan of any loss that is reduced: the upstream gradient of each row is known when this runs.
    problem = operators.problem_of(replace(operands, loss=Loss(reduction="sum")), options)
    problem = replace(problem, teacher_dtype=teacher_x.dtype, teacher_hidden=teacher_x.shape[1])
    plan = cached_plan(problem, options, x.device)
    assert isinstance(plan, GradientsInForward | LossOnly)
    if isinstance(plan, GradientsInForward):
        # Logits of two heads are not staged in one dW; and without targets, no column is known to be frequent.
        has_targets = settings.loss.ignores_rows
        plan = replace(plan, staged=None, float32_rows=plan.float32_rows if has_targets else 0)
    teacher = Teacher(teacher_x, teacher_weight)
    return distillation.run(operands, teacher, settings.divergence, plan=plan, upstream=upstream)


def _forward(*tensors: Tensor, settings: str, target: Tensor | None = None) -> list[Tensor]:
    known, upstream, (x, *_) = Settings.parse(settings), None, tensors
    if known.finishes_in_forward:
        dtype = operators.statistics_dtype(x.dtype)
        upstream = torch.full((), known.options.expected_gradient or 1.0, dtype=dtype, device=x.device)
    result = _run(known, (*tensors, target), upstream)
    gradients = [] if result.gradients is None else result.gradients.needed()
    return [result.loss, result.valid_count, *gradients]


def _forward_fake(*tensors: Tensor, settings: str, target: Tensor | None = None) -> list[Tensor]:
    known, (x, weight, *_) = Settings.parse(settings), tensors
    shape = x.shape[:1] if known.loss.reduction == "none" else ()
    results = [x.new_empty(shape, dtype=operators.statistics_dtype(x.dtype)), x.new_empty((), dtype=torch.int64)]
    return [*results, *_gradients_fake(known, x, weight)] if known.finishes_in_forward else results


def _gradients_fake(settings: Settings, *tensors: Tensor) -> list[Tensor]:
    operands = zip(_OPERANDS, tensors, strict=False)
    return [tensor.new_empty(tensor.shape) for name, tensor in operands if name in settings.needs_grad]


def _backward(grad: Tensor, *tensors: Tensor, settings: str, target: Tensor | None = None) -> list[Tensor]:
    gradients = _run(Settings.parse(settings), (*tensors, target), grad).gradients
    assert gradients is not None
    return gradients.needed()


def _backward_fake(grad: Tensor, *tensors: Tensor, settings: str, target: Tensor | None = None) -> list[Tensor]:
    return _gradients_fake(Settings.parse(settings), *tensors[:2])


_OPERANDS = ("input", "linear_weight", "teacher_input", "teacher_weight")
_SCHEMA = f"{', '.join(f'Tensor {name}' for name in _OPERANDS)}, *, str settings, Tensor? target=None"
operators.define("linear_kl_divergence", _SCHEMA, _forward, _forward_fake)
operators.define("linear_kl_divergence_backward", f"Tensor grad, {_SCHEMA}", _backward, _backward_fake)


def _below_autograd(settings: str, *tensors: Tensor | None) -> list[Tensor]:
    *others, target = tensors
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.thunder_flce.linear_kl_divergence(*others, settings=settings, target=target)


class _LinearKLDivergence(torch.autograd.Function):
    """Returns the gradients that the backward scales as further results."""

    @staticmethod
    def forward(settings: str, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(_below_autograd(settings, *tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        settings, *tensors = inputs
        ctx.settings = Settings.parse(settings)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        ctx.save_for_backward(*(results[1:] if ctx.settings.finishes_in_forward else tensors))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(_NO_SECOND_DERIVATIVE)
        if grad is None:
            return (None,) * 6
        if ctx.settings.finishes_in_forward:
            valid_count, *finished = ctx.saved_tensors
            expected = ctx.settings.options.expected_gradient
            scale = inductor.scaled if operators.is_traced(valid_count) else engine.scale_gradients
            found = iter(scale(grad, valid_count, *finished, expected_gradient=expected))
        else:
            *tensors, target = ctx.saved_tensors
            call, settings = torch.ops.thunder_flce.linear_kl_divergence_backward, str(ctx.settings)
            found = iter(call(grad, *tensors, settings=settings, target=target))
        of_operands = (next(found) if name in ctx.settings.needs_grad else None for name in _OPERANDS)
        return None, *of_operands, None


def _autograd_kernel(*tensors: Tensor, settings: str, target: Tensor | None = None) -> list[Tensor]:
    """Runs a direct call of the operator, such as those in exported programs."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return _below_autograd(settings, *tensors, target)
    check_needed(dict(zip(_OPERANDS, tensors, strict=True)), Settings.parse(settings))
    return list(_LinearKLDivergence.apply(settings, *tensors, target))


operators.library.impl("linear_kl_divergence", _autograd_kernel, "Autograd")
