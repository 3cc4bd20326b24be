"""How many rows are valid, as far as the host knows: a backward need not ask for what a forward has waited for.

The device would have to finish all that was launched before it answers. On an H200 it then idles for up to 0.6 ms,
until the host has launched the first kernels of the backward.
"""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# A weak reference keeps the address of a storage from being used again: it stands for one storage.
_known: dict[StorageWeakRef, int] = {}


def remember(count: Tensor, value: int) -> None:
    """Notes that `count`, () int64, holds `value`. Nobody may change it as long as its memory lives."""
    for memory in list(_known):
        if memory.expired():
            _known.pop(memory, None)
    _known[StorageWeakRef(count.untyped_storage())] = value


def value_of(count: Tensor) -> int:
    """The number in `count`, () int64; waits for the device where it is not known, such as in a copy."""
    known = _known.get(StorageWeakRef(count.untyped_storage()))
    return int(count) if known is None else known
