"""Which of cuBLAS's algorithms runs a large product: the one that was the fastest when the product first ran.

cuBLAS's first proposal, the one that PyTorch runs, is not the fastest for the region's products, whose outputs are
large for the work behind them: at 2048 × 128256 × 4096 in bfloat16 on an H200, another proposal takes 6% less time for
the logits and 9% less for what is added to dW (small tiles, so that one is written while the next is summed); 21% less
at 512 tokens (traces/h200/products.jsonl).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from thunder_flce.cublaslt import Algorithm, Product, Signature
from thunder_flce.plan import TUNED_OPERATIONS

# Proposals that take up to this much longer than the fastest, run once or twice, are measured again, at length: under
# load a GPU lowers its clock, and then an algorithm that moves less data gains. No more than _FINALISTS, which at two
# bursts each take half a second.
_CLOSE = 1.05
_FINALISTS = 6
_BURST_SECONDS = 0.04

# Which of the sizes M, N and K is the number of tokens. It changes from chunk to chunk, so what was measured serves
# all numbers of tokens between the same powers of two.
_TOKENS = {"logits": 0, "dX": 0, "dW": 2}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was measured about a product out (M, N) = a (M, K) @ b (K, N)."""

    product: str
    """"logits", "dX" or "dW"."""

    sizes: tuple[int, int, int]
    """M, N and K."""

    algorithm: Algorithm | None
    """The fastest; None where cuBLAS proposed nothing."""

    gain: float
    """The time of cuBLAS's first proposal over that of the fastest."""

    seconds: float
    """What measuring has taken."""


_tunings: dict[tuple, Tuning] = {}


def tunings() -> list[Tuning]:
    """All of this process, in the order in which the products first ran."""
    return list(_tunings.values())


def run(name: str, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, *, accumulate: bool = False) -> bool:
    """Runs a product by the algorithm that is the fastest for it, which is measured if it is the first of its kind.

    Measuring runs the product some dozens of times and waits for the device. It needs no memory: each time, the product
    goes to `out`. So nothing is measured for a product that is added to `out`, nor while a CUDA graph is captured.

    Args:
        name: "logits", "dX" or "dW", the last for a product whose out will be added to.
        out: (M, N).
        a: (M, K).
        b: (K, N).
        bias: (N,) or None, added before the result is rounded.
        accumulate: whether the product is added to what out holds.

    Returns:
        Whether the product has run: not if it is small, nor if it lies in memory in a way that cuBLASLt cannot read,
        nor if nothing was measured.
    """
    (m, k), n = a.shape, b.shape[1]
    if 2 * m * n * k < TUNED_OPERATIONS:
        return False
    signature = Signature.of(out, a, b, bias)
    if signature is None:
        return False
    sizes = [m, n, k]
    sizes[_TOKENS[name]] = (sizes[_TOKENS[name]] - 1).bit_length()
    kind = (name, *sizes, *signature[:3], signature.a.is_transposed, signature.b.is_transposed, signature.has_bias)
    with torch.cuda.device(out.device):
        if kind not in _tunings:
            if accumulate or torch.cuda.is_current_stream_capturing():
                return False
            _tunings[kind] = _measured(name, signature, out, a, b, bias)
        algorithm = _tunings[kind].algorithm
        return algorithm is not None and _product(signature).run(algorithm, out, a, b, bias, accumulate=accumulate)


_product = lru_cache(maxsize=64)(Product)


def _measured(name: str, signature: Signature, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tuning:
    start = time.perf_counter()
    product = _product(signature)
    # All chunks but the first add to dW; what is in its memory now does not matter.
    accumulate = name == "dW"
    proposals, runs = [], []
    for proposal in product.proposals():
        run = partial(product.run, proposal, out, a, b, bias, accumulate=accumulate)
        if run():
            proposals.append(proposal)
            runs.append(run)
    algorithm, gain = None, 1.0
    if runs:
        index, gain = fastest(runs, _seconds)
        algorithm = proposals[index]
    return Tuning(
        product=name,
        sizes=(a.shape[0], b.shape[1], a.shape[1]),
        algorithm=algorithm,
        gain=gain,
        seconds=time.perf_counter() - start,
    )


def fastest(
    runs: list[Callable[[], object]], seconds: Callable[[Callable[[], object], int], float]
) -> tuple[int, float]:
    """The index of the fastest of `runs`, and how many times as long the first one takes.

    Args:
        runs: what to compare, the likeliest first; each has run before.
        seconds: gives the mean time of one of them, run so many times in a row.
    """
    times = [min(seconds(run, 1), seconds(run, 1)) for run in runs]
    order = sorted(range(len(runs)), key=times.__getitem__)
    finalists = [index for index in order[:_FINALISTS] if times[index] <= _CLOSE * times[order[0]]]
    # The first is always among them: it is what the others are compared with, and wins a draw.
    finalists = [0, *(index for index in finalists if index != 0)]
    totals = dict.fromkeys(finalists, 0.0)
    # There and back, so that a clock that falls meanwhile favours none.
    for index in [*finalists, *reversed(finalists)]:
        totals[index] += seconds(runs[index], math.ceil(_BURST_SECONDS / times[index]))
    best = min(finalists, key=totals.__getitem__)
    return best, totals[0] / totals[best]


def _seconds(run: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times
