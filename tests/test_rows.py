"""Which rows are computed, and how what was computed of them finds its tokens."""

import pytest
import torch

from thunder_flce import Options, linear_cross_entropy, products, rows
from thunder_flce.rows import RowPolicy, RowSelection


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("ignored", [(), (0,), (0, 1, 5, 6, 7, 19), (17, 18, 19), tuple(range(20)), tuple(range(19))])
@pytest.mark.parametrize("policy", ["skip", "skip_on_device"])
def test_spread(policy, ignored, block, monkeypatch):
    """In place what `scatter` does; what lay in the other rows, were it NaN, is gone."""
    monkeypatch.setattr(rows, "_MOVED_ROWS", block)
    target = torch.arange(20) % 7
    target[list(ignored)] = -100
    selected = RowSelection(target, 7, -100, RowPolicy(ignored_rows=policy)).rows()
    packed = torch.randn(selected.count, 3)
    tensor = torch.full((20, 3), float("nan"))
    tensor[: selected.count] = packed
    selected.spread_(tensor)
    assert torch.equal(tensor, selected.scatter(packed))


def test_take_and_scatter():
    target = torch.tensor([3, -100, 1, 2, -100])
    selected = RowSelection(target, 4, -100, RowPolicy()).rows()
    x = torch.randn(5, 2)
    assert torch.equal(selected.take(x, slice(1, 3)), x[[2, 3]])
    assert torch.equal(selected.scatter(selected.gather(x)), torch.where((target == -100)[:, None], 0, x))


def test_on_the_device_valid_rows_come_first():
    """Of each chunk, too; zeros follow, whatever the ignored rows hold."""
    target = torch.tensor([-100, 3, -100, 1, 2, -100])
    selected = RowSelection(target, 4, -100, RowPolicy(ignored_rows="skip_on_device")).rows()
    assert selected.count == 6
    assert [int(selected.valid_rows(chunk)) for chunk in selected.chunks(2, 2)] == [2, 1, 0]
    assert int(selected.valid_rows(slice(None))) == 3
    assert selected.target.tolist() == [3, 1, 2, 0, 0, 0]
    x = torch.randn(6, 2)
    x[target == -100] = float("nan")
    taken = [selected.take(x, chunk) for chunk in selected.chunks(2, 2)]
    assert torch.equal(torch.cat(taken), torch.cat([x[[1, 3, 4]], torch.zeros(3, 2)]))
    out = torch.empty(2, 2)
    assert selected.take(x, slice(2, 4), out).data_ptr() == out.data_ptr() and torch.equal(out, taken[1])


@pytest.mark.parametrize("policy", ["skip", "compute"])
def test_elsewhere_all_rows_of_a_chunk_count(policy):
    target = torch.tensor([-100, 3, -100, 1])
    assert RowSelection(target, 4, -100, RowPolicy(ignored_rows=policy)).rows().valid_rows(slice(0, 2)) is None


@pytest.mark.parametrize("strategy", ["gradients_in_forward", "save_logits"])
def test_rows_of_x_take_no_memory_beside_dx(strategy, monkeypatch):
    """Where rows are skipped, those of a chunk are packed where its dX goes."""
    addresses = []

    def spy(name, read):
        function = getattr(products, name)

        def call(*arguments, **settings):
            addresses.append(read(*arguments).data_ptr())
            return function(*arguments, **settings)

        monkeypatch.setattr(products, name, call)

    spy("weight_gradient_", lambda out, dlogits, x: x)
    spy("input_gradient_", lambda out, dlogits, weight: out)
    x, weight = torch.randn(40, 8).requires_grad_(), torch.randn(12, 8).requires_grad_()
    target = torch.randint(0, 12, (40,))
    target[::3] = -100
    options = Options(strategy=strategy, chunk_rows=None if strategy == "save_logits" else 10)
    linear_cross_entropy(x, weight, target, options=options).backward()
    assert addresses[::2] == addresses[1::2]
    assert len(set(addresses)) == (1 if strategy == "save_logits" else 3)
