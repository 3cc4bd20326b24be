"""How much memory a call needs at its peak."""

from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory that `call` holds at a time, in bytes, on top of what was held before.

    Counts what PyTorch allocates on `device`, whether Python, autograd or a compiled function asks for it. What `call`
    leaves behind, such as gradients, counts as well.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    # The CPU's allocator keeps no peak, but tells the profiler of every block that it gives out (bytes > 0) or takes
    # back (bytes < 0), in order.
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        call()
    held = peak = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
