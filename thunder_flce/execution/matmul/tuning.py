"""Which of cuBLAS's algorithms runs a large product: the one that was the fastest when the product first ran.

cuBLAS's first proposal, the one that PyTorch runs, is not the fastest for the region's products, whose outputs are
large for the work behind them. At 2048 × 128256 × 4096 in bfloat16 on an H200, another takes 11% to 15% less time for
what is added to dW, and at 512 tokens 15% to 27% (small tiles, so that one is written while the next is summed). For
the logits it is up to 8%, and 15% at 512 tokens; dX, whose output is small, hardly gains, but up to 11% where a single
chunk holds all tokens, and 27% at 512 × 256000 × 2304 (`tuned_products` in traces/h200/regions.jsonl).

Only on Hopper: elsewhere nobody has looked whether all proposals add in the same order.
"""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from thunder_flce.execution.matmul.cublaslt import Algorithm, Product, Signature
from thunder_flce.planning.plan import HOPPER, TUNED_OPERATIONS

# Proposals that take up to this much longer than the fastest, run once or twice, are measured again, at length: under
# load a GPU lowers its clock, and then an algorithm that moves less data gains. No more than _FINALISTS and the first
# one: two bursts each take 0.3 s.
_CLOSE = 1.05
_FINALISTS = 4
_BURST_SECONDS = 0.03
_UNLUCKY = 1.2
# What a product is multiplied by while it is measured, the smallest number above 0. Added to a sum, it changes nothing
# but the sign of a 0 and, in 32 bits, a sum near 0. (cuBLAS need not compute what is multiplied by 0.)
_MEASURED_FACTOR = 2.0**-149

# Which of the sizes M, N and K is the number of tokens. It changes from chunk to chunk, so what was measured serves
# all numbers of tokens between the same powers of two, and others where nothing can be measured. Of dX, a quarter of
# those: it has few tiles, and it matters how they fill the last wave of thread blocks. (At 1229 × 4096, the algorithm
# for 2048 tokens takes two waves of large tiles and fills six tenths of them.)
_TOKENS = {"logits": 0, "dX": 0, "dW": 2}
_SIZES_AN_OCTAVE = {"logits": 1, "dX": 4, "dW": 1}


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
    """The time of the first algorithm that cuBLAS proposes over that of the fastest."""

    milliseconds: float
    """The time of the fastest, a burst of it."""

    seconds: float
    """What measuring has taken."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "algorithm"}


_tunings: dict[tuple, dict[int, Tuning]] = {}
"""By what a product is but for its tokens, and by `_bucket` of these."""


def tunings() -> list[Tuning]:
    """All of this process: those of one kind of product beside each other."""
    return [tuning for of_kind in _tunings.values() for tuning in of_kind.values()]


def run(name: str, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, *, accumulate: bool = False) -> bool:
    """Runs a product by the algorithm that is the fastest for it, which is measured if it is the first of its kind.

    Measuring runs the product some dozens of times and waits for the device. It needs no memory: each time, hardly more
    than 0 times the product goes to `out`, or is added to it. While a CUDA graph is captured nothing is measured: then
    what was measured for the nearest number of tokens has to do.

    Args:
        name: "logits", "dX" or "dW".
        out: (M, N).
        a: (M, K).
        b: (K, N).
        bias: (N,) or None, added before the result is rounded.
        accumulate: whether the product is added to what out holds.

    Returns:
        Whether the product has run: not if it is small, nor if it lies in memory in a way that cuBLASLt cannot read,
        nor if nothing was measured, nor while PyTorch is asked for deterministic algorithms.
    """
    (m, k), n = a.shape, b.shape[1]
    if 2 * m * n * k < TUNED_OPERATIONS or torch.are_deterministic_algorithms_enabled():
        return False
    signature = Signature.of(out, a, b, bias)
    if signature is None or torch.cuda.get_device_capability(out.device)[0] != HOPPER:
        return False
    sizes = [m, n, k]
    tokens = _bucket(name, sizes.pop(_TOKENS[name]))
    kind = (name, *sizes, *signature[:3], signature.a.is_transposed, signature.b.is_transposed, signature.has_bias)
    of_kind = _tunings.setdefault(kind, {})
    with torch.cuda.device(out.device):
        if tokens not in of_kind:
            if not torch.cuda.is_current_stream_capturing():
                of_kind[tokens] = _measured(name, signature, out, a, b, bias, accumulate=accumulate)
            elif of_kind:
                tokens = min(of_kind, key=lambda measured: max(measured / tokens, tokens / measured))
            else:
                return False
        algorithm = of_kind[tokens].algorithm
        return algorithm is not None and _product(signature).run(algorithm, out, a, b, bias, accumulate=accumulate)


def _bucket(name: str, tokens: int) -> int:
    """The largest number of tokens that shares what is measured for this one."""
    octave = 2 ** ((tokens - 1).bit_length() - 1)
    step = max(octave // _SIZES_AN_OCTAVE[name], 1)
    return -(-tokens // step) * step


_product = lru_cache(maxsize=64)(Product)


def _measured(
    name: str, signature: Signature, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, *, accumulate: bool
) -> Tuning:
    start = time.perf_counter()
    # dW is measured as a sum even for the first chunk, since it is one for all others; whatever is in its memory then
    # does not matter. Where it is never a sum, that may cost 3% (S2; at S1, S3 and U1 the same one is the fastest).
    how = {"accumulate": accumulate or name == "dW", "alpha": _MEASURED_FACTOR}
    proposals, runs = [], []
    try:
        product = _product(signature)
        for proposal in product.proposals():
            run_proposal = partial(product.run, proposal, out, a, b, bias, **how)
            if run_proposal():
                proposals.append(proposal)
                runs.append(run_proposal)
    except RuntimeError as error:
        warnings.warn(f"cuBLASLt cannot be asked for algorithms, products are PyTorch's: {error}", stacklevel=2)
    algorithm, gain, seconds = None, 1.0, math.nan
    if runs:
        index, gain, seconds = fastest(runs, _seconds)
        algorithm = proposals[index]
    return Tuning(
        product=name,
        sizes=(a.shape[0], b.shape[1], a.shape[1]),
        algorithm=algorithm,
        gain=gain,
        milliseconds=seconds * 1e3,
        seconds=time.perf_counter() - start,
    )


def fastest(
    runs: list[Callable[[], object]], seconds: Callable[[Callable[[], object], int], float]
) -> tuple[int, float, float]:
    """The index of the fastest of `runs`, how many times as long the first one takes, and the fastest one's seconds.

    Args:
        runs: what to compare, the likeliest first; each has run before.
        seconds: gives the mean time of one of them, run so many times in a row.
    """
    times = [seconds(run, 1) for run in runs]
    best = min(times)
    # Once more for those that may just have been unlucky.
    times = [min(t, seconds(run, 1)) if t <= _UNLUCKY * best else t for t, run in zip(times, runs, strict=True)]
    order = sorted(range(len(runs)), key=times.__getitem__)
    finalists = [index for index in order[:_FINALISTS] if times[index] <= _CLOSE * times[order[0]]]
    # The first is always among them: it is what the others are compared with, and wins a draw.
    finalists = [0, *(index for index in finalists if index != 0)]
    totals = dict.fromkeys(finalists, 0.0)
    # There and back, so that a clock that falls meanwhile favours none.
    for index in [*finalists, *reversed(finalists)]:
        totals[index] += seconds(runs[index], math.ceil(_BURST_SECONDS / times[index])) / 2
    winner = min(finalists, key=totals.__getitem__)
    return winner, totals[0] / totals[winner], totals[winner]


def _seconds(run: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times
