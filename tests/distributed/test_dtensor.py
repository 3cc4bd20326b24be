"""DTensors as arguments: the loss of the whole in float64, and gradients in the placements of what they belong to."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from divided import R, assert_refused, mesh_result, placed_case
from ranks import RankErrors, as_threads
from reference import Case, assert_close_to_truth, error, incoming_gradients, make_case, truth
from thunder_flce import LinearCrossEntropyLoss, count_items, linear_cross_entropy


def make_batch(**changes) -> Case:
    """Four sequences of eight tokens, and a vocabulary that no number of ranks divides."""
    case = make_case(**{"tokens": 32, "vocab": 41, "hidden": 8, "bias": True, "ranks": (3,), **changes})

    def as_batch(tensor):
        return tensor.detach().view(4, 8, -1).requires_grad_(tensor.requires_grad)

    case.x, case.target = as_batch(case.x), case.target.view(4, 8)
    case.terms = tuple((as_batch(x), weight) for x, weight in case.terms)
    return case


# Placements of the hidden states and of the weight along one dimension of a mesh.
ALONG = [(R, R), (R, Shard(0)), (Shard(0), R), (Shard(1), R), (Shard(0), Shard(0)), (Shard(1), Shard(0))]
MESHES = [
    *(((2,), (x,), (weight,)) for x, weight in ALONG),
    *(((2, 2), *zip(*pair, strict=True)) for pair in itertools.product(ALONG, repeat=2) if pair[0][1] == R),
    ((3,), (Shard(0),), (R,)),  # Parts of two, two and no sequences.
    # The vocabulary along the first dimension.
    *(((2, 2), (x, Shard(other)), (Shard(0), R)) for x in (R, Shard(0), Shard(1)) for other in (0, 1)),
    ((2, 2), (Shard(0), R), (Shard(0), R)),
    ((2, 2, 2), (Shard(0), Shard(1), Shard(1)), (R, R, Shard(0))),
]


@pytest.mark.parametrize("placements", MESHES, ids=str)
def test_every_placement(placements):
    case = make_batch(dtype=torch.float64)
    result = mesh_result(case, placements, num_items=13.0, label_smoothing=0.1)
    assert_close_to_truth(result, case, tiny=True, num_items=13.0, label_smoothing=0.1)


def test_tensor_parallel_inside_fully_shard():
    """Each rank has a part of its rows; in the forward, all of its rows."""
    case = make_batch(bias=False, ranks=(), dtype=torch.float64)
    exact = truth(case)

    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        head, sequences = LinearCrossEntropyLoss(8, 41), slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        head.linear.weight = nn.Parameter(case.weight.detach().clone())
        parallelize_module(head, mesh["tp"], {"linear": ColwiseParallel()})
        fully_shard(head, mesh=mesh["dp"])
        x = distribute_tensor(case.x.detach()[sequences].clone(), mesh["tp"], [Shard(1)]).requires_grad_()
        weight, labels = head.linear.weight, case.target[sequences]
        num_items = count_items(labels, group=mesh["dp"])
        loss = head(x, labels, num_items=num_items)
        loss.backward()
        for tensor, gradient in ((weight, exact.gradients[1]), (x, 2 * exact.gradients[0][sequences])):
            assert tensor.grad.placements == tensor.placements
            assert error(tensor.grad.full_tensor(), gradient) < 1e-12
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        assert error(total / 2, exact.loss) < 1e-12
        x = x.detach()
        on_grid = DTensor.from_local(x.to_local(), mesh, [Shard(0), Shard(1)], run_check=False)
        not_on_mesh = r"linear_weight must be on input's mesh, .*tp=2.*, but is on .*dp=2, tp=2.*fully_shard"
        strided = r"linear_weight must be .*but is _StridedShard\(.* along 'dp'; redistribute .*fully_shard"
        assert_refused(
            linear_cross_entropy,
            {"linear_weight": weight, "target": labels, "num_items": num_items},
            ({"input": x}, not_on_mesh),
            ({"input": on_grid}, strided),
            ({"input": x.to_local()}, "input must be a DTensor because others are .*fully_shard"),
        )

    as_threads(4, run)


@pytest.mark.parametrize("wrong", [{"options": 3}, {"token_loss": 3}, {"num_items": None}], ids=str)
def test_what_one_rank_refuses_raises_on_all_of_them(wrong):
    case = make_batch()

    def run(rank):
        placed = placed_case(case, init_device_mesh("cpu", (2, 2)), [Shard(0), R], [R, Shard(0)])
        settings = {"linear_bias": placed.bias, "num_items": 32.0, **(wrong if rank == 1 else {})}
        if rank < 2:  # Those that divide the vocabulary of the same tokens.
            linear_cross_entropy(placed.x, placed.weight, placed.target, **settings)

    with pytest.raises(RankErrors) as raised:
        as_threads(4, run)
    (name,), errors = wrong, raised.value.errors
    assert str(errors[0]).startswith("rank 1 of vocab_parallel has refused its arguments: ")
    assert name in str(errors[1]) and len(errors) == 2


def test_plain_tensors_of_all_tokens_or_of_this_rank():
    case = make_batch(bias=False, ranks=())
    weights, case.class_weight = torch.rand(4, 8), torch.rand(41)
    exact = truth(case, reduction="sum", token_weights=weights).loss

    def run(rank):
        mesh, tokens = init_device_mesh("cpu", (2,)), slice(4 * rank, 4 * rank + 4)
        placed = placed_case(case, mesh, [Shard(1)], [Shard(0)])
        settings = {"reduction": "sum", "weight": distribute_tensor(case.class_weight, mesh, [Shard(0)])}
        for target, token_weights in (
            (case.target, weights),
            (case.target[:, tokens], weights[:, tokens]),
            (distribute_tensor(case.target, mesh, [Shard(0)]), distribute_tensor(weights, mesh, [Shard(1)])),
        ):
            loss = linear_cross_entropy(placed.x, placed.weight, target, token_weights=token_weights, **settings)
            assert error(loss, exact) < 1e-6

    as_threads(2, run)


@pytest.mark.parametrize("vocab", [41, 1])
def test_term_that_is_placed_otherwise_than_the_weight(vocab):
    """Ranks have parts of different sizes of its hidden dimension; a single column of logits is all on one rank."""
    case = make_batch(bias=False, dtype=torch.float64, vocab=vocab)
    exact, ((_, term_weight),) = truth(case), case.terms

    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        placed = placed_case(case, mesh, [R], [Shard(0)])
        weight = distribute_tensor(term_weight.detach().clone(), mesh, [Shard(1)]).requires_grad_()
        terms = [(placed.terms[0][0], weight)]
        loss = linear_cross_entropy(placed.x, placed.weight, placed.target, terms=terms)
        loss.backward()
        assert error(loss, exact.loss) < 1e-12
        assert error(weight.grad.full_tensor(), exact.gradients[-1]) < 1e-12

    as_threads(2, run)


def test_outputs_that_are_changed_in_place():
    case = make_batch(bias=False, ranks=(), dtype=torch.float64)
    exact = truth(case, torch.zeros(4, 8), reduction="none", outputs=("entropy",))
    (upstream,) = incoming_gradients(case, ("entropy",), torch.float64)

    def run(rank):
        placed = placed_case(case, init_device_mesh("cpu", (2,)), [Shard(0)], [R])
        _, entropy = linear_cross_entropy(placed.x, placed.weight, case.target, reduction="none", outputs=("entropy",))
        entropy *= 3
        entropy.full_tensor().backward(upstream / 3)
        assert error(placed.x.grad.full_tensor(), exact.gradients[0]) < 1e-12

    as_threads(2, run)


# What has no meaning.

REFUSED = [
    ((Shard(2),), (Shard(0),), {}, r"input must be Replicate\(\) or a Shard of a dimension of tokens.*Shard\(dim=2\)"),
    ((Partial(),), (Shard(0),), {}, r"input must be .* but is Partial\(sum\) along 'tp'; redistribute it first"),
    ((R,), (Shard(1),), {}, r"linear_weight must be .*Shard\(0\), as Colwise.* but is Shard\(dim=1\) along 'tp'"),
    ((Shard(0),), (R,), {}, r'reduction "mean" needs num_items.* because input is Shard\(dim=0\) along .tp.'),
    ((Shard(0),), (R,), {"num_items": 9, "outputs": ("accuracy",)}, "outputs must not have 'accuracy', a mean over"),
    ((Shard(0),), (Shard(0),), {"target": torch.zeros(2, 4)}, r"target .*\(4, 8\), or .* rank's tokens, \(2, 8\), but"),
    ((R,), (Shard(0),), {"token_weights": torch.zeros(4, 5)}, r"token_weights must .*\(4, 8\), but got \(4, 5\)"),
    ((R,), (Shard(0),), {"input": torch.zeros(4, 8, 8)}, "input must be a DTensor because .*linear_weight"),
    ((R,), (Shard(0),), {"input": None}, "input must be a DTensor because .*linear_weight.* but got NoneType"),
    ((R,), (Shard(0),), {"linear_weight": torch.zeros(41, 8)}, r"linear_weight must be a DTensor .*fully_shard"),
    ((R,), (Shard(0),), {"linear_bias": torch.zeros(41)}, "linear_bias must be a DTensor"),
    ((R,), (Shard(0),), {"terms": [(torch.zeros(4, 8, 2),)]}, r"terms\[0\] must be a pair"),
    ((R,), (Shard(0),), {"vocab_parallel": "tp"}, "vocab_parallel must be a ProcessGroup or a DeviceMesh"),
]


def test_refused():
    case = make_batch(bias=False, ranks=())

    def run(rank):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = grid["tp"]

        def placed(tensor, placements, mesh=mesh):
            if isinstance(placements[0], Partial):
                return DTensor.from_local(tensor.detach(), mesh, placements)
            return distribute_tensor(tensor.detach().clone(), mesh, placements)

        for x_placements, weight_placements, change, message in REFUSED:
            x, weight = placed(case.x, x_placements), placed(case.weight, weight_placements)
            arguments = {"input": x, "linear_weight": weight, "target": case.target}
            assert_refused(linear_cross_entropy, arguments, (change, message))
        other = init_device_mesh("cpu", (1, 4))
        five = {"input": placed(case.x[:, :5], [Shard(1)]), "target": case.target[:, :5]}
        six = {"input": placed(case.x[:, :6], [Shard(1)] * 2, grid), "target": case.target[:, :6]}
        six["linear_weight"] = placed(case.weight, [R, Shard(0)], grid)
        twice = {"input": placed(case.x, [R] * 2, grid), "linear_weight": placed(case.weight, [Shard(0)] * 2, grid)}
        assert_refused(
            partial(linear_cross_entropy, num_items=9),
            {"input": placed(case.x, [R]), "linear_weight": placed(case.weight, [Shard(0)]), "target": case.target},
            (five, "dimension 1 of 5 tokens must be a multiple of the 2 ranks"),
            # Three tokens along the first dimension of the mesh are no two equal parts along the second.
            (six, r"1 of 6 tokens must be a multiple of the 4 ranks .* along 'tp', which"),
            ({"target": placed(case.target, [R, R], other)}, "target must be on input's mesh"),
            ({"linear_weight": placed(case.weight, [R, R], other)}, "linear_weight must be on input's mesh"),
            (twice, r"Shard\(0\) along one dimension of the mesh at most.*fully_shard"),
        )

    as_threads(4, run)
