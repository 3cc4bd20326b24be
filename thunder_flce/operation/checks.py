"""Checks of the arguments of a call, for tensors, `Spec`s and thunder's proxies alike.

Dtypes, devices, shapes and combinations of arguments are checked here, when a program is traced and at the first call
of each signature. The values of the targets are checked when the region runs. Legend as in `call`.
"""

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

import torch

from thunder_flce.operation import pointwise
from thunder_flce.operation.call import CLASS, HIDDEN, SCALAR, TOKEN, Call, argument, is_tensor
from thunder_flce.operation.divergence import KINDS
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, OUTPUTS, Loss
from thunder_flce.operation.pointwise import VARIABLES

REDUCTIONS = ("mean", "sum", "none")


def dtype_name(dtype: Any) -> str:
    """Returns the plain name, such as "bfloat16", of a dtype of PyTorch or thunder."""
    return str(dtype).split(".")[-1].rstrip("_").replace("bool8", "bool")


def check_call(call: Call) -> None:
    """Raises an error if an argument is wrong. num_items and expected_gradient may be numbers instead of tensors.

    Raises:
        TypeError: for a wrong type or dtype; the message names the argument and the expected ones.
        ValueError: for a wrong shape, device, value or combination of arguments, likewise.
    """
    loss, divergence = call.loss, call.loss.divergence
    required = ("target",) if divergence is None else ("teacher_input", "teacher_weight")
    arguments = {**dict.fromkeys(("input", "linear_weight", *required)), **call.tensors}
    numbers = {name: value for name, value in arguments.items() if name in _SCALAR_RULES and not is_tensor(value)}
    tensors = {name: tensor for name, tensor in arguments.items() if name not in numbers}
    for name in tensors:
        _check_tensor(name, tensors)
    # V, if each rank has a part of the rows.
    vocab = None if call.shard is None else call.shard.weight_rows
    _check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, vocab)
    for name, tensor in tensors.items():
        _check_needs_no_gradient(name, tensor)
    check_loss(loss, tensors["linear_weight"].shape[0] if vocab is None else vocab)
    _check_combinations(arguments, loss)
    for name, number in numbers.items():
        check_scalar(name, number)
    if divergence is not None:
        if divergence.kind not in KINDS:
            raise ValueError(f"divergence must be one of {KINDS}, but got {divergence.kind!r}")
        _check_number("beta", divergence.beta, ("be between 0 and 1, both excluded", lambda x: 0 < x < 1))
        _check_number("temperature", divergence.temperature, ("be positive and finite", lambda x: 0 < x < math.inf))


def check_fits_float32(name: str, number: Any) -> None:
    """Raises an error if an argument is not a number that is finite as a float32."""
    _check_number(name, number, ("be between -3.4e38 and 3.4e38", lambda x: -3.4e38 <= x <= 3.4e38))


def check_scalar(name: str, number: Any) -> None:
    """Raises an error if an argument that is a number in place of a tensor must not be that number."""
    _check_number(name, number, _SCALAR_RULES[name], what=_NUMBER_OR_TENSOR)


def check_is_dense(name: str, tensor: Any) -> None:
    """Raises a TypeError for a nested tensor, whose shape may be undefined, and for a sparse tensor."""
    if getattr(tensor, "is_nested", False):
        raise TypeError(f"{name} must be a dense tensor, but is nested; pass torch.cat({name}.unbind())")
    if (layout := getattr(tensor, "layout", torch.strided)) is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, but has the layout {layout}")


def _check_tensor(name: str, tensors: Mapping[str, Any]) -> None:
    """Checks type, dtype and device of one tensor; input and teacher_input first, since others are compared to them."""
    tensor, properties = tensors[name], argument(name)
    check_is_dense(name, tensor)
    if not is_tensor(tensor):
        raise TypeError(f"{name} must be a tensor, but got {type(tensor).__name__}")
    if hasattr(tensor, "device_mesh"):
        advice = "pass what to_local() or full_tensor() returns"
        raise TypeError(f"{name} must be a tensor on one device, but got {type(tensor).__name__}; {advice}")
    dtype = dtype_name(tensor.dtype)
    if dtype not in properties.dtypes:
        advice = "; pass mask.to(input.dtype)" if name.endswith("_weights") and dtype == "bool" else ""
        raise TypeError(f"{name} must have one of the dtypes {', '.join(properties.dtypes)}, but got {dtype}{advice}")
    if properties.dtype_of is not None and dtype != (expected := dtype_name(tensors[properties.dtype_of].dtype)):
        # Class weights are not an operand of a matmul, so they may be float32 with 16-bit operands.
        if properties.role != CLASS or dtype != "float32" or expected == "float64":
            raise TypeError(f"{name} must have {properties.dtype_of}'s dtype, {expected}, but got {dtype}")
    device = tensors["input"].device
    if str(tensor.device) != str(device):
        raise ValueError(f"{name} must be on input's device, {device}, but got {tensor.device}")


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], whole_vocab: int | None) -> None:
    input_shape, weight_shape, target_shape = shapes["input"], shapes["linear_weight"], shapes.get("target", ())
    if not input_shape:
        raise ValueError("input must have at least one dimension, (..., H), but got a tensor without any")
    if len(weight_shape) != 2:
        raise ValueError(f"linear_weight must be two-dimensional, (V, H), but got {weight_shape}")
    tokens, vocab = input_shape[:-1], weight_shape[0]
    whole_vocab = vocab if whole_vocab is None else whole_vocab
    if whole_vocab == 0:
        raise ValueError("linear_weight must have at least one row (V ≥ 1), but got V = 0")
    if input_shape[-1] != weight_shape[1]:
        as_in = f"H = {weight_shape[1]}, as in linear_weight {weight_shape}"
        raise ValueError(f"input's last dimension must be {as_in}, but input is {input_shape}")
    has_k = "target_weights" in shapes
    if has_k and (target_shape[:-1] != tokens or len(target_shape) != len(input_shape) or not target_shape[-1]):
        requirement = f"(..., K) with input's dimensions but the last, and K ≥ 1, but got {target_shape}"
        raise ValueError(f"with target_weights, target must be {requirement}; input is {input_shape}")
    by_role = {TOKEN: tokens, CLASS: (whole_vocab,), SCALAR: ()}
    by_name = {"linear_bias": (vocab,), **({"target": target_shape, "target_weights": target_shape} if has_k else {})}
    for name, shape in shapes.items():
        role = argument(name).role
        if shape != (expected := by_name.get(name, by_role.get(role, shape))):
            is_as_target = name != "target" and (name == "target_weights" or not has_k)
            shape_words = "target's shape" if is_as_target else "input's shape without its last dimension"
            words = {TOKEN: f"have {shape_words}, {expected}", SCALAR: f"be {_NUMBER_OR_TENSOR}"}
            raise ValueError(f"{name} must {words.get(role, f'be (V,) = {expected}')}, but got {shape}")
    for x in (name for name in shapes if argument(name).role == HIDDEN and name != "input"):
        weight = x.replace("input", "weight")
        x_shape, weight_shape = shapes[x], shapes[weight]
        if len(weight_shape) != 2 or weight_shape[0] != vocab:
            size, advice = "h", ""
            if weight == "teacher_weight":
                size, advice = "H'", "; if one of both is padded, slice it to the rows that both have"
            raise ValueError(f"{weight} must be (V, {size}) with V = {vocab}, but got {weight_shape}{advice}")
        if x_shape != (expected := (*tokens, weight_shape[1])):
            requirement = f"{expected}: input's shape with the last dimension of {weight}"
            raise ValueError(f"{x} must be {requirement}, but got {x_shape}")


def _check_needs_no_gradient(name: str, tensor: Any) -> None:
    # The teacher's weight is a constant, whatever its requires_grad; its input is one if nothing is recorded.
    if argument(name).differentiable or name == "teacher_weight" or not tensor.requires_grad:
        return
    advice = ""
    if name == "teacher_input":
        if not torch.is_grad_enabled():
            return
        advice = "; compute it under torch.no_grad(), or pass teacher_input.detach()"
    raise ValueError(f"{name} must not require a gradient: it gets none{advice}")


def check_loss(loss: Loss, vocab: int) -> None:
    """Raises an error if a field of a loss is wrong for a linear_weight with `vocab` rows, as `check_call` does."""
    if loss.reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, but got {loss.reduction!r}")
    up_to_vocab = f"be between 1 and the rows of linear_weight, {vocab}"
    _check_number("ignore_index", loss.ignore_index, ("fit 64 bits", _fits_64_bits), kind=Integral)
    if loss.vocab_size is not None:
        _check_number("vocab_size", loss.vocab_size, (up_to_vocab, lambda x: 1 <= x <= vocab), kind=Integral)
    _check_number("label_smoothing", loss.label_smoothing, ("be between 0 and 1", lambda x: 0 <= x <= 1))
    if loss.softcap is not None:
        _check_number("softcap", loss.softcap, _FINITE, ("be positive, or None for no softcap", lambda x: x > 0))
    nonzero = ("not be 0, which makes all logits equal", lambda x: x != 0)
    _check_number("logit_scale", loss.logit_scale, _FINITE, nonzero)
    _check_number("z_loss", loss.z_loss, _FINITE)
    names = tuple(name for name in OUTPUTS if name != "divergence" or loss.divergence)
    if not isinstance(loss.outputs, tuple) or any(name not in names for name in loss.outputs):
        raise ValueError(f"outputs must be a tuple of names among {names}, but got {loss.outputs!r}")
    if len(set(loss.outputs)) < len(loss.outputs):
        raise ValueError(f"outputs must name each output once, but got {loss.outputs!r}")
    differentiable = [name for name in loss.outputs if name in DIFFERENTIABLE_OUTPUTS]
    if not isinstance(loss.detached, tuple) or any(name not in differentiable for name in loss.detached):
        requirement = f"a tuple of outputs that are differentiable, here {differentiable}"
        raise ValueError(f"detached must be {requirement}, but got {loss.detached!r}")


def _check_combinations(names: Collection[str], loss: Loss) -> None:
    """Raises an error for arguments that do not go together, or need others; `names` are those of the arguments."""
    has_targets, has_weight, has_each_row = "target_weights" in names, "weight" in names, loss.reduction == "none"
    inputs = sum(name.startswith("token_inputs") for name in names)
    needs_detached = has_weight and loss.label_smoothing and "mean_logit" in loss.differentiable_outputs
    if loss.token_loss:
        pointwise.check(loss.token_loss, inputs)
    wrong = (
        (needs_detached, 'outputs has "mean_logit", which gets no gradient with both weight and label_smoothing; pass '
         'detached=("mean_logit",) if none is needed'),
        ("num_items" in names and loss.reduction != "mean", 'num_items must be None unless reduction is "mean", whose '
         f"divisor it is, but reduction is {loss.reduction!r}"),
        (has_targets and has_weight, "weight must be None with target_weights: multiply these by the class weights of "
         "the targets"),
        (has_targets and loss.token_loss, "token_loss must be None with target_weights, which belong to the "
         "cross-entropy that it replaces"),
        (has_targets and loss.label_smoothing, "label_smoothing must be 0 with target_weights, which are soft targets "
         "already"),
        (has_targets and "accuracy" in loss.outputs, "outputs must not have 'accuracy' with target_weights: a token "
         "has no single target then"),
        (inputs and not loss.token_loss, "token_inputs must be empty without token_loss, which reads them"),
        (loss.token_loss and has_each_row, 'token_loss needs reduction "mean" or "sum"; for a loss of each token, '
         f"apply it to the results of outputs={VARIABLES}"),
        (loss.token_loss and has_weight, "weight must be None with token_loss, which replaces the cross-entropy that "
         "it belongs to"),
        (loss.token_loss and loss.label_smoothing, "label_smoothing must be 0 with token_loss, which replaces the "
         "cross-entropy that it belongs to"),
    )  # fmt: skip
    for is_wrong, text in wrong:
        if is_wrong:
            raise ValueError(text)


def _fits_64_bits(value: int) -> bool:
    return -(2**63) <= value < 2**63


_Rule = tuple[str, Callable[[Any], bool]]
"""A requirement of a number in words, which follow "must", and the predicate for it"""
_FINITE: _Rule = ("be finite", math.isfinite)
_NUMBER_OR_TENSOR = "a number or a tensor without dimensions"
_SCALAR_RULES: dict[str, _Rule] = {
    # They become float32.
    "num_items": ("be at most 3.4e38 and not negative", lambda x: 0 <= x <= 3.4e38),
    "expected_gradient": ("be at most 3.4e38 and not 0", lambda x: -3.4e38 <= x <= 3.4e38 and x != 0),
}


def _check_number(name: str, value: Any, *rules: _Rule, kind: type = Real, what: str = "a number") -> None:
    # A number, or a tracer's symbol or proxy of one, but not a bool.
    is_symbol = isinstance(value, torch.SymInt | torch.SymFloat)
    value_type = value.node.pytype if is_symbol else getattr(value, "python_type", type(value))
    if not issubclass(value_type, kind) or value_type is bool:
        raise TypeError(f"{name} must be {'an int' if kind is Integral else what}, but got {type(value).__name__}")
    # An int of more than 64 bits fits no tensor, and perhaps no float.
    if kind is Real and isinstance(value, int) and not _fits_64_bits(value):
        raise ValueError(f"{name} must be a float or fit 64 bits, but is an int of {value.bit_length()} bits")
    for expected, is_right in rules:
        # The value of a proxy is unknown, and so is that of a symbol for a tensor's value.
        is_known = value.node.has_hint() if is_symbol else isinstance(value, Real)
        if is_known and not is_right(value):
            raise ValueError(f"{name} must {expected}, but got {value}")
