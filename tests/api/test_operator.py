"""`linear_cross_entropy` among PyTorch's own tools: compilers, exporters, transforms, modes and wrappers."""

import math
from functools import partial

import numpy as np
import pytest
import thunder
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.logging_tensor import LoggingTensor, capture_logs
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from front_ends import COMPILERS
from reference import Case, Recorder, Result, assert_close_to_truth, differentiate, errors, make_case, results_of, truth
from thunder_flce import LinearCrossEntropyLoss, Options, calls, inductor, linear_cross_entropy, linear_kl_divergence
from thunder_flce.engine.plan import LOSS_ONLY, Plan
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import _SCHEMA, Settings
from thunder_flce.options import GRADIENTS_IN_FORWARD, STRATEGIES

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


def upstream_of(case: Case, settings):
    return torch.randn(case.target.shape if settings.get("reduction") == "none" else ())


def assert_right(result, case: Case, upstream=None, *, options: Options | None = None, **settings) -> None:
    """Compares a loss, which is differentiated, or a result for some upstream gradient with float64."""
    if not isinstance(result, Result):
        upstream = upstream_of(case, settings)
        result = differentiate(result, case, upstream)
    assert_close_to_truth(result, case, upstream, factor=1.5, **settings)


# The operators by themselves.

CALLS = {
    **{name: {"options": Options(strategy=name)} for name in STRATEGIES},
    "some logits, each row": {"options": Options(memory_budget=6000), "reduction": "none"},
    "everything": {
        "reduction": "none", "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1, "vocab_size": 97,
        "outputs": ("entropy", "argmax", "accuracy", "log_prob"),
    },
    "token loss": {
        "token_loss": lambda log_prob, entropy, factor: entropy - log_prob * factor, "token_inputs": (torch.rand(37),),
    },
    "target weights, each row": {"target_weights": torch.rand(37, 2), "reduction": "none"},
    "factors": {
        "token_weights": torch.rand(37), "expected_gradient": torch.tensor(3.0), "num_items": torch.tensor(3.0),
    },
    "divergence, each row": {
        "divergence": "jensen_shannon", "cross_entropy_weight": 0.5, "reduction": "none",
        "options": Options(chunk_rows=5),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("needs_grad", "is_compiled"), [(True, False), (True, True), (False, False)], ids=["", "any length", "loss only"]
)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, needs_grad, is_compiled):
    """For the calls that the function makes, forward and backward, eagerly and from a compiled program."""
    settings = dict(CALLS[name])
    # The rows of saved logits after those of valid targets are never written.
    case = make_case(vocab=97, bias=True, ranks=(4,), class_weight=name in STRATEGIES, ignored=0.0)
    if "target_weights" in settings:
        case.target = torch.stack([case.target, case.target.flip(0)], -1)
    if "divergence" in settings:
        case.bias, case.terms = None, ()
    for tensor in case.operands():
        tensor.requires_grad_(needs_grad and (not case.terms or tensor is not case.terms[0][0]))
    function = torch.compile(call, backend="eager", dynamic=True) if is_compiled else call
    with Recorder() as recorder:
        function(case, **settings)
    ((tensors, literal),) = recorder.of(OPERATOR)
    tensors = [tensor.detach() for tensor in tensors]
    torch.library.opcheck(OPERATOR, (tensors, literal))
    parsed = Settings.parse(literal)
    if "computed_rows" not in parsed.saved_names:
        return
    results = dict(zip(parsed.result_names, OPERATOR(tensors, literal), strict=True))
    upstream = [results[result].detach() + 1 if result in results else None for result in parsed.upstream_names]
    arguments = upstream, [results[result].detach() for result in parsed.saved_names], tensors, literal
    torch.library.opcheck(BACKWARD, arguments)
    # It leaves what was saved as it is, even in a backward pass whose graph goes.
    gradients, leaf = [], torch.zeros((), requires_grad=True)
    leaf.register_hook(lambda grad: gradients.extend(BACKWARD(*arguments) for _ in range(2)))
    leaf.backward()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert all(gradient.is_contiguous() for gradient in gradients[0])


# Compilers and exporters.


@pytest.mark.parametrize("kind", [int, np.int64])
def test_options_that_change_between_calls(kind):
    """Dynamo makes a symbol of a number that changes, also where it is a field of an argument."""

    def program(x, weight, target, options):
        return linear_cross_entropy(x * 2, weight, target, options=options)

    compiled, case = torch.compile(program, backend="aot_eager", fullgraph=True), make_case(tokens=37)
    for number in (1 << 20, 1 << 21, 1 << 22):
        fields = dict.fromkeys(("chunk_rows", "memory_budget", "expected_gradient"), kind(number))
        arguments = case.x, case.weight, case.target, Options(**fields)
        assert torch.equal(compiled(*arguments), program(*arguments))


@pytest.mark.parametrize("kind", [int, float])
def test_numbers_that_change_between_calls(kind):
    """The program is compiled once for all divisors, which are known only at each step."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def program(case, num_items, expected_gradient):
        return results_of(case, num_items=num_items, expected_gradient=expected_gradient)

    compiled = torch.compile(program, backend=counter, fullgraph=True)
    for number in (3, 5, 8, 20):
        case = make_case()
        assert_right(compiled(case, kind(number), kind(2 * number)), case, num_items=kind(number))
    assert counter.frame_count == 2
    # Dynamo has an error of its own around ours.
    with pytest.raises(Exception, match="num_items must"):
        compiled(make_case(), kind(-1), kind(7))
    with pytest.raises(Exception, match="expected_gradient must"):
        compiled(make_case(), kind(7), kind(0))


@pytest.fixture
def lowered_anew(monkeypatch):
    """Gradients of any size are lowered, and not by the caches on disk, which know programs by their operators."""
    monkeypatch.setattr(inductor, "_LARGE", 0)
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.mark.inductor
@pytest.mark.usefixtures("lowered_anew")
@pytest.mark.parametrize(("count", "is_checkpointed"), [(1, False), (3, False), (3, True)])
def test_backward_overwrites_what_only_it_reads(count, is_checkpointed, device):
    """As Inductor compiles it: saved logits and finished gradients, unless a checkpoint computes them in the backward.

    Also where an embedding shares the weight.
    """
    case = make_case(device=device, bias=True)
    operands = case.operands()[:count]
    for frozen in case.operands()[count:]:
        frozen.requires_grad_(False)
    factors = torch.randn(case.target.shape, device=device)

    def loss(hidden):
        arguments = hidden, case.weight, case.target
        settings = {"reduction": "none", "options": Options(strategy="save_logits")}
        row_losses = linear_cross_entropy(*arguments, linear_bias=case.bias, **settings)
        return (row_losses * factors).sum() + linear_cross_entropy(*arguments)

    def program():
        hidden = case.x.tanh() + F.embedding(case.target.clamp(0, 9), case.weight)
        return checkpoint.checkpoint(loss, hidden, use_reentrant=False) if is_checkpointed else loss(hidden)

    def gradients(program, upstream):
        return torch.autograd.grad(program(), operands, torch.tensor(upstream, device=device))

    compiled = torch.compile(program, fullgraph=True)
    for upstream in (1.0, -0.3):
        result, codes = run_and_get_code(gradients, compiled, upstream)
        torch.testing.assert_close(result, gradients(program, upstream))
    for operator in ("scale_gradient_.default(", "cross_entropy_backward_.default("):
        assert (operator in codes[-1]) == (not is_checkpointed)
    # Without a valid row, the mean is NaN, and what comes back may be.
    case.target.fill_(-100)
    assert not any(gradient.any() for gradient in gradients(compiled, math.nan))


@pytest.mark.inductor
@pytest.mark.usefixtures("lowered_anew")
def test_two_equal_calls_share_what_they_save(device):
    """Inductor compiles them as one, whose results both backwards read: neither overwrites them."""
    case = make_case(device=device)
    operands, settings = (case.x, case.weight), {"reduction": "none", "options": Options(strategy="save_logits")}

    def program(x, weight):
        x, total = x * 1, x.sum()
        first, second = (linear_cross_entropy(x, weight, case.target, **settings) for _ in range(2))
        mean, same = (linear_cross_entropy(x, weight, case.target) for _ in range(2))
        return first.square().sum() + (second * total).mean() + mean.exp() + same * total

    compiled = torch.compile(program, fullgraph=True)
    result, expected = (torch.autograd.grad(function(*operands), operands) for function in (compiled, program))
    torch.testing.assert_close(result, expected)


@pytest.mark.inductor
@pytest.mark.filterwarnings("error:.*may not alias")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu) for name in WAYS])
def test_reduce_overhead(name):
    """By CUDA graphs, which are replayed with other values and other ignored rows."""
    settings = WAYS[name]
    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    for ignored in (0.1, 0.1, 0.1, 0.8, 0.0):
        case = make_case(tokens=300, hidden=64, vocab=1009, device="cuda", ignored=ignored)
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(case, **settings)
        result = differentiate(loss, case, None)
        loss_error, *gradient_errors = errors(result, truth(case, reduction=settings.get("reduction", "mean")))
        assert loss_error < 1e-5 and max(gradient_errors) < 1e-4


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["no_grad", "training"])
def test_exported(needs_grad, strict):
    """For any number of tokens; a program that is exported with gradients can be trained."""
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
    assert_right(loss, Case(other.x.detach(), *parameters, other.target))
    if needs_grad:
        with pytest.raises(RuntimeError, match="input requires a gradient, but did not when this .*no_grad"):
            exported(other.x, other.target)


@pytest.mark.filterwarnings("ignore:Converting a tensor", "ignore:`torch.jit.trace` is deprecated")
def test_traced_by_jit(settings):
    """For any number of tokens, and any of them ignored."""
    case, other = make_case(), make_case(tokens=11)

    def function(*operands):
        return linear_cross_entropy(*operands, **settings)

    # The trace would be compared with one under torch.no_grad.
    traced = torch.jit.trace(function, (case.x, case.weight, case.target), check_trace=False)
    assert_right(traced(other.x, other.weight, other.target), other, **settings)


def test_graph_of_a_step(settings):
    """`make_fx` traces it; the graph runs on tensors that require gradients, and its gradients have no derivatives."""
    case = make_case()
    upstream = upstream_of(case, settings).requires_grad_()

    def step(x, weight, target, upstream):
        loss = linear_cross_entropy(x, weight, target, **settings)
        return loss, *torch.autograd.grad(loss, (x, weight), upstream)

    arguments = case.x, case.weight, case.target, upstream
    loss, *gradients = make_fx(step)(*arguments)(*arguments)
    assert_right(Result(loss, gradients), case, upstream.detach(), **settings)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        gradients[0].sum().backward()


def test_second_derivative_of_a_compiled_call():
    """AOTAutograd raises an error if the backward reads an operand, which it need not with finished gradients."""
    case = make_case()
    loss = torch.compile(call, backend="aot_eager")(case)
    for operand in (case.x, case.weight):
        (gradient,) = torch.autograd.grad(loss, operand, create_graph=True)
        with pytest.raises(RuntimeError, match="not currently support double backward"):
            torch.autograd.grad(loss + gradient.square().sum(), operand, retain_graph=True)


def test_compiled_without_a_valid_target(settings):
    """Gradients are zeros, even for an upstream gradient of NaN."""
    case = make_case(ignored=1.0)
    loss = torch.compile(call, backend="aot_eager", fullgraph=True)(case, **settings)
    for gradient in torch.autograd.grad(loss, (case.x, case.weight), torch.full_like(loss, math.nan)):
        assert not gradient.any()


# Transforms of torch.func.


def test_vjp_and_compiled_grad(settings):
    case = make_case()

    def function(x, weight):
        return linear_cross_entropy(x, weight, case.target, **settings)

    operands = case.x.detach(), case.weight.detach()
    loss, vjp = torch.func.vjp(function, *operands)
    upstream = torch.randn_like(loss)
    grad = torch.func.grad(lambda *operands: (function(*operands) * upstream).sum(), argnums=(0, 1))
    compiled = torch.compile(grad, backend="aot_eager", fullgraph=True)
    for gradients in (vjp(upstream), compiled(*operands)):
        assert_right(Result(loss, gradients), case, upstream, **settings)


def test_a_gradient_that_only_an_outer_transform_needs(settings):
    """The gradient of the value that the inner one returns beside its gradient, for the same upstream gradient."""
    case = make_case()
    # This call is cached, and has a frozen weight.
    linear_cross_entropy(case.x, case.weight.detach(), case.target)
    upstream = upstream_of(case, settings)

    def value(weight):
        def product(x):
            return (linear_cross_entropy(x, weight, case.target, **settings) * upstream).sum()

        return torch.func.grad_and_value(product)(case.x.detach())[1]

    gradient = torch.func.grad(value)(case.weight.detach())
    exact = truth(case, upstream, reduction=settings.get("reduction", "mean")).gradients[1]
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transforms_that_raise_an_error(reduction):
    case, batch = make_case(), make_case(tokens=6)
    x, weight = case.x.detach(), case.weight.detach()
    batch_x, batch_target = batch.x.detach().view(3, 2, -1), batch.target.view(3, 2)

    def loss(x, weight, target=case.target):
        return linear_cross_entropy(x, weight, target, reduction=reduction).sum()

    def several_upstream_gradients():
        losses = linear_cross_entropy(case.x, weight, case.target, reduction=reduction)
        return torch.autograd.grad(losses, case.x, torch.ones(3, *losses.shape), is_grads_batched=True)

    def dual(program):
        with forward_ad.dual_level():
            return program(forward_ad.make_dual(x, x), weight)

    grad, graph = torch.func.grad(loss), make_fx(lambda x, weight: loss(x, weight))(x, weight)
    for match, transforms in {
        "no forward-mode derivative": (
            lambda: dual(loss),
            lambda: dual(graph),
            lambda: torch.func.jvp(loss, (x, weight), (x, weight)),
            lambda: torch.func.hessian(loss)(x, weight),
        ),
        "no second derivative": (
            lambda: torch.autograd.grad(loss(case.x, case.weight), case.x, create_graph=True),
            lambda: torch.func.grad(lambda x: grad(x, weight).sum())(x),
            lambda: torch.func.grad(lambda weight: grad(x, weight).sum())(weight),
        ),
        "no vmap": (
            lambda: torch.vmap(lambda x, target: loss(x, weight, target))(batch_x, batch_target),
            lambda: torch.func.jacrev(lambda x: linear_cross_entropy(x, weight, case.target, reduction="none"))(x),
        ),
        "no vmap; .* without is_grads_batched=True": (several_upstream_gradients,),
    }.items():
        for transform in transforms:
            with pytest.raises(RuntimeError, match=f"linear_cross_entropy has {match}"):
                transform()


# Checkpoints, hooks and modes.


@pytest.mark.parametrize("is_selective", [False, True], ids=["", "selective"])
def test_checkpoint(is_selective, settings):
    """A selective one keeps what the operator has returned, and does not run it again."""
    case, contexts = make_case(), partial(checkpoint.create_selective_checkpoint_contexts, [OPERATOR])
    function, how = partial(linear_cross_entropy, **settings), {"context_fn": contexts} if is_selective else {}
    with Recorder() as recorder:
        loss = checkpoint.checkpoint(function, case.x, case.weight, case.target, use_reentrant=False, **how)
        assert_right(loss, case, **settings)
    assert len(recorder.of(OPERATOR)) == (1 if is_selective else 2)


def test_saved_tensors_hooks(settings):
    """Saved tensors may be elsewhere until the backward: finished gradients, or what PyTorch's own loss would save."""
    case, saved = make_case(), set()

    def pack(tensor):
        saved.add(tensor.data_ptr())
        return tensor.numpy(force=True).copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        loss = call(case, **settings)
    assert_right(loss, case, **settings)
    saves_operands = {case.x.data_ptr(), case.weight.data_ptr()} <= saved
    assert saves_operands is (settings != WAYS[GRADIENTS_IN_FORWARD])


def test_cached_calls_in_modes_and_of_other_tensors():
    """A call that the cache knows still goes through a mode, a subclass, or a negation that is due when it is read."""
    case = make_case()
    x, weight, target = case.x.detach(), case.weight.detach(), case.target

    class Subclass(torch.Tensor):
        pass

    for _ in range(2):
        expected = linear_cross_entropy(x, weight, target)
        with capture_logs() as logs:
            assert torch.equal(linear_cross_entropy(LoggingTensor(x), weight, target).elem, expected)
        assert len(logs) == 1 and "thunder_flce.linear_cross_entropy.default" in logs[0]
        with Recorder() as recorder:
            assert torch.equal(linear_cross_entropy(x, weight, target), expected)
        assert len(recorder.of(OPERATOR)) == 1
        with torch.profiler.profile() as profile:
            linear_cross_entropy(x, weight, target)
        assert any("thunder_flce" in event.name for event in profile.events())
        for other in (x.as_subclass(Subclass), torch.complex(x, -x).conj().imag):
            assert torch.equal(torch.Tensor(linear_cross_entropy(other, weight, target)), expected)


@pytest.mark.parametrize("is_inside", [False, True], ids=["around the program", "in the program"])
@pytest.mark.parametrize("compiler", ["eager", "torch.compile", "thunder's own jit", "thunder.jit"])
def test_autocast(compiler, is_inside):
    """The linear is cast, as PyTorch's; its operands' gradients keep their dtype."""
    case, autocast = make_case(bias=True), torch.autocast("cpu", torch.bfloat16)
    compiled = {"eager": lambda program: program, "thunder's own jit": thunder.jit, **COMPILERS}[compiler]

    def program(x, weight, target, bias):
        return linear_cross_entropy(x, weight, target, linear_bias=bias)

    step = compiled(autocast(program)) if is_inside else autocast(compiled(program))
    result = differentiate(step(case.x, case.weight, case.target, case.bias), case, None)
    loss_error, *gradient_errors = errors(result, truth(case))
    assert 1e-6 < loss_error < 1e-2 and 1e-4 < min(gradient_errors) and max(gradient_errors) < 2e-2
    assert {tensor.dtype for tensor in (result.loss, *result.gradients)} == {torch.float32}


@pytest.mark.parametrize("settings", [WAYS["gradients_in_forward"], WAYS["none"]], ids=["mean", "none"])
def test_compiled_autograd(settings, monkeypatch):
    """The backward of an eager forward is compiled, also that of a first call."""
    monkeypatch.setattr(calls, "_settings_cache", {})
    case = make_case()
    loss = call(case, **settings)
    upstream = upstream_of(case, settings)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        result = differentiate(loss, case, upstream)
    assert_right(result, case, upstream, **settings)


# Results and settings.


@pytest.mark.parametrize("outputs", [(), ("log_prob",)], ids=["loss", "log_prob"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
def test_results_may_change_in_place(outputs, is_frozen):
    """Also those of a second call, which the cache knows."""
    case = make_case(tokens=6, ignored=0.0)
    case.x, case.target = case.x.detach().view(2, 3, -1).requires_grad_(), case.target.view(2, 3)
    case.weight.requires_grad_(not is_frozen)
    exact = truth(case, torch.full((2, 3), -2.0 if outputs else 2.0), reduction="none").gradients[0]
    for _ in range(2):
        results = results_of(case, reduction="none", outputs=outputs)
        result = results[1] if outputs else results
        result.mul_(2)
        (gradient,) = torch.autograd.grad(result.sum(), case.x)
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-6)


def test_no_upstream_gradient(settings):
    case = make_case()
    torch._C._functions.UndefinedGrad()(call(case, **settings)).sum().backward()
    assert case.x.grad is None and case.weight.grad is None


def test_settings_of_another_schema():
    """As in a program that another version has exported."""
    settings = Settings(names=("input",), loss=Loss(ignore_index=-7), needs_grad=(), plan=Plan(strategy=LOSS_ONLY))
    schema = f"'schema': {_SCHEMA}"
    assert schema in str(settings) and Settings.parse(str(settings)) == settings
    with pytest.raises(ValueError, match="exported with another version of thunder_flce"):
        Settings.parse(str(settings).replace(schema, "'schema': 0"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("strategy", "matmuls"), [("gradients_in_forward", 3), ("recompute_logits", 4)])
def test_operations_are_counted(device, strategy, matmuls):
    """By FlopCounterMode, also on the meta device, as litgpt uses it."""
    x, w = (torch.randn(size, 16, device=device, requires_grad=True) for size in (30, 50))
    y = torch.zeros(30, dtype=torch.int64, device=device)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, w, y, options=Options(strategy=strategy)).backward()
    assert counter.get_total_flops() == matmuls * 2 * 30 * 50 * 16


def test_one_text_for_several_dtypes():
    """The operator has one `Settings` for all calls of one text, also if their dtypes differ."""
    names, plan = ("input", "linear_weight", "target"), Plan(strategy=GRADIENTS_IN_FORWARD)
    options = Options(strategy=GRADIENTS_IN_FORWARD)
    text = str(Settings(names=names, loss=Loss(), needs_grad=names[:2], plan=plan, options=options))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        case = make_case(dtype=dtype)
        assert_right(OPERATOR([case.x, case.weight, case.target], text)[0], case)
