"""Checks of the arguments of `linear_cross_entropy`, for tensors and for thunder's proxies alike.

What can be known from shapes, dtypes and devices is checked here, when a program is traced or called; the values of the
targets are checked when the region runs (`rows.RowSelection`).
"""

from numbers import Integral, Number
from typing import Any

REDUCTIONS = ("mean", "sum", "none")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


def dtype_name(tensor: Any) -> str:
    """A tensor's or proxy's dtype as a plain name, such as "bfloat16"."""
    return str(tensor.dtype).split(".")[-1].rstrip("_")


def check_linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any,
    weight: Any,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
) -> None:
    """Raises for arguments of `functional.linear_cross_entropy` that have no meaning or are not supported.

    Raises:
        TypeError: for a dtype or a type that does not fit; the message names the argument and what was expected.
        ValueError: for a shape, a device or a value that does not fit, likewise.
        NotImplementedError: for an argument of which only the default is supported yet.
    """
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    if linear_bias is not None:
        tensors["linear_bias"] = linear_bias
    for name, tensor in tensors.items():
        if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
            raise TypeError(f"{name} must be a tensor, but got {type(tensor).__name__}")
        expected = INTEGERS if name == "target" else FLOATS
        if dtype_name(tensor) not in expected:
            raise TypeError(f"{name} must have one of the dtypes {', '.join(expected)}, but got {dtype_name(tensor)}")

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
    if linear_bias is not None and tuple(linear_bias.shape) != (vocab,):
        raise ValueError(f"linear_bias must be (V,) = ({vocab},), but got {_shape(linear_bias)}")

    for name, tensor in tensors.items():
        if name not in ("input", "target") and dtype_name(tensor) != dtype_name(input):
            raise TypeError(f"{name} must have input's dtype, {dtype_name(input)}, but got {dtype_name(tensor)}")
        if str(tensor.device) != str(input.device):
            raise ValueError(f"{name} must be on input's device, {input.device}, but got {tensor.device}")

    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, but got {reduction!r}")
    if isinstance(ignore_index, bool) or not (isinstance(ignore_index, Integral) or _is_number_proxy(ignore_index)):
        raise TypeError(f"ignore_index must be an int, but got {type(ignore_index).__name__}")
    if isinstance(ignore_index, Integral) and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit 64 bits, but got {ignore_index}")
    unsupported = {
        "weight": (weight, None),
        "label_smoothing": (label_smoothing, 0.0),
        "softcap": (softcap, None),
        "logit_scale": (logit_scale, 1.0),
        "z_loss": (z_loss, 0.0),
    }
    for name, (value, default) in unsupported.items():
        is_default = value is None if default is None else isinstance(value, Number) and value == default
        if not is_default:
            raise NotImplementedError(f"{name} is not supported yet; only its default, {default}, is")


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _is_number_proxy(value: Any) -> bool:
    return getattr(value, "python_type", None) is int
