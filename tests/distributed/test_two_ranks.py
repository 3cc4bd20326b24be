"""Models on two ranks that speak gloo: data parallel, sharded and tensor parallel, with thunder and without it."""

import warnings
from functools import partial
from unittest import mock

import pytest
import thunder
import thunder.distributed
import torch
import torch.distributed as dist
from thunder.distributed import FSDPType
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from thunder.transforms import MaterializationTransform
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import front_ends
import thunder_flce
from divided import part_of, parts
from front_ends import H, V, assert_fused
from ranks import GPUS, as_processes
from reference import error, make_case, truth
from thunder_flce import LinearCrossEntropyLoss, Options, VocabParallel, count_items, linear_cross_entropy
from thunder_flce.backend import compile_graph

CASES, CPU = {}, torch.device("cpu")
FLOAT32 = {"policy": MixedPrecisionPolicy(), "bound": 1e-5}
BFLOAT16 = {"policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), "bound": 0.03}


def on_two_ranks(**variants):
    """Makes a function of the rank a case of `test_on_two_ranks`, or one for each variant of its other arguments."""

    def register(case):
        named = {f"{case.__name__}[{name}]": partial(case, **arguments) for name, arguments in variants.items()}
        CASES.update(named or {case.__name__: case})
        return case

    return register


class Model(front_ends.Model):
    """The same on all ranks, whose loss PyTorch computes."""

    def __init__(self, vocab: int = V, *, tied: bool = False):
        torch.manual_seed(0)
        super().__init__(vocab=vocab)
        if tied:
            self.lm_head.weight = self.embedding.weight


class ModelWithLoss(Model):
    """The same with a head that computes its loss."""

    def __init__(self, *, tied: bool = False, options: Options | None = None):
        super().__init__(tied=tied)
        self.lm_head = LinearCrossEntropyLoss.from_linear(self.lm_head, options=options)

    def forward(self, tokens, labels, num_items=None):
        return self.lm_head(self.last_hidden(tokens), labels, num_items=num_items)


def batch(number: int, vocab: int = V):
    """Tokens, and labels of which batches have different numbers."""
    tokens, labels = torch.randint(vocab, (2, 3, 8), generator=torch.Generator().manual_seed(number))
    labels[: number % 2 + 1] = -100
    return tokens, labels


def exact_gradients(model, numbers=(0, 1), *, ranks=2, is_token_mean=False) -> dict[str, torch.Tensor]:
    """Those of the losses of some batches, averaged over ranks, or of the mean over all tokens; in float64."""
    head, vocab = getattr(model.lm_head, "linear", model.lm_head), model.embedding.num_embeddings
    exact = Model(vocab, tied=head.weight is model.embedding.weight).double()
    counts = [(batch(number)[1] != -100).sum() for number in numbers]
    for number, count in zip(numbers, counts, strict=True):
        part = count / sum(counts) if is_token_mean else 1 / ranks
        (part * exact(*batch(number, vocab))).backward()
    return {name: parameter.grad for name, parameter in exact.named_parameters()}


def check(model, exact: dict[str, torch.Tensor], *, bound=1e-5, part=lambda gradient: gradient) -> None:
    """Asserts that the gradients of a model are these, or this rank's part of them."""
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.").replace("lm_head.linear", "lm_head")
        if parameter.requires_grad:
            gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            assert error(gradient, part(exact[name])) < bound, name


# thunder.distributed.


def padded_part(rank: int, gradient: torch.Tensor, ranks: int = 2) -> torch.Tensor:
    """A rank's rows; last ones of zeros make the parts equal."""
    rows = -(-gradient.shape[0] // ranks)
    return torch.cat([gradient, gradient.new_zeros(ranks, *gradient.shape[1:])])[rank * rows :][:rows]


@on_two_ranks(fusion_first={"is_fsdp_first": False}, fsdp_first_tied={"is_fsdp_first": True})
def thunder_fsdp(rank, is_fsdp_first):
    model = Model(tied=is_fsdp_first)
    exact = exact_gradients(model)
    if is_fsdp_first:
        init = MaterializationTransform.init_from_original_module_init()
        transforms = [FSDPTransform(device=CPU), MaterializationTransform(CPU, init=init)]
        transforms.append(thunder_flce.FuseLinearCrossEntropy(strict=True))
        executors = [thunder_flce.executor, *thunder.get_default_executors()]
        step = thunder.jit(model, transforms=transforms, executors=executors)
    else:
        step = thunder_flce.jit(model, strict=True)
        step = thunder.distributed.fsdp(step, device=CPU, sharding_strategy=FSDPType.ZERO3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "thunder_flce")
        step(*batch(rank)).backward()
    assert_fused(step)
    check(step, exact, part=partial(padded_part, rank))


@on_two_ranks()
def thunder_ddp_accumulates(rank):
    model = Model()
    exact = exact_gradients(model, (0, 1, 2, 3))
    step = thunder.distributed.ddp(thunder_flce.jit(model, strict=True))
    with step.no_sync():
        step(*batch(rank)).backward()
    loss = step(*batch(rank + 2))
    loss.backward(retain_graph=True)
    assert_fused(step)
    check(step, exact)
    # What was averaged in its memory was not what autograd keeps.
    step.zero_grad()
    loss.backward()
    check(step, exact_gradients(model, (2, 3)))


@on_two_ranks()
def thunder_warns_of_gradients_that_are_not_summed(rank):
    step = thunder.distributed.fsdp(thunder_flce.jit(Model()), device=CPU)
    with step.no_sync(), pytest.warns(UserWarning, match=r"fsdp loses gradients in no_sync\(\)"):
        step(*batch(rank))
    step = thunder_flce.jit(Model())
    fully_shard(step, mesh=init_device_mesh("cpu", (2,)))
    with pytest.warns(UserWarning, match="fully_shard has no effect on a module that thunder compiles"):
        step(*batch(rank))


# PyTorch's own.


@on_two_ranks(plain=FLOAT32, tied={"tied": True, **FLOAT32}, frozen={"frozen": True, **FLOAT32}, bfloat16=BFLOAT16)
def fsdp2_head(rank, policy, bound, tied=False, frozen=False):
    counts = []
    for chunk_rows, unshards in ((24, True), (5, True), (5, False)):
        model = ModelWithLoss(tied=tied, options=Options(chunk_rows=chunk_rows))
        exact = exact_gradients(model)
        if frozen:
            model.lm_head.linear.weight.requires_grad_(False)
        if tied:
            fully_shard([model.embedding, model.lm_head], mp_policy=policy)
        else:
            fully_shard(model.lm_head, mp_policy=policy)
            model.lm_head.set_unshard_in_backward(unshards)
        fully_shard(model, mp_policy=policy)
        with CommDebugMode() as communication:
            loss = model(*batch(rank))
            # As a unit of its own, this rank has only its rows again.
            assert tied or model.lm_head.linear.weight.to_local().shape == (49 - rank, H)
            loss.backward()
        counts.append(communication.get_total_counts())
        check(model, exact, bound=bound)
    # However many chunks there are; and the gradients are there before the backward, which needs no weight.
    assert counts[0] == counts[1] > counts[2] or (tied and counts[0] == counts[1] == counts[2]), counts


@on_two_ranks(mean=FLOAT32, num_items={"has_num_items": True, **FLOAT32}, bfloat16=BFLOAT16)
def fsdp2_divides_the_vocabulary_too(rank, policy, bound, has_num_items=False):
    """Gradients are those of the mean over all tokens, in two equal batches; parameters are those of a state dict."""
    model, mesh = ModelWithLoss(), init_device_mesh("cpu", (2,))
    exact, head = exact_gradients(model, is_token_mean=True), model.lm_head
    head.vocab_parallel = VocabParallel(group=mesh, data_parallel=True)
    head.linear.weight = nn.Parameter(distribute_tensor(head.linear.weight.detach(), mesh, [Shard(0)]))
    for module in (model.hidden, model.embedding):
        fully_shard(module, mp_policy=policy)
    fully_shard(model, mesh=mesh, ignored_params=set(head.parameters()))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, ModelWithLoss().state_dict(), options=options)
    torch.testing.assert_close(get_model_state_dict(model, options=options), dict(ModelWithLoss().state_dict()))
    tokens, labels = batch(rank)
    for _ in range(2):
        loss = model(tokens, labels, 2 * count_items(labels, group=dist.group.WORLD) if has_num_items else None)
        (loss if has_num_items else loss / 2).backward()
    check(model, exact, bound=bound)
    assert head.linear.weight.grad.placements == (Shard(0),)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    exact_norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    assert error(norm.full_tensor(), exact_norm) < bound
    head.linear.weight = nn.Parameter(head.linear.weight.full_tensor())
    with pytest.raises(TypeError, match="weight must be a DTensor with vocab_parallel"):
        model(tokens, labels)


@on_two_ranks()
def module_with_a_divided_weight(rank):
    case, mesh = make_case(bias=True, dtype=torch.float64), init_device_mesh("cpu", (2,))
    module = LinearCrossEntropyLoss(*case.weight.shape[::-1], bias=True, dtype=torch.float64)
    x, weight, bias = (distribute_tensor(tensor.detach(), mesh, [Shard(0)]) for tensor in case.operands())
    module.linear.weight, module.linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    # Nobody has waited for this all-gather yet.
    hidden = x.requires_grad_().redistribute(placements=[Replicate()], async_op=True)
    module(hidden, case.target).backward()
    tensors = x, module.linear.weight, module.linear.bias
    for tensor, gradient in zip(tensors, truth(case).gradients, strict=True):
        assert tensor.grad.placements == (Shard(0),) and error(tensor.grad.full_tensor(), gradient) < 1e-12


@on_two_ranks(ddp={"is_ddp": True}, fsdp2_tied={"is_ddp": False})
def backend_of_torch_compile(rank, is_ddp):
    """With `aot_eager` in place of Inductor, which takes seconds for each program.

    DDPOptimizer cuts the graph into one for each bucket, of which the last has the head and its loss.
    """
    vocab = 2**14 if is_ddp else V  # The embedding and the head then have 1 MiB each.
    model = Model(vocab, tied=not is_ddp)
    exact, mesh = exact_gradients(model), init_device_mesh("cpu", (2,))
    step = DistributedDataParallel(model, bucket_cap_mb=1) if is_ddp else fully_shard(model, mesh=mesh)
    with mock.patch("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **others: aot_eager(gm, inputs)):
        compiled = torch.compile(step, backend=compile_graph, options={"strict": True})
        for _ in range(2):
            step.zero_grad()
            compiled(*batch(rank, vocab)).backward()
    check(model, exact)
    assert_fused(compiled, times=1)
    assert (len(thunder_flce.explain(compiled)) > 1) == is_ddp


@on_two_ranks()
def compiled_call_whose_start_is_an_argument(rank):
    """Of which Dynamo would make a symbol."""
    case = make_case(dtype=torch.float64)
    exact = truth(case).loss
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((40, 61), (60, 41)):
        part, parallel = parts(sizes)[rank], VocabParallel(group=dist.group.WORLD, start=parts(sizes)[rank].start)
        assert error(compiled(case.x, case.weight[part], case.target, vocab_parallel=parallel), exact) < 1e-12


def _on_gpus(rank: int) -> list[str]:
    """With NCCL, what thunder distributes, and a compiled call; in words, what is wrong."""
    device, ranks, wrong = torch.device("cuda", rank), dist.get_world_size(), []
    for kind in ("ddp", "fsdp", "column_parallel"):
        model, is_column = Model(96), kind == "column_parallel"
        exact = exact_gradients(model, [0] * ranks if is_column else range(ranks), ranks=ranks)
        step = thunder_flce.jit(model.to(device), strict=True)
        distribute = getattr(thunder.distributed, kind)
        if is_column:
            step = distribute(step, ["lm_head"])
        else:
            step = distribute(step, device=device) if kind == "fsdp" else distribute(step)
        step(*(tensor.to(device) for tensor in batch(0 if is_column else rank, 96))).backward()
        assert_fused(step)
        for name, gradient in exact.items():
            is_part = kind == "fsdp" or (is_column and name == "lm_head.weight")
            gradient = padded_part(rank, gradient, ranks) if is_part else gradient
            distance = error(step.get_parameter(name).grad.cpu(), gradient)
            if not distance < 1e-3:
                wrong.append(f"{kind}, {name}: {distance}")

    def call(x, weight, target):
        return linear_cross_entropy(x, weight, target, vocab_parallel=dist.group.WORLD)

    sizes = (200, *[20] * (ranks - 2), 131 - 20 * (ranks - 2))
    part = part_of(make_case(tokens=64, vocab=331, hidden=64, device="cuda"), parts(sizes)[rank])
    results = []
    for step in (call, torch.compile(call, fullgraph=True)):
        loss = step(part.x, part.weight, part.target)
        results.append((loss, *torch.autograd.grad(loss, (part.x, part.weight))))
    if not all(map(torch.equal, *results)):
        wrong.append("a compiled call differs")
    return wrong


@pytest.mark.gpu(count=2)
def test_on_gpus():
    assert as_processes(GPUS, _on_gpus, device="cuda") == [[]] * GPUS


def _passes(rank: int, case) -> bool:
    case(rank)
    return True


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(name):
    for rank, result in enumerate(as_processes(2, partial(_passes, case=CASES[name]))):
        assert result is True, f"on rank {rank}: {result}"
