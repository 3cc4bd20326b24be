"""Checks of the arguments of `linear_cross_entropy`, for tensors and for thunder's proxies alike.

What can be known from shapes, dtypes and devices is checked here, when a program is traced or called; the values of the
targets are checked when the region runs (`rows.RowSelection`).
"""

import math
from numbers import Integral, Real
from typing import Any

from thunder_flce.operation.loss import OUTPUTS, Loss

REDUCTIONS = ("mean", "sum", "none")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


def dtype_name(tensor: Any) -> str:
    """A tensor's or proxy's dtype as a plain name, such as "bfloat16"."""
    return str(tensor.dtype).split(".")[-1].rstrip("_")


def check_linear_cross_entropy(
    input: Any, linear_weight: Any, target: Any, *, linear_bias: Any, weight: Any, num_items: Any, loss: Loss
) -> None:
    """Raises for arguments of `functional.linear_cross_entropy` that have no meaning.

    Args:
        input: a tensor or a proxy, as the following.
        linear_weight: see there.
        target: see there.
        linear_bias: see there; may be None.
        weight: see there; may be None.
        num_items: see there; may be None.
        loss: the arguments that are plain values.

    Raises:
        TypeError: for a dtype or a type that does not fit; the message names the argument and what was expected.
        ValueError: for a shape, a device or a value that does not fit, likewise.
    """
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    optional = {"linear_bias": linear_bias, "weight": weight}
    tensors.update({name: tensor for name, tensor in optional.items() if tensor is not None})
    for name, tensor in tensors.items():
        if not _is_tensor(tensor):
            raise TypeError(f"{name} must be a tensor, but got {type(tensor).__name__}")
        if hasattr(tensor, "device_mesh"):
            raise TypeError(
                f"{name} must be a tensor on one device, but got {type(tensor).__name__}; pass what to_local() or "
                f"full_tensor() returns"
            )
        expected = INTEGERS if name == "target" else FLOATS
        if dtype_name(tensor) not in expected:
            raise TypeError(f"{name} must have one of the dtypes {', '.join(expected)}, but got {dtype_name(tensor)}")
    _check_shapes(tensors)
    for name, tensor in tensors.items():
        # Class weights are no operand of a product: float32 ones beside 16-bit operands lose nothing.
        allowed = [dtype_name(input), *(["float32"] if name == "weight" and dtype_name(input) != "float64" else [])]
        if name not in ("input", "target") and dtype_name(tensor) not in allowed:
            raise TypeError(f"{name} must have input's dtype, {dtype_name(input)}, but got {dtype_name(tensor)}")
        if str(tensor.device) != str(input.device):
            raise ValueError(f"{name} must be on input's device, {input.device}, but got {tensor.device}")
    if weight is not None and weight.requires_grad:
        raise ValueError("weight must not require a gradient: there is none with respect to class weights")
    _check_num_items(num_items, input, loss)
    _check_loss(loss, linear_weight.shape[0])


def _check_shapes(tensors: dict[str, Any]) -> None:
    input, linear_weight, target = (tensors[name] for name in ("input", "linear_weight", "target"))
    if input.ndim < 1:
        raise ValueError("input must have at least one dimension, (..., H), but got a tensor without any")
    if linear_weight.ndim != 2:
        raise ValueError(f"linear_weight must be two-dimensional, (V, H), but got {_shape(linear_weight)}")
    vocab, hidden = linear_weight.shape
    if vocab == 0:
        raise ValueError("linear_weight must have at least one row (V ≥ 1), but got V = 0")
    if input.shape[-1] != hidden:
        raise ValueError(
            f"input's last dimension must be H = {hidden}, as in linear_weight {_shape(linear_weight)}, but input is "
            f"{_shape(input)}"
        )
    if tuple(target.shape) != tuple(input.shape[:-1]):
        raise ValueError(
            f"target must have input's shape without its last dimension, {tuple(input.shape[:-1])}, but got "
            f"{_shape(target)}"
        )
    for name in ("linear_bias", "weight"):
        if name in tensors and tuple(tensors[name].shape) != (vocab,):
            raise ValueError(f"{name} must be (V,) = ({vocab},), but got {_shape(tensors[name])}")


def _check_num_items(num_items: Any, input: Any, loss: Loss) -> None:
    if num_items is None:
        return
    if loss.reduction != "mean":
        raise ValueError(
            f'num_items is what reduction "mean" divides by, in place of the number of valid targets; with reduction '
            f"{loss.reduction!r} it has no meaning"
        )
    if _is_tensor(num_items):
        if num_items.ndim != 0:
            raise ValueError(f"num_items must be a number or a tensor without dimensions, but got {_shape(num_items)}")
        if dtype_name(num_items) not in (*INTEGERS, *FLOATS):
            raise TypeError(f"num_items must be a number, but got {dtype_name(num_items)}")
        if num_items.requires_grad:
            raise ValueError("num_items must not require a gradient: there is none with respect to it")
        if str(num_items.device) != str(input.device):
            raise ValueError(f"num_items must be on input's device, {input.device}, but got {num_items.device}")
    elif isinstance(num_items, bool) or not (isinstance(num_items, Real) or _is_number_proxy(num_items, int, float)):
        raise TypeError(
            f"num_items must be a number or a tensor without dimensions, but got {type(num_items).__name__}"
        )
    elif isinstance(num_items, Real) and not 0 <= num_items < math.inf:
        raise ValueError(f"num_items must be finite and not negative, but got {num_items}")


def _check_loss(loss: Loss, vocab: int) -> None:
    if loss.reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, but got {loss.reduction!r}")
    for name in ("ignore_index", "vocab_size"):
        value = getattr(loss, name)
        is_default = name == "vocab_size" and value is None
        is_int = isinstance(value, Integral) or _is_number_proxy(value, int)
        if not is_default and (isinstance(value, bool) or not is_int):
            raise TypeError(f"{name} must be an int, but got {type(value).__name__}")
    ignore_index, vocab_size = loss.ignore_index, loss.vocab_size
    if isinstance(ignore_index, Integral) and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit 64 bits, but got {ignore_index}")
    if isinstance(vocab_size, Integral) and not 1 <= vocab_size <= vocab:
        raise ValueError(f"vocab_size must be between 1 and the rows of linear_weight, {vocab}, but got {vocab_size}")
    for name in ("label_smoothing", "softcap", "logit_scale", "z_loss"):
        value = getattr(loss, name)
        if name == "softcap" and value is None:
            continue
        if isinstance(value, bool) or not (isinstance(value, Real) or _is_number_proxy(value, int, float)):
            raise TypeError(f"{name} must be a number, but got {type(value).__name__}")
        if isinstance(value, Real) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, but got {value}")
    if isinstance(loss.label_smoothing, Real) and not 0 <= loss.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, but got {loss.label_smoothing}")
    if isinstance(loss.softcap, Real) and not loss.softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no softcap, but got {loss.softcap}")
    if isinstance(loss.logit_scale, Real) and loss.logit_scale == 0:
        raise ValueError("logit_scale must not be 0: all logits would be equal")
    if not isinstance(loss.outputs, tuple) or any(name not in OUTPUTS for name in loss.outputs):
        raise ValueError(f"outputs must be a tuple of names among {OUTPUTS}, but got {loss.outputs!r}")
    if len(set(loss.outputs)) < len(loss.outputs):
        raise ValueError(f"outputs must name each output once, but got {loss.outputs!r}")


def _is_tensor(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("shape", "dtype", "requires_grad"))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _is_number_proxy(value: Any, *types: type) -> bool:
    return getattr(value, "python_type", None) in types
