"""What only a GPU can show: memory, CUDA graphs, and that a factor of 1 costs nothing."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder_flce
from reference import assert_as_exact_as_eager, captured, error, make_case, ours, truth
from thunder_flce import Options, calls, linear_cross_entropy
from thunder_flce.backend import compile_graph
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.engine.choose import temporary_bytes
from thunder_flce.engine.kernels.dispatch import BACKENDS, is_installed
from thunder_flce.options import STRATEGIES

IGNORED_ROWS = ("skip", "compute")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_poison")]


def _peak_bytes(run):
    """Peak above what is allocated before, of the second of two runs."""
    run()
    # Whatever an earlier test has left must not go meanwhile.
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _workspace_bytes():
    """Memory that PyTorch 2.15 gives cuBLAS for each matmul anew; 0 with PyTorch 2.11."""
    matrix = torch.zeros(1024, 1024, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(matrix)
    return _peak_bytes(lambda: torch.mm(matrix, matrix, out=out))


SHAPES = [
    Shape(name="large H", tokens=4096, vocab=64000, hidden=2048),
    Shape(name="larger H", tokens=4096, vocab=64000, hidden=4096),
    Shape(name="small H", tokens=8192, vocab=64000, hidden=512, bias=True),
    Shape(name="odd V", tokens=4096, vocab=50257, hidden=1600),
    Shape(name="many tokens", tokens=32768, vocab=32000, hidden=2048),
    Shape(name="adapter", tokens=4096, vocab=64000, hidden=2048, frozen=True),
]
VECTOR_BYTES = 72
"""Of each token, as measured"""
# Options, the reduction, and a memory budget as a fraction of all logits.
WAYS = {
    "default": (Options(), "mean", None),
    "512 rows": (Options(chunk_rows=512, accumulate="parameter"), "mean", None),
    "512 rows, float32 dW": (Options(chunk_rows=512, accumulate="float32"), "mean", None),
    "float32 logits": (Options(logits_dtype="float32"), "mean", None),
    "save logits": (Options(strategy="save_logits"), "mean", None),
    "save some logits": (Options(), "none", 0.5),
    "recompute logits": (Options(strategy="recompute_logits"), "mean", None),
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("needs", ["all", "input", "weight", "nothing"])
def test_peak_memory_is_what_the_program_predicts(needs, way, shape, monkeypatch):
    options, reduction, budget = WAYS[way]
    inputs = Inputs.random(shape, "cuda")
    inputs.target[0] = -100  # Then rows are left out, which takes copies of the others.
    has_grad = {"device": "cuda", "dtype": shape.dtype, "requires_grad": needs != "nothing"}
    adapter = [torch.randn(size, 16, **has_grad) for size in (shape.tokens, shape.vocab) if shape.name == "adapter"]
    if needs == "nothing":
        inputs = inputs.map(torch.Tensor.detach)
    elif needs != "all":
        kept = {"input": inputs.x, "weight": inputs.weight}[needs]
        for tensor in (inputs.x, inputs.weight, inputs.bias):
            if tensor is not None and tensor is not kept:
                tensor.requires_grad_(False)
    if budget is not None:
        options = replace(options, memory_budget=int(budget * shape.tokens * shape.vocab * shape.dtype.itemsize))
    planned, plan_for = [], calls.plan_for

    def recorded_plan_for(call, options, **settings):
        planned.append((call.specs(), plan_for(call, options, **settings)))
        return planned[-1][1]

    monkeypatch.setattr(calls, "plan_for", recorded_plan_for)
    monkeypatch.setattr(calls, "_settings_cache", {})
    upstream = torch.ones((shape.tokens,) if reduction == "none" else (), device="cuda")

    def run():
        settings = {"linear_bias": inputs.bias, "terms": [tuple(adapter)] if adapter else ()}
        settings |= {"reduction": reduction, "options": options}
        loss = linear_cross_entropy(inputs.x, inputs.weight, inputs.target, **settings)
        if loss.requires_grad:
            loss.backward(upstream)
        for tensor in (*inputs.named_operands().values(), *adapter):
            tensor.grad = None

    peak = _peak_bytes(run)
    call, plan = planned[-1]
    predicted = call.gradient_bytes + temporary_bytes(call, plan)
    # The prediction leaves out vectors of one number a token: targets, their order, weights and statistics.
    most = 1.05 * predicted + VECTOR_BYTES * call.tokens + _workspace_bytes()
    assert 0.95 * predicted <= peak <= most, plan.describe()


def test_operations_on_the_device():
    """Kernels, copies and fills of a plain mean over one chunk, forward and backward."""
    case = make_case(tokens=2048, vocab=4096, hidden=256, dtype=torch.bfloat16, device="cuda", ignored=0.0)

    def step():
        linear_cross_entropy(case.x, case.weight, case.target).backward()
        case.x.grad = case.weight.grad = None

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(names) <= 14, names


def test_peak_memory_through_thunder():
    """Nothing is copied on the way through thunder and autograd into .grad."""
    shape = Shape(name="", tokens=4096, vocab=64000, hidden=2048)
    inputs = Inputs.random(shape, "cuda")
    jitted = thunder_flce.jit(lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target))

    def run():
        jitted(inputs.x, inputs.weight, inputs.target).backward()
        inputs.x.grad = inputs.weight.grad = None

    run()
    plan = thunder_flce.explain(jitted)[0].decisions[0].plan
    outputs = sum(tensor.nbytes for tensor in inputs.named_operands().values())
    predicted = outputs + plan.chunk_rows * shape.vocab * shape.dtype.itemsize
    assert _peak_bytes(run) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("rows", "dtype"), [*((rows, torch.float32) for rows in IGNORED_ROWS), ("compute", torch.bfloat16)]
)
@pytest.mark.parametrize("ranks", [(), (8,)], ids=["", "adapter beside a frozen head"])
def test_cuda_graph(ranks, rows, dtype, strategy, reduction):
    """Captured once, replayed with other values and other ignored rows."""
    if strategy == "gradients_in_forward" and reduction == "none":
        pytest.skip("no such strategy")
    chunk_rows = None if strategy == "save_logits" else 100
    options = Options(strategy=strategy, ignored_rows=rows, chunk_rows=chunk_rows, accumulate="float32")
    sizes = {"tokens": 300, "hidden": 64, "vocab": 1009, "ranks": ranks}
    cases = [make_case(**sizes, dtype=dtype, device="cuda", bias=True, ignored=i) for i in (0.1, 0.8)]
    held = copy.deepcopy(cases[0])
    held.weight.requires_grad_(not ranks)
    grad = torch.tensor(0.5, device="cuda").expand(300 if reduction == "none" else ()).contiguous()

    def step():
        return ours(held, grad, options=options, reduction=reduction)

    graph, result = captured(step)
    for case in (cases[1], cases[0]):
        case.weight.requires_grad_(not ranks)
        with torch.no_grad():
            for target, source in zip((*held.operands(), held.target), (*case.operands(), case.target), strict=True):
                target.copy_(source)
        graph.replay()
        exact = truth(case, grad, reduction=reduction)
        most, most_of_gradients = (1e-5, 1e-5) if dtype == torch.float32 else (1e-3, 5e-3)
        assert error(result.loss, exact.loss) < most
        assert all(error(*pair) < most_of_gradients for pair in zip(result.gradients, exact.gradients, strict=True))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if is_installed(name)])
def test_cuda_graph_of_a_backend(backend):
    """All of its kernels: sums over rows, moments, target entries."""
    options = Options(strategy="save_logits", row_kernels=backend)
    settings = {"label_smoothing": 0.1, "z_loss": 0.1, "outputs": ("mean_logit", "log_sum_sq_probs")}
    case = make_case(tokens=300, hidden=64, vocab=1009, dtype=torch.bfloat16, device="cuda", bias=True)

    def step():
        return ours(case, options=options, **settings)

    expected = step()
    graph, result = captured(step)
    results = [result.loss, *result.outputs, *result.gradients]
    with torch.no_grad():
        for tensor in results:
            tensor.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(results, [expected.loss, *expected.outputs, *expected.gradients])


@pytest.mark.inductor
def test_gradients_accumulate_in_cuda_graphs():
    """Into memory of their own: PyTorch refuses to add to what a graph has returned, and may overwrite."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(1009, 64), nn.Linear(64, 64), nn.Linear(64, 1009)).cuda()
    tokens, labels = torch.randint(1009, (2, 2, 4, 75), device="cuda")

    def loss(tokens, labels):
        return F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())

    def gradients(loss):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(4):
            module.zero_grad(set_to_none=False)
            for batch in zip(tokens, labels, strict=True):
                loss(*batch).backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    expected = gradients(loss)
    compiled = torch.compile(loss, backend=compile_graph, mode="reduce-overhead")
    torch.testing.assert_close(gradients(compiled), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("captured", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuda_graph_of_one_pass(strategy, captured):
    """The other pass runs without one, where the host may wait for the number of valid rows."""
    case = make_case(tokens=300, hidden=64, vocab=1009, dtype=torch.float32, device="cuda", ignored=0.4)
    operands, grad = (case.x, case.weight), torch.tensor(0.5, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def forward():
        return linear_cross_entropy(case.x, case.weight, case.target, options=Options(strategy=strategy))

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(forward(), operands, grad)
        loss = None if captured == "forward" else forward()
    if loss is None:
        with torch.cuda.graph(graph, stream=stream):
            loss = forward()
        graph.replay()
        gradients = torch.autograd.grad(loss, operands, grad)
    else:
        with torch.cuda.graph(graph, stream=stream):
            gradients = torch.autograd.grad(loss, operands, grad)
        graph.replay()
    torch.cuda.synchronize()
    exact = truth(case, grad)
    assert error(loss, exact.loss) < 1e-5
    assert all(error(*pair) < 1e-5 for pair in zip(gradients, exact.gradients[:2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_synchronisation_when_asked_for_none(dtype):
    case = make_case(tokens=300, hidden=64, vocab=1009, dtype=dtype, device="cuda", bias=True)
    options = Options(ignored_rows="compute", chunk_rows=100)
    ours(case, options=options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(case, options=options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("rows", IGNORED_ROWS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_device_that_is_not_the_current_one(strategy, rows):
    with torch.cuda.device(0):
        case = make_case(tokens=700, hidden=256, vocab=4003, dtype=torch.bfloat16, device="cuda:1", ignored=0.6)
        assert_as_exact_as_eager(case, options=Options(strategy=strategy, ignored_rows=rows))
