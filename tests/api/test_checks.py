"""Arguments are checked by what is known without their numbers: tensors and `Spec`s alike."""

import math

import pytest
import torch

from thunder_flce.operation.call import Spec
from thunder_flce.operation.checks import check_call
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import Loss

STUDENT = {"input": torch.zeros(2, 3, 4), "linear_weight": torch.zeros(9, 4)}
CALL = {**STUDENT, "target": torch.zeros(2, 3, dtype=torch.int64)}
TEACHER = {**STUDENT, "teacher_input": torch.zeros(2, 3, 5).half(), "teacher_weight": torch.zeros(9, 5).half()}


def spec(value):
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype, value.device, value.requires_grad)
    return [spec(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("form", [lambda value: value, spec], ids=["tensors", "specs"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"terms": [(torch.zeros(2, 3, 5), torch.zeros(9, 5))], "num_items": 3, "expected_gradient": 0.5}, None),
        ({"terms": [(torch.zeros(2, 3, 5), torch.zeros(9, 4))]}, r"terms\[0\].input must be \(2, 3, 4\)"),
        ({"terms": torch.zeros(2)}, "terms must be a sequence of pairs"),
        ({"token_inputs": torch.zeros(2, 3)}, "token_inputs must be a sequence of tensors"),
        ({"token_inputs": [torch.zeros(2, 3)]}, "token_inputs are what token_loss reads"),
        ({"token_inputs": [None]}, r"token_inputs\[0\] must be a tensor, but got NoneType"),
        ({"terms": [(torch.zeros(2, 3, 5), None)]}, r"terms\[0\].weight must be a tensor, but got NoneType"),
        ({"target": None}, "target must be a tensor, but got NoneType"),
        ({"target": CALL["target"].to("meta")}, "target must be on input's device, cpu, but got meta"),
        ({"expected_gradient": math.inf}, "expected_gradient must be finite and not 0"),
    ],
)
def test_cross_entropy(change, message, form):
    arguments = {name: form(value) for name, value in {**CALL, **change}.items()}
    if message is None:
        return check_call(arguments, loss=Loss())
    with pytest.raises((TypeError, ValueError), match=message):
        check_call(arguments, loss=Loss())


def test_a_part_of_the_rows():
    """Class weights are whole; what belongs to the rows of the weight has as many as are here."""
    part = {**CALL, "linear_bias": torch.zeros(9), "weight": torch.zeros(20)}
    check_call(part, loss=Loss(vocab_size=19), vocab=20)
    with pytest.raises(ValueError, match=r"weight must be \(V,\) = \(20,\), but got \(9,\)"):
        check_call({**part, "weight": torch.zeros(9)}, loss=Loss(), vocab=20)


def test_float32_class_weights_of_16_bit_operands():
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in CALL.items()}
    check_call({**half, "weight": torch.zeros(9)}, loss=Loss())
    with pytest.raises(TypeError, match="weight must have input's dtype, float16, but got bfloat16"):
        check_call({**half, "weight": torch.zeros(9).bfloat16()}, loss=Loss())


def test_what_a_teacher_may_require():
    """A gradient of its weight is not asked for; its input must be a constant where gradients are recorded."""
    learning = {name: TEACHER[name].clone().requires_grad_() for name in ("teacher_input", "teacher_weight")}
    check_call({**TEACHER, "teacher_weight": learning["teacher_weight"]}, loss=Loss(), divergence=Divergence())
    with pytest.raises(ValueError, match="teacher_input must not require a gradient.*pass teacher_input.detach"):
        check_call({**TEACHER, **learning}, loss=Loss(), divergence=Divergence())
    with torch.no_grad():
        check_call({**TEACHER, **learning}, loss=Loss(), divergence=Divergence())


@pytest.mark.parametrize("field", ["beta", "temperature"])
def test_numbers_of_a_divergence(field):
    for value, kind in ((math.nan, ValueError), (-1, ValueError), (10**30, ValueError), ("1", TypeError)):
        with pytest.raises(kind, match=f"^{field} must"):
            check_call(TEACHER, loss=Loss(), divergence=Divergence(**{field: value}))
