"""Through thunder: what is recognised, what is not fused and why, and that results agree with eager PyTorch."""

import operator
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.extend import OperatorExecutor
from thunder.recipes import BaseRecipe
from thunder.transforms import LORATransform
from thunder.transforms.quantization import BitsAndBytesLinearQuant4bit, get_bitsandbytes_executor

import front_ends
import thunder_flce
from front_ends import CLOSE, H, Model, V, assert_agrees, assert_fused, assert_same, batch, decisions, operands, run
from random_calls import chooser, named
from reference import doubled
from thunder_flce import FuseLinearCrossEntropy, NotFusedWarning, Options, linear_cross_entropy

by_each_jit = pytest.mark.parametrize("jit", [thunder.jit, thunder_flce.jit], ids=["thunder", "ours"])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@by_each_jit
def test_one_trace_for_all_lengths(jit, reduction):
    """With symbolic values, the operation makes its plan when it runs."""
    jitted = jit(lambda h, w, y: linear_cross_entropy(h, w, y, reduction=reduction), cache="symbolic values")
    for tokens in (7, 5, 1):
        tensors = operands(tokens, torch.float64)
        assert_same(jitted, lambda h, w, y: F.cross_entropy(F.linear(h, w), y, reduction=reduction), tensors)
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("number", [
    lambda x, scale: scale, lambda x, scale: 2 * scale, lambda x, scale: 1 / x.shape[0], lambda x, scale: x.shape[0],
], ids=["number", "computed", "of a size", "size"])  # fmt: skip
def test_symbolic_numbers(number):
    """The symbol has them as constants: thunder compiles anew for others, also where they are made of sizes."""
    program = lambda h, w, y, scale: linear_cross_entropy(h, w, y, logit_scale=number(h, scale))  # noqa: E731
    jitted = thunder_flce.jit(program, cache="symbolic values")
    for tokens, scale in ((7, 1.5), (5, 0.5), (7, 1.5)):
        assert_same(partial(jitted, scale=scale), partial(program, scale=scale), operands(tokens))
    assert thunder.cache_misses(jitted) == 2


def test_numbers_that_are_read():
    """A loss that is only logged does not keep it from being fused, and what does is said."""

    def logged(h, w, y):
        loss = F.cross_entropy(F.linear(h, w), y)
        return loss, loss.detach().item()

    tensors, jitted = operands(7), thunder_flce.jit(logged, strict=True)
    assert jitted(*tensors)[1] == pytest.approx(logged(*tensors)[1])
    assert_same(lambda *_: jitted(*tensors)[0], lambda *_: logged(*tensors)[0], tensors)
    assert_fused(jitted, times=1)

    scaled = lambda h, w, y: F.cross_entropy(F.linear(h, w) * w.max().item(), y)  # noqa: E731
    with pytest.warns(NotFusedWarning, match="reads a number from a tensor"):
        assert_same(thunder_flce.jit(scaled), scaled, tensors)
    with pytest.raises(TypeError, match="no number that a compiled program reads from a tensor"):
        thunder_flce.jit(lambda h, w, y: linear_cross_entropy(h, w, y, logit_scale=w.max().item()))(*tensors)


def test_a_number_that_changes_brings_no_other_reason():
    """Dynamo reads it from a tensor, in the graph that thunder compiles."""

    def program(h, w, y, scale):
        logits = F.linear(h * scale, w)
        return F.cross_entropy(logits, y), logits

    compiled, tensors = thunder_flce.thunderfx(program), [tensor.detach() for tensor in operands(7)]
    with pytest.warns(NotFusedWarning, match="returns its logits"):
        for scale in (1.5, 2.5):
            torch.testing.assert_close(compiled(*tensors, scale), program(*tensors, scale))
    assert {decision.reason.name for decision in decisions(compiled)} == {"LOGITS_RETURNED"}


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float32, torch.bfloat16])
def test_a_softmax_with_a_dtype_under_autocast(dtype, device):
    """As attention has it; not as a loss."""

    def program(q):
        scores = q @ q.transpose(-1, -2)
        return (
            scores.softmax(-1, dtype=dtype),
            F.softmax(scores, -1, dtype=dtype),
            F.log_softmax(scores, -1, dtype=dtype),
        )

    q = torch.randn(4, 6, device=device)
    with torch.autocast(device, torch.bfloat16):
        torch.testing.assert_close(thunder_flce.jit(program)(q), program(q), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("loss", [
    front_ends.flattened_loss, lambda z, y: F.nll_loss(F.log_softmax(z.flatten(0, 1), -1), y.flatten()),
    lambda z, y: -F.log_softmax(z, -1).gather(-1, y.clamp(0).unsqueeze(-1)).mean(),
], ids=["cross_entropy", "nll_loss", "gather"])  # fmt: skip
def test_autocast(loss, device):
    """The loss has the dtype that eager PyTorch gives, which depends on the device; gradients have the parameters'."""
    model = Model(loss).to(device)
    jitted = thunder_flce.jit(model, strict=True)
    arguments = batch(device=device)
    with torch.autocast(device, torch.bfloat16):
        value, expected = jitted(*arguments), model(*arguments)
    torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)
    value.backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_target_out_of_range_in_cross_entropy_alone(device):
    """An error where the host sees it; in an nvFuser fusion, which can't raise, no number at all."""
    jitted = thunder_flce.jit(F.cross_entropy)
    logits = torch.randn(53, V, device=device, requires_grad=True)
    labels = torch.randint(0, V, (53,), device=device)
    labels[3] = V
    if device == "cpu":
        with pytest.raises(IndexError, match=r"target has 1 of 53 values that are neither in \[0, 97\)"):
            jitted(logits, labels)
    else:
        pytest.importorskip("nvfuser_direct", reason="without nvFuser, an assertion on the device leaves it unusable")
        loss = jitted(logits, labels)
        loss.backward()
        assert loss.isnan() and logits.grad[3].isnan().all() and logits.grad[:3].isfinite().all()


@pytest.mark.parametrize("front_end", [thunder_flce.jit, thunder_flce.thunderfx])
def test_many_lengths_bring_one_warning(front_end, recwarn):
    step = front_end(lambda h, w, y: F.cross_entropy(F.linear(h, w), y))
    weight, counts = torch.randn(11, 8, requires_grad=True), []
    for tokens in range(3, 16):
        step(torch.randn(tokens, 8), weight, torch.randint(11, (tokens,)))
        counts.append(sum("for the 8th time" in str(warning.message) for warning in recwarn))
    # Dynamo makes a second graph for all lengths, which thunder compiles for each.
    first = 7 if front_end is thunder_flce.jit else 8
    assert counts == [0] * first + [1] * (len(counts) - first)


def test_second_backward_over_a_retained_graph():
    """Of logits that are saved, which a backward may use up."""
    model, arguments = Model(), batch()
    jitted = thunder_flce.jit(model, options=Options(strategy="save_logits"))
    weight, losses = model.lm_head.weight, (jitted(*arguments), model(*arguments))
    for factor in (0.7, 3.0):
        gradients = (torch.autograd.grad(loss, weight, torch.tensor(factor), retain_graph=True) for loss in losses)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("operation", [operator.add, operator.mul])
def test_a_loss_beside_a_number_of_each_row(operation):
    """thunder by itself takes a scalar on a CPU for a number, and does not sum its gradient."""
    program = lambda h, w, y: operation(F.cross_entropy(F.linear(h, w), y), h.sum(-1)).sum()  # noqa: E731
    assert_same(thunder_flce.jit(program, strict=True), program, operands(7), rtol=1e-4, atol=1e-4)


def test_a_grad_mode_of_the_program_itself():
    """At the end, of which thunder knows the mode, there is none."""
    program = torch.enable_grad()(lambda h, w, y: F.cross_entropy(F.linear(h, w), y))
    with torch.no_grad():
        assert_same(thunder_flce.jit(program, strict=True), program, operands(7))


@by_each_jit
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_output_without_the_loss(jit, reduction):
    """The gradient of the loss is zeros then, which thunder writes without a shape for a scalar."""

    def program(x, weight, target):
        loss, entropy = linear_cross_entropy(x, weight, target, reduction=reduction, outputs=("entropy",))
        return entropy.square().sum()

    assert_same(jit(program), program, operands(7))


@pytest.mark.parametrize("front_end", [thunder_flce.jit, thunder_flce.thunderfx])
def test_our_options_as_arguments(front_end):
    with pytest.raises(TypeError, match=r"chunk_rows is no argument .* options=thunder_flce.Options\(chunk_rows=…\)"):
        front_end(torch.nn.Linear(2, 2), chunk_rows=512)
    with pytest.raises(TypeError, match="stict is no argument; did you mean strict"):
        front_end(torch.nn.Linear(2, 2), stict=True, sharp_edges="allow")
    with pytest.raises(TypeError, match="strict must be True or False, but got 3"):
        front_end(torch.nn.Linear(2, 2), strict=3)


def test_the_executor_alone():
    """No transform has to be named; the list that the user gives is one that thunder reads, so it gets the fusion."""
    model, arguments = Model(), batch()
    executors = [thunder_flce.executor, *thunder.get_default_executors()]
    jitted = thunder.jit(model, executors=executors)
    assert_agrees(model, lambda: model(*arguments), lambda: jitted(*arguments), **CLOSE)
    assert_fused(jitted, times=1)
    for log_softmax in (F.log_softmax, torch.log_softmax):
        jitted = thunder.jit(lambda h, w, y: log_softmax(h @ w.t(), -1).gather(-1, y).mean(), executors=executors)  # noqa: B023
        jitted(torch.randn(3, H), torch.randn(V, H), torch.arange(3)[:, None])
        assert_fused(jitted, times=1)
    plain = thunder.jit(model)
    plain(*arguments)
    assert not thunder.compile_data(plain).transforms
    with pytest.warns(NotFusedWarning, match="give thunder.jit its transforms as a list"):
        thunder.jit(model, executors=executors, transforms=())(*arguments)


def test_an_operator_of_another_executor():
    """It has the name of one of PyTorch's, and does something else."""

    def twice(x):
        return x * 2

    other = OperatorExecutor("other")
    other.register_operator("tanh", like=ltorch.tanh, fn=twice, replaces=twice)
    tensors = torch.randn(3, H), torch.randn(V, H), torch.arange(3)
    program = lambda h, w, y: F.cross_entropy(twice(F.linear(h, w)), y)  # noqa: E731
    jitted = thunder_flce.jit(program, executors=[other])
    torch.testing.assert_close(jitted(*tensors), program(*tensors))
    assert "by tanh of other" in str(decisions(jitted)[0])


class Quantized(BitsAndBytesLinearQuant4bit):
    """As if bitsandbytes were there, which needs a GPU: weights are kept in another shape."""

    def quantize_weight(self, w):
        state = {"dtype": w.dtype, "shape": w.shape, "blocksize": 64, "absmax": torch.ones(1), "code": torch.ones(16)}
        return w.detach().reshape(-1, 1), SimpleNamespace(**state)


@pytest.mark.parametrize("transform", [lambda: LORATransform(r=4, lora_alpha=8), Quantized])
def test_transforms_that_rewrite_linears(transform, monkeypatch):
    """The head is what they make of it: one with an adapter, or no linear any more."""

    def product(x, weight, *, bias, quant_state):
        return F.linear(x, weight.reshape(quant_state["shape"]), bias)

    functional = SimpleNamespace(QuantState=lambda absmax, **state: state)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(functional=functional, matmul_4bit=product))
    model, arguments, losses = Model(vocab=H).requires_grad_(False), [tensor % H for tensor in batch()], []
    for jit in (thunder.jit, thunder_flce.jit):
        jitted = jit(model, transforms=[transform()], executors=[get_bitsandbytes_executor()])
        for name, parameter in jitted._overrides_parameters.items():
            if "lora" in name:
                torch.nn.init.eye_(parameter)
        losses += [jitted(*arguments), jitted(*(tensor[:2] for tensor in arguments))]
    torch.testing.assert_close(losses[2:], losses[:2])
    assert [decision.fused for decision in decisions(jitted)] == [transform is not Quantized] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("sequence_sums", [
    lambda log_probs: log_probs.view(8, -1).sum(-1), lambda log_probs: (-log_probs).view(8, -1).sum(-1),
    lambda log_probs: (log_probs * 0.5).view(8, -1).mean(-1),
    lambda log_probs: torch.stack(log_probs.view(8, -1).unbind()).sum(-1),
])  # fmt: skip
def test_sums_of_sequences(sequence_sums):
    """Their gradients are expanded and reshaped, which nvFuser must not fuse with what follows."""
    pytest.importorskip("nvfuser_direct", reason="thunder's logsigmoid on a GPU has no derivative without nvFuser")

    def preference(x, weight, target):
        log_probs = F.linear(x, weight).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
        chosen, rejected = sequence_sums(log_probs).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    parameters = [torch.randn(size, H, device="cuda", requires_grad=True) for size in (64, V)]
    target = torch.randint(V, (64,), device="cuda")
    steps = thunder_flce.jit(preference), preference
    gradients = (torch.autograd.grad(step(*parameters, target), parameters) for step in steps)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


# thunderfx.


SHAPES = [(3, 8), (2, 9), (4, 5), (3, 8)]


def weighted_loss(logits, labels):
    losses = F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return (losses * labels[:, 1:].flatten().remainder(3)).sum() / losses.numel()


def losses_of_slices(logits, labels):
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (losses[:, 1:] * labels[:, :-1].remainder(3)).sum() + losses[:, -3:].exp().mean() + losses[1:, 0].sum()


def losses_in_another_order(logits, labels):
    """Joined by a `cat` whose derivative is slices, and chosen by a `where`; what is logged is detached."""
    pairs = zip(logits.flatten(0, 1).split(8), labels.flatten().split(8), strict=True)
    losses = torch.cat([F.cross_entropy(*pair, reduction="none") for pair in pairs][::-1]).view(labels.shape)
    with torch.no_grad():
        logged = logits[:, 1:].logsumexp(-1).mean()
    return torch.where(labels > 3, losses, 0.0).sum(), logged


def assert_not_split(compiled):
    """Asserts that thunder compiles all of each graph, and leaves nothing to Inductor."""
    assert not any(info.split_reasons for info in compiled._backend.subgraph_infos)


@pytest.mark.parametrize("loss", [front_ends.flattened_loss, weighted_loss, losses_of_slices, losses_in_another_order])
def test_new_shapes(loss):
    """Dynamo makes the first dimension that changes a dynamic one; thunder still gets a trace for each of its sizes.

    Nothing that is written is left to Inductor, to which thunder would have to give sizes.
    """
    model = Model(loss)
    compiled = thunder_flce.thunderfx(model)
    for shape in SHAPES:
        arguments = batch(*shape)
        assert_agrees(model, lambda a=arguments: model(*a), lambda a=arguments: compiled(*a), **CLOSE)
    assert_fused(compiled)
    compiled_so_far = len(decisions(compiled))
    assert compiled_so_far in (2, 3, 4)
    compiled(*arguments)
    assert len(decisions(compiled)) == compiled_so_far
    assert_not_split(compiled)


def sequence_losses_in_16_bits(hidden, weight, labels):
    """Their weights are in float32, and expanded."""
    losses = F.cross_entropy(F.linear(hidden.to(torch.bfloat16), weight.to(torch.bfloat16)), labels, reduction="none")
    return (losses.view(4, 6) @ torch.ones(6, dtype=torch.bfloat16)).mean()


def labels_changed_after_a_logged_loss(hidden, weight, labels):
    """thunder takes a row of them for all of them, where both are arguments of a part of the graph."""
    labels = labels.view(4, 6)
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        losses = F.cross_entropy(logits[:6], labels[0], reduction="none")
        labels.mul_(0)
    return losses, labels, hidden.sum()


@pytest.mark.parametrize("program", [sequence_losses_in_16_bits, labels_changed_after_a_logged_loss])
def test_what_is_written_stays_in_thunder(program):
    compiled, parameters = thunder_flce.thunderfx(program), operands(24)[:2]
    results = (run(function, (*parameters, torch.arange(24))) for function in (compiled, program))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
    assert_fused(compiled, times=1)
    assert_not_split(compiled)


@pytest.mark.parametrize("product", [torch.mm, operator.matmul, lambda x, matrix: torch.addmm(matrix[0], x, matrix)])
def test_autocast_of_products(product):
    """Of hidden states in bfloat16 with a weight in float32."""

    def program(hidden, weight, labels):
        return F.cross_entropy(product(hidden, weight.t()).float(), labels)

    compiled, (hidden, weight, labels) = thunder_flce.thunderfx(program, strict=True), operands(24)
    tensors = hidden.detach().bfloat16(), weight, labels
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(compiled, program, tensors, rtol=2e-2, atol=2e-2)
    assert_fused(compiled, times=1)


@pytest.mark.parametrize("interpreter", ["thunder.jit", "thunder.fx"])
def test_recipe_with_plugin(interpreter):
    # thunder's default recipe insists on nvFuser, which needs a GPU.
    fuser = "nvfuser" if torch.cuda.is_available() else "torch.compile"
    recipe, model, arguments = BaseRecipe(fuser=fuser, interpreter=interpreter), Model(), batch()
    compiled = thunder.compile(model, recipe=recipe, plugins="flce")
    assert_agrees(model, lambda: model(*arguments), lambda: compiled(*arguments), **CLOSE)
    (fusion,) = [t for t in recipe.transforms if isinstance(t, FuseLinearCrossEntropy)]
    assert [d.fused for c in fusion.compilations for d in c.decisions] == [True]


# Losses without a linear, and what a loss is made of, through our executor: the numbers of float64.

COUNT, OURS = 60, "flce_cross_entropy_fwd"
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


def drawn(number, device):
    """Returns a random call: logits, targets or their probabilities, maybe class weights, and other arguments."""
    one_of, generator = chooser(number), torch.Generator().manual_seed(number)
    dtype = one_of(*TOLERANCES)
    shape = one_of((6, 9), (9,), (3, 9, 4), (2, 9, 3, 2), (0, 9), (1, 9))
    target_shape = shape[:1] + shape[2:] if len(shape) > 1 else ()
    rand = lambda *size: torch.rand(size, generator=generator)  # noqa: E731
    logits = (rand(*shape) * 8 - 4).to(device, dtype).requires_grad_()
    target = torch.randint(9, target_shape, generator=generator)
    settings = {"reduction": one_of("mean", "sum", "none"), "label_smoothing": one_of(0.0, 0.0, 0.3)}
    if one_of(True, True, False):
        settings["ignore_index"] = one_of(-100, 4, -1)
        target = target.masked_fill(rand(*target_shape) < 0.3, settings["ignore_index"]).to(device)
    else:
        target = rand(*shape).to(device, one_of(dtype, torch.float32, torch.float64)).requires_grad_()
    weight = (rand(9) + 0.1).to(device, dtype).requires_grad_(target.requires_grad)
    return (logits, target, weight)[: one_of(2, 3)], settings


def check(program, *tensors):
    """Compares results and gradients with float64; returns which of our symbol and thunder's own run."""
    jitted = thunder.jit(program, executors=[thunder_flce.executor, *thunder.get_default_executors()])
    (results, gradients), (exact, exact_gradients) = run(jitted, tensors), run(program, doubled(tensors))
    assert results[0].dtype is program(*tensors).dtype
    tolerance = TOLERANCES[tensors[0].dtype]
    for value, right in zip((*results, *gradients), (*exact, *exact_gradients), strict=True):
        # The error of a sum that cancels is relative to its largest summand.
        largest = float(right.nan_to_num(0, 0, 0).abs().max()) if right.numel() else 0.0
        tolerances = {"rtol": tolerance, "atol": tolerance * max(1.0, largest)}
        torch.testing.assert_close(value.double(), right, **tolerances, equal_nan=True)
    return {bsym.sym.name for bsym in front_ends.symbols(thunder.last_traces(jitted)[-1])} & {OURS, "cross_entropy"}


def test_cross_entropies(device):
    """By our symbol, but for probabilities as targets, which are operations of ours."""
    for number in range(COUNT):
        tensors, settings = drawn(number, device)
        with named((number, [(tensor.shape, tensor.dtype) for tensor in tensors], settings)):
            names = check(partial(F.cross_entropy, **settings), *tensors)
            assert names == (set() if tensors[1].is_floating_point() else {OURS})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("program", [
    lambda x, w, y: F.log_softmax(x, 0) * 2,
    lambda x, w, y: F.log_softmax(x, -1),
    lambda x, w, y: F.linear(x, w),
    lambda x, w, y: F.linear(x, w, w[:, 0]),
    lambda x, w, y: F.nll_loss(x, y, w[:7, 0].abs() + 1, ignore_index=2),
    lambda x, w, y: F.nll_loss(x, y - 102 * (y == 2)),
    lambda x, w, y: F.nll_loss(x, y, w[:7, 0].abs(), ignore_index=2, reduction="sum"),
    lambda x, w, y: F.nll_loss(x.unsqueeze(0).transpose(1, 2), y[None], reduction="none"),
])  # fmt: skip
def test_operations_that_are_no_loss(program, dtype, device):
    x, w = torch.randn(5, 7, dtype=dtype, device=device), torch.randn(11, 7, dtype=dtype, device=device)
    check(program, x.requires_grad_(), w, torch.tensor([0, 2, 6, 2, 1], device=device))


def test_logits_that_are_changed_after_the_loss(device):
    """It reads them again in the backward."""

    def program(x, w, y):
        logits = F.linear(x, w)
        loss = F.cross_entropy(logits, y)
        logits.mul_(2)
        return loss

    parameters = [torch.randn(size, 7, device=device, requires_grad=True) for size in (5, 11)]
    assert check(program, *parameters, torch.arange(5, device=device)) == {OURS}
