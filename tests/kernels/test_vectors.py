"""Triton's kernels for vectors of a number a token against PyTorch's operations, and the scaling of gradients.

On a GPU and, in a process of its own, in Triton's interpreter.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from interpreted import DEVICE, INTERPRETED, on_device, prepare_row_kernels
from thunder_flce.device import ABSENT_DEVICE
from thunder_flce.engine.kernels import scaling
from thunder_flce.engine.kernels.interface import Prepared, RowStatistics
from thunder_flce.operation.loss import NOTHING_IGNORED, OUTPUTS, Row

ONE_MULTIPROCESSOR = replace(ABSENT_DEVICE, multiprocessors=1)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VOCAB = 50


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    prepare_row_kernels(monkeypatch)


def _vectors():
    from thunder_flce.engine.kernels import triton_vectors

    return triton_vectors


def _expected(target, *, ignore_index, token_weights, class_weight, num_items, upstream, reduction, ignores):
    """The fields of `Prepared` by PyTorch's operations, in float64."""
    target = target.long()
    is_label = target != ignore_index if ignores else torch.ones_like(target, dtype=torch.bool)
    weight = torch.ones_like(target, dtype=torch.float64) if token_weights is None else token_weights.double()
    valid = is_label & (weight != 0)
    wrong = is_label & ((target < 0) | (target >= VOCAB))
    target, weight = torch.where(is_label & ~wrong, target, 0), torch.where(valid, weight, 0.0)
    at_target = None if class_weight is None else class_weight[target].double()
    total, total_z = (weight if at_target is None else weight * at_target).sum(), weight.sum()
    if num_items is not None:
        total = total_z = torch.where(num_items == 0, float("inf"), num_items.double())
    divisors = torch.stack([total, total_z]) if reduction == "mean" else torch.ones(2, device=target.device)
    s = torch.where(valid, weight * (1 if upstream is None else upstream.double()) / divisors[0], 0.0)
    order = torch.cat([valid.nonzero()[:, 0], (~valid).nonzero()[:, 0]])
    counts = torch.stack([valid.sum(), wrong.sum()])
    return target, weight, s, at_target, divisors, counts, (~wrong.any())[None].long(), order


@on_device
@pytest.mark.parametrize("tokens", [1, 7, 2048, 5001])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("weighted", "of_classes", "num_items"), list(itertools.product([False, True], repeat=3)))
def test_prepare(tokens, reduction, weighted, of_classes, num_items):
    generator = torch.Generator().manual_seed(tokens)
    random = lambda *size: torch.rand(*size, generator=generator).to(DEVICE)  # noqa: E731
    target = torch.randint(-1, VOCAB, (tokens,), generator=generator).to(DEVICE)
    settings = {
        "ignore_index": -1,
        "token_weights": random(tokens).sub(0.3).clamp(min=0) if weighted else None,
        "class_weight": random(VOCAB) if of_classes else None,
        "num_items": torch.tensor(7, device=DEVICE) if num_items else None,
        "upstream": torch.tensor(-0.75, device=DEVICE) if weighted else random(tokens) if of_classes else None,
        "reduction": reduction,
        "ignores": True,
    }
    _check(target, settings)


def _check(target, settings):
    """In the tokens' order, and valid ones first, of which only these are defined."""
    expected = _expected(target, **settings)
    _check_each(_vectors().prepare(target, vocab=VOCAB, **settings), (*expected[:-1], None))
    order, valid = expected[-1], slice(int(expected[5][0]))
    *vectors, divisors, counts, is_right, got_order = _vectors().prepare(target, vocab=VOCAB, ordered=True, **settings)
    got = [None if each is None else each[valid] for each in vectors]
    in_order = [None if each is None else each[order[valid]] for each in expected[:4]]
    _check_each([*got, divisors, counts, is_right, got_order], [*in_order, *expected[4:]])


def _check_each(got, expected):
    for name, of_got, of_expected in zip(Prepared._fields, got, expected, strict=True):
        if of_expected is None:
            assert of_got is None
        elif of_expected.dtype in (torch.int64, torch.bool):
            assert of_got.dtype == of_expected.dtype and torch.equal(of_got, of_expected), name
        else:
            assert of_got.dtype == FP32
            torch.testing.assert_close(of_got.double(), of_expected.double(), rtol=1e-6, atol=0, equal_nan=True)


PLAIN = {"token_weights": None, "class_weight": None, "num_items": None, "upstream": None, "reduction": "mean"}


@on_device
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("ignore_index", "ignores"), [(-100, True), (3, True), (200, True), (-1, True), (NOTHING_IGNORED, False)]
)
def test_labels_of_any_integer_dtype(dtype, ignore_index, ignores):
    """Compared in 64 bits: 156 of 8 bits is not -100. Labels outside the vocabulary are counted."""
    numbers = [0, 3, 49, 50, 100, 3] + ([200, 255, 156] if dtype == torch.uint8 else [-100, -1, -5])
    numbers += [2**40 + 3, -(2**40)] if dtype == torch.int64 else []
    target = torch.tensor(numbers, device=DEVICE, dtype=dtype)
    _check(target, {**PLAIN, "ignore_index": ignore_index, "ignores": ignores})


@on_device
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_valid_row_and_no_items(reduction):
    """The scales are 0, though they are quotients of zeros; the mean over no rows is NaN, and over no items 0."""
    target = torch.full((5,), -100, device=DEVICE)
    settings = {**PLAIN, "ignore_index": -100, "ignores": True, "reduction": reduction}
    _check(target, settings)
    _check(target, settings | {"upstream": torch.tensor(float("nan"), device=DEVICE)})
    _check(target * 0 + 1, settings | {"num_items": torch.tensor(0.0, device=DEVICE)})
    for num_items, expected in [(None, float("nan")), (torch.tensor(0, device=DEVICE), 0.0)]:
        prepared = _vectors().prepare(target, vocab=VOCAB, **(settings | {"num_items": num_items}))
        zeros = torch.zeros(5, device=DEVICE)
        loss = _finish(RowStatistics(zeros, zeros), zeros, prepared, reduction=reduction)
        assert loss.isnan() == (reduction == "mean" and expected != 0) and (loss == 0) != loss.isnan()


def _finish(statistics, z_y, prepared, *, z_loss=0.0, reduction, outputs=()):
    loss, found = _vectors().finish(
        statistics, z_y, weight=prepared.weight, at_target=prepared.at_target, divisors=prepared.divisors,
        z_loss=z_loss, reduction=reduction, outputs=outputs,
    )  # fmt: skip
    return (loss, found) if outputs else loss


@on_device
@pytest.mark.parametrize("outputs", [("log_prob",), ("entropy", "log_sum_exp"), ("log_sum_exp", "argmax", "log_prob")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_outputs_that_come_with_the_loss(outputs, reduction):
    """They have the bits of the formulas, in ignored rows 0, and change nothing of the loss."""
    tokens = 5001
    target = torch.randint(VOCAB, (tokens,), device=DEVICE)
    target[::3] = -100
    prepared = _vectors().prepare(target, vocab=VOCAB, ignore_index=-100, reduction=reduction)
    row_max, row_log_sum, z_y = torch.randn(3, tokens, device=DEVICE)
    row_log_sum, z_y[3], row_max[4] = row_log_sum.abs(), float("nan"), float("inf")
    statistics = RowStatistics(row_max, row_log_sum)
    loss, found = _finish(statistics, z_y, prepared, outputs=outputs, reduction=reduction)
    assert {*found} == {*outputs} & {"log_prob", "log_sum_exp"}
    for name, got in found.items():
        row = Row(row_max, row_log_sum, z_y, {})
        right = torch.where(target == -100, 0, OUTPUTS[name].of(row, VOCAB, torch.log))
        assert torch.equal(got.nan_to_num(7.0), right.nan_to_num(7.0)), name
    alone = _finish(statistics, z_y, prepared, reduction=reduction)
    assert torch.equal(loss.nan_to_num(7.0), alone.nan_to_num(7.0))


@on_device
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("of_classes", [False, True])
def test_finish(reduction, z_loss, dtype, of_classes):
    """Ignored rows may have anything; a u_y above the maximum, by rounding, is no gain."""
    tokens = 2051
    z = (3 * torch.randn(tokens, VOCAB, device=DEVICE)).to(dtype)
    target = torch.randint(VOCAB, (tokens,), device=DEVICE)
    target[::3] = -100
    weights = torch.rand(tokens, device=DEVICE)
    class_weight = torch.rand(VOCAB, device=DEVICE) if of_classes else None
    prepared = _vectors().prepare(
        target, vocab=VOCAB, ignore_index=-100, token_weights=weights, class_weight=class_weight, reduction=reduction
    )
    u, column = z.double(), prepared.target[:, None]
    u_y, row_max = u.gather(1, column)[:, 0], u.amax(1)
    u_y[4], row_max[4] = row_max[4] + 1e-3, row_max[4]
    z_y = z.gather(1, column)[:, 0]
    z_y[3] = float("nan")
    row_log_sum = (u - row_max[:, None]).exp().sum(1).log()
    row_max[4] -= 100
    weight, at_target = prepared.weight.double(), 1 if class_weight is None else prepared.at_target.double()
    shifted = torch.where(target == -100, 0, z_y.double() - row_max).clamp(max=0)
    terms = weight * at_target * (row_log_sum - shifted), weight * z_loss * (row_max + row_log_sum) ** 2
    if reduction == "none":
        expected = sum(terms)
    else:
        expected = sum(term.sum() / divisor for term, divisor in zip(terms, prepared.divisors.double(), strict=True))
    statistics = RowStatistics(row_max.float(), row_log_sum.float())
    loss = _finish(statistics, z_y, prepared, z_loss=z_loss, reduction=reduction)
    assert loss.shape == expected.shape and loss.dtype == FP32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@on_device
def test_a_loss_that_is_not_finite_stays_so():
    prepared = _vectors().prepare(torch.zeros(3, dtype=torch.int64, device=DEVICE), vocab=2, ignore_index=-1,
                                  reduction="none")  # fmt: skip
    nan, inf = float("nan"), float("inf")
    row_max, row_log_sum, z_y = torch.tensor([[0.0, inf, 0.0], [nan, 0.0, 1.0], [0.0, inf, -inf]], device=DEVICE)
    loss = _finish(RowStatistics(row_max, row_log_sum), z_y, prepared, reduction="none")
    assert loss[:2].isnan().all() and loss[2] == inf
    nothing = _vectors().prepare(torch.zeros(0, dtype=torch.int64, device=DEVICE), vocab=2, ignore_index=-1,
                                 reduction="none")  # fmt: skip
    empty = torch.zeros(0, device=DEVICE)
    loss = _finish(RowStatistics(empty, empty), empty, nothing, reduction="none")
    assert loss.shape == (0,) and nothing.counts.tolist() == [0, 0] and nothing.is_right


@on_device
@pytest.mark.parametrize(
    ("grad", "expected", "count"),
    [(1.0, None, 3), (-0.75, None, None), (2.0, 2.0, 3), (3.0, 1.7, 3), (float("nan"), None, 0), (1.0, 0.5, 0)],
)
@pytest.mark.parametrize(("size", "dtype"), [(1, BF16), (64, FP16), (300, FP32), (9000, BF16)], ids=str)
def test_finished_gradients_are_multiplied(size, grad, expected, count, dtype, monkeypatch):
    """By Triton and by PyTorch; what lies behind them is left alone, and where the factor is 1 all of it."""
    monkeypatch.setattr(_vectors(), "Device", SimpleNamespace(of=lambda device: ONE_MULTIPROCESSOR))
    monkeypatch.setattr(_vectors(), "_PROGRAMS_PER_MULTIPROCESSOR", 2)
    memory = torch.randn(size + 100, device=DEVICE).to(dtype)
    before, of_torch = memory.clone(), memory[:size].clone()
    scalars = [None if of is None else torch.tensor(of, device=DEVICE) for of in (grad, count, expected)]
    _vectors().scale_([memory[:size]], *scalars)
    factor = 0.0 if count == 0 else grad / (expected or 1)
    torch.testing.assert_close(memory[:size].double(), before[:size].double() * factor, rtol=2**-7, atol=0)
    assert torch.equal(memory[size:], before[size:]) and (factor != 1 or torch.equal(memory, before))
    monkeypatch.setattr(scaling, "library", lambda dtype, device: "PyTorch")
    named = {"valid_count": scalars[1], "expected": scalars[2]}
    (product,) = scaling.scaled_gradients([of_torch], scalars[0], **named, may_overwrite=False)
    assert product is not of_torch and torch.equal(of_torch, before[:size])
    (in_place,) = scaling.scaled_gradients([of_torch], scalars[0], **named, may_overwrite=True)
    assert in_place is of_torch
    torch.testing.assert_close(in_place, memory[:size], rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.equal(in_place, product)


@on_device
def test_several_gradients_are_multiplied_at_once(monkeypatch):
    """More than one launch takes, of several sizes, one of them empty."""
    monkeypatch.setattr(_vectors(), "Device", SimpleNamespace(of=lambda device: ONE_MULTIPROCESSOR))
    sizes = (300, 5, 9000, 0, 17, 4096)
    gradients = [torch.randn(size, device=DEVICE).to(BF16) for size in sizes]
    before = [gradient.clone() for gradient in gradients]
    _vectors().scale_(gradients, torch.tensor(-0.25, device=DEVICE))
    for gradient, old in zip(gradients, before, strict=True):
        assert torch.equal(gradient, old * -0.25)


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64], ids=str)
def test_what_gradients_may_be_expected_to_be(dtype):
    inf, small = float("inf"), torch.finfo(dtype).smallest_normal
    for expected, right in [(0, 1), (-0.0, 1), (inf, 1), (-inf, 1), (float("nan"), 1), (small, small), (-3, -3)]:
        given = torch.tensor(expected, dtype=dtype)
        usable = scaling.usable(given)
        assert usable == right and usable.dtype == dtype
        assert given == expected or given.isnan()
