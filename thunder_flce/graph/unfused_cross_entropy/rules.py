"""Which `torch.nn.functional.cross_entropy` the executor `flce` runs without its linear, and its derivative.

Targets that are class indices run our symbols. Targets that are class probabilities run thunder's own operations, which
other executors fuse; nvFuser's cross_entropy would read probabilities as indices, and fail.

thunder calls the checker and the rules with the arguments of `torch.nn.functional.cross_entropy`, already checked.
"""

from typing import Any, NamedTuple

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad, vjp
from thunder.core.utils import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_type_promotion
from thunder.executors.nvfuserex import nvfuser_available

from thunder_flce.graph.reading import is_static
from thunder_flce.graph.symbols import executor
from thunder_flce.graph.unfused_cross_entropy import symbols


class CrossEntropy(NamedTuple):
    """The arguments of a `torch.nn.functional.cross_entropy` in a trace."""

    logits: TensorProxy
    """(N, V), (V,) or (B, V, …)"""
    target: TensorProxy
    """(N,), () or (B, …), or class probabilities in the logits' shape"""
    weight: TensorProxy | None = None
    """(V,)"""
    size_average: None = None
    """thunder accepts only None, here and for `reduce`"""
    ignore_index: int = -100
    reduce: None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def has_probabilities(self) -> bool:
        """Whether the targets are class probabilities."""
        return dtypes.is_float_dtype(self.target.dtype)

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments that both symbols share; class weights and label smoothing only if they are used."""
        settings: dict[str, Any] = {"reduction": self.reduction, "ignore_index": self.ignore_index}
        if self.weight is not None:
            settings["weight"] = self.weight
        if self.label_smoothing:
            settings["label_smoothing"] = self.label_smoothing
        return settings


def _is_supported(*args: Any, **kwargs: Any) -> bool:
    """Whether the executor computes a call: static sizes, and logits of a float dtype."""
    call = CrossEntropy(*args, **kwargs)
    is_known = is_static(call.logits, call.target, call.ignore_index, call.label_smoothing)
    return is_known and dtypes.is_float_dtype(call.logits.dtype)


def _to_rows(tensor: TensorProxy) -> TensorProxy:
    """Reshapes (B, V, …) or (V,) to (N, V)."""
    if tensor.ndim > 2:
        tensor = ltorch.permute(tensor, (0, *range(2, tensor.ndim), 1))
    return tensor if tensor.ndim == 2 else ltorch.reshape(tensor, (-1, tensor.shape[-1]))


def _forward(call: CrossEntropy) -> tuple[TensorProxy, tuple[TensorProxy, ...]]:
    """Adds the forward symbol for class indices; returns the loss and the tensors that the backward reads."""
    logits = _to_rows(call.logits)
    target = call.target if call.target.ndim == 1 else ltorch.reshape(call.target, (-1,))
    loss, *statistics = symbols.cross_entropy_fwd(logits, target, **call.settings)
    if call.reduction == "none":
        loss = ltorch.reshape(loss, tuple(call.target.shape))
    return loss, (logits, target, *statistics)


def _loss_of_probabilities(call: CrossEntropy) -> TensorProxy:
    """Returns the loss for class probabilities y: -Σ_v q_v log p_v with q = w ((1 - ε) y + ε / V)."""
    # logsumexp instead of log_softmax, which thunder's torch.compile executor would take out of the fusion.
    class_dim = min(1, call.logits.ndim - 1)
    tensors = [tensor for tensor in call if isinstance(tensor, TensorProxy)]
    dtype, out_dtype = elementwise_type_promotion(*tensors, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    logits, share = ltorch.to(call.logits, dtype), ltorch.to(call.target, dtype)
    if call.label_smoothing:
        share = share * (1 - call.label_smoothing) + call.label_smoothing / logits.shape[class_dim]
    if call.weight is not None:
        share = share * ltorch.reshape(call.weight, (-1, *[1] * (logits.ndim - 2)))
    loss = ltorch.sum(share * (ltorch.logsumexp(logits, class_dim, keepdim=True) - logits), class_dim)
    if call.reduction != "none":
        rows, loss = loss.numel, ltorch.sum(loss)
        loss = loss / rows if call.reduction == "mean" else loss
    return ltorch.to(loss, out_dtype)


def _transform(*args: Any, **kwargs: Any) -> TensorProxy:
    call = CrossEntropy(*args, **kwargs)
    return _loss_of_probabilities(call) if call.has_probabilities else _forward(call)[0]


def _grad(*args: Any, **kwargs: Any) -> TensorProxy:
    call = CrossEntropy(*args, **kwargs)
    if call.has_probabilities:
        loss = _loss_of_probabilities(call)
        tensors = {name: value for name, value in call._asdict().items() if isinstance(value, TensorProxy)}

        def loss_of(*values: TensorProxy) -> TensorProxy:
            return _loss_of_probabilities(call._replace(**dict(zip(tensors, values, strict=True))))

        _, gradients = vjp(loss_of)((*tensors.values(),), (get_grad(loss),))
        for tensor, gradient in zip(tensors.values(), gradients, strict=True):
            put_grad(tensor, gradient)
        return loss
    loss, saved = _forward(call)
    grad = get_grad(loss)
    grad = ltorch.reshape(grad, (-1,)) if call.reduction == "none" and grad.ndim != 1 else grad
    gradient = symbols.cross_entropy_bwd(grad, *saved, **call.settings)
    _, (logits_grad,) = vjp(_to_rows)((call.logits,), (gradient,))
    put_grad(call.logits, logits_grad)
    return loss


executor.register_implementation(
    ltorch.cross_entropy, checker=_is_supported, execution_transform=_transform, grad_transform=_grad
)
if nvfuser_available():
    from thunder_flce.graph.unfused_cross_entropy import nvfuser_impl

    nvfuser_impl.register()
