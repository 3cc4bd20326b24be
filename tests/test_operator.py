"""`linear_cross_entropy` among PyTorch's own tools: compilers, exporters, transforms, modes and wrappers."""

import copy
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import BaseTorchFunctionMode
from torch.utils import checkpoint

from conftest import on_gpu
from reference import (
    Case,
    RecordedCalls,
    assert_close_to_truth,
    differentiate,
    error,
    make_case,
    run_inside,
    truth,
)
from thunder_flce import Options, inductor, linear_cross_entropy, operators
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.plan import GradientsInForward, LossOnly, Plan, RecomputeLogits, SaveLogits, SaveSomeLogits
from thunder_flce.execution.row_kernels.interface import LogitsBuffer
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.operation.loss import Loss, RowCoefficients
from thunder_flce.operators import Settings, operands_of
from thunder_flce.options import STRATEGIES

OPERATOR = torch.ops.thunder_flce.linear_cross_entropy.default
BACKWARD = torch.ops.thunder_flce.linear_cross_entropy_backward.default
WAYS = {**{name: {"options": Options(strategy=name)} for name in STRATEGIES}, "none": {"reduction": "none"}}
EVERYTHING = {
    "reduction": "none",
    "label_smoothing": 0.1,
    "softcap": 5.0,
    "z_loss": 0.1,
    "vocab_size": 97,
    "outputs": ("entropy", "argmax", "accuracy", "log_prob"),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture(params=WAYS)
def settings(request):
    return WAYS[request.param]


def wide_case(**sizes) -> Case:
    """With every operand, and targets in the vocabulary of `EVERYTHING`."""
    return make_case(bias=True, class_weight=True, ranks=(4,), **{"vocab": 97, **sizes})


def call(case: Case, **settings):
    return linear_cross_entropy(
        case.x,
        case.weight,
        case.target,
        linear_bias=case.bias,
        weight=case.class_weight,
        terms=case.terms,
        **settings,
    )


def assert_right(results, case: Case, **settings) -> None:
    """Compares results and gradients with float64."""
    settings = {name: value for name, value in settings.items() if name != "options"}
    grad = torch.randn(case.target.shape) if settings.get("reduction") == "none" else torch.tensor(0.7)
    got = differentiate(results, case, grad, settings.get("outputs", ()))
    assert_close_to_truth(got, case, grad, factor=1.5, **settings)


def assert_right_after_backward(loss, case: Case, **settings) -> None:
    """The same, of the gradients that `backward` leaves in `.grad`."""
    grad = torch.randn_like(loss)
    loss.backward(grad)
    exact = truth(case, grad, reduction=settings.get("reduction", "mean"))
    assert error(loss, exact.loss) < 1e-6
    for operand, right in zip(case.needing_grad(), exact.gradients, strict=True):
        assert error(operand.grad, right) < 1e-6


def head(case: Case):
    return case.x, case.weight, case.target


# The operators by themselves.

PLANS: list[Plan] = [
    GradientsInForward(chunk_rows=10),
    SaveLogits(),
    SaveSomeLogits(saved_rows=8, chunk_rows=10, block_columns=30),
    RecomputeLogits(chunk_rows=10, block_columns=30),
    LossOnly(chunk_rows=10),
]


def operator_arguments(case: Case, loss: Loss, plan: Plan, *, is_planned: bool):
    needs_grad = () if isinstance(plan, LossOnly) else ("input", "linear_weight", "linear_bias", "terms[0].weight")
    tensors = {"linear_bias": case.bias, "weight": case.class_weight, "num_items": None, "expected_gradient": None}
    if is_planned:
        settings = Settings.planned(loss, needs_grad, plan)
    else:
        named = {"input": case.x, "linear_weight": case.weight, "target": case.target, "terms": case.terms, **tensors}
        options = Options(strategy=None if isinstance(plan, LossOnly) else plan.strategy, chunk_rows=10)
        settings = Settings.unplanned(operands_of(named, loss, needs_grad), needs_grad, options)
    terms = [tensor for term in case.terms for tensor in term]
    return head(case), {**tensors, "terms": terms, "settings": str(settings)}, settings


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: type(plan).__name__)
def test_opcheck(plan):
    """Planned, as eager calls are, and for any number of tokens, as compiled programs are."""
    # A part of the logits is saved only where that was planned.
    check_operators(plan, is_planned=isinstance(plan, SaveSomeLogits | LossOnly))


def test_opcheck_of_a_plan():
    check_operators(PLANS[0], is_planned=True)


def check_operators(plan, *, is_planned):
    names = {**EVERYTHING, "reduction": "mean"}
    if isinstance(plan, GradientsInForward):
        names["outputs"] = ("argmax", "valid_argmax", "accuracy", "mean_logit")
    loss = Loss(**names)
    # Of logits that are saved, the rows after those of valid targets are never written; and the backward overwrites
    # them, which this check would see.
    saves_logits = plan.strategy == "save_logits"
    case = wide_case(vocab=101, ignored=0.0 if saves_logits else 0.3)
    case.target[case.target > 96] = 96
    case.terms[0][0].requires_grad_(False)
    if saves_logits or isinstance(plan, LossOnly):
        for tensor in case.operands():
            tensor.requires_grad_(False)
    args, kwargs, settings = operator_arguments(case, loss, plan, is_planned=is_planned)
    torch.library.opcheck(OPERATOR, args, kwargs)
    if isinstance(plan, GradientsInForward | LossOnly):
        return
    with torch.no_grad():
        value, entropy, _, _, log_prob, *saved = OPERATOR(*args, **kwargs)
    args = [tensor.detach() for tensor in (torch.tensor(0.7), *args, *saved[:3])]
    kwargs = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    kwargs |= {"terms": [tensor.detach() for tensor in kwargs["terms"]], "entropy": entropy}
    kwargs |= {"kept": saved[3] if len(saved) > 3 else None, "entropy_grad": entropy + 1, "log_prob_grad": log_prob}
    torch.library.opcheck(BACKWARD, args, kwargs)
    # It leaves what was saved as it is, even in a backward pass whose graph goes.
    results = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_hook(lambda grad: results.extend(BACKWARD(*args, **kwargs) for _ in range(2)))
    leaf.backward()
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ("token_loss", "gradients_in_forward"),
        ("target_weights", "gradients_in_forward"),
        ("target_weights", "recompute_logits"),
        ("token_weights", "recompute_logits"),
    ],
)
def test_opcheck_of_what_tokens_have(given, strategy):
    """A loss of one's own with its inputs, several weighted targets, weights of tokens: what the function calls."""
    case, options = make_case(vocab=97), Options(strategy=strategy, chunk_rows=10)
    target, factors = case.target, torch.rand(case.target.numel())
    settings = {given: factors}
    if given == "token_loss":
        settings = {given: lambda log_prob, entropy, each: entropy - log_prob * each, "token_inputs": (factors,)}
    elif given == "target_weights":
        target, settings = target[:, None].clamp(min=0).repeat(1, 2), {given: torch.stack([factors, 1 - factors], -1)}
    with RecordedCalls(OPERATOR) as calls:
        linear_cross_entropy(case.x, case.weight, target, options=options, **settings)
    (((_, _, flat), named),) = calls
    torch.library.opcheck(OPERATOR, (case.x, case.weight, flat), named)


def test_settings_are_read_as_they_were_written():
    loss = Loss(reduction="sum", softcap=30.0, z_loss=1e-4, outputs=("entropy", "argmax"), ignore_index=-1)
    plan = GradientsInForward(chunk_rows=7, staged=(14, 3), row_kernels="torch")
    options = Options(strategy="save_logits", memory_budget=0.5, tune_products=False)
    written = [
        Settings.planned(loss, ("input", "terms[0].weight"), plan),
        replace(Settings.planned(Loss(), (), LossOnly(chunk_rows=3)), plan=None, options=options),
    ]
    for settings in written:
        assert Settings.parse(str(settings)) == settings


def test_numbers_of_numpy():
    case = make_case(vocab=97)
    settings = {"softcap": np.float32(5), "z_loss": np.float64(0.1), "vocab_size": np.int64(90)}
    case.target[case.target >= 90] = 89
    assert_right(call(case, **settings), case, **{name: value.item() for name, value in settings.items()})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_options_with_a_number_of_numpy(backend):
    options, case = Options(expected_gradient=np.float64(0.5)), make_case(vocab=97)
    assert type(Options(memory_budget=np.float64(0.5)).memory_budget) is float
    compiled = torch.compile(partial(linear_cross_entropy, options=options), backend=backend, fullgraph=True)
    loss = compiled(case.x, case.weight, case.target)
    torch.testing.assert_close(loss, F.cross_entropy(case.x @ case.weight.t(), case.target))


# Compilers and exporters.


def test_compiled_whole(settings):
    """Once for any number of tokens, some of them ignored."""

    def program(x, weight, target):
        loss = linear_cross_entropy(x * 2, weight, target, **settings)
        return loss * 3

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    for tokens in (37, 19):
        case = make_case(tokens=tokens)
        for tensor in (case.x, case.target):
            torch._dynamo.mark_dynamic(tensor, 0)
        loss = compiled(*head(case))
        grad = torch.randn_like(loss)
        got = torch.autograd.grad(loss, (case.x, case.weight), grad)
        exact = copy.deepcopy(case)
        with torch.no_grad():
            exact.x *= 2
        reduction = settings.get("reduction", "mean")
        right = truth(exact, grad * 3, reduction=reduction)
        assert error(loss, right.loss * 3) < 1e-6
        assert error(got[0], right.gradients[0] * 2) < 1e-5 and error(got[1], right.gradients[1]) < 1e-5
    assert counter.frame_count == 1


def test_compiled_with_everything():
    """All operands and outputs, every size symbolic."""
    case = wide_case(dtype=torch.bfloat16, vocab=101)
    case.target[case.target > 96] = 96
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_right(compiled(case, **EVERYTHING), case, **EVERYTHING)
    assert_right(compiled(case, num_items=11.0), case, num_items=11.0)


def test_numbers_that_change_between_calls():
    """The number of items is a symbol; others are a part of the program."""
    case = make_case()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for items, z_loss in ((11.0, 0.1), (13.0, 0.1), (17, 0.2), (19, 0.3)):
        assert_right(compiled(case, num_items=items, z_loss=z_loss), case, num_items=items, z_loss=z_loss)


@pytest.mark.parametrize("expected", [0.7, torch.tensor(0.5)], ids=["number", "tensor"])
def test_expected_gradient_compiled(expected):
    case = make_case()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_right(compiled(case, expected_gradient=expected), case)


def test_the_function_itself_compiled():
    case = make_case()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    assert_right(compiled(*head(case)), case)


def test_a_compiled_backward_reads_what_is_saved_more_than_once(settings):
    """Nothing is overwritten while the graph is kept; nor where an operator runs in the backward."""
    case = make_case()
    loss = torch.compile(call, backend="aot_eager", fullgraph=True)(case, **settings)
    grad = torch.randn_like(loss)
    first = torch.autograd.grad(loss, (case.x, case.weight), grad, retain_graph=True)
    second = torch.autograd.grad(loss, (case.x, case.weight), grad)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# The caches on disk know programs by their operators, and not by what these are lowered to.
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


def test_logits_are_not_saved_for_any_number_of_tokens():
    """Unless the options say so: how much memory is free must not be a part of a compiled program."""
    case = make_case()
    named = {"input": case.x, "linear_weight": case.weight, "target": case.target}
    named |= dict.fromkeys(("linear_bias", "weight", "num_items", "expected_gradient")) | {"terms": ()}

    def strategy(loss=None, *, needs_grad=("input", "linear_weight"), dtype=torch.float32, **options) -> str:
        cast = {name: named[name].to(dtype) for name in ("input", "linear_weight")}
        operands = operands_of({**named, **cast}, loss or Loss(), needs_grad)
        settings = Settings.unplanned(operands, needs_grad, Options(**options))
        # What the operator plans with when it runs.
        assert settings.options.strategy == (settings.strategy if needs_grad else None)
        return settings.strategy

    assert strategy() == "gradients_in_forward"
    assert strategy(dtype=torch.float16) == strategy(Loss(reduction="none")) == "recompute_logits"
    assert strategy(Loss(reduction="none"), memory_budget=2**30) == "recompute_logits"
    assert strategy(Loss(reduction="none"), strategy="save_logits") == "save_logits"
    assert strategy(Loss(reduction="none"), needs_grad=("input",)) == "gradients_in_forward"
    assert strategy(needs_grad=()) == "loss_only"
    with pytest.raises(ValueError, match="gradients_in_forward"):
        strategy(Loss(reduction="none"), strategy="gradients_in_forward")


class Head(torch.nn.Module):
    def __init__(self, vocab: int = 101, hidden: int = 24):
        super().__init__()
        self.linear = torch.nn.Linear(hidden, vocab)

    def forward(self, x, target):
        return linear_cross_entropy(x, self.linear.weight, target, linear_bias=self.linear.bias)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["no_grad", "training"])
def test_exported(needs_grad, strict):
    """With any number of tokens; what is exported with gradients can be trained."""
    model, case, other = Head(), make_case(), make_case(tokens=11)
    tokens = {0: torch.export.Dim("tokens", min=2)}
    with torch.set_grad_enabled(needs_grad):
        inputs = (case.x.detach(), case.target)
        program = torch.export.export(model.eval(), inputs, dynamic_shapes=(tokens, tokens), strict=strict)
        assert [node.target for node in program.graph.nodes if "thunder_flce" in str(node.target)] == [OPERATOR]
        exported = program.module() if needs_grad else program.run_decompositions().module()
        loss = exported(other.x.detach(), other.target)
    case = Case(other.x.detach(), model.linear.weight, model.linear.bias, other.target)
    assert error(loss, truth(case).loss) < 1e-6
    assert loss.requires_grad == needs_grad
    if needs_grad:
        loss.backward()
        for name, right in zip(("weight", "bias"), truth(case).gradients, strict=True):
            assert error(exported.get_parameter(f"linear.{name}").grad, right) < 1e-6
        with pytest.raises(RuntimeError, match="input requires a gradient, but this operator was traced with"):
            exported(other.x, other.target)


# Tensors without values.


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_without_values(kind, settings):
    def made(*shape, **others):
        return torch.empty(*shape, device="meta" if kind == "meta" else "cpu", **others)

    with FakeTensorMode():
        x, weight = made(3, 5, 24, dtype=torch.bfloat16), made(101, 24, dtype=torch.bfloat16)
        x.requires_grad_(), weight.requires_grad_()
        target = made(3, 5, dtype=torch.int32)
        names = () if settings.get("options") else ("entropy", "argmax")
        results = linear_cross_entropy(x, weight, target, outputs=("accuracy", *names), **settings)
        loss = results[0]
        assert loss.dtype == torch.float32 and loss.shape == (target.shape if "reduction" in settings else ())
        assert [tuple(result.shape) for result in results[1:]] == [(), (3, 5), (3, 5)][: 1 + len(names)]
        for operand, gradient in zip((x, weight), torch.autograd.grad(loss.sum(), (x, weight)), strict=True):
            assert (gradient.shape, gradient.dtype, gradient.device) == (operand.shape, operand.dtype, operand.device)


@pytest.mark.parametrize("kind", ["cpu", "meta", "fake", "compiled"])
def test_errors_are_the_same_without_values(kind):
    function = torch.compile(linear_cross_entropy, backend="eager") if kind == "compiled" else linear_cross_entropy
    device = "meta" if kind == "meta" else "cpu"
    x, weight = torch.randn(6, 8, device=device), torch.randn(12, 8, device=device)
    target = torch.zeros(6, dtype=torch.int64, device=device)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else torch.no_grad()
    # Dynamo raises its own error, with the text in it.
    with mode:
        with pytest.raises(Exception, match=r"input's last dimension must be H = 7, as in linear_weight \(12, 7\)"):
            function(x, weight[:, :7], target)
        with pytest.raises(Exception, match="linear_weight must have input's dtype, float32, but got bfloat16"):
            function(x, weight.bfloat16(), target)
        with pytest.raises(Exception, match="target must have input's shape without its last dimension"):
            function(x, weight, target[:5])


# Transforms of torch.func.


@pytest.fixture(params=["mean", "none"])
def reduction(request):
    return request.param


def test_grad_and_vjp(settings):
    case = make_case()

    def function(x, weight):
        return linear_cross_entropy(x, weight, case.target, **settings)

    loss, vjp = torch.func.vjp(function, case.x.detach(), case.weight.detach())
    upstream = torch.randn_like(loss)
    right = truth(case, upstream, reduction=settings.get("reduction", "mean"))

    def summed(x, weight):
        return (function(x, weight) * upstream).sum()

    for got in (vjp(upstream), torch.func.grad(summed, argnums=(0, 1))(case.x.detach(), case.weight.detach())):
        for gradient, exact in zip(got, right.gradients, strict=True):
            assert error(gradient, exact) < 1e-6
    compiled = torch.compile(torch.func.grad(summed), backend="aot_eager", fullgraph=True)
    assert error(compiled(case.x.detach(), case.weight.detach()), right.gradients[0]) < 1e-6


def test_a_gradient_that_only_an_outer_transform_needs():
    """Of the value that the inner one returns beside its gradient."""
    case = make_case()

    def value(weight):
        inner = torch.func.grad_and_value(lambda x, weight: linear_cross_entropy(x, weight, case.target))
        return inner(case.x.detach(), weight)[1]

    assert error(torch.func.grad(value)(case.weight.detach()), truth(case).gradients[1]) < 1e-6


def test_second_derivatives_raise(reduction):
    case = make_case()
    x, weight = case.x.detach(), case.weight.detach()

    def loss(x, weight):
        return linear_cross_entropy(x, weight, case.target, reduction=reduction).sum()

    match = "linear_cross_entropy has no second derivative"
    with pytest.raises(RuntimeError, match=match):
        torch.autograd.grad(loss(case.x, case.weight), case.x, create_graph=True)
    with pytest.raises(RuntimeError, match=match):
        torch.func.grad(lambda x: torch.func.grad(loss)(x, weight).sum())(x)
    with pytest.raises(RuntimeError, match=match):
        torch.func.grad(lambda weight: torch.func.grad(loss)(x, weight).sum())(weight)


def test_vmap_raises(reduction):
    case = make_case(tokens=6)
    x, target, weight = case.x.detach().view(3, 2, -1), case.target.view(3, 2), case.weight.detach()

    def loss(x, target):
        return linear_cross_entropy(x, weight, target, reduction=reduction).sum()

    for function in (loss, torch.func.grad(loss)):
        with pytest.raises(RuntimeError, match="linear_cross_entropy has no vmap"):
            torch.vmap(function)(x, target)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no vmap"):
        torch.func.jacrev(lambda x: linear_cross_entropy(x, weight, case.target, reduction="none"))(case.x.detach())
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no vmap; .* without is_grads_batched=True"):
        losses = linear_cross_entropy(case.x, case.weight, case.target, reduction=reduction)
        upstream = torch.ones(3, *losses.shape)
        torch.autograd.grad(losses, case.x, upstream, is_grads_batched=True)


# Checkpoints, hooks and modes.


@pytest.mark.parametrize(
    ("use_reentrant", "backend"), [(False, None), (True, None), (False, "aot_eager")], ids=["", "reentrant", "compiled"]
)
def test_checkpoint(use_reentrant, backend, settings):
    case = make_case()

    def inner(x, weight):
        return linear_cross_entropy(x, weight, case.target, **settings)

    def program(x, weight):
        return checkpoint.checkpoint(inner, x, weight, use_reentrant=use_reentrant)

    if backend is not None:
        program = torch.compile(program, backend=backend, fullgraph=True)
    loss = program(case.x, case.weight)
    assert_right_after_backward(loss, case, **settings)


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    """Names what is dispatched, also by the forward operator, but for views and for what poisons new memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        if func not in (OPERATOR, torch.ops.aten.fill_.Scalar) and not is_view:
            self.names.append(func.name())
        return run_inside(self, func, args, kwargs)


def test_operations_of_a_plain_call():
    """Each takes the host several microseconds, which is what small models wait for.

    Those of the row kernels, which are one launch on CUDA, are counted apart.
    """
    case = make_case(tokens=16, vocab=64, ignored=0.0)
    linear_cross_entropy(*head(case)).backward()
    with Operations() as forward:
        loss = linear_cross_entropy(*head(case))
    with Operations() as backward:
        loss.backward()
    logits, weight = torch.randn(16, 64), torch.ones(16)
    with Operations() as row_kernels:
        TorchRowKernels().statistics_and_gradient(
            LogitsBuffer(logits, VocabLayout.contiguous(64)), case.target, RowCoefficients(weight, weight)
        )
    assert len(forward.names) - len(row_kernels.names) <= FORWARD_OPERATIONS, forward.names
    assert len(backward.names) <= BACKWARD_OPERATIONS, backward.names


FORWARD_OPERATIONS, BACKWARD_OPERATIONS = 20, 10


def test_who_needs_the_operator():
    tensor, seen = torch.zeros(2), []

    def inside(x):
        seen.append((operators.needs_operator([x]), operators.needs_operator([tensor]), x))
        return x.sum()

    class Subclass(torch.Tensor):
        pass

    assert not operators.needs_operator([tensor, None, torch.nn.Parameter(tensor)])
    for other in (tensor.to("meta"), tensor.as_subclass(Subclass)):
        assert operators.needs_operator([tensor, other])
    assert operators.needs_operator([torch.zeros(2, dtype=torch.complex64).conj().imag]), "to be negated when read"
    for mode in (Calls(), BaseTorchFunctionMode(), torch.profiler.profile()):
        with mode:
            assert operators.needs_operator([tensor])
    torch.func.grad(inside)(tensor)
    torch.jit.trace(inside, tensor, check_trace=False)
    assert all(of_x and of_others for of_x, of_others, _ in seen) and len(seen) == 2
    assert operators.needs_operator([seen[0][2]]), "a tensor that has left its transform"


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of the forward operator."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is OPERATOR
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_saved", [True, False])
def test_selective_checkpoint(is_saved, settings):
    case = make_case()

    def policy(ctx, op, *args, **kwargs):
        if op is OPERATOR and is_saved:
            return checkpoint.CheckpointPolicy.MUST_SAVE
        return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def program(x, weight):
        return linear_cross_entropy(x * 1, weight, case.target, **settings)

    with Calls() as calls:
        loss = checkpoint.checkpoint(
            program,
            case.x,
            case.weight,
            use_reentrant=False,
            context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(policy),
        )
        assert_right(loss, case, **settings)
    assert calls.count == (1 if is_saved else 2)


def test_saved_tensors_hooks(settings):
    """What is saved may be elsewhere until the backward."""
    case = make_case()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
        loss = call(case, **settings)
    assert_right(loss, case, **settings)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_autocast(backend):
    case = make_case(bias=True)
    function = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = function(case)
    gradients = torch.autograd.grad(loss, case.operands())
    exact = truth(case)
    assert loss.dtype == torch.float32 and 1e-6 < error(loss, exact.loss) < 1e-2
    for got, right in zip(gradients, exact.gradients, strict=True):
        assert got.dtype == torch.float32 and 1e-4 < error(got, right) < 2e-2


@pytest.mark.parametrize("settings", [WAYS["gradients_in_forward"], WAYS["none"]], ids=["mean", "none"])
def test_compiled_autograd(settings):
    """Eager forwards, one compiled backward."""
    case = make_case()
    loss = call(case, **settings)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        assert_right_after_backward(loss, case, **settings)


@pytest.mark.parametrize("case", [make_case(ignored=1.0), make_case(tokens=0)], ids=["ignored", "none"])
def test_compiled_without_a_valid_target(case, settings):
    """Zeros, even for an upstream gradient of NaN."""
    loss = torch.compile(call, backend="aot_eager", fullgraph=True)(case, **settings)
    for gradient in torch.autograd.grad(loss, (case.x, case.weight), torch.full_like(loss, float("nan"))):
        assert not gradient.any()


# Several processes.


@pytest.fixture
def process_group():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=(Path(folder) / "store").as_uri(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_distributed(wrapper, backend, process_group):
    model = Head()
    case = make_case()
    right = truth(Case(case.x.detach(), model.linear.weight, model.linear.bias, case.target))
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        torch.distributed.fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    step = model if backend is None else torch.compile(model, backend=backend)
    step(case.x.detach(), case.target).backward()
    for parameter, exact in zip(model.parameters(), right.gradients, strict=True):
        grad = parameter.grad if wrapper == "ddp" else parameter.grad.full_tensor()
        assert error(grad, exact) < 1e-6


# CUDA graphs.


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in WAYS])
def test_reduce_overhead(name):
    """Inductor's CUDA graphs, replayed with other values and other ignored rows."""
    settings = WAYS[name]
    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    for ignored in (0.1, 0.1, 0.1, 0.8, 0.0):
        case = make_case(tokens=300, hidden=64, vocab=1009, device="cuda", ignored=ignored)
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(case, **settings)
        grad = torch.ones_like(loss)
        gradients = [gradient.clone() for gradient in torch.autograd.grad(loss, (case.x, case.weight), grad)]
        right = truth(case, grad, reduction=settings.get("reduction", "mean"))
        assert error(loss, right.loss) < 1e-5
        for got, exact in zip(gradients, right.gradients, strict=True):
            assert error(got, exact) < 1e-4


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in WAYS])
def test_captured_after_compilation(name):
    """A compiled program in a CUDA graph of the user's own."""
    settings = WAYS[name]
    case = make_case(tokens=300, hidden=64, vocab=1009, device="cuda")
    compiled = torch.compile(call, fullgraph=True)

    def step():
        loss = compiled(case, **settings)
        return loss, *torch.autograd.grad(loss.sum(), (case.x, case.weight))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = make_case(tokens=300, hidden=64, vocab=1009, device="cuda", ignored=0.8)
    with torch.no_grad():
        for held, new in zip(head(case), head(other), strict=True):
            held.copy_(new)
    graph.replay()
    reduction = settings.get("reduction", "mean")
    right = truth(case, torch.ones_like(captured[0]), reduction=reduction)
    for got, exact in zip(captured, (right.loss, *right.gradients), strict=True):
        assert error(got, exact) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_upstream_gradient(strategy):
    """As from a function that has none: then nothing has a gradient."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    case = make_case()
    loss = linear_cross_entropy(case.x, case.weight, case.target, options=Options(strategy=strategy))
    Stop.apply(loss).backward()
    assert case.x.grad is None and case.weight.grad is None


def test_settings_change_with_the_schema(monkeypatch):
    """PyTorch keeps compiled graphs on disk, by their arguments: one of another schema must not be found."""
    settings = Settings(loss=Loss(), needs_grad=(), strategy=LossOnly.strategy)
    before = str(settings)
    monkeypatch.setattr(operators, "_SCHEMA", operators._SCHEMA + 1)
    operators._written.cache_clear()
    after = str(settings)
    operators._written.cache_clear()
    assert after != before and Settings.parse(after) == settings
