"""`linear_cross_entropy` among PyTorch's own tools: compilers, exporters, transforms, modes and wrappers."""

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.logging_tensor import LoggingTensor, capture_logs
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from reference import Case, Result, assert_close_to_truth, differentiate, errors, make_case, results_of, truth
from thunder_flce import LinearCrossEntropyLoss, Options, inductor, linear_cross_entropy, linear_kl_divergence
from thunder_flce.engine.plan import GRADIENTS_IN_FORWARD, LOSS_ONLY, Plan
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import _SCHEMA, Settings
from thunder_flce.options import STRATEGIES

OPERATOR = torch.ops.thunder_flce.linear_cross_entropy.default
BACKWARD = torch.ops.thunder_flce.linear_cross_entropy_backward.default
WAYS = {**{name: {"options": Options(strategy=name)} for name in STRATEGIES}, "none": {"reduction": "none"}}


@pytest.fixture(params=WAYS)
def settings(request):
    return WAYS[request.param]


def call(case: Case, **settings):
    if "divergence" in settings:
        teacher = case.x.detach().flip(0), case.weight.detach().flip(0)
        return linear_kl_divergence(case.x, case.weight, *teacher, case.target, **settings)
    return results_of(case, **settings)


def assert_right(results, case: Case, *, after_backward: bool = False, **settings) -> None:
    """Compares results and gradients with float64; also those that `backward` leaves in `.grad`."""
    settings = {name: value for name, value in settings.items() if name != "options"}
    grad = torch.randn(case.target.shape) if settings.get("reduction") == "none" else torch.tensor(0.7)
    if after_backward:
        results.backward(grad)
        got = Result(results.detach(), tuple(operand.grad for operand in case.needing_grad()))
    else:
        got = differentiate(results, case, grad, settings.get("outputs", ()))
    assert_close_to_truth(got, case, grad, factor=1.5, **settings)


class RecordedCalls(TorchDispatchMode):
    """The arguments of each call of an operator, positional ones and those by name."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.calls = operator, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is self.operator:
            self.calls.append((args, kwargs or {}))
        return function(*args, **(kwargs or {}))


# The operators by themselves.

OF_TOKENS = torch.rand(37)
CALLS = {
    **{name: {"options": Options(strategy=name)} for name in STRATEGIES},
    "chunks": {"options": Options(chunk_rows=10)},
    "some logits, each row": {"options": Options(memory_budget=6000), "reduction": "none"},
    "everything": {
        "reduction": "none", "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1, "vocab_size": 97,
        "outputs": ("entropy", "argmax", "accuracy", "log_prob"),
    },
    "in the forward": {"outputs": ("argmax", "valid_argmax", "accuracy", "mean_logit"), "detached": ("mean_logit",)},
    "token loss": {"token_loss": lambda p, e, each: e - p * each, "token_inputs": (OF_TOKENS,)},
    "target weights": {"target_weights": torch.rand(37, 2)},
    "target weights, each row": {"target_weights": torch.rand(37, 2), "reduction": "none"},
    "token weights": {"token_weights": OF_TOKENS},
    "expected gradient": {"expected_gradient": torch.tensor(3.0)},
    "items": {"num_items": torch.tensor(3.0)},
    "divergence": {"divergence": "jensen_shannon"},
    "divergence, each row": {"divergence": "jensen_shannon", "reduction": "none", "options": Options(chunk_rows=5)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("needs_grad", "is_compiled"), [(True, False), (True, True), (False, False)], ids=["", "any length", "loss only"]
)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, needs_grad, is_compiled):
    """Of the calls that the function makes, forward and backward, eagerly and from a compiled program."""
    settings = dict(CALLS[name])
    # Of logits that are saved, the rows after those of valid targets are never written.
    case = make_case(vocab=97, bias=True, ranks=(4,), class_weight=name in STRATEGIES, ignored=0.0)
    if "target_weights" in settings:
        case.target = torch.stack([case.target, case.target.flip(0)], -1)
    if "divergence" in settings:
        case.bias, case.terms = None, ()
    for tensor in case.operands():
        tensor.requires_grad_(needs_grad and (not case.terms or tensor is not case.terms[0][0]))
    function = torch.compile(call, backend="eager", dynamic=True) if is_compiled else call
    with RecordedCalls(OPERATOR) as recorded:
        function(case, **settings)
    (((tensors, literal), _),) = recorded.calls
    tensors = [tensor.detach() for tensor in tensors]
    torch.library.opcheck(OPERATOR, (tensors, literal))
    known = Settings.parse(literal)
    waits = name in ("save_logits", "recompute_logits", "everything") or name.endswith("each row")
    assert ("computed_rows" in known.saved_names) == (needs_grad and waits)
    if not (needs_grad and waits):
        return
    found = dict(zip(known.result_names, OPERATOR(tensors, literal), strict=True))
    upstream = [found[each].detach() + 1 if each in found else None for each in known.upstream_names]
    args = (upstream, [found[each].detach() for each in known.saved_names], tensors, literal)
    torch.library.opcheck(BACKWARD, args)
    # It leaves what was saved as it is, even in a backward pass whose graph goes.
    gradients, leaf = [], torch.zeros((), requires_grad=True)
    leaf.register_hook(lambda grad: gradients.extend(BACKWARD(*args) for _ in range(2)))
    leaf.backward()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    for each, gradient in zip(known.needs_grad, gradients[0], strict=True):
        operand = tensors[known.names.index(each)]
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype) and gradient.is_contiguous()


# Compilers and exporters.


@pytest.mark.parametrize("kind", [int, np.int64], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("field", ["chunk_rows", "memory_budget", "expected_gradient"])
def test_options_that_change_between_calls(field, kind):
    """Of a number that changes, Dynamo makes a symbol, also where it is a field of an argument."""

    def program(x, weight, target, options):
        return linear_cross_entropy(x * 2, weight, target, options=options)

    compiled, case = torch.compile(program, backend="aot_eager", fullgraph=True), make_case(tokens=37)
    for number in (1 << 20, 1 << 21, 1 << 22):
        given = case.x, case.weight, case.target, Options(**{field: kind(number)})
        assert torch.equal(compiled(*given), program(*given))


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("name", ["num_items", "expected_gradient"])
def test_numbers_that_change_between_calls(name, kind):
    """What is divided by is known at each step anew: the program is compiled once for all of them."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda case, number: call(case, **{name: number}), backend=counter, fullgraph=True)
    for number in (3, 5, 8, 20):
        case = make_case()
        settings = {name: kind(number)} if name == "num_items" else {}
        assert_right(compiled(case, kind(number)), case, **settings)
    assert counter.frame_count == 2
    # Dynamo has an error of its own around ours.
    with pytest.raises(Exception, match=f"{name} must"):
        compiled(make_case(), kind(-1) if name == "num_items" else kind(0))


# The caches on disk know programs by their operators, and not by what these are lowered to.
@pytest.mark.inductor
@torch._inductor.config.patch(fx_graph_cache=False)
@torch._functorch.config.patch(enable_autograd_cache=False)
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpoint"])
def test_finished_gradients_are_scaled_in_their_memory(is_checkpointed, device, monkeypatch):
    """By Inductor, where they come from the forward; also where an embedding shares the weight."""
    monkeypatch.setattr(inductor, "_LARGE", 0)
    case = make_case(device=device)

    def program(x, weight):
        hidden = x.tanh() + F.embedding(case.target.clamp(0, 9), weight)
        if is_checkpointed:
            return checkpoint.checkpoint(linear_cross_entropy, hidden, weight, case.target, use_reentrant=False)
        return linear_cross_entropy(hidden, weight, case.target)

    compiled, operands = torch.compile(program, fullgraph=True), (case.x, case.weight)
    for factor in (1.0, -0.3):

        def gradients(program, factor=factor):
            return torch.autograd.grad(program(*operands), operands, torch.tensor(factor, device=device))

        got, codes = run_and_get_code(gradients, compiled)
        torch.testing.assert_close(got, gradients(program))
    assert ("scale_gradient_.default(" in codes[-1]) == (not is_checkpointed)
    # Without a valid row, the mean is NaN, and what comes back may be.
    case.target.fill_(-100)
    nothing = torch.autograd.grad(compiled(*operands), operands, torch.tensor(math.nan, device=device))
    assert not any(gradient.any() for gradient in nothing)


@pytest.mark.inductor
@pytest.mark.parametrize(("count", "is_checkpointed"), [(1, False), (3, False), (3, True)])
def test_saved_logits_become_their_gradient(count, is_checkpointed, device):
    """In a program that Inductor compiles, unless a checkpoint computes them in the backward."""
    case = make_case(device=device, bias=True)
    operands = case.operands()[:count]
    for frozen in case.operands()[count:]:
        frozen.requires_grad_(False)

    settings = {"linear_bias": case.bias, "reduction": "none", "options": Options(strategy="save_logits")}

    def loss():
        return linear_cross_entropy(case.x.tanh(), case.weight, case.target, **settings)

    def program():
        return checkpoint.checkpoint(loss, use_reentrant=False) if is_checkpointed else loss()

    compiled, grad = torch.compile(program, fullgraph=True), torch.randn(case.target.shape, device=device)
    got, codes = run_and_get_code(lambda: torch.autograd.grad(compiled(), operands, grad))
    torch.testing.assert_close(got, torch.autograd.grad(program(), operands, grad))
    assert ("cross_entropy_backward_.default(" in codes[-1]) == (not is_checkpointed)


@pytest.mark.inductor
def test_two_equal_calls_read_the_same(monkeypatch, device):
    """In a program that Inductor compiles, where they become one: neither backward overwrites what both read."""
    monkeypatch.setattr(inductor, "_LARGE", 0)
    case = make_case(device=device)
    operands, settings = (case.x, case.weight), {"reduction": "none", "options": Options(strategy="save_logits")}

    def program(x, weight):
        x, total = x * 1, x.sum()
        first, second = (linear_cross_entropy(x, weight, case.target, **settings) for _ in range(2))
        mean, same = (linear_cross_entropy(x, weight, case.target) for _ in range(2))
        return first.square().sum() + (second * total).mean() + mean.exp() + same * total

    compiled = torch.compile(program, fullgraph=True)
    got, right = (torch.autograd.grad(each(*operands), operands) for each in (compiled, program))
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["no_grad", "training"])
def test_exported(needs_grad, strict):
    """With any number of tokens; what is exported with gradients can be trained."""
    model, case, other = LinearCrossEntropyLoss(24, 101, bias=True), make_case(), make_case(tokens=11)
    tokens = {0: torch.export.Dim("tokens", min=2)}
    with torch.set_grad_enabled(needs_grad):
        inputs = (case.x.detach(), case.target)
        program = torch.export.export(model.eval(), inputs, dynamic_shapes=(tokens, tokens), strict=strict)
        assert [node.target for node in program.graph.nodes if "thunder_flce" in str(node.target)] == [OPERATOR]
        exported = program.module() if needs_grad else program.run_decompositions().module()
        loss = exported(other.x.detach(), other.target)
    assert loss.requires_grad == needs_grad
    parameters = [exported.get_parameter(f"linear.{name}").requires_grad_(needs_grad) for name in ("weight", "bias")]
    assert_right(loss, Case(other.x.detach(), *parameters, other.target), after_backward=needs_grad)
    if needs_grad:
        with pytest.raises(RuntimeError, match="input requires a gradient, but did not when this .*no_grad"):
            exported(other.x, other.target)


@pytest.mark.filterwarnings("ignore:Converting a tensor", "ignore:`torch.jit.trace` is deprecated")
def test_traced_by_jit(settings):
    """One operator, for any number of tokens, and any of them ignored."""
    case, other = make_case(), make_case(tokens=11)

    def step(*operands):
        return linear_cross_entropy(*operands, **settings)

    # It would be compared with one that is traced under torch.no_grad.
    traced = torch.jit.trace(step, (case.x, case.weight, case.target), check_trace=False)
    assert_right(traced(other.x, other.weight, other.target), other, **settings)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_graphs_of_a_whole_step(mode, settings):
    """As `make_fx` traces them: they run with what requires gradients, and their gradients have no derivatives."""
    case, scale = make_case(), torch.tensor(0.7, requires_grad=True)

    def step(x, weight, target, scale):
        loss = (linear_cross_entropy(x, weight, target, **settings) * scale).sum()
        return loss, *torch.autograd.grad(loss, (x, weight))

    arguments = case.x, case.weight, case.target, scale
    loss, *gradients = make_fx(step, tracing_mode=mode)(*arguments)(*arguments)
    upstream = torch.full(case.target.shape if settings.get("reduction") else (), 0.7)
    right = truth(case, upstream, reduction=settings.get("reduction", "mean"))
    right.loss = (right.loss * upstream).sum()
    assert max(errors(Result(loss, gradients), right)) < 1e-6
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        gradients[0].sum().backward()


def test_second_derivative_of_a_compiled_call(settings):
    case = make_case()
    loss = torch.compile(call, backend="aot_eager")(case, **settings).sum()
    for operand in (case.x, case.weight):
        (gradient,) = torch.autograd.grad(loss, operand, create_graph=True)
        with pytest.raises(RuntimeError, match="not currently support double backward"):
            torch.autograd.grad(loss + gradient.square().sum(), operand, retain_graph=True)


# Transforms of torch.func.


def test_grad_and_vjp(settings):
    case = make_case()

    def function(x, weight):
        return linear_cross_entropy(x, weight, case.target, **settings)

    operands = case.x.detach(), case.weight.detach()
    loss, vjp = torch.func.vjp(function, *operands)
    upstream = torch.randn_like(loss)
    right = truth(case, upstream, reduction=settings.get("reduction", "mean"))
    grad = torch.func.grad(lambda *operands: (function(*operands) * upstream).sum(), argnums=(0, 1))
    compiled = torch.compile(grad, backend="aot_eager", fullgraph=True)
    for got in (vjp(upstream), grad(*operands), compiled(*operands)):
        assert max(errors(Result(loss, got), right)) < 1e-6


def test_a_gradient_that_only_an_outer_transform_needs():
    """Of the value that the inner one returns beside its gradient."""
    case = make_case()
    # What is known of a call with a frozen weight is not so of this one.
    linear_cross_entropy(case.x, case.weight.detach(), case.target)

    def value(weight):
        inner = torch.func.grad_and_value(lambda x, weight: linear_cross_entropy(x, weight, case.target))
        return inner(case.x.detach(), weight)[1]

    gradient, right = torch.func.grad(value)(case.weight.detach()), truth(case).gradients[1]
    torch.testing.assert_close(gradient.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_transforms_do_not_have(reduction):
    case, several = make_case(), make_case(tokens=6)
    x, weight, batch = case.x.detach(), case.weight.detach(), several.x.detach().view(3, 2, -1)

    def loss(x, weight, target=case.target):
        return linear_cross_entropy(x, weight, target, reduction=reduction).sum()

    def of_batch(x, target):
        return loss(x, weight, target)

    def gradients(x):
        losses = linear_cross_entropy(x, weight, case.target, reduction=reduction)
        return torch.autograd.grad(losses, x, torch.ones(3, *losses.shape), is_grads_batched=True)

    def dual(program=loss):
        with forward_ad.dual_level():
            return program(forward_ad.make_dual(x, x), weight)

    grad, made = torch.func.grad(loss), make_fx(lambda x, weight: loss(x, weight))(x, weight)
    of_many = several.target.view(3, 2)
    for match, runs in {
        "no forward-mode derivative": (
            dual,
            lambda: dual(made),
            lambda: torch.func.linearize(loss, x, weight),
            lambda: torch.func.jvp(loss, (x, weight), (x, weight)),
            lambda: torch.func.hessian(loss)(x, weight),
        ),
        "no second derivative": (
            lambda: torch.autograd.grad(loss(case.x, case.weight), case.x, create_graph=True),
            lambda: torch.func.grad(lambda x: grad(x, weight).sum())(x),
            lambda: torch.func.grad(lambda weight: grad(x, weight).sum())(weight),
        ),
        "no vmap": (
            lambda: torch.vmap(of_batch)(batch, of_many),
            lambda: torch.vmap(torch.func.grad(of_batch))(batch, of_many),
            lambda: torch.func.jacrev(lambda x: results_of(Case(x, weight, None, case.target), reduction="none"))(x),
        ),
        "no vmap; .* without is_grads_batched=True": (lambda: gradients(case.x),),
    }.items():
        for run in runs:
            with pytest.raises(RuntimeError, match=f"linear_cross_entropy has {match}"):
                run()


# Checkpoints, hooks and modes.

SELECTIVE = {"context_fn": lambda: checkpoint.create_selective_checkpoint_contexts([OPERATOR])}


@pytest.mark.parametrize("how", [{}, SELECTIVE, {"use_reentrant": True}], ids=["", "selective", "reentrant"])
def test_checkpoint(how, settings):
    """One that keeps what the operator has returned does not run it again."""
    case, how = make_case(), {"use_reentrant": False, **how}
    with RecordedCalls(OPERATOR) if "context_fn" in how else nullcontext() as recorded:
        loss = checkpoint.checkpoint(lambda x: call(replace(case, x=x * 1), **settings), case.x, **how)
        assert_right(loss, case, after_backward=True, **settings)
    assert recorded is None or len(recorded.calls) == 1


def test_modes_and_tensors_that_are_no_plain_ones():
    """What is known of a signature does not stand for a call in a mode, of a subclass, or to be negated when read."""
    case = make_case()
    x, weight, target = case.x.detach(), case.weight.detach(), case.target

    class Subclass(torch.Tensor):
        pass

    for _ in range(2):
        expected = linear_cross_entropy(x, weight, target)
        with capture_logs() as logs:
            assert torch.equal(linear_cross_entropy(LoggingTensor(x), weight, target).elem, expected)
        assert len(logs) == 1 and "thunder_flce.linear_cross_entropy.default" in logs[0]
        with RecordedCalls(OPERATOR) as recorded:
            assert torch.equal(linear_cross_entropy(x, weight, target), expected) and len(recorded.calls) == 1
        with torch.profiler.profile() as profile:
            linear_cross_entropy(x, weight, target)
        assert any("thunder_flce" in event.name for event in profile.events())
        for other in (x.as_subclass(Subclass), torch.complex(x, -x).conj().imag):
            assert torch.equal(torch.Tensor(linear_cross_entropy(other, weight, target)), expected)


def test_saved_tensors_hooks(settings):
    """What is saved may be elsewhere until the backward: finished gradients, or what PyTorch's own loss would save."""
    case, packed = make_case(), []

    def pack(tensor):
        packed.append(tensor)
        return tensor.numpy(force=True).copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        loss = call(case, **settings)
    assert_right(loss, case, **settings)
    saves_operands = {case.x.data_ptr(), case.weight.data_ptr()} <= {each.data_ptr() for each in packed}
    assert saves_operands is (settings != WAYS[GRADIENTS_IN_FORWARD])


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_autocast(backend):
    case = make_case(bias=True)
    function = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = function(case)
    result = differentiate(loss, case, None)
    of_loss, *of_gradients = errors(result, truth(case))
    assert 1e-6 < of_loss < 1e-2 and 1e-4 < min(of_gradients) and max(of_gradients) < 2e-2
    assert {each.dtype for each in (result.loss, *result.gradients)} == {torch.float32}


@pytest.mark.parametrize("settings", [WAYS["gradients_in_forward"], WAYS["none"]], ids=["mean", "none"])
def test_compiled_autograd(settings):
    """Eager forwards, one compiled backward."""
    case = make_case()
    loss = call(case, **settings)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        assert_right(loss, case, after_backward=True, **settings)


@pytest.mark.parametrize("case", [make_case(ignored=1.0), make_case(tokens=0)], ids=["ignored", "none"])
def test_compiled_without_a_valid_target(case, settings):
    """Zeros, even for an upstream gradient of NaN."""
    loss = torch.compile(call, backend="aot_eager", fullgraph=True)(case, **settings)
    for gradient in torch.autograd.grad(loss, (case.x, case.weight), torch.full_like(loss, float("nan"))):
        assert not gradient.any()


# CUDA graphs.


@pytest.mark.inductor
@pytest.mark.filterwarnings("error:.*may not alias")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu) for name in WAYS])
def test_reduce_overhead(name):
    """Inductor's CUDA graphs, replayed with other values and other ignored rows."""
    settings = WAYS[name]
    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    for ignored in (0.1, 0.1, 0.1, 0.8, 0.0):
        case = make_case(tokens=300, hidden=64, vocab=1009, device="cuda", ignored=ignored)
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(case, **settings)
        result = differentiate(loss, case, None)
        of_loss, *of_gradients = errors(result, truth(case, reduction=settings.get("reduction", "mean")))
        assert of_loss < 1e-5 and max(of_gradients) < 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_upstream_gradient(strategy):
    """Then nothing has a gradient."""
    case = make_case()
    loss = linear_cross_entropy(case.x, case.weight, case.target, options=Options(strategy=strategy))
    torch._C._functions.UndefinedGrad()(loss).backward()
    assert case.x.grad is None and case.weight.grad is None


def test_settings_of_another_schema():
    """PyTorch keeps compiled graphs on disk, by their arguments: one of another schema must not be found."""
    settings = Settings(names=("input",), loss=Loss(ignore_index=-7), needs_grad=(), plan=Plan(strategy=LOSS_ONLY))
    schema = f"'schema': {_SCHEMA}"
    assert schema in str(settings) and Settings.parse(str(settings)) == settings
    with pytest.raises(ValueError, match="exported with another version of thunder_flce"):
        Settings.parse(str(settings).replace(schema, "'schema': 0"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("strategy", "matmuls"), [("gradients_in_forward", 3), ("recompute_logits", 4)])
def test_operations_are_counted(device: str, strategy: str, matmuls: int) -> None:
    """As people measure a model's, and litgpt does on the meta device."""
    x, w = (torch.randn(size, 16, device=device, requires_grad=True) for size in (30, 50))
    y = torch.zeros(30, dtype=torch.int64, device=device)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, w, y, options=Options(strategy=strategy)).backward()
    assert counter.get_total_flops() == matmuls * 2 * 30 * 50 * 16
