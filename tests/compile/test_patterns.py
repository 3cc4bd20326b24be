"""The ways to write a loss (traces/patterns.py): fused or not as it says there, with the results of eager PyTorch."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core.proxies import TensorProxy

import thunder_flce
from thunder_flce import FuseLinearCrossEntropy, NotFusedError, NotFusedWarning
from thunder_flce.backend import compile_graph
from thunder_flce.inspection import programs

sys.path.insert(0, str(Path(__file__).parents[2] / "traces"))

import patterns  # noqa: E402
import regenerate  # noqa: E402
from patterns import SIZES  # noqa: E402

TABLE = (regenerate.FOLDER / "patterns.md").read_text(encoding="utf-8").splitlines()


def _arguments(program, dtype=torch.float32):
    tensors = programs.arguments(program, SIZES, device="cpu", dtype=dtype)
    for name, tensor in zip(program.__code__.co_varnames, tensors, strict=False):
        if name == "labels":
            tensor[0, :5] = -100
        if name == "tokens":
            # One less is a label that counts from the end.
            tensor[0, 0] = 0
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
    # Of a vector, gradients that differ from one element to the next.
    loss = outputs[0] if outputs[0].ndim == 0 else (outputs[0] * torch.linspace(-1, 2, outputs[0].shape[-1])).sum()
    return outputs, torch.autograd.grad(loss, needing_grad, allow_unused=True, materialize_grads=True)


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


def _assert_in_table(program, decisions):
    """That what is printed of a program is what was decided, unless it was printed with other versions."""
    if f"{regenerate.versions()}." in TABLE:
        printed = [row for row in TABLE if row.startswith(f"| `{program.__name__}` ")]
        assert printed == patterns.table_rows(program, decisions), "run `python traces/regenerate.py --device cpu`"


def test_table_has_every_program():
    printed = re.findall(r"^\| `(\w+)`", "\n".join(TABLE), re.MULTILINE)
    assert list(dict.fromkeys(printed)) == [program.__name__ for program in (*patterns.FUSED, *patterns.NOT_FUSED)]


@pytest.mark.parametrize("program", patterns.FUSED, ids=lambda program: program.__name__)
def test_fused(program):
    tensors = _arguments(program)
    jitted = thunder_flce.jit(program)
    torch.testing.assert_close(_run(jitted, tensors), _run(program, tensors), rtol=1e-4, atol=1e-5)
    decisions = thunder_flce.explain(jitted)[-1].decisions
    assert decisions and all(decision.fused for decision in decisions), decisions
    _assert_in_table(program, decisions)
    # Weights and their gradients are smaller than half of the logits.
    assert _largest_with_vocabulary(jitted) < SIZES.tokens // 2 * SIZES.vocab


# Those that cast something themselves, and one of each kind of the others.
IN_BFLOAT16 = [
    *(each for each in patterns.FUSED if re.search(r"float|dtype|\.to\(|type_as", inspect.getsource(each))),
    *(patterns.flattened, patterns.divided, patterns.label_smoothing, patterns.class_weights),
    *(patterns.low_rank_adapter, patterns.predictions_returned, patterns.weighted_tokens),
    *(patterns.log_probability_indexed, patterns.probability_gathered, patterns.entropy_beside_cross_entropy),
]


@pytest.mark.parametrize("program", IN_BFLOAT16, ids=lambda program: program.__name__)
def test_fused_in_bfloat16(program):
    tensors = _arguments(program, dtype=torch.bfloat16)
    (loss, *_), _ = _run(torch.compile(program, backend=compile_graph, fullgraph=True), tensors)
    (expected, *_), _ = _run(program, tensors)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("program", patterns.NOT_FUSED, ids=lambda program: program.__name__)
def test_not_fused(program):
    tensors = _arguments(program)
    jitted = thunder_flce.jit(program)
    with pytest.warns(NotFusedWarning, match="not fused, because"):
        results = _run(jitted, [tensor.clone() if tensor.is_floating_point() else tensor for tensor in tensors])
    outputs, _ = results
    torch.testing.assert_close(outputs, _run(program, tensors)[0], rtol=1e-4, atol=1e-5)
    decisions = thunder_flce.explain(jitted)[-1].decisions
    assert patterns.NOT_FUSED[program] in {decision.reason for decision in decisions}, decisions
    _assert_in_table(program, decisions)


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
    bsyms = thunder.last_traces(jitted)[-1].bound_symbols
    (bsym,) = [each for each in bsyms if each.sym.name == "flce_linear_cross_entropy_fwd"]
    optional = ("logit_scale", "softcap", "vocab_size", "label_smoothing", "outputs")
    assert {name: value for name, value in bsym.kwargs.items() if name in optional} == expected


@pytest.mark.parametrize("program", [patterns.shift_by_slices, patterns.softcapped, patterns.accuracy])
def test_symbolic_values_stay_right(program):
    """thunder's cache with symbolic values has no shapes to plan with, so nothing is fused."""
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
        with pytest.raises(NotFusedError, match=r"patterns.py:\d+: not fused, because .* used elsewhere .by square"):
            jitted(*_arguments(program))


def test_strict_lets_pass_what_is_fused_or_has_no_linear():
    fused = patterns.shift_by_slices
    thunder_flce.jit(fused, strict=True)(*_arguments(fused))
    table, labels = torch.randn(5, 7, requires_grad=True), torch.randint(5, (3,))

    def of_a_table(table, labels):
        return F.cross_entropy(F.embedding(labels, table), labels)

    jitted = thunder_flce.jit(of_a_table, strict=True)
    torch.testing.assert_close(jitted(table, labels), of_a_table(table, labels))


def test_strict_raises_for_logits_that_are_given():
    """As to a part of a program after a graph break."""
    logits, labels = torch.randn(5, 7, requires_grad=True), torch.randint(7, (5,))
    with pytest.raises(NotFusedError, match="its logits are given to the program"):
        thunder_flce.jit(F.cross_entropy, strict=True)(logits, labels)


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
    """A bias gets one if it was added after the linear was detached, and none if it was detached with it."""
    tensors = _arguments(program)
    jitted, without_executor = thunder_flce.jit(program), thunder.jit(program, transforms=[FuseLinearCrossEntropy()])
    expected = _run(program, tensors)
    for compiled in (jitted, without_executor):
        torch.testing.assert_close(_run(compiled, tensors), expected, rtol=1e-4, atol=1e-5)
    assert [decision.fused for decision in thunder_flce.explain(jitted)[-1].decisions] == [True]


def two_adapters(hidden, weight, bias, second_weight, adapter_down, adapter_up, labels):
    """Both weights (V, H) are frozen; the second linear is a matmul, and has a factor of its own."""
    low_rank = F.linear(F.linear(hidden, adapter_down), adapter_up, bias)
    second = torch.tanh(hidden) @ second_weight.detach().t() * 0.5
    return patterns._loss(low_rank + F.linear(hidden, weight.detach()) + second, labels)


def trained_head_and_adapter_without_grad(hidden, weight, adapter_down, adapter_up, labels):
    with torch.no_grad():
        low_rank = hidden @ adapter_down.t() @ adapter_up.t()
    return patterns._loss((F.linear(hidden, weight) + low_rank)[:, :-1], labels[:, 1:])


def one_weight_for_two_inputs(hidden, weight, labels):
    return patterns._loss(F.linear(hidden, weight) + F.linear(torch.tanh(hidden), weight), labels)


def adapter_beside_tied_embeddings(tokens, weight, adapter_down, adapter_up, labels):
    hidden = torch.tanh(F.embedding(tokens, weight))
    return patterns._loss(F.linear(hidden, weight) + F.linear(F.linear(hidden, adapter_down), adapter_up), labels)


def adapter_with_a_matrix(hidden, matrix, adapter_down, adapter_up, labels):
    """Weights that are (H, V) and need a gradient."""
    matrix = matrix * 1.0
    return patterns._loss(hidden @ matrix + F.linear(hidden, adapter_down) @ (adapter_up.t() * 1.0), labels)


def adapter_alone_is_trained(hidden, weight, adapter_down, adapter_up, labels):
    low_rank = F.linear(F.linear(hidden.detach(), adapter_down), adapter_up)
    return patterns._loss(F.linear(hidden.detach(), weight.detach()) + low_rank, labels)


_TERM = ("terms[0].input", "terms[0].weight")
_SUMS = {
    two_adapters: ("input", "linear_bias", *_TERM, "terms[1].input"),
    trained_head_and_adapter_without_grad: ("input", "linear_weight"),
    one_weight_for_two_inputs: ("input", "linear_weight", *_TERM),
    adapter_beside_tied_embeddings: ("input", "linear_weight", *_TERM),
    adapter_with_a_matrix: ("input", "linear_weight", *_TERM),
    adapter_alone_is_trained: _TERM,
    patterns.low_rank_adapter: ("input", *_TERM),
    patterns.low_rank_adapter_by_matmul: ("input", "linear_weight", "linear_bias", *_TERM),
    patterns.low_rank_adapter_on_logits_without_grad: _TERM,
}


def _bound_symbols(traces):
    waiting = [bsym for trace in traces for bsym in trace.bound_symbols]
    while waiting:
        yield (bsym := waiting.pop())
        waiting += bsym.subsymbols


@pytest.mark.parametrize(
    ("program", "options"),
    [*((program, None) for program in _SUMS), (two_adapters, thunder_flce.Options(strategy="recompute_logits"))],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_sum_of_linears(program, options):
    """Each linear keeps its operands and gets its gradients; the head is the one with the largest hidden size."""
    tensors = _arguments(program)
    jitted = thunder_flce.jit(program, options=options)
    torch.testing.assert_close(_run(jitted, tensors), _run(program, tensors), rtol=1e-4, atol=1e-5)
    forward, backward = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    (region,) = [bsym for bsym in forward.bound_symbols if bsym.sym.name == "flce_linear_cross_entropy_fwd"]
    assert region.kwargs["needs_grad"] == _SUMS[program]
    assert region.args[1].shape == (SIZES.vocab, SIZES.hidden)
    for term_input, term_weight in region.kwargs["terms"]:
        assert term_weight.shape == (SIZES.vocab, term_input.shape[-1])
        assert term_input.shape[:-1] == region.args[0].shape[:-1]
    names = {bsym.sym.name for bsym in _bound_symbols([forward, backward])}
    assert not any("cat" in name.split("_") for name in names), names


@pytest.mark.parametrize("program", [patterns.low_rank_adapter, adapter_alone_is_trained, two_adapters])
def test_a_frozen_head_beside_an_adapter_takes_no_memory(program):
    """Nothing of its size is made or saved, but for views of it."""
    jitted = thunder_flce.jit(program)
    _run(jitted, _arguments(program))
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    views = ("detach", "t", "transpose", "permute", "numpy_T")
    large = [
        (bsym.sym.name, proxy.name)
        for bsym in _bound_symbols(traces)
        if not any(bsym.sym.name.endswith(view) for view in views) and not bsym.sym.name.startswith("unpack")
        for proxy in bsym.flat_proxy_outs
        if isinstance(proxy, TensorProxy) and proxy.numel >= SIZES.vocab * SIZES.hidden
    ]
    assert not large


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_factors_that_are_no_float_together_are_not_fused(factor):
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
