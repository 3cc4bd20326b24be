"""The vocabulary divided among ranks: the loss of the whole in float64, and the same bits on all ranks."""

import re
import threading
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as DivideRows

import thunder_flce
from divided import ALL, assert_refused, divided, part_of, parts, placed_case, rank_result
from ranks import as_threads, errors_of
from reference import Case, error, make_case, ours, truth
from test_plan import DEVICES, call, shard_of
from thunder_flce import LinearCrossEntropyLoss, Options, VocabParallel, count_items, linear_cross_entropy
from thunder_flce.agreement import CHECK_EVERY_CALL, agreement_on
from thunder_flce.device import Device
from thunder_flce.engine.choose import choose
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import Loss
from thunder_flce.options import STRATEGIES

UNEVEN = (40, 0, 61)


def rank_arguments(rank: int, case: Case, sizes=(50, 51), counts=None, **how) -> dict:
    """Returns the arguments of a rank's call, which has some rows of the weight and all tokens, or its own."""
    part = part_of(case, parts(sizes)[rank], ALL if counts is None else parts(counts)[rank])
    parallel = VocabParallel(group=dist.group.WORLD, **how)
    return {"input": part.x, "linear_weight": part.weight, "target": part.target, "vocab_parallel": parallel}


def test_of_equal_logits_the_argmax_is_the_lowest_column():
    """Also where the last part comes before another."""
    case = make_case(tokens=8, vocab=101, ignored=0.0)
    with torch.no_grad():
        case.weight[[20, 30, 45, 100]] = 3 * case.x[0]
        case.weight[[50, 90]] = 3 * case.x[1]

    def run(rank):
        start, stop = ((0, 40), (61, 101), (40, 61))[rank]
        parallel = VocabParallel(group=dist.group.WORLD, start=start)
        return ours(part_of(case, slice(start, stop)), vocab_parallel=parallel, outputs=("argmax",)).outputs[0]

    for argmax in as_threads(3, run):
        assert torch.equal(argmax, (case.x @ case.weight.t()).argmax(1))
        assert argmax[0] == 20 and argmax[1] == 50


def test_partial_input_gradients_add_up():
    case = make_case(dtype=torch.float64)

    def run(rank):
        parallel = VocabParallel(group=dist.group.WORLD, input_grad="partial")
        return ours(part_of(case, parts(UNEVEN)[rank]), vocab_parallel=parallel).gradients[0]

    gradients, exact = as_threads(3, run), truth(case).gradients[0]
    assert not gradients[1].any() and error(gradients[0], exact) > 0.1
    assert error(sum(gradients), exact) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_input_gradients_are_summed_in_the_dtype_asked_for(strategy):
    case = make_case(tokens=64, vocab=200, hidden=32, dtype=torch.bfloat16)
    options = Options(strategy=strategy, chunk_rows=30)

    def gradient(dtype):
        return divided(case, (50, 50, 50, 50), options=options, how={"input_grad_dtype": dtype}).gradients[0]

    exact = truth(case).gradients[0]
    assert error(gradient(torch.bfloat16), exact) > 1.2 * error(gradient(None), exact)


@pytest.mark.parametrize("is_used", [False, True])
def test_losses_of_tokens_that_are_changed_in_place_beside_an_output_that_nobody_or_one_rank_differentiates(is_used):
    case = make_case(tokens=36)

    def run(rank):
        arguments = rank_arguments(rank, case, counts=(20, 16), data_parallel=True)
        loss, log_prob = linear_cross_entropy(**arguments, reduction="none", outputs=("log_prob",))
        loss *= 3
        total = -3 * log_prob.sum() if is_used and rank else loss.sum()
        return torch.autograd.grad(total, (arguments["input"], arguments["linear_weight"]))

    dx, dw = map(torch.cat, zip(*as_threads(2, run), strict=True))
    exact = truth(case, torch.ones(36), reduction="none").gradients
    assert error(dx, 3 * exact[0]) < 1e-6 and error(2 * dw, 3 * exact[1]) < 1e-6


def test_weights_that_are_dtensors():
    """With `vocab_parallel`, and hidden states that are plain tensors."""
    case = make_case(tokens=36, bias=True, class_weight=True)

    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        dtensors = placed_case(case, mesh, [DivideRows(0)], [DivideRows(0)])
        arguments = rank_arguments(rank, case, counts=(20, 16), data_parallel=True)
        arguments |= {"linear_weight": dtensors.weight, "linear_bias": dtensors.bias}
        arguments["weight"] = distribute_tensor(case.class_weight, mesh, [DivideRows(0)])
        assert error(linear_cross_entropy(**arguments), truth(case).loss) < 1e-6
        alone = [dist.new_group([member]) for member in range(2)][rank]  # Each rank makes each group.
        replicated = dtensors.bias.redistribute(placements=[Replicate()])
        assert_refused(
            linear_cross_entropy, arguments,
            ({"linear_bias": replicated}, r"linear_bias must be Shard\(0\) over"),
            ({"vocab_parallel": alone}, r"linear_weight must be Shard\(0\) over the ranks"),
            ({"input": dtensors.x}, "input must be a plain tensor with vocab_parallel"),
            ({"vocab_parallel": None}, r"input must be a DTensor .*group=mesh, data_parallel=True"),
        )  # fmt: skip

    as_threads(2, run)


# All ranks mean the same call.

SEQUENCE_PARALLEL = {"counts": (12, 12, 12), "how": {"sequence_parallel": True}}


@pytest.mark.parametrize(("target", "division"), [(101, {}), (-1, {}), (106, SEQUENCE_PARALLEL)])
def test_a_target_outside_the_vocabulary_raises_on_all_ranks(target, division):
    case = make_case(tokens=36)
    case.target[5] = target
    for raised in errors_of(3, partial(rank_result, case=case, sizes=UNEVEN, **division)):
        assert isinstance(raised, IndexError) and "neither in [0, 101)" in str(raised)


def test_arguments():
    case = make_case()

    def run(rank):
        group, grid = dist.group.WORLD, init_device_mesh("cpu", (2, 1))
        assert_refused(
            linear_cross_entropy, rank_arguments(rank, case),
            ({"weight": torch.ones(50)}, r"weight must be .*\(101,\)"),
            ({"vocab_size": 102}, "vocab_size must be between 1 and .* 101, but got 102"),
            ({"vocab_parallel": grid}, r"device mesh of one dimension, but has 2.*mesh\[\"tp\"\]"),
            ({"vocab_parallel": VocabParallel(group=group, start=rank)}, "start must be None .* 0 with 50 rows, 1 "),
            ({"vocab_parallel": VocabParallel(group=group, start=None if rank else 0)}, "start must be None on all"),
            (
                {"vocab_parallel": VocabParallel(group=group, input_grad_dtype=torch.float16)},
                "input_grad_dtype must be None, .* or input's dtype, torch.float32, but",
            ),
        )  # fmt: skip
        assert_refused(
            VocabParallel, {"group": group},
            ({"start": 1.5}, "start must be None or an int"),
            ({"group": "tp"}, "^group must be a ProcessGroup or a DeviceMesh"),
            ({"input_grad": "summed"}, "input_grad must be one of"),
            ({"sequence_parallel": 1}, "sequence_parallel must be one of .False, True., but got 1"),
            ({"input_grad": "partial", "sequence_parallel": True}, "input_grad must be .reduced. with sequence"),
            ({"input_grad": "partial", "data_parallel": True}, "input_grad must be .reduced. with data_parallel"),
            ({"data_parallel": True, "sequence_parallel": True}, "sequence_parallel must be False with data_parallel"),
        )  # fmt: skip
        assert deepcopy(LinearCrossEntropyLoss(4, 9, vocab_parallel=group)).vocab_parallel.group is group
        first, mesh = DeviceMesh("cpu", [0]), init_device_mesh("cpu", (2,))
        assert_refused(
            count_items, {"target": case.target, "group": mesh},
            ({"group": grid}, "group must be a device mesh of one dimension, but has 2"),
            ({"target": distribute_tensor(case.target, mesh, [Replicate()])}, "target must be a plain"),
            *[({"group": first}, "group must be .* that this rank belongs to, but got DeviceMesh")] * rank,
        )  # fmt: skip

    as_threads(2, run)


def test_traced_programs():
    """A call is one operator in a graph; around DTensors, Dynamo breaks it. What cannot do that says so."""
    case = make_case(dtype=torch.float64)
    exact, plain = 2 * truth(case).loss, (case.x, case.weight)
    whole_graph = partial(torch.compile, backend="eager", fullgraph=True)

    def run(rank):
        mesh = init_device_mesh("cpu", (1,))

        def loss(x, weight, vocab_parallel=mesh, **settings):
            parallel = None if isinstance(x, DTensor) else vocab_parallel
            return 2 * linear_cross_entropy(x, weight, case.target, vocab_parallel=parallel, **settings)

        for compiler in (whole_graph, thunder_flce.thunderfx):
            assert error(compiler(loss)(*plain), exact) < 1e-12
        averaged = partial(loss, vocab_parallel=VocabParallel(group=mesh, data_parallel=True))
        dtensors = [distribute_tensor(tensor.detach(), mesh, [DivideRows(0)]) for tensor in plain]
        for program, tensors in ((loss, dtensors), (averaged, plain)):
            with pytest.raises(torch._dynamo.exc.Unsupported, match="work in eager calls only"):
                whole_graph(program)(*tensors)
            assert error(torch.compile(program, backend="eager")(*tensors), exact) < 1e-12
            with pytest.raises(NotImplementedError, match="work in eager calls only"):
                thunder_flce.jit(program)(*tensors)
        module = LinearCrossEntropyLoss(*case.weight.shape[::-1], dtype=case.weight.dtype, vocab_parallel=mesh)
        module.linear.weight = torch.nn.Parameter(dtensors[1])
        with pytest.raises(NotImplementedError, match="work in eager calls only"):
            thunder_flce.jit(module)(case.x, case.target)
        saving = partial(loss, vocab_size=90, options=Options(strategy="save_logits"))
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="strategy must not be .save_logits. with voc"):
            torch.compile(saving, backend="eager")(*plain)
        several = {"target": case.target[:, None].expand(-1, 2), "target_weights": torch.full((37, 2), 0.5)}
        several["vocab_parallel"] = VocabParallel(group=mesh, sequence_parallel=True)
        for compiler in (whole_graph, thunder_flce.jit):
            assert error(2 * compiler(partial(linear_cross_entropy, **several))(*plain), exact) < 1e-12
        # DTensors among the terms alone have no meaning.
        term = tuple(distribute_tensor(torch.zeros(rows, 2), mesh, [Replicate()]) for rows in (37, 101))
        with pytest.raises(TypeError, match=r"input must be a DTensor because others are \(terms\), but got Tensor"):
            torch.compile(partial(loss, terms=[term], vocab_parallel=None), backend="eager")(*plain)

    as_threads(1, run)


X = torch.ones(37, 24)
DIFFERENT = [
    ("options", lambda rank: Options(chunk_rows=8 + rank), "options is Options.* on rank 0 and Options.*"),
    ("label_smoothing", lambda rank: 0.1 * rank, "label_smoothing is 0.0 on rank 0 and 0.1 on rank 1"),
    ("linear_bias", lambda rank: None if rank else torch.zeros(50), "linear_bias is"),
    ("weight", lambda rank: torch.ones(101 + rank), r"weight is float32 \(101\) on cpu on rank 0"),
    ("num_items", lambda rank: {} if rank else 5, "num_items is int on rank 0 and dict on rank 1"),
    ("num_items", lambda rank: 3 + rank, "the value of num_items is 3 on rank 0 and 4 on rank 1"),
    ("token_weights", lambda rank: [1.0] * rank or None, "token_weights is None on rank 0 and list"),
    ("token_inputs", lambda rank: [None] * rank, r"token_inputs\[0\] is None on rank 0 and NoneType"),
    ("target", lambda rank: torch.zeros(37 - rank).long(), r"target is int64 \(T\) .* on rank 0 and int64 \(36\)"),
    ("target", lambda rank: [1] if rank else torch.zeros(37).long(), r"target is int64 \(T\) .* on rank 0 and list"),
    ("linear_weight", lambda rank: torch.ones(50, 24, device=("cpu", "meta")[rank]), "cpu on rank 0 .* on meta"),
    ("input", lambda rank: X.clone().requires_grad_(rank == 0), "which requires a gradient on rank 0 and .* on cpu on"),
    # It has no numbers, but others have.
    ("input", lambda rank: X.to(("cpu", "meta")[rank]), r"24\) on cpu on rank 0 .* on meta on"),
    # Parts of the tokens have to be equal.
    ("input", lambda rank: X[rank:], r"input is float32 \(37, 24\) .* on rank 0 and float32 \(36, 24\)"),
]
TOKENS = {"target": "data_parallel", "num_items": "data_parallel", "input": "sequence_parallel"}
"""Who divides the tokens where these differ"""


@pytest.mark.parametrize("checks_every_call", ["0", "1"], ids=["", "every call"])
def test_what_differs_between_ranks_raises_on_all_of_them(checks_every_call, monkeypatch):
    monkeypatch.setenv(CHECK_EVERY_CALL, checks_every_call)
    case = make_case()

    def run(rank, name, value):
        arguments = rank_arguments(rank, case, **({TOKENS[name]: True} if name in TOKENS else {}))
        with suppress(TypeError, ValueError):  # Ranks may have agreed on each of them before.
            linear_cross_entropy(**arguments | {name: value(0)})
        linear_cross_entropy(**arguments | {name: value(rank)})

    for name, value, message in DIFFERENT:
        for raised in errors_of(2, partial(run, name=name, value=value)):
            assert isinstance(raised, ValueError) and re.search(message, str(raised))


@pytest.mark.parametrize("how", [None, {"sequence_parallel": True}, {"data_parallel": True}], ids=str)
def test_what_is_equal_where_each_call_is_compared(how, monkeypatch):
    """Not the tokens, where each rank has its own, and a NaN is one on all ranks."""
    monkeypatch.setenv(CHECK_EVERY_CALL, "1")
    case, counts = make_case(tokens=38), (19, 19) if how else None
    for num_items, is_nan in ((None, False), (38, False), (torch.tensor(torch.nan), True)):
        assert divided(case, (50, 51), counts=counts, how=how, num_items=num_items).loss.isnan() == is_nan


@pytest.mark.parametrize(("name", "refused", "message"), [
    ("terms", lambda x, mesh: [(x,)], "terms[0] must be a pair"),
    ("token_inputs", lambda x, mesh: 3, "token_inputs must be a sequence"),
    ("input", lambda x, mesh: DTensor.from_local(x, mesh), "input must be a plain tensor"),
    ("input", lambda x, mesh: torch.nested.nested_tensor([x]), "input must be a dense tensor"),
    ("input", lambda x, mesh: x.to_sparse(), "input must be a dense tensor"),
    ("options", lambda x, mesh: {"chunk_rows": 3}, "options must be thunder_flce.Options"),
    ("token_loss", lambda x, mesh: "entropy", "token_loss must be a function"),
    ("token_loss", lambda x, mesh: lambda log_prob, entropy: 1 / 0, "division by zero"),
])  # fmt: skip
def test_what_one_rank_refuses_raises_on_all_of_them(name, refused, message):
    """And no other rank waits for it: the class weights, a DTensor, are gathered afterwards."""
    case = make_case(class_weight=True)

    def run(rank):
        arguments, mesh = rank_arguments(rank, case, data_parallel=True), init_device_mesh("cpu", (2,))
        arguments["weight"] = distribute_tensor(case.class_weight, mesh, [DivideRows(0)])
        arguments |= {name: refused(case.x.detach(), mesh)} if rank else {}
        linear_cross_entropy(**arguments)

    first, second = errors_of(2, run)
    assert isinstance(first, ValueError) and "rank" in str(first) and "has refused its arguments" in str(first)
    assert message in str(second)


def test_what_is_wrong_on_all_ranks_of_data_parallel():
    """Ranks with fewer tokens, which add ignored ones, raise the same error."""
    case = make_case(tokens=36)

    def run(rank, wrong):
        linear_cross_entropy(**rank_arguments(rank, case, counts=(20, 16), data_parallel=True), **wrong)

    for wrong, message in (
        ({"ignore_index": "x"}, "ignore_index must be an int, but got str"),
        ({"ignore_index": 2**64}, "ignore_index must fit 64 bits"),
        ({"num_items": True}, "num_items must be a number"),
        ({"num_items": torch.tensor(True)}, "num_items must have one of the dtypes"),
        ({"num_items": [3]}, "num_items must be a number"),
    ):
        raised = errors_of(2, partial(run, wrong=wrong))
        assert all(message in str(error) for error in raised), raised


def test_heads_of_which_a_rank_has_as_many_rows():
    """What ranks have agreed on for one of them is not taken for the other's."""

    def run(rank):
        x, target = torch.ones(6, 4), torch.zeros(6, dtype=torch.long)
        heads = [torch.ones(rows, 4, requires_grad=True) for rows in (1 - rank, 1)] * 2
        losses = torch.stack([linear_cross_entropy(x, head, target, vocab_parallel=dist.group.WORLD) for head in heads])
        losses.sum().backward()
        return losses.detach()

    for losses in as_threads(2, run):
        torch.testing.assert_close(losses.exp(), torch.tensor([1.0, 2.0, 1.0, 2.0]))


def test_a_default_device():
    """What ranks tell each other is not made there: not of pinned memory on a GPU, which there is not."""

    def run(rank):
        x, weight, target = torch.ones(6, 4), torch.ones(1, 4), torch.zeros(6, dtype=torch.long)
        with torch.device("meta"):
            return linear_cross_entropy(x, weight, target, vocab_parallel=dist.group.WORLD)

    for loss in as_threads(2, run):
        torch.testing.assert_close(loss.exp(), torch.tensor(2.0))


def test_a_program_on_one_rank_alone_is_an_error_where_its_backward_would_wait():
    def run(rank):
        x, weight = (torch.zeros(rows, 8, requires_grad=True) for rows in (3, 5))
        tensors = {"input": x, "linear_weight": weight, "target": torch.zeros(3).long()}
        program_call = Call(tensors=tensors, loss=Loss(), needs_grad=("input", "linear_weight") if rank else ())
        return agreement_on(VocabParallel(group=dist.group.WORLD), program_call, Options())()

    for raised in errors_of(2, run):
        assert "whether a program computes gradients is False on rank 0 and True on rank 1" in str(raised)


@pytest.mark.parametrize("names", [("H100", "L40S"), ("A100", "3090"), ("H200", "H200")], ids=str)
def test_ranks_with_different_gpus_make_one_plan(names, monkeypatch):
    """That of the smallest. Or they would run another number of chunks, and wait for each other."""
    devices, thread = [DEVICES[name] for name in names], threading.local()
    monkeypatch.setattr(Device, "of", lambda device: devices[thread.rank])

    def run(rank):
        thread.rank = rank
        tensors = {"input": torch.zeros(3, 8), "linear_weight": torch.zeros(5, 8), "target": torch.zeros(3).long()}
        agree = agreement_on(VocabParallel(group=dist.group.WORLD), Call(tensors=tensors, loss=Loss()), Options())
        device, region = agree().device, call(shard=replace(shard_of(2), rank=rank))
        return device, [choose(region, Options(tune_products=tune), device) for tune in (None, True)]

    (first, plans), (second, second_plans) = as_threads(2, run)
    assert plans == second_plans and first == second == min(devices, key=lambda device: device.memory)
    # What each would plan on its own.
    alone = {choose(call(shard=shard_of(2)), Options(), device) for device in devices}
    assert (len(alone) > 1) == (names != ("H200", "H200"))


def test_a_cuda_graph_that_is_captured_on_another_device_than_the_current_one(monkeypatch):
    """The host must not wait for the ranks' numbers there."""
    current = [torch.device("cuda:0")]

    @contextmanager
    def as_current(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(Device, "of", lambda device: DEVICES["H100"])
    monkeypatch.setattr(dist.distributed_c10d, "_get_object_coll_device", lambda group: "cuda")
    monkeypatch.setattr(torch.cuda, "device", as_current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].index == 1)

    def run(rank):
        return agreement_on(VocabParallel(group=dist.group.WORLD), call(3, 5, 8, device="cuda:1"), Options())()

    (raised,) = errors_of(1, run)
    assert "cannot agree on a new call with vocab_parallel while a CUDA graph is captured" in str(raised)
