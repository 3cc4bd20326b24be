"""Labels of training on several ranks."""

import numpy
import pytest
import thunder
import torch

from thunder_flce import count_items, shift_labels


def test_count_of_one_rank():
    target = torch.tensor([[1, -100, 3], [7, 7, 0]])
    assert count_items(target) == 5 and count_items(target, ignore_index=numpy.int64(7)) == 4
    assert count_items(target.int(), ignore_index=2**32 + 7) == 6
    for dtype in (torch.float32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"target must be a tensor of integers, but got {dtype}"):
            count_items(target.to(dtype))
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a DeviceMesh .* but got str"):
        count_items(target, group="tp")


def test_labels_are_shifted_before_tokens_are_divided():
    labels = torch.arange(8).reshape(2, 4)
    shifted = shift_labels(labels)
    assert shifted.tolist() == [[1, 2, 3, -100], [5, 6, 7, -100]]
    assert torch.equal(thunder.jit(shift_labels)(labels), shifted)
    as_int32 = shift_labels(labels.int(), ignore_index=-1)
    assert as_int32.dtype == torch.int32 and as_int32[1, -1] == -1
    assert shift_labels(labels[:, :0]).shape == (2, 0)
    for arguments, error, message in (
        (([1, 2],), TypeError, "labels must be a tensor of integers, but got list"),
        ((labels, None), TypeError, "ignore_index must be an int, but got NoneType"),
        ((torch.tensor(1),), ValueError, "labels must have at least one dimension"),
        ((labels.byte(),), ValueError, "torch.uint8, which cannot hold ignore_index, -100; pass labels.long()"),
    ):
        with pytest.raises(error, match=message):
            shift_labels(*arguments)
