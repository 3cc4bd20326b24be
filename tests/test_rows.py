"""Which rows are computed, and how what was computed of them finds its tokens."""

import pytest
import torch

from thunder_flce import rows
from thunder_flce.rows import RowPolicy, RowSelection


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("ignored", [(), (0,), (0, 1, 5, 6, 7, 19), (17, 18, 19), tuple(range(20)), tuple(range(19))])
def test_spread(ignored, block, monkeypatch):
    """In place what `scatter` does; what lay in the other rows, were it NaN, is gone."""
    monkeypatch.setattr(rows, "_MOVED_ROWS", block)
    target = torch.arange(20) % 7
    target[list(ignored)] = -100
    selected = RowSelection(target, 7, -100, RowPolicy()).rows()
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
