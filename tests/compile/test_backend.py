"""`torch.compile(backend="thunder_flce")`: what is fused, with Inductor's results, modes, options and wrappers.

Inductor itself, which needs seconds for each program on a CPU, runs where a test is marked so.
"""

from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import fresh_cache
from torch.amp.autocast_mode import _enter_autocast
from torch.utils.checkpoint import checkpoint

import thunder_flce
from front_ends import (
    CLOSE,
    H,
    Model,
    V,
    assert_agrees,
    assert_fused,
    assert_same,
    batch,
    decisions,
    flattened_loss,
    fused_graph,
    log_probs,
    operands,
)
from test_patterns import _arguments, patterns
from thunder_flce import NotFusedError
from thunder_flce.backend import compile_graph
from thunder_flce.dynamo import frames, fusion, lengths
from thunder_flce.engine.kernels.interface import row_stride

ROOT = Path(__file__).parents[2]


compiled_with = partial(torch.compile, backend="thunder_flce")


@pytest.mark.parametrize("name", [
    "padded_label_shift", "negated_and_shifted", "transposed", "accuracy", "weighted_tokens",
    "masked_mean_of_each_sequence", "log_softmax_gathered", "log_probability_indexed", "entropy_beside_cross_entropy",
])  # fmt: skip
def test_any_number_of_tokens(name):
    """One graph for all of them: what the first call has, such as B = T, is not taken for the rule."""
    program = getattr(patterns, name)
    compiled = compiled_with(program, fullgraph=True, dynamic=True)
    compilations = []
    for rows, length in ((2, 24), (2, 17), (1, 9), (2, 2)):
        tensors = []
        for tensor in _arguments(program):
            part = tensor[:rows, :length] if tensor.shape[:2] == (2, 24) else tensor
            tensors.append(part.detach().clone().requires_grad_(tensor.requires_grad))
        tensors[2][0, 0] = 3
        # The weights of tokens, where there are any.
        tensors[-1][:, 0] = 1
        assert_same(compiled, program, tensors, rtol=1e-4, atol=1e-5)
        compilations.append(len(thunder_flce.explain(compiled)))
    assert_fused(compiled)
    # To Dynamo, B = 1 and B = T are graphs of their own.
    assert compilations[:2] == [1, 1]


def test_batches_and_lengths_that_change(device):
    """Labels and weights have sizes of their own, which guards alone relate, and hidden states say how many rows."""

    def program(h, w, v, y, a):
        total = h.square().mean()
        for weight in (w, v):
            logits = F.linear(h[:, :-1].reshape(-1, H), weight)
            losses = F.cross_entropy(logits, y[:, 1:].reshape(-1), reduction="none").view(h.shape[0], -1)
            total = total + losses.mean() - (losses.sigmoid() * a[:, 1:]).sum() / a.square().sum()
        return total

    compiled = compiled_with(program, options={"chunk_rows": 64})
    for rows, length in ((2, 12), (3, 7), (4, 9)):
        shapes = (rows, length, H), (V, H), (V, H)
        parameters = [torch.randn(*shape, device=device, requires_grad=True) for shape in shapes]
        labels = torch.randint(V, (rows, length), device=device)
        tensors = *parameters, labels, torch.randn(rows, length, device=device)
        assert_same(compiled, program, tensors, **CLOSE)
    assert_fused(compiled)
    assert {decision.plan.strategy for decision in decisions(compiled)} == {"gradients_in_forward"}


def test_labels_of_fewer_tokens():
    """PyTorch gathers for those that there are; what was compiled for as many labels as tokens does not."""
    compiled, weight = compiled_with(log_probs), torch.randn(53, 16)
    for tokens, label_count in ((9, 9), (5, 5), (7, 7), (8, 6), (6, 4), (10, 10)):
        hidden, labels = torch.randn(4, tokens, 16), torch.randint(53, (4, label_count))
        result, right = (program(hidden, weight, labels).sum() for program in (compiled, log_probs))
        torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", [
    lambda x, at: x[:, at:].exp().mean(), lambda x, at: x.split([at, x.shape[1] - at], 1)[1].mean(),
    lambda x, at: x[:, at:].exp().sum() / x[:, at:].numel(), lambda x, at: x[:, at:].sum() / x[:, at:].numel(),
])  # fmt: skip
def test_the_mean_of_tokens_of_which_there_may_be_none(loss):
    def program(h, w, y, at):
        x = log_probs(h, w, y)
        return x.exp().sum() + loss(x, at)

    compiled, weight = compiled_with(program), torch.randn(53, 16)
    for length, at in ((9, 2), (8, 3), (7, 7), (6, 2), (5, 5)):
        hidden, labels = torch.randn(4, length, 16, requires_grad=True), torch.randint(53, (4, length))
        result, right = (function(hidden, weight, labels, at) for function in (compiled, program))
        torch.testing.assert_close(result, right, equal_nan=True)
    assert "gradients_in_forward" in {decision.plan.strategy for decision in decisions(compiled) if decision.plan}


def test_graphs_of_two_functions():
    """Each has its own, though both have the same options."""
    functions = [compiled_with(lambda h, w, y, factor=factor: factor * log_probs(h, w, y).sum()) for factor in (2, 3)]
    for compiled in functions:
        compiled(*operands(6))
    assert [len(thunder_flce.explain(compiled)) for compiled in functions] == [1, 1]


@pytest.mark.skipif(torch.__version__ < "2.10", reason="PyTorch 2.9 returns something else there")
@pytest.mark.parametrize("nested", [False, True])
def test_a_graph_break_in_the_layers(nested):
    model, arguments = Model(), batch()
    model.hidden.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = compiled_with(model, options={"strict": True})
    with torch._dynamo.config.patch(nested_graph_breaks=nested):
        if nested:
            assert_agrees(model, lambda: model(*arguments), lambda: compiled(*arguments))
            assert_fused(compiled)
        else:
            with pytest.raises(NotFusedError, match="after a graph break|before a graph break"):
                compiled(*arguments)


@pytest.mark.inductor
@pytest.mark.parametrize(("loss", "numbers", "dynamic", "times"), [
    (lambda z, y, n: F.cross_entropy(z, y.where(y > 9, n), ignore_index=n), (-100, 3), True, 2),
    (lambda z, y, n: F.cross_entropy(z, y, label_smoothing=n), (0.25, 0.5), True, None),
    # They divide the logits, and those who do so multiply the loss by them.
    (lambda z, y, t: F.cross_entropy(z.div_(t), y) * t**2, (0.7, 1.3, 0.0625), None, None),
    (lambda z, y, t: F.cross_entropy(t * z, y) + F.cross_entropy(z * (t + 2), y), (2, 3, 5), None, None),
], ids=["ignored label", "label smoothing", "temperature", "integer"])  # fmt: skip
def test_a_number_that_changes(loss, numbers, dynamic, times, monkeypatch):
    """Dynamo has a symbol for it, at first or later, and AOTAutograd has it trace the program once more with a number.

    Inductor itself runs for temperatures: floats that are symbols are inputs of its programs, and it asks for sizes.
    """
    if 0.7 not in numbers:
        compile_fx = lambda graph, inputs, **_: aot_eager(graph, inputs)  # noqa: E731
        monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)

    def step(hidden, weight, labels, number):
        return loss(F.linear(hidden, weight), labels, number)

    options = {"strict": True, "chunk_rows": 7, "epilogue_fusion": True}
    compiled = compiled_with(step, dynamic=dynamic, options=options)
    for tokens, number in enumerate(numbers, 24):
        assert_same(partial(compiled, number=number), partial(step, number=number), operands(tokens), **CLOSE)
    assert_fused(compiled, times)
    assert {decision.plan.chunk_rows for decision in decisions(compiled)} == {7}


@pytest.mark.gpu
@pytest.mark.inductor
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_on_a_gpu(mode):
    """With CUDA graphs: a call that warms up, one that records, and replays."""
    model = Model().cuda()
    # Without an option, so small a loss would be left to Inductor.
    settings = {"mode": mode} if mode else {"options": {"chunk_rows": 7}}
    compiled = compiled_with(model, fullgraph=True, **settings)
    for _ in range(5):
        arguments = [tensor.cuda() for tensor in batch()]
        torch.compiler.cudagraph_mark_step_begin()
        assert_agrees(model, lambda a=arguments: model(*a), lambda a=arguments: compiled(*a), **CLOSE)
    assert_fused(compiled, times=1)


@pytest.mark.parametrize(("lengths", "settings", "largest", "are_left"), [
    ((24,), {"options": {"strict": True}}, None, [True]), ((24,), {"options": {"chunk_rows": 24}}, None, [False]),
    ((24,), {"mode": "reduce-overhead"}, None, [False]), ((24,), {"dynamic": True}, None, [True]),
    ((8192,), {}, None, [False]), ((8192,), {"dynamic": True}, None, [False]),
    # It is compiled again for lengths with which it is not small, unless the caller has said how long they are.
    ((24, 20, 30, 9000, 9001, 25), {}, None, [True, True, False]),
    ((24, 20, 30), {}, 40, [True]), ((24, 20, 30), {}, 9000, [False]),
])  # fmt: skip
def test_a_small_loss_is_left_to_inductor(lengths, settings, largest, are_left, on_gpu):
    """As on a GPU: where the host's time counts, and logits are small."""
    head = nn.Linear(H, V, bias=False)
    compiled = compiled_with(lambda x, y: F.cross_entropy(head(x), y), fullgraph=True, **settings)
    for tokens in lengths:
        x, y = torch.randn(tokens, H), torch.randint(V, (tokens,))
        for tensor in (x, y) if largest and tokens == lengths[0] else ():
            torch._dynamo.mark_dynamic(tensor, 0, min=2, max=largest)
        torch.testing.assert_close(compiled(x, y), F.cross_entropy(head(x), y))
    left = ["left to Inductor" in str(decision) for decision in decisions(compiled)]
    assert [not decision.fused for decision in decisions(compiled)] == left == are_left


@pytest.mark.parametrize("is_one_head", [True, False])
def test_losses_of_one_head_are_small_together(is_one_head, on_gpu):
    first, second = (nn.Linear(H, V, bias=False) for _ in range(2))
    heads = (first, first) if is_one_head else (first, second)
    compiled = compiled_with(lambda xs, y: [F.cross_entropy(head(x), y) for head, x in zip(heads, xs, strict=True)])
    tokens = lengths.ONE_CHUNK_BYTES // (4 * V) * 3 // 4
    compiled(torch.randn(2, tokens, H).unbind(), torch.randint(V, (tokens,)))
    assert {decision.fused for decision in decisions(compiled)} == {is_one_head}


def test_losses_of_the_same_rows_are_small(on_gpu):
    def program(x, weight, y):
        log_probs = F.linear(x, weight).log_softmax(-1)
        return F.nll_loss(log_probs, y) - log_probs.gather(1, torch.stack([y, y.flip(0)], 1)).mean()

    compiled = compiled_with(program)
    compiled(torch.randn(24, H), torch.randn(V, H, requires_grad=True), torch.randint(V, (24,)))
    assert ["left to Inductor" in str(decision) for decision in decisions(compiled)] == [True, True]


@pytest.mark.parametrize(("largest", "expected"), [(None, [True, True, False]), (16, [True]), (99, [False])])
def test_saved_logits_of_many_lengths(largest, expected):
    """Logits are saved while they fit, by the number of tokens alone."""

    def preference(hidden, weight, labels):
        losses = F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), labels, reduction="none")
        chosen, rejected = losses.sum(1).chunk(2)
        return F.softplus(chosen - rejected).mean()

    def arguments(tokens):
        head = torch.randn(V, H, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return torch.randn(4, tokens, H, requires_grad=True), head, torch.randint(V, (4, tokens))

    # The logits of four sequences of 16 tokens, in whose place their gradient is.
    budget = 4 * 16 * row_stride(V, dtype=torch.float32, device_type="cpu") * 4
    compiled = compiled_with(preference, fullgraph=True, options={"memory_budget": budget})
    for tokens in (12, 10, 16, 30, 20, 4):
        tensors = arguments(tokens)
        for tensor in tensors[::2] if largest else ():
            torch._dynamo.mark_dynamic(tensor, 1, min=2, max=largest)
        if tokens <= (largest or tokens):
            assert_same(compiled, preference, tensors, **CLOSE)
    assert [decision.plan.strategy == "save_logits" for decision in decisions(compiled)] == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_declared", [False, True])
def test_pairs_of_many_lengths(is_declared):
    """Labels and logits have other symbols, of which the program's own checks have bounded one, or made a number."""

    def preference(hidden, weight, labels):
        assert labels.shape[1] <= 64
        chosen, rejected = log_probs(hidden, weight, labels).sum(1).chunk(2)
        return F.softplus(rejected - chosen).mean()

    compiled = compiled_with(preference, fullgraph=True)
    for sequences, tokens in ((4, 7), (4, 5), (2, 9), (6, 8)):
        head = torch.randn(V, H, requires_grad=True)
        tensors = torch.randn(sequences, tokens, H, requires_grad=True), head, torch.randint(V, (sequences, tokens))
        if is_declared:
            torch._dynamo.mark_dynamic(tensors[0], 0)  # No guard may make that a number.
        assert_same(compiled, preference, tensors, **CLOSE)
    assert all(decision.fused for decision in decisions(compiled)) is not is_declared
    assert decisions(compiled)


@pytest.mark.parametrize(("program", "strategy"), [
    (lambda h, w, y, m: F.cross_entropy(F.linear(h, w), y, reduction="sum"), "gradients_in_forward"),
    # A quotient of sums of none is NaN.
    (lambda h, w, y, m: (log_probs(h, w, y) * m).sum() / m.sum(), "recompute_logits"),
])  # fmt: skip
def test_no_tokens(program, strategy):
    """Their logits take no memory, which is no reason to save them."""
    compiled, tensors = compiled_with(program, fullgraph=True), (*operands(0), torch.ones(0))
    assert_same(compiled, program, tensors, equal_nan=True)
    assert [decision.plan.strategy for decision in decisions(compiled)] == [strategy]


def test_kernels_of_the_user(monkeypatch):
    """Any of their arguments may be changed. Dynamo has them in the graph only where a GPU could run them."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda **_: True)

    @triton.jit
    def kernel(first, second):
        pass

    @torch.no_grad()
    def program(hidden, weight, labels):
        before = log_probs(hidden, weight, labels)
        kernel[1,](hidden, before)
        return before + log_probs(hidden, weight, labels)

    called = [node for node in fused_graph(program, *operands(6)).graph.nodes if node.op == "call_function"]
    order = [node.name.partition("_")[0] for node in called]
    assert [name for name in order if name in ("linear", "log", "triton")] == ["linear", "triton", "linear"]


def test_an_exported_program():
    """Before each cast, it checks the dtype of its operand, here of the logits."""
    model, (tokens, labels) = Model(lambda logits, labels: flattened_loss(logits.float(), labels)).bfloat16(), batch()
    length = {1: torch.export.Dim("length", min=2, max=100)}
    exported = torch.export.export(model, (tokens, labels), dynamic_shapes=(length, length)).module()
    compiled = compiled_with(exported, fullgraph=True)
    arguments = batch(tokens=11)
    loss, expected = compiled(*arguments), model(*arguments)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_fused(compiled, times=1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(exported.get_parameter(name).grad, parameter.grad, rtol=0.02, atol=1e-3)


@pytest.fixture
def on_gpu(monkeypatch):
    """The backend takes the tensors for those of a GPU, where it asks whether a loss is small; nothing is compiled."""
    are_small = fusion.are_small

    def are_small_on_gpu(regions):
        with monkeypatch.context() as patch:
            for region in regions:
                patch.setattr(region.parts[0].logits.terms[0].input, "device", torch.device("cuda"))
            return are_small(regions)

    monkeypatch.setattr(fusion, "are_small", are_small_on_gpu)
    monkeypatch.setattr(lengths, "ONE_CHUNK_BYTES", 2**20)
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", lambda gm, inputs, **others: gm.forward)


@pytest.mark.inductor
@fresh_cache()
def test_programs_on_the_disk(monkeypatch):
    """Constants of a derivative tell them apart, here the tokens of a list.

    Compiled or found on the disk, each has a frame larger than a chunk of Python's stack: see `dynamo.frames`.
    """
    monkeypatch.setattr(frames, "_LARGE", 1)
    for tokens in ([0, 3], [1, 3], [0, 3]):
        torch._dynamo.reset()
        PyCodeCache.cache_clear()

        def program(hidden, weight, labels, tokens=tokens):
            return log_probs(hidden, weight, labels)[tokens].sum()

        compiled = compiled_with(program)
        assert_same(compiled, program, operands(6), **CLOSE)
        assert_fused(compiled, times=1)
        codes = [module.call.__code__ for module in PyCodeCache.modules if hasattr(module, "call")]
        assert len(codes) == 2 and all(code.co_stacksize * 8 >= 2**14 for code in codes)


def test_what_is_computed_again_is_in_the_code():
    """By which PyTorch finds programs on the disk: these differ in nothing else."""

    def small(h, w, y):
        return F.cross_entropy(checkpoint(lambda h: F.linear(h.sin(), w), h.cos(), use_reentrant=False), y)

    def large(h, w, y):
        return F.cross_entropy(checkpoint(lambda h: F.linear(h.cos().sin(), w), h, use_reentrant=False), y)

    codes = [fused_graph(program, *operands(6)).code for program in (small, large)]
    assert "checkpoint" not in codes[0] and codes[0] != codes[1]


def _in_checkpoints(h, y, weights):
    losses = (lambda h, w=w: F.cross_entropy(F.linear(h.sin(), w), y) for w in weights)
    return sum(checkpoint(loss, h, use_reentrant=False) for loss in losses)


def _added_in_place(h, y, weights):
    totals = [h.new_zeros(()) for _ in range(8)]
    for at, total in enumerate(totals):
        total.add_(F.cross_entropy(F.linear(h[at : at + 2], weights[0]), y[at : at + 2]))
    return sum(totals)


def _under_autocast(h, y, weights):
    with torch.autocast("xpu"), torch.autocast("hpu"), torch.autocast("cuda"), torch.autocast("cpu"):
        return F.cross_entropy(F.linear(h, weights[0]), y)


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
def test_order_of_what_is_added():
    """It must not depend on addresses, nor on hashes of strings: PyTorch finds programs on the disk by their code."""
    hidden, weight, labels = operands(9)
    weights = [weight.detach().clone().requires_grad_() for _ in range(8)]
    opened, added, cast = (
        fused_graph(program, hidden, labels, weights).graph
        for program in (_in_checkpoints, _added_in_place, _under_autocast)
    )
    numbers = [node.meta["ac_graph_id"] for node in opened.nodes if "ac_graph_id" in node.meta]
    clones = added.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    totals = [node.args[0] for node in clones if node.args[0].target == "new_zeros"]
    switches = [node.args for node in cast.find_nodes(op="call_function", target=_enter_autocast)]
    devices = [device for device, _, is_on, _ in switches if not is_on]
    for order, count in ((numbers, 8), (totals, 8), (devices, 4)):
        assert order == sorted(order) and len(order) == count


def test_moved_where_autocast_does_not_cache():
    """What reads a loss of each token moves behind the sum of them, with all that autocast is told there."""

    def program(h, w, y):
        losses = F.cross_entropy(F.linear(h, w), y, reduction="none")
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            product = losses.detach()[None] @ h.detach()
        return losses.sum(), product

    switches = fused_graph(program, *operands(5)).graph.find_nodes(op="call_function", target=_enter_autocast)
    assert len(switches) > 1 and {node.args for node in switches} == {("cpu", torch.bfloat16, True, False)}


@pytest.mark.parametrize(("head_is_cast", "loss_is_cast"), [(True, False), (True, True), (False, True)])
def test_autocast(head_is_cast, loss_is_cast):
    """The region must not be cast where the loss is, whose place it takes."""
    model, arguments = Model(), batch()

    def step(tokens, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=head_is_cast):
            logits = model.logits(tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=loss_is_cast):
            return F.cross_entropy((logits if loss_is_cast else logits.float()).view(-1, V), labels.view(-1))

    compiled = compiled_with(step, fullgraph=True)
    close = {"rtol": 2e-2, "atol": 2e-2} if head_is_cast else CLOSE
    assert_agrees(model, lambda: step(*arguments), lambda: compiled(*arguments), **close)
    assert_fused(compiled, times=1)


def test_what_autocast_does_not_cast():
    """An operator of another library called softmax, a product with an out_dtype, wider class probabilities."""

    def backend(gm, inputs):
        assert not any(decision.fused for decision in fusion.fuse(gm, thunder_flce.Options(), strict=False))
        assert [node.target for node in gm.graph.nodes if node.op == "call_method"] == ["t"]
        return gm.forward

    torch.library.define("flce_tests::softmax", "(Tensor x) -> Tensor")
    torch.library.register_fake("flce_tests::softmax", torch.Tensor.float)
    x, softmax = torch.empty(3, 5, dtype=torch.bfloat16, device="meta"), torch.ops.flce_tests.softmax
    program = lambda x, p: (softmax(x), torch.mm(x, x.t(), out_dtype=torch.float32), F.cross_entropy(x, p))  # noqa: E731
    torch.compile(program, backend=backend)(x, x.float())


@pytest.mark.parametrize("has_grad", [True, False])
def test_without_gradients(has_grad):
    """Casts of trained class weights need no gradient there, and where nothing does, nothing switches gradients."""

    def program(hidden, weight, labels):
        with torch.set_grad_enabled(has_grad), torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(F.linear(hidden, weight), labels, class_weights)

    def backend(gm, inputs):
        switches = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
        assert [decision.fused for decision in fusion.fuse(gm, thunder_flce.Options(), strict=True)] == [True]
        assert gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled) == switches
        return gm.forward

    class_weights = torch.rand(V, dtype=torch.bfloat16, requires_grad=not has_grad)
    tensors = [tensor.detach() for tensor in operands(5)]
    result = torch.compile(program, backend=backend)(*tensors)
    torch.testing.assert_close(result, program(*tensors), rtol=1e-2, atol=1e-2)


def test_compiled_in_a_checkpoint():
    """The checkpoint counts what the program saves, when it is compiled and when it is run again."""
    model, arguments = Model(), batch()
    compiled = compiled_with(model)
    again = partial(checkpoint, compiled, *arguments, use_reentrant=False)
    assert_agrees(model, lambda: model(*arguments), again, **CLOSE)
    assert_fused(compiled, times=1)


@pytest.mark.parametrize(("options", "message"), [
    ({"chunk_row": 8}, "no option 'chunk_row'; did you mean 'chunk_rows'"),
    ({"chunk-rows": 8}, "no option 'chunk-rows'; did you mean 'chunk_rows'"),
    ({1: 4}, "the names of options must be strings, but got 1"),
    ({"options": None}, r"no option 'options'\. Its own are accumulate, "),
    (thunder_flce.Options(chunk_rows=8), 'options must be a dict, such as {"chunk_rows": 512}, but got Options'),
    ({"chunk_rows": -1}, "chunk_rows must be None or a positive int, but got -1"),
    ({"strict": 1}, "strict must be True or False, but got 1"),
    ({"epilogue_fusion": "yes"}, "Unexpected type of attr epilogue_fusion"),
])  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises(BackendCompilerFailed, match=message):
        compiled_with(Model(), options=options)(*batch())


@pytest.mark.inductor
def test_mode_and_options_reach_inductor(monkeypatch):
    seen = []

    def compile_fx(gm, inputs, config_patches, **others):
        seen.append(config_patches)
        return aot_eager(gm, inputs)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    compiled_with(Model(), mode="max-autotune-no-cudagraphs")(*batch())
    compiled_with(Model(), options={"max_autotune": True, "chunk_rows": 8})(*batch())
    expected = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert seen == [expected, {"max_autotune": True}]


def test_entry_point():
    """Found without an import: by the metadata, which name what is there."""
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = entry_points["torch_dynamo_backends"].items()
    entry_point = EntryPoint(name, value, "torch_dynamo_backends")
    assert name == "thunder_flce" and entry_point.load() is compile_graph is lookup_backend("thunder_flce")


def test_a_backend_around_ours():
    compiled = torch.compile(log_probs, backend=lambda *arguments: compile_graph(*arguments))
    assert_same(compiled, log_probs, operands(5), **CLOSE)
    assert_fused(compiled, times=1)
