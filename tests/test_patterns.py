"""The ways to write a loss (traces/patterns.py): fused or not as it says there, with the results of eager PyTorch."""

import sys
from pathlib import Path

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core.proxies import TensorProxy

import thunder_flce
from thunder_flce import NotFusedError, NotFusedWarning
from thunder_flce.inspection import programs

sys.path.insert(0, str(Path(__file__).parent.parent / "traces"))

import patterns  # noqa: E402

SIZES = programs.Sizes(batch=2, sequence=24, hidden=16, vocab=100)


def _arguments(program, dtype=torch.float32):
    tensors = programs.arguments(program, SIZES, device="cpu", dtype=dtype)
    for name, tensor in zip(program.__code__.co_varnames, tensors, strict=False):
        if name == "labels":
            tensor[0, :5] = -100
        if name == "weight":
            tensor.data.mul_(0.3)
    return tensors


def _run(fn, tensors):
    """Outputs, and the gradients of the first of them."""
    outputs = fn(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    needing_grad = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs[0].requires_grad:
        return outputs, ()
    return outputs, torch.autograd.grad(outputs[0], needing_grad, allow_unused=True, materialize_grads=True)


def _largest_with_vocabulary(jitted):
    """Elements of the largest tensor in the final traces that has the vocabulary as one of its dimensions."""
    largest = 0
    for traces in (thunder.last_traces(jitted), thunder.last_backward_traces(jitted)):
        waiting = list(traces[-1].bound_symbols) if traces else []
        while waiting:
            bsym = waiting.pop()
            waiting += bsym.subsymbols
            for proxy in bsym.flat_proxy_outs:
                if isinstance(proxy, TensorProxy) and SIZES.vocab in proxy.shape:
                    largest = max(largest, proxy.numel)
    return largest


@pytest.mark.parametrize("program", patterns.FUSED, ids=lambda program: program.__name__)
def test_fused(program):
    tensors = _arguments(program)
    jitted = thunder_flce.jit(program)
    torch.testing.assert_close(_run(jitted, tensors), _run(program, tensors), rtol=1e-4, atol=1e-5)
    decisions = thunder_flce.explain(jitted)[-1].decisions
    assert decisions and all(decision.fused for decision in decisions), decisions
    # Weights and their gradients are smaller than half of the logits.
    assert _largest_with_vocabulary(jitted) < SIZES.tokens // 2 * SIZES.vocab


@pytest.mark.parametrize("program", patterns.FUSED, ids=lambda program: program.__name__)
def test_fused_in_bfloat16(program):
    tensors = _arguments(program, dtype=torch.bfloat16)
    (loss, *_), _ = _run(thunder_flce.jit(program), tensors)
    (expected, *_), _ = _run(program, tensors)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("program", patterns.DECLINED, ids=lambda program: program.__name__)
def test_declined(program):
    tensors = _arguments(program)
    jitted = thunder_flce.jit(program)
    with pytest.warns(NotFusedWarning, match="not fused, because"):
        results = _run(jitted, [tensor.clone() if tensor.is_floating_point() else tensor for tensor in tensors])
    outputs, _ = results
    torch.testing.assert_close(outputs, _run(program, tensors)[0], rtol=1e-4, atol=1e-5)
    decision = thunder_flce.explain(jitted)[-1].decisions[0]
    assert decision.reason is patterns.DECLINED[program], decision


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (patterns.float32_logits, {}),
        (patterns.divided, {"logit_scale": 0.125}),
        (patterns.softcapped, {"softcap": 3.0}),
        (patterns.softcapped_in_one_line, {"softcap": 9.8, "logit_scale": 3.0}),
        (patterns.first_columns_of_the_vocabulary, {"vocab_size": 91}),
        (patterns.label_smoothing, {"label_smoothing": 0.1}),
        (patterns.accuracy, {"outputs": ("valid_argmax",)}),
        (patterns.predictions_returned, {"outputs": ("argmax",)}),
        (patterns.accuracy_for_other_labels, {"outputs": ("argmax",)}),
        (patterns.class_weights_and_label_smoothing, {"label_smoothing": 0.2}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_arguments_of_the_region(program, expected):
    """The last two factors of a softcap multiply exactly, so that none is left over."""
    jitted = thunder_flce.jit(program)
    jitted(*_arguments(program))
    (bsym,) = [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.name == "linear_cross_entropy_fwd"]
    optional = ("logit_scale", "softcap", "vocab_size", "label_smoothing", "outputs")
    assert {name: value for name, value in bsym.kwargs.items() if name in optional} == expected


@pytest.mark.parametrize("program", [patterns.shift_by_slices, patterns.softcapped, patterns.accuracy])
def test_symbolic_values_stay_right(program):
    """thunder's cache with symbolic values knows no shapes to plan with, so nothing is fused."""
    tensors = _arguments(program)
    jitted = thunder_flce.jit(program, cache="symbolic values")
    with pytest.warns(NotFusedWarning, match="not known when the trace is compiled"):
        results = _run(jitted, tensors)
    torch.testing.assert_close(results, _run(program, tensors), rtol=1e-4, atol=1e-5)


def test_strict_raises_what_would_be_a_warning():
    """With source and reason; and again at the next call, since nothing was compiled."""
    program = patterns.logits_used_by_another_loss
    jitted = thunder_flce.jit(program, strict=True)
    for _ in range(2):
        with pytest.raises(NotFusedError, match=r"patterns.py:\d+: not fused, because .* is used by logsumexp"):
            jitted(*_arguments(program))


def test_strict_lets_pass_what_is_fused_or_has_no_linear():
    fused = patterns.shift_by_slices
    thunder_flce.jit(fused, strict=True)(*_arguments(fused))
    logits, labels = torch.randn(5, 7, requires_grad=True), torch.randint(7, (5,))
    jitted = thunder_flce.jit(torch.nn.functional.cross_entropy, strict=True)
    torch.testing.assert_close(jitted(logits, labels), torch.nn.functional.cross_entropy(logits, labels))


def test_strict_by_plugin():
    program = patterns.activation
    plugin = thunder_flce.FlcePlugin(strict=True)
    (transform,) = plugin.setup_transforms()
    executors = [*plugin.setup_executors(), *thunder.get_default_executors()]
    with pytest.raises(NotFusedError, match="by relu"):
        thunder.jit(program, executors=executors, transforms=[transform])(*_arguments(program))


def frozen_head_and_trained_bias(hidden, weight, bias, labels):
    with torch.no_grad():
        logits = hidden @ weight.t()
    return patterns._loss(logits + bias, labels)


def detached_head_and_trained_bias(hidden, weight, bias, labels):
    return patterns._loss(F.linear(hidden, weight).detach() + bias, labels)


def adapter_on_a_detached_head_with_bias(hidden, weight, bias, labels, adapter_down, adapter_up):
    low_rank = F.linear(F.linear(hidden, adapter_down), adapter_up)
    return patterns._loss(F.linear(hidden, weight, bias).detach() + low_rank, labels)


@pytest.mark.parametrize(
    "program",
    [frozen_head_and_trained_bias, detached_head_and_trained_bias, adapter_on_a_detached_head_with_bias],
)
def test_gradients_flow_where_they_do_in_pytorch(program):
    """To a bias that was added after the products were detached, and to none that was detached with them."""
    tensors = _arguments(program)
    jitted = thunder_flce.jit(program)
    torch.testing.assert_close(_run(jitted, tensors), _run(program, tensors), rtol=1e-4, atol=1e-5)
    assert [decision.fused for decision in thunder_flce.explain(jitted)[-1].decisions] == [True]


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_factors_that_are_no_float_together_are_declined(factor):
    def program(hidden, weight, labels):
        return patterns._loss(F.linear(hidden, weight) * factor * factor, labels)

    tensors = _arguments(program)
    jitted = thunder_flce.jit(program)
    with pytest.warns(NotFusedWarning, match="by factors whose product is no float"):
        loss = jitted(*tensors)
    torch.testing.assert_close(loss, program(*tensors), equal_nan=True)


def test_predictions_compared_with_narrowed_labels():
    """-100 as an unsigned byte is 156, a label that was predicted."""

    def program(hidden, weight, labels):
        logits = F.linear(hidden, weight)
        return patterns._loss(logits, labels, reduction="sum"), (logits.argmax(-1) == labels.to(torch.uint8)).sum()

    hidden, weight = torch.ones(2, 24, 16, requires_grad=True), torch.zeros(200, 16)
    weight[156] = 1
    labels = torch.full((2, 24), -100)
    _, right = thunder_flce.jit(program)(hidden, weight, labels)
    assert right == program(hidden, weight, labels)[1] == 48
