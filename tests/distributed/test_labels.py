"""Labels of training on several ranks."""

import numpy
import pytest
import thunder
import torch

from thunder_flce import count_items, shift_labels


def test_alone_it_is_the_number_of_targets():
    target = torch.tensor([[1, -100, 3], [7, 7, 0]])
    assert count_items(target) == 5 and count_items(target, ignore_index=numpy.int64(7)) == 4
    assert count_items(target.int(), ignore_index=2**32 + 7) == 6
    for dtype in (torch.float32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"target must be a tensor of integers, but got {dtype}"):
            count_items(target.to(dtype))
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a DeviceMesh .* but got str"):
        count_items(target, group="tp")


def test_labels_are_shifted_before_tokens_are_divided():
    labels = torch.arange(16).reshape(2, 8)
    shifted = shift_labels(labels)
    assert shifted.tolist() == [[1, 2, 3, 4, 5, 6, 7, -100], [9, 10, 11, 12, 13, 14, 15, -100]]
    assert torch.equal(thunder.jit(shift_labels)(labels), shifted)
    assert shift_labels(labels.int(), ignore_index=-1).dtype == torch.int32
    assert shift_labels(labels, ignore_index=-1)[1, -1] == -1
    assert shift_labels(labels[:, :0]).shape == (2, 0)
    with pytest.raises(TypeError, match="labels must be a tensor of integers, but got list"):
        shift_labels([1, 2])
    for function in (shift_labels, count_items):
        with pytest.raises(TypeError, match="ignore_index must be an int, but got NoneType"):
            function(labels, None)
    with pytest.raises(ValueError, match="labels must have at least one dimension"):
        shift_labels(torch.tensor(1))
    with pytest.raises(ValueError, match="torch.uint8, which cannot hold ignore_index, -100; pass labels.long()"):
        shift_labels(labels.byte())
