"""The thunder symbols of this project and what runs them on torch tensors.

==========================  ======================================================================================
symbol                      what it stands for
==========================  ======================================================================================
linear_cross_entropy        the region; its subsymbols are the plain decomposition, linear then cross_entropy
linear_cross_entropy_fwd    its forward: the loss, the rows' statistics, and what else the plan keeps
linear_cross_entropy_bwd    its backward, for plans that compute the gradients there
scale_gradients             its backward, for plans that computed the gradients in the forward
cross_entropy_fwd, _bwd     cross-entropy on logits that somebody else needs, too
==========================  ======================================================================================

All but the first belong to the executor `flce` and are primitives: opaque to every pass, and tagged so that no pass
computes a forward again in the backward.

The forwards return the loss, row_max, row_logsumexp (relative to row_max) and valid_count; see `engine`.
"""

from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor
from torch import Tensor

from thunder_flce import engine, functional, printer
from thunder_flce.arguments import check_linear_cross_entropy
from thunder_flce.engine import Gradients, Operands, SavedStatistics
from thunder_flce.plan import Plan, layout_for
from thunder_flce.standalone import backward_impl, forward_impl

executor = OperatorExecutor("flce", version="0.1")

# REDUCTION_OP is what nvFuser's rematerialisation heeds, DONT_RECOMPUTE_IN_BACKWARD what thunder's own does.
FORWARD_TAGS = (prims.OpTags.REDUCTION_OP, prims.OpTags.DONT_RECOMPUTE_IN_BACKWARD)


@ltorch.torchsymbol(functional.linear_cross_entropy, id="thunder_flce.linear_cross_entropy", tags=FORWARD_TAGS)
def linear_cross_entropy(
    input: TensorProxy,
    linear_weight: TensorProxy,
    target: TensorProxy,
    *,
    linear_bias: TensorProxy | None = None,
    weight: TensorProxy | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    options: None = None,
    dtype: dtypes.dtype | None = None,
    needs_grad: tuple[str, ...] | None = None,
    plan: dict[str, Any] | None = None,
) -> TensorProxy:
    """`functional.linear_cross_entropy` in a trace. What it calls is what runs where the executor is not used.

    `FuseLinearCrossEntropy` sets the last three: the loss's dtype (None: as in `functional.linear_cross_entropy`), the
    names of the tensors that need a gradient, and the fields of a `Plan`.
    """
    check_linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
    )
    if options is not None:
        raise ValueError("options is for eager calls; inside thunder.jit, give them to thunder_flce.jit")
    logits = ltorch.linear(input, linear_weight, linear_bias)
    if dtypes.to_strong_dtype(input.dtype) is not loss_dtype(input):
        logits = ltorch.to(logits, loss_dtype(input))
    logits = ltorch.reshape(logits, (-1, linear_weight.shape[0]))
    flat_target = ltorch.reshape(target, (-1,))
    if dtypes.to_strong_dtype(target.dtype) is not dtypes.int64:
        flat_target = ltorch.to(flat_target, dtypes.int64)
    loss = ltorch.cross_entropy(logits, flat_target, ignore_index=ignore_index, reduction=reduction)
    if dtype is not None and dtype != loss.dtype:
        loss = ltorch.to(loss, dtype)
    return ltorch.reshape(loss, target.shape) if reduction == "none" else loss


def loss_dtype(tensor: TensorProxy) -> dtypes.dtype:
    """float32, or float64 for float64: the dtype of the loss and of everything that is one number a row."""
    return dtypes.float64 if dtypes.to_strong_dtype(tensor.dtype) is dtypes.float64 else dtypes.float32


def _rows_like(tensor: TensorProxy, shape: tuple[int, ...]) -> TensorProxy:
    return TensorProxy(shape=shape, device=tensor.device, dtype=loss_dtype(tensor), requires_grad=False)


def _statistics_like(tensor: TensorProxy, rows: int) -> tuple[TensorProxy, TensorProxy]:
    return _rows_like(tensor, (rows,)), _rows_like(tensor, (rows,))


# The arguments after the tensors are a Plan's fields and what `Operands` asks for, spelled out, since a trace prints
# and hashes plain values only.


def _linear_cross_entropy_fwd_meta(
    input: TensorProxy,
    linear_weight: TensorProxy,
    target: TensorProxy,
    linear_bias: TensorProxy | None,
    *,
    reduction: str,
    ignore_index: int,
    needs_grad: tuple[str, ...],
    dtype: dtypes.dtype | None = None,
    **plan: Any,
) -> tuple[TensorProxy, ...]:
    """Mirrors `_linear_cross_entropy_fwd_impl`."""
    tokens = target.numel
    shape = tuple(target.shape) if reduction == "none" else ()
    loss = TensorProxy(shape=shape, device=input.device, dtype=dtype or loss_dtype(input), requires_grad=False)
    valid_count = TensorProxy(shape=(), device=input.device, dtype=dtypes.int64, requires_grad=False)
    outputs = [loss, *_statistics_like(input, tokens), valid_count]
    if plan["strategy"] == "gradients_in_forward":
        tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
        outputs += [TensorProxy(like=tensors[name], requires_grad=False) for name in needs_grad]
    elif plan["strategy"] == "save_logits":
        torch_dtype = dtypes.to_torch_dtype(input.dtype)
        layout = layout_for(linear_weight.shape[0], dtype=torch_dtype, device_type=input.device.type)
        outputs.append(TensorProxy(like=input, shape=(tokens, layout.row_stride), requires_grad=False))
    return tuple(outputs)


def _operands(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    *,
    reduction: str,
    ignore_index: int,
    needs_grad: tuple[str, ...],
) -> Operands:
    return Operands(
        input.reshape(target.numel(), input.shape[-1]),
        linear_weight,
        linear_bias,
        target.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
        input_grad="input" in needs_grad,
        weight_grad="linear_weight" in needs_grad,
        bias_grad="linear_bias" in needs_grad,
    )


def _linear_cross_entropy_fwd_impl(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    *,
    reduction: str,
    ignore_index: int,
    needs_grad: tuple[str, ...],
    dtype: dtypes.dtype | None = None,
    **plan: Any,
) -> tuple[Tensor, ...]:
    """See `engine.forward`. Returns the loss, the statistics, and the logits or the needed gradients, if planned."""
    operands = _operands(
        input,
        linear_weight,
        target,
        linear_bias,
        reduction=reduction,
        ignore_index=ignore_index,
        needs_grad=needs_grad,
    )
    result = engine.forward(operands, Plan(**plan))
    loss = result.loss.reshape(target.shape) if reduction == "none" else result.loss
    outputs = [loss if dtype is None else loss.to(dtypes.to_torch_dtype(dtype)), *result.statistics]
    if result.logits is not None:
        outputs.append(result.logits)
    return *outputs, *_present(result.gradients, input.shape)


def _present(gradients: Gradients, input_shape: torch.Size) -> list[Tensor]:
    """The gradients that are not None, dX in the shape of the input."""
    if gradients.input is not None:
        gradients = gradients._replace(input=gradients.input.view(input_shape))
    return [gradient for gradient in gradients if gradient is not None]


def _linear_cross_entropy_bwd_meta(
    grad: TensorProxy,
    input: TensorProxy,
    linear_weight: TensorProxy,
    target: TensorProxy,
    linear_bias: TensorProxy | None,
    row_max: TensorProxy,
    row_logsumexp: TensorProxy,
    valid_count: TensorProxy,
    logits: TensorProxy | None,
    *,
    reduction: str,
    ignore_index: int,
    needs_grad: tuple[str, ...],
    **plan: Any,
) -> tuple[TensorProxy, ...]:
    """Mirrors `_linear_cross_entropy_bwd_impl`."""
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    return tuple(TensorProxy(like=tensors[name], requires_grad=False) for name in needs_grad)


def _linear_cross_entropy_bwd_impl(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    row_max: Tensor,
    row_logsumexp: Tensor,
    valid_count: Tensor,
    logits: Tensor | None,
    *,
    reduction: str,
    ignore_index: int,
    needs_grad: tuple[str, ...],
    **plan: Any,
) -> tuple[Tensor, ...]:
    """See `engine.backward`. Returns the needed gradients."""
    operands = _operands(
        input,
        linear_weight,
        target,
        linear_bias,
        reduction=reduction,
        ignore_index=ignore_index,
        needs_grad=needs_grad,
    )
    statistics = SavedStatistics(row_max, row_logsumexp, valid_count)
    gradients = engine.backward(operands, Plan(**plan), statistics, logits, grad.reshape(-1) if grad.ndim else grad)
    return tuple(_present(gradients, input.shape))


def _scale_gradients_meta(
    grad: TensorProxy, valid_count: TensorProxy, *gradients: TensorProxy
) -> tuple[TensorProxy, ...]:
    """Mirrors `engine.scale_gradients`."""
    return tuple(TensorProxy(like=gradient) for gradient in gradients)


def _cross_entropy_fwd_meta(
    logits: TensorProxy, target: TensorProxy, *, reduction: str, ignore_index: int
) -> tuple[TensorProxy, ...]:
    """Mirrors `standalone.forward_impl`."""
    shape = tuple(target.shape) if reduction == "none" else ()
    loss = TensorProxy(like=logits, shape=shape, requires_grad=False)
    return loss, *_statistics_like(logits, target.shape[0]), _rows_like(logits, ())


def _cross_entropy_bwd_meta(
    grad: TensorProxy,
    logits: TensorProxy,
    target: TensorProxy,
    row_max: TensorProxy,
    row_logsumexp: TensorProxy,
    valid_count: TensorProxy,
    *,
    reduction: str,
    ignore_index: int,
) -> TensorProxy:
    """Mirrors `standalone.backward_impl`."""
    return TensorProxy(like=logits, requires_grad=False)


linear_cross_entropy_fwd = executor.register_operator(
    "linear_cross_entropy_fwd",
    meta=_linear_cross_entropy_fwd_meta,
    fn=_linear_cross_entropy_fwd_impl,
    tags=FORWARD_TAGS,
    python_printer=printer.print_forward,
)
linear_cross_entropy_bwd = executor.register_operator(
    "linear_cross_entropy_bwd",
    meta=_linear_cross_entropy_bwd_meta,
    fn=_linear_cross_entropy_bwd_impl,
    python_printer=printer.print_backward,
)
scale_gradients = executor.register_operator(
    "scale_gradients",
    meta=_scale_gradients_meta,
    fn=engine.scale_gradients,
    python_printer=printer.print_scaling,
)
cross_entropy_fwd = executor.register_operator(
    "cross_entropy_fwd", meta=_cross_entropy_fwd_meta, fn=forward_impl, tags=FORWARD_TAGS
)
cross_entropy_bwd = executor.register_operator("cross_entropy_bwd", meta=_cross_entropy_bwd_meta, fn=backward_impl)
