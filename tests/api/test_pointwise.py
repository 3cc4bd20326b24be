"""Token losses: the text of a function, its values and derivatives against autograd's, and what is refused."""

import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from thunder_flce.operation import pointwise
from thunder_flce.operation.pointwise import VARIABLES, text_of
from thunder_flce.token_losses import token_loss_of

needs_dynamo = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.10"), reason="older Dynamo does not trace the calls of a token loss"
)
T = 34
TWO = torch.tensor(2.0, dtype=torch.float64)
SCALE = 0.5


def without_gradients(tensor):
    with torch.no_grad():
        return tensor.exp() * 2


def with_constants(p, e, *_):
    weight = torch.full_like(p, 0.3) + torch.zeros_like(e) + torch.tensor(0.5) * torch.ones(())
    return p * weight + torch.where(p > e, 1.0, -0.5) * TWO - TWO * e + torch.minimum(p, -TWO)


FUNCTIONS = {
    "GRPO": lambda p, e, a, o, *_: (
        -torch.min(torch.exp(p - o) * a, torch.exp(p - o).clamp(0.8, 1.2) * a) + 0.04 * (torch.exp(o - p) - (o - p) - 1)
    ),
    "focal": lambda p, e, *_: -((1 - p.exp()) ** 2) * p,
    "softplus": lambda p, e, *_: F.softplus(-p),
    "huber": lambda p, e, a, *_: F.huber_loss(p, a, reduction="none", delta=0.7),
    "smooth l1": lambda p, e, a, *_: F.smooth_l1_loss(p, a, reduction="none", beta=0.3),
    "binary cross-entropy": lambda p, e, a, o, m, *_: (
        F.binary_cross_entropy_with_logits(p, m.to(p.dtype), reduction="none")
        + F.binary_cross_entropy(p.exp(), m.to(p.dtype), reduction="none")
    ),
    "tensor clamp": lambda p, e, a, *_: -torch.clamp(torch.exp(p), min=a - 1, max=a + 1),
    "nan_to_num": lambda p, e, a, *_: -torch.nan_to_num(p / (a > 0), nan=1.0, posinf=2.0, neginf=3.0) * a,
    "pow": lambda p, e, a, *_: (-p) ** a.abs() + 2.0**p + e**-1 + e**1,
    "where": lambda p, e, a, *_: torch.where(torch.isnan(a), 0.0, -p * a),
    "detach": lambda p, e, a, o, *_: -torch.exp(p - p.detach()) * a - torch.exp(p - o).clamp(max=1.2).detach() * a * p,
    "no_grad": lambda p, e, a, *_: -without_gradients(p) * p * a,
    "masks": lambda p, e, a, o, m, *_: -p * m.to(torch.float32) + e.masked_fill(~m, 0.0) + (1 - m.long()) * p,
    "logsigmoid": lambda p, e, *_: -F.logsigmoid(p - 1),
    "log_sum_exp": lambda p, e, *_, log_sum_exp: log_sum_exp**2 - e.tanh(),
    "mean_logit": lambda p, e, a, *_, log_sum_exp, mean_logit: 0.1 * (log_sum_exp - mean_logit) - mean_logit * p * a,
    "rare": lambda p, e, a, *_: torch.erf(p) + torch.sin(a * p) * torch.log2(e + 1) + p.sign(),
    "lerp": lambda p, e, a, *_: torch.lerp(p, e, a),
    "activations": lambda p, e, *_: F.gelu(p) + F.silu(e) + F.elu(p) + F.leaky_relu(p) * F.mish(e) + F.hardtanh(p),
    "ties": lambda p, e, *_: torch.maximum(p, p.detach()) * 3 + torch.minimum(2 * e, e + e) + p.clamp(min=-3),
    "integers": lambda p, e, a, o, m, k: torch.maximum(p, -k) + e * (k + m) ** 2 + p * (k % 3 > 0) * (k // 2) / k,
    "fractions of integers": lambda p, e, a, o, m, k: p * (k / 3) + e * k.reciprocal() + p * (m * 0.3),
    "logic": lambda p, e, a, o, m, k: torch.where((p < a) & ~m | (k > 1) ^ m, p * e, (~(e > 1)).double() * e),
    "casts": lambda p, e, a, *_: (p > a).type_as(p) * e + p.double() * e.to(torch.float32) + (e * 3).long() * p,
    "numbers": lambda p, e, *_: (p - p.detach()) ** 0 + p * np.float64(2) - e * np.float32(0.5),
    "infinities": lambda p, e, a, *_: p.masked_fill(p > a, -math.inf).exp() + e.clamp(0.1, math.inf) * p,
    "constants": with_constants,
    "a constant derivative": lambda p, e, a, *_: p * 0 + a - e,
    "unary": lambda p, e, *_: p.expm1() + torch.log1p(e) * e.sqrt() + p.abs() * p.tanh() - (e + 3).log(),
    "bounds": lambda p, e, a, *_: p.clamp(max=-1).clip(-9, -2) * a - e.clamp_min(0.5) + p.clamp_max(-0.5),
    "sums of masks": lambda p, e, a, *_: p * (e > 1) + e * ((p > -2) + (a > 0)) + p * ((e > 1) * (a > -1)),
    "dtypes": lambda p, e, a, *_: (p < a).to(e.dtype) * p + e.type_as(p < a).to(p) + (e > a).type_as(p),
    "identity": lambda p, e, *_: p,
    "a mask": lambda p, e, *_: p > -1,
}
DTYPES = (torch.float64, torch.float16, torch.bool, torch.int64)


def values_of(dtype):
    generator = torch.Generator().manual_seed(5)
    random = [torch.rand(T, generator=generator, dtype=torch.float64) for _ in range(6)]
    values = {"log_prob": -4 * random[0] - 0.05, "entropy": 4 * random[1], "log_sum_exp": 2 * random[2]}
    values["mean_logit"] = values["log_sum_exp"] - 3
    values["log_prob"][:3] = torch.tensor([-3.0, -1.0, -2.0])
    values |= {"i0": 2 * random[3] - 1, "i1": -4 * random[4], "i2": random[5] > 0.5, "i3": 1 + torch.arange(T) % 5}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}


def by_autograd(function, values):
    variables = {name: values[name].clone().requires_grad_() for name in VARIABLES}
    keywords = pointwise.keyword_variables(function, len(DTYPES))
    # Casts to a dtype with fractions are to that of the rows.
    with patch.object(torch, "float32", values["log_prob"].dtype):
        value = pointwise.call_function(function, values | variables, keywords).to(values["log_prob"].dtype)
        total = value.sum() + sum(variable.sum() * 0 for variable in variables.values())
        return value.detach(), dict(zip(VARIABLES, torch.autograd.grad(total, variables.values()), strict=True))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_value_and_derivatives(function, dtype):
    """Those of autograd, in the dtype of the rows; on meta tensors, their shape and dtype."""
    values = values_of(dtype)
    exact, exact_derivatives = by_autograd(function, values)
    token_loss = text_of(function, DTYPES)
    pointwise.check(token_loss, len(DTYPES))
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    value, derivatives = pointwise.value_and_derivatives(token_loss, values)
    torch.testing.assert_close((value, pointwise.evaluate(token_loss, values)), (exact, exact), **close)
    for name, exact in exact_derivatives.items():
        derivative = torch.zeros(T, dtype=dtype) if derivatives[name] is None else derivatives[name]
        torch.testing.assert_close(derivative, exact, **close, equal_nan=True)
        assert derivatives[name] is None or pointwise.uses(token_loss, name)
    on_meta = {name: tensor.to("meta") for name, tensor in values.items()}
    value, derivatives = pointwise.value_and_derivatives(token_loss, on_meta)
    for tensor in (value, *filter(torch.is_tensor, derivatives.values())):
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((T,), dtype, "meta")


# What is refused.


def assigning(log_prob, entropy):
    log_prob[entropy > 2] = 0.0
    return log_prob


ONES = torch.ones(33), torch.ones(2), torch.ones(1, requires_grad=True)
BAD = {
    "called with log_prob, entropy and the 0": lambda log_prob: log_prob,
    "token_loss is called with .*: no signature found": torch.sub,
    "it has: mean": lambda p, e: p * p.mean(),
    "it has: sort": lambda p, e: e.sort().values,
    "it has: stack": lambda p, e: torch.stack([p, e]),
    "it has: bernoulli": lambda p, e: torch.bernoulli(p.exp()) * p,
    "control flow": lambda p, e: p if p > 0 else e,
    "those of math": lambda p, e: p * math.exp(e),
    "indexing|select": lambda p, e: p[0] * e,
    "item assignment|index_put_|masked_fill_": assigning,
    "it has: unbind": lambda p, e: sum(p),
    "or on how many": lambda p, e: p / p.numel(),
    "a number that depends on the tokens": lambda p, e: p * p.detach().numpy()[0],
    "among its arguments": lambda p, e, *, a=ONES[0]: p * a,
    "a tensor that is not among its arguments": lambda p, e, *, a=ONES[1]: p * a,
    "among its arguments; give it": lambda p, e, *, a=ONES[2]: p * a,
    "it has: mul_, which changes a tensor in place": lambda p, e: (p * 2).mul_(2),
    "depends on none of log_prob, entropy, log_sum_exp": lambda p, e: torch.ones_like(p),
    "float as its result": lambda p, e: 1.0,
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_refused(message):
    with pytest.raises(TypeError, match=message):
        text_of(BAD[message], ())


def test_other_errors():
    with pytest.raises(ZeroDivisionError):
        text_of(lambda p, e: p * (1 / 0), ())
    with pytest.raises(TypeError, match="reads token_inputs.1., but"):
        pointwise.check(text_of(lambda p, e, a, b: p * b, [torch.float32] * 2), 1)


# What a text depends on.


class Trainer:
    def __init__(self, epsilon):
        self.epsilon = SimpleNamespace(value=epsilon)

    def loss(self, log_prob, entropy):
        return log_prob * self.epsilon.value


def helper(tensor):
    return tensor * SCALE


def reading_a_global(log_prob, entropy):
    return (lambda tensor: helper(tensor))(log_prob)


def reading_the_default_dtype(log_prob, entropy):
    return log_prob * torch.tensor(0.1)


def closing_over(factor, *, default=0.0):
    return lambda log_prob, entropy, default=default: log_prob * factor[0] + default


def test_what_a_function_reads_may_change():
    def factor_of(function):
        return -pointwise.evaluate(text_of(function, ()), {"log_prob": -torch.ones(1)}).item()

    assert factor_of(reading_a_global) == 0.5
    with patch(f"{__name__}.SCALE", 3.0):
        assert factor_of(reading_a_global) == 3.0
    with patch(f"{__name__}.helper", lambda tensor: tensor * 4.0):
        assert factor_of(reading_a_global) == 4.0
    factor, trainer, constant = [2.0], Trainer(2.0), torch.tensor(2.0)
    functions = closing_over(factor), trainer.loss, lambda p, e: p * trainer.epsilon.value, lambda p, e: p * constant
    assert [*map(factor_of, functions)] == [2.0] * 4
    factor[0] = trainer.epsilon.value = 5.0
    constant.add_(3)
    assert [*map(factor_of, functions)] == [5.0] * 4
    constant.data.fill_(7)  # Has no version, as an array of NumPy's that shares the memory.
    assert factor_of(functions[3]) == 7.0
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert factor_of(reading_the_default_dtype) == torch.tensor(0.1).item()
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_text_is_short():
    """No tensors of equal numbers, and no factor 1, the upstream gradient with which a derivative begins."""
    text = "f0 = aten.exp(log_prob); f1 = aten.add(f0, 0.5); loss = f1; d_log_prob = f0"
    assert text_of(lambda p, e: torch.tensor(0.5) + p.exp(), ()) == text


# In Dynamo.


@needs_dynamo
@pytest.mark.parametrize("message", [
    "it has: mean", "control flow", "indexing|select", "item assignment|index_put_|masked_fill_",
    "it has: mul_, which changes a tensor in place",
])  # fmt: skip
def test_what_dynamo_refuses(message):
    with pytest.raises(TypeError, match=message):
        torch.compile(lambda x: (x + 1, token_loss_of(BAD[message], ())), backend="eager")(torch.ones(2))


class NoFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was seen")


def test_surroundings_of_the_call_do_not_matter():
    """Hooks of saved tensors are those of a checkpoint or of offloading; torch.export notes functions that it sees."""
    focal = FUNCTIONS["focal"]
    text = text_of(focal, ())
    # With inputs of dtypes that no other test has, the function is traced again.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().numpy(), torch.from_numpy):
        assert text_of(focal, (torch.float64,)) == text
    with torch.no_grad(), NoFunctions():
        assert text_of(focal, (torch.int8,)) == text
    transformed = torch.vmap(torch.func.grad(lambda x: x * (text_of(focal, (torch.int16,)) == text)))
    assert transformed(torch.ones(2)).all()


def test_threads_at_once():
    """Afterwards, programs are compiled as before: PyTorch's flag for dispatch modes is one for all threads."""

    def scaled(factor):
        return lambda p, e, a: torch.exp(p - a) * factor

    def trace(number):
        for step in range(30):
            text_of(scaled(number + step + 2), [torch.float32])

    before = is_in_torch_dispatch_mode(include_infra_modes=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(trace, range(4)))
    assert is_in_torch_dispatch_mode(include_infra_modes=True) == before
