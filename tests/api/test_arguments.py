"""Bad input gets an error that names the argument: eagerly and when a program is traced."""

import contextlib
import gc
import weakref
from fractions import Fraction

import pytest
import torch

import thunder_flce
from thunder_flce import Options, linear_cross_entropy

X = torch.zeros(6, 4)
W = torch.zeros(9, 4)
Y = torch.zeros(6, dtype=torch.long)
WEIGHTED = {"outputs": ("mean_logit",), "weight": torch.ones(9)}
WITH_GRAD = torch.ones(6, requires_grad=True)
TERM = (torch.zeros(6, 3), torch.zeros(9, 3))
LOG_PROB = lambda log_prob, entropy, *_: log_prob  # noqa: E731

BAD = [
    ({"input": [1, 2]}, TypeError, "input must be a tensor, but got list"),
    ({"target": X[:, 0]}, TypeError, "target must have one of the dtypes int8.*got float32"),
    ({"input": torch.zeros(())}, ValueError, "input must have at least one dimension"),
    ({"linear_weight": W.view(-1)[:0]}, ValueError, r"linear_weight must be two-dimensional, .* but got \(0,\)"),
    ({"linear_weight": W[:0]}, ValueError, "linear_weight must have at least one row"),
    ({"input": torch.zeros(6, 5)}, ValueError, r"input's last dimension must be H = 4.*input is \(6, 5\)"),
    ({"target": Y[:5]}, ValueError, r"target must have input's shape without its last dimension, \(6,\)"),
    ({"linear_weight": W.double()}, TypeError, "linear_weight must have input's dtype, float32, but got float64"),
    ({"linear_bias": torch.zeros(8)}, ValueError, r"linear_bias must be \(V,\) = \(9,\), but got \(8,\)"),
    ({"linear_bias": torch.zeros(9).half()}, TypeError, "linear_bias must have input's dtype"),
    ({"reduction": "avg"}, ValueError, "reduction must be one of .*, but got 'avg'"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int, but got float"),
    ({"ignore_index": 2**64}, ValueError, "ignore_index must fit 64 bits"),
    ({"weight": torch.zeros(8)}, ValueError, r"weight must be \(V,\) = \(9,\), but got \(8,\)"),
    ({"weight": torch.zeros(9).half()}, TypeError, "weight must have input's dtype, float32, but got float16"),
    ({"weight": torch.ones(9, requires_grad=True)}, ValueError, "weight must not require a gradient"),
    ({"label_smoothing": 1.1}, ValueError, "label_smoothing must be between 0 and 1, but got 1.1"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive, or None for no softcap, but got 0.0"),
    ({"softcap": float("inf")}, ValueError, "softcap must be finite, but got inf"),
    ({"logit_scale": 0}, ValueError, "logit_scale must not be 0"),
    ({"z_loss": float("nan")}, ValueError, "z_loss must be finite, but got nan"),
    ({"vocab_size": 10}, ValueError, "vocab_size must be between 1 and the rows of linear_weight, 9, but got 10"),
    ({"vocab_size": 0}, ValueError, "vocab_size must be between 1 and the rows of linear_weight, 9, but got 0"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, 'num_items must be None unless reduction is "mean"'),
    ({"num_items": torch.ones(1)}, ValueError, r"num_items must be a number or a tensor without dimensions, .*\(1,\)"),
    ({"num_items": float("nan")}, ValueError, "num_items must be at most 3.4e38 and not negative, but got nan"),
    ({"num_items": "3"}, TypeError, "num_items must be a number or a tensor without dimensions, but got str"),
    ({"token_loss": X}, TypeError, "token_loss must be a function, but got Tensor"),
    ({"softcap": 10**30}, ValueError, "softcap must be a float or fit 64 bits"),
    ({"num_items": 10**400}, ValueError, "num_items must be a float or fit 64 bits"),
    ({"expected_gradient": 1e39}, ValueError, r"expected_gradient must be at most 3.4e38 and not 0, but got 1e\+39"),
    ({"token_weights": torch.ones(5)}, ValueError, r"token_weights must have target's shape, \(6,\), but got \(5,\)"),
    ({"token_weights": WITH_GRAD}, ValueError, "token_weights must not require a gradient"),
    ({"token_weights": Y > 0}, TypeError, r"but got bool; pass mask.to\(input.dtype\)"),
    ({"token_loss": LOG_PROB, "reduction": "none"}, ValueError, 'reduction "mean" or "sum"'),
    ({"token_loss": LOG_PROB, "label_smoothing": 0.1}, ValueError, "label_smoothing must be 0 with token_loss"),
    ({"token_loss": LOG_PROB, "weight": torch.ones(9)}, ValueError, "weight must be None with token_loss"),
    ({"token_loss": LOG_PROB, "token_inputs": (1.0,)}, TypeError, r"token_inputs\[0\] must be a tensor, but got float"),
    ({"token_loss": LOG_PROB, "token_inputs": (WITH_GRAD,)}, ValueError, r"token_inputs\[0\] must not require a grad"),
    ({"token_loss": lambda p, e: p, "token_inputs": (Y, Y)}, TypeError, "called with log_prob, entropy and the 2"),
    ({"token_loss": lambda p, e, *_: torch.max(p, 0)}, TypeError, "single tokens, .* it has: .*max"),
    ({"token_inputs": [Y]}, ValueError, "token_inputs must be empty without token_loss"),
    ({"token_inputs": Y}, TypeError, "token_inputs must be a sequence of tensors"),
    ({"detached": ("argmax",), "outputs": ("argmax",)}, ValueError, "detached must be a tuple of outputs that are"),
    ({"vocab_parallel": "tp"}, TypeError, "vocab_parallel must be a ProcessGroup or a DeviceMesh .*, but got str"),
    ({"outputs": ("entropie",)}, ValueError, "outputs must be a tuple of names among"),
    ({"outputs": ["entropy"]}, ValueError, "outputs must be a tuple of names among"),
    ({"outputs": ("entropy", "entropy")}, ValueError, "outputs must name each output once"),
    ({"terms": 3}, TypeError, r"terms must be a sequence of pairs \(input, weight\), but got int"),
    ({"terms": TERM}, TypeError, r"terms\[0\] must be a pair \(input, weight\), but got Tensor"),
    ({"terms": [TERM, (X,)]}, TypeError, r"terms\[1\] must be a pair \(input, weight\), but has length 1"),
    ({"terms": [(Y, W)]}, TypeError, r"terms\[0\].input must have one of the dtypes float16.*got int64"),
    ({"terms": [TERM, (X, W.half())]}, TypeError, r"terms\[1\].weight must have input's dtype, float32, but got"),
    ({"terms": [(X, W[:, 0])]}, ValueError, r"terms\[0\].weight must be \(V, h\) with V = 9, but got \(9,\)"),
    ({"terms": [TERM, (X, W[:8])]}, ValueError, r"terms\[1\].weight must be \(V, h\) with V = 9, but got \(8, 4\)"),
    ({"terms": [(X, TERM[1])]}, ValueError, r"terms\[0\].input must be \(6, 3\): .* but got \(6, 4\)"),
    (WEIGHTED | {"label_smoothing": 0.1}, ValueError, r'"mean_logit", .* weight and label_smoothing; pass detached=\('),
]
TARGETS = torch.zeros(6, 5, dtype=torch.long)
BAD_WITH_TARGET_WEIGHTS = [
    ({"target_weights": torch.rand(6)}, ValueError, r"target_weights must have target's shape, \(6, 5\)"),
    ({"target_weights": torch.rand(6, 5).requires_grad_()}, ValueError, "target_weights must not require"),
    ({"target_weights": torch.rand(6, 5) > 0}, TypeError, r"but got bool; pass mask.to\(input.dtype\)"),
    ({"target": Y}, ValueError, r"target must be \(..., K\)"),
    ({"target": TARGETS[:, :0]}, ValueError, "and K ≥ 1"),
    ({"weight": torch.rand(9)}, ValueError, "weight must be None with target_weights"),
    ({"label_smoothing": 0.1}, ValueError, "label_smoothing must be 0 with target_weights"),
    ({"outputs": ("accuracy",)}, ValueError, "outputs must not have 'accuracy' with target_weights"),
    ({"target_weights": None}, ValueError, "target must have input's shape without its last dimension"),
]
BAD += [
    ({"target": TARGETS, "target_weights": torch.ones(6, 5), **change}, *error)
    for change, *error in BAD_WITH_TARGET_WEIGHTS
]
TRAINED = {"input": X.clone().requires_grad_(), "token_loss": LOG_PROB}
EAGER = [
    ({"linear_weight": W.to_sparse()}, TypeError, "linear_weight must be a dense tensor, but has the layout torch.sp"),
    ({"input": torch.nested.nested_tensor([X], layout=torch.jagged)}, TypeError, r"input must be a dense .*unbind\(\)"),
    ({"input": torch.nested.nested_tensor([X])}, TypeError, r"input must be a dense tensor, but is nested"),
    ({"target": Y.to("meta")}, ValueError, "target must be on input's device, cpu, but got meta"),
    ({**TRAINED, "options": Options(strategy="save_logits")}, ValueError, "leave strategy=None"),
    (
        {"linear_weight": W.clone().requires_grad_(), "reduction": "none",
         "options": Options(strategy="gradients_in_forward")},
        ValueError, 'strategy "gradients_in_forward" needs reduction "mean" or "sum"',
    ),
    ({"options": Options(row_kernels="triton")}, ValueError, 'row_kernels="triton" runs on CUDA'),
    ({**TRAINED, "input": X.half().requires_grad_(), "linear_weight": W.half()}, ValueError, "expected_gradient"),
    ({"target": TARGETS + 9, "target_weights": torch.ones(6, 5)}, IndexError, "target has 6 of 6 rows with values"),
]  # fmt: skip


def call(change):
    """Returns the tensors of a call with bad arguments, and the call as a function of them."""
    arguments = {"input": X, "linear_weight": W, "target": Y, **change}
    tensors = [arguments.pop(name) for name in ("input", "linear_weight", "target")]
    return tensors, lambda *tensors: linear_cross_entropy(*tensors, **arguments)


@pytest.mark.parametrize(("change", "exception", "message"), BAD + EAGER)
def test_eager(change, exception, message):
    tensors, function = call(change)
    with pytest.raises(exception, match=message):
        function(*tensors)


@pytest.mark.parametrize(("change", "exception", "message"), BAD)
def test_traced_by_thunder(change, exception, message):
    tensors, function = call(change)
    with pytest.raises(exception, match=message):
        thunder_flce.jit(function)(*tensors)


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("ignore_index", 1, True), ("vocab_size", 9, 9.0), ("label_smoothing", 0, False), ("num_items", Fraction(3), -1),
    ("expected_gradient", 3.0, 0.0), ("linear_weight", W, W.to_sparse()), ("target", Y, Y[:5]),
    ("token_weights", torch.ones(6), torch.ones(7)),
])  # fmt: skip
def test_after_a_good_call(name, good, bad):
    """The cache tells the two apart, also where they are equal, or differ in the number of tokens alone."""
    arguments = {"input": X, "linear_weight": W, "target": Y}
    linear_cross_entropy(**arguments | {name: good})
    with pytest.raises((TypeError, ValueError), match=f"{name} must"):
        linear_cross_entropy(**arguments | {name: bad})


def test_an_error_keeps_no_operand_alive():
    """Its traceback goes with it, and no cycle waits for Python's collector."""
    x = torch.zeros(3, 8)
    gone = weakref.ref(x)
    gc.disable()
    with contextlib.suppress(TypeError):
        linear_cross_entropy(x, torch.zeros(5, 8), torch.zeros(3).long(), options=3)
    del x
    assert gone() is None
    gc.enable()
