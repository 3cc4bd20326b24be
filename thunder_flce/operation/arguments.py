"""Checks of the arguments of `linear_cross_entropy`, for tensors and for thunder's proxies alike.

Shapes, dtypes and devices are checked here, when a program is traced or called; the values of the targets are checked
when the region runs (`row_selection.RowSelection`).
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeVar

import torch

from thunder_flce.operation.divergence import KINDS, Divergence
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, OUTPUTS, Loss
from thunder_flce.operation.token_loss import check as check_token_loss

REDUCTIONS = ("mean", "sum", "none")
# Concrete classes first: to ask an abstract one takes ten times as long, and each call asks some dozen times.
_NUMBERS = (float, int, Real)
_SEQUENCES = (tuple, list, Sequence)
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")

_T = TypeVar("_T")


def dtype_name(tensor: Any) -> str:
    """A tensor's or proxy's dtype as a plain name, such as "bfloat16"."""
    return _name_of(tensor.dtype)


@cache
def _name_of(dtype: Any) -> str:
    return str(dtype).split(".")[-1].rstrip("_").replace("bool8", "bool")


def named_operands(
    input: _T, linear_weight: _T, linear_bias: _T | None, terms: Sequence[tuple[_T, _T]]
) -> dict[str, _T]:
    """The operands of the linears by name, in the order of `needs_grad`: these are all that can have a gradient."""
    operands = {"input": input, "linear_weight": linear_weight}
    if linear_bias is not None:
        operands["linear_bias"] = linear_bias
    for number, (term_input, term_weight) in enumerate(terms):
        operands |= {f"terms[{number}].input": term_input, f"terms[{number}].weight": term_weight}
    return operands


def check_linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any,
    terms: Any = (),
    weight: Any,
    token_weights: Any = None,
    target_weights: Any = None,
    token_inputs: Any = (),
    num_items: Any,
    expected_gradient: Any,
    loss: Loss,
    vocab: int | None = None,
) -> None:
    """Raises for arguments of `functional.linear_cross_entropy`, tensors or proxies, that have no meaning.

    `vocab` are the rows of the whole weight, where linear_weight is one of its parts.

    Raises:
        TypeError: for a dtype or a type that does not fit; the message names the argument and what was expected.
        ValueError: for a shape, a device or a value that does not fit, likewise.
    """
    check_pairs(terms)
    tensors = {**named_operands(input, linear_weight, linear_bias, terms), "target": target}
    check_token_inputs(token_inputs)
    optional = {"weight": weight, "token_weights": token_weights, "target_weights": target_weights}
    optional |= {f"token_inputs[{number}]": tensor for number, tensor in enumerate(token_inputs)}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    numbers = {"num_items": num_items, "expected_gradient": expected_gradient}
    tensors |= {name: number for name, number in numbers.items() if _is_tensor(number)}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, input)
    _check_shapes(tensors, vocab)
    for name in (*optional, *numbers):
        if name in tensors and tensors[name].requires_grad:
            raise ValueError(f"{name} must not require a gradient: there is none with respect to it")
    check_loss(loss, linear_weight.shape[0] if vocab is None else vocab)
    if target_weights is not None:
        _check_goes_with_target_weights(weight, loss)
    elif loss.target_rest:
        raise ValueError("target_rest is the rest of target_weights; without these it has no meaning")
    _check_token_loss(loss, len(token_inputs), has_class_weight=weight is not None)
    for name, number in numbers.items():
        if number is not None and name not in tensors and not _is_number(number):
            raise TypeError(f"{name} must be a number or a tensor without dimensions, but got {type(number).__name__}")
    if num_items is not None and loss.reduction != "mean":
        raise ValueError(
            f'num_items is what reduction "mean" divides by, in place of the number of valid targets; with reduction '
            f"{loss.reduction!r} it has no meaning"
        )
    for name, number in numbers.items():
        _check_size(name, number)
    if isinstance(num_items, _NUMBERS) and not 0 <= float(num_items) < math.inf:
        raise ValueError(f"num_items must be finite and not negative, but got {num_items}")
    if isinstance(expected_gradient, _NUMBERS) and (expected_gradient == 0 or not math.isfinite(expected_gradient)):
        raise ValueError(f"expected_gradient must be finite and not 0, but got {expected_gradient}")


def _check_goes_with_target_weights(weight: Any, loss: Loss) -> None:
    if weight is not None:
        raise ValueError(
            "weight has no meaning with target_weights: multiply these by the class weights of the targets"
        )
    if loss.token_loss:
        raise ValueError("token_loss takes the place of the cross-entropy that target_weights belong to")
    if loss.target_rest and loss.reduction == "none":
        raise ValueError('target_rest needs reduction "mean" or "sum"')
    if loss.label_smoothing:
        raise ValueError("label_smoothing must be 0 with target_weights, which are soft targets already")
    for name in ("log_prob", "accuracy"):
        if name in loss.outputs:
            raise ValueError(
                f"outputs must not have {name!r} with target_weights: a token has no target of its own then"
            )


def check_linear_kl_divergence(
    student: Mapping[str, Any], teacher: Mapping[str, Any], divergence: Divergence, *, loss: Loss
) -> None:
    """Raises for arguments of `kl_divergence.linear_kl_divergence` that have no meaning.

    Args:
        student: input, linear_weight and target, which may be None, by name.
        teacher: teacher_input and teacher_weight by name.
        divergence: which one.
        loss: the reduction and ignore_index.

    Raises:
        TypeError: for a dtype or a type that does not fit; the message names the argument and what was expected.
        ValueError: for a shape, a device or a value that does not fit, likewise.
    """
    tensors = {name: tensor for name, tensor in student.items() if tensor is not None}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, tensors["input"])
    _check_shapes(tensors, None)
    for name, tensor in teacher.items():
        _check_tensor(name, tensor, teacher["teacher_input"], "teacher_input")
    of_input, of_weight = tuple(tensors["input"].shape), tuple(tensors["linear_weight"].shape)
    of_teacher_input, of_teacher = (tuple(tensor.shape) for tensor in teacher.values())
    if len(of_teacher) != 2 or of_teacher[0] != of_weight[0]:
        raise ValueError(
            f"teacher_weight must be (V, H') with V = {of_weight[0]}, the rows of linear_weight, but got {of_teacher}; "
            "where one of both is padded, slice it to the columns that both have"
        )
    if of_teacher_input != (*of_input[:-1], of_teacher[1]):
        what = f"be {(*of_input[:-1], of_teacher[1])}: input's shape with the last dimension of teacher_weight"
        raise ValueError(f"teacher_input must {what}, but got {of_teacher_input}")
    if str(teacher["teacher_input"].device) != str(tensors["input"].device):
        device = tensors["input"].device
        raise ValueError(
            f"teacher_input must be on input's device, {device}, but got {teacher['teacher_input'].device}"
        )
    if divergence.kind not in KINDS:
        raise ValueError(f"divergence must be one of {KINDS}, but got {divergence.kind!r}")
    for name, is_right, expected in (
        ("beta", lambda value: 0 < value < 1, "be between 0 and 1, both excluded"),
        ("temperature", lambda value: 0 < value < math.inf, "be positive and finite"),
    ):
        value = getattr(divergence, name)
        if not _is_number(value):
            raise TypeError(f"{name} must be a number, but got {type(value).__name__}")
        _check_size(name, value)
        if not is_right(value):
            raise ValueError(f"{name} must {expected}, but got {value}")
    check_loss(loss, of_weight[0])


def _check_token_loss(loss: Loss, inputs: int, *, has_class_weight: bool) -> None:
    if not loss.token_loss:
        if inputs:
            raise ValueError("token_inputs are what token_loss reads; without it they have no meaning")
        return
    check_token_loss(loss.token_loss, inputs)
    if loss.reduction == "none":
        raise ValueError(
            'token_loss needs reduction "mean" or "sum"; for a loss of each token, apply it to the results of '
            'outputs=("log_prob", "entropy", "log_sum_exp")'
        )
    for name, is_given in (("weight", has_class_weight), ("label_smoothing", loss.label_smoothing != 0)):
        if is_given:
            raise ValueError(f"{name} belongs to the cross-entropy, in whose place token_loss is")


def check_token_inputs(token_inputs: Any) -> None:
    """Raises `TypeError` for token_inputs that are no sequence."""
    if not isinstance(token_inputs, _SEQUENCES):
        raise TypeError(f"token_inputs must be a sequence of tensors, but got {type(token_inputs).__name__}")


def check_pairs(terms: Any) -> None:
    """Raises `TypeError` for terms that are not pairs."""
    if not isinstance(terms, _SEQUENCES):
        raise TypeError(f"terms must be a sequence of pairs (input, weight), but got {type(terms).__name__}")
    for number, term in enumerate(terms):
        is_sequence = isinstance(term, _SEQUENCES)
        if not is_sequence or len(term) != 2:
            found = f"has length {len(term)}" if is_sequence else f"got {type(term).__name__}"
            raise TypeError(f"terms[{number}] must be a pair (input, weight), but {found}")


def _check_tensor(name: str, tensor: Any, input: Any, of: str = "input") -> None:
    if not _is_tensor(tensor):
        raise TypeError(f"{name} must be a tensor, but got {type(tensor).__name__}")
    if hasattr(tensor, "device_mesh"):
        advice = "pass what to_local() or full_tensor() returns"
        raise TypeError(f"{name} must be a tensor on one device, but got {type(tensor).__name__}; {advice}")
    expected = {"target": INTEGERS, "num_items": (*INTEGERS, *FLOATS)}.get(name, FLOATS)
    is_token_input = name.startswith("token_inputs")
    if is_token_input:
        expected = (*FLOATS, *INTEGERS, "bool")
    others = ("target", "token_weights", "target_weights", "num_items", "expected_gradient")
    may_differ = is_token_input or name in others
    dtype, of_input = dtype_name(tensor), dtype_name(input)
    if dtype not in expected:
        advice = "; pass mask.to(input.dtype)" if name.endswith("_weights") and dtype == "bool" else ""
        raise TypeError(f"{name} must have one of the dtypes {', '.join(expected)}, but got {dtype}{advice}")
    # Class weights are not an operand of a matmul, so they may be float32 where the operands have 16 bits.
    is_wider_weight = name == "weight" and dtype == "float32" and of_input != "float64"
    if dtype != of_input and not may_differ and not is_wider_weight:
        raise TypeError(f"{name} must have {of}'s dtype, {of_input}, but got {dtype}")
    if tensor.device != input.device and str(tensor.device) != str(input.device):
        raise ValueError(f"{name} must be on {of}'s device, {input.device}, but got {tensor.device}")


def _check_shapes(tensors: dict[str, Any], whole_vocab: int | None) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    of_input, of_weight = shapes["input"], shapes["linear_weight"]
    if not of_input:
        raise ValueError("input must have at least one dimension, (..., H), but got a tensor without any")
    if len(of_weight) != 2:
        raise ValueError(f"linear_weight must be two-dimensional, (V, H), but got {of_weight}")
    vocab, hidden = of_weight
    whole_vocab = vocab if whole_vocab is None else whole_vocab
    if whole_vocab == 0:
        raise ValueError("linear_weight must have at least one row (V ≥ 1), but got V = 0")
    *rows, last = of_input
    if last != hidden:
        as_in = f"H = {hidden}, as in linear_weight {of_weight}"
        raise ValueError(f"input's last dimension must be {as_in}, but input is {of_input}")
    of_target = shapes.get("target", ())
    if "target_weights" in shapes:
        if of_target[:-1] != tuple(rows) or len(of_target) != len(of_input) or not of_target[-1]:
            what = f"(..., K), input's shape with another last dimension, and K ≥ 1, but is {of_target}"
            raise ValueError(f"with target_weights, target must be {what}; input is {of_input}")
    right = {
        "target": of_target if "target_weights" in shapes else tuple(rows),
        "token_weights": tuple(rows),
        "target_weights": of_target,
        "linear_bias": (vocab,),
        "weight": (whole_vocab,),
        "num_items": (),
        "expected_gradient": (),
    }
    for name, shape in shapes.items():
        expected = tuple(rows) if name.startswith("token_inputs") else right.get(name, shape)
        if shape != expected:
            raise ValueError(f"{name} must {_words_for(name, expected, shapes)}, but got {shape}")
    names = [name for name in shapes if name.startswith("terms")]
    for name, weight_name in zip(names[::2], names[1::2], strict=True):
        of_weight = shapes[weight_name]
        if len(of_weight) != 2 or of_weight[0] != vocab:
            raise ValueError(f"{weight_name} must be (V, h) with V = {vocab}, but got {of_weight}")
        if shapes[name] != (*rows, of_weight[1]):
            what = f"be {(*rows, of_weight[1])}: input's shape with the last dimension of {weight_name}"
            raise ValueError(f"{name} must {what}, but got {shapes[name]}")


def _words_for(name: str, expected: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What the shape of an argument must be, where it is not."""
    if name in ("num_items", "expected_gradient"):
        return "be a number or a tensor without dimensions"
    if name in ("linear_bias", "weight"):
        return f"be (V,) = {expected}"
    if name == "target" or (name == "token_weights" and "target_weights" in shapes):
        return f"have input's shape without its last dimension, {expected}"
    return f"have target's shape, {expected}"


def check_loss(loss: Loss, vocab: int) -> None:
    """Raises for a loss that has no meaning where linear_weight has `vocab` rows; see `check_linear_cross_entropy`."""
    if loss.reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, but got {loss.reduction!r}")
    for name, is_right, expected in (
        ("ignore_index", lambda value: -(2**63) <= value < 2**63, "fit 64 bits"),
        ("vocab_size", lambda value: 1 <= value <= vocab, f"be between 1 and the rows of linear_weight, {vocab}"),
        ("label_smoothing", lambda value: 0 <= value <= 1, "be between 0 and 1"),
        ("softcap", lambda value: value > 0, "be positive, or None for no softcap"),
        ("logit_scale", lambda value: value != 0, "not be 0, which makes all logits equal"),
        ("z_loss", math.isfinite, "be finite"),
    ):
        value, is_int = getattr(loss, name), name in ("ignore_index", "vocab_size")
        if value is None and name in ("vocab_size", "softcap"):
            continue
        if not _is_number(value, Integral if is_int else Real):
            raise TypeError(f"{name} must be {'an int' if is_int else 'a number'}, but got {type(value).__name__}")
        if not is_int:
            _check_size(name, value)
        # The value of a proxy is not known.
        if isinstance(value, _NUMBERS):
            if not is_int and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, but got {value}")
            if not is_right(value):
                raise ValueError(f"{name} must {expected}, but got {value}")
    if not isinstance(loss.target_rest, bool):
        raise TypeError(f"target_rest must be a bool, but got {type(loss.target_rest).__name__}")
    if not isinstance(loss.outputs, tuple) or any(name not in OUTPUTS for name in loss.outputs):
        raise ValueError(f"outputs must be a tuple of names among {tuple(OUTPUTS)}, but got {loss.outputs!r}")
    could_have_grad = [name for name in DIFFERENTIABLE_OUTPUTS if name in loss.outputs]
    if not isinstance(loss.detached, tuple) or any(name not in could_have_grad for name in loss.detached):
        raise ValueError(
            f"detached must be a tuple of outputs that could have a gradient, here {could_have_grad}, but got "
            f"{loss.detached!r}"
        )
    if len(set(loss.outputs)) < len(loss.outputs):
        raise ValueError(f"outputs must name each output once, but got {loss.outputs!r}")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "requires_grad")


def _check_size(name: str, value: Any) -> None:
    """Raises for a number that is an int which no tensor takes, and perhaps no float."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be a float or fit 64 bits, but is an int of {value.bit_length()} bits")


def _is_number(value: Any, kind: type = Real) -> bool:
    """Whether it is a `Real` or an `Integral` number, or stands for one while a program is traced, but no bool."""
    if type(value) in (float, int):
        return kind is Real or type(value) is int
    if isinstance(value, torch.SymInt | torch.SymFloat):
        of_value = value.node.pytype
    else:
        of_value = getattr(value, "python_type", type(value))
    return issubclass(of_value, kind) and of_value is not bool
