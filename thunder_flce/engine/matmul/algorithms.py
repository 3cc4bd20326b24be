"""Which of cuBLASLt's algorithms runs a matmul: the fastest one, by measurement.

cuBLAS's first candidate, the one that PyTorch runs, is not the fastest where the output is large for the operations
that it takes: the logits of small hidden sizes, and what chunks of few tokens add to dW. Others do not gain in whole
steps what they gain alone (lab/experiments.md). On GPUs other than Hopper nobody has looked what it gains: there it is
done where it is asked for. Candidates that do not give the bits of the first one are left out.
"""

import itertools
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any

import torch

from thunder_flce.device import on_device
from thunder_flce.engine.matmul.cublaslt import Algorithm, Matmul, MatmulDescriptor, Signature

# Matmuls of so many operations, half a millisecond on an H200, are worth measuring, which takes about 0.15 s. Of 27
# with 2e11 or more, but fewer, 24 gained 2% or less, the others 3% to 5% (H200).
TUNED_OPERATIONS = 4e11
# And where each element sums so many products at most, over the hidden size or the tokens of a chunk.
TUNED_DEPTH = 2048

# All candidates run in turns, then those that take up to this much longer than the fastest of them: under load a GPU
# lowers its clock, from one run to the next, and for the others as well. A candidate takes the place of the first one
# if that takes this much longer.
_CLOSE = 1.05
_LOOKS = 2
_FINALISTS = 3
_TURNS, _TURNS_SECONDS = (3, 20), 0.06
_WORTH = 1.02
# Of so many rows, results of candidates are compared: each row adds as all others do.
_COMPARED_ROWS = 256
# What a matmul is multiplied by while it is measured, the smallest number above 0. Added to a sum, it changes nothing
# but the sign of a 0 and, in 32 bits, a sum near 0. (cuBLAS need not compute what is multiplied by 0.)
_MEASURED_FACTOR = 2.0**-149

# Of logits, or of sums of dW, for one V and H; and of these.
_MOST_TUNINGS, _MOST_KINDS = 64, 256

# The fastest for one number of tokens may be the slowest for another: on an H100, 1680 × 128256 × 2048 took 5.2 ms by
# what was chosen for 1536 tokens, where cuBLAS's first took 4.2. So each number is measured for itself: the first one,
# in most trainings the only one, at once, and others when they have come so often that measuring takes a tenth of the
# time that they took. What it gains, 3% or so, pays for it later. Logits that are computed early, while the host
# waits, have a number of their own.
_AT_ONCE = 2
_OFTEN = 1000
_MOST_MET = 4096

_descriptor = lru_cache(maxsize=64)(MatmulDescriptor)

# Integers of as many bytes, in which NaN equals NaN.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was measured about a matmul out (M, N) = a (M, K) @ b (K, N)."""

    sizes: tuple[int, int, int]
    """M, N and K"""
    algorithm: Algorithm | None
    """The one that runs: the fastest, or cuBLAS's first where that is nearly as fast; None where it has none"""
    gain: float
    """The time of cuBLAS's first candidate over that of the one that runs"""
    milliseconds: float
    """The time of the one that runs, among the others"""
    seconds: float
    """What measuring has taken"""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "algorithm"}


_tunings: dict[tuple[Any, ...], dict[Signature, Tuning]] = {}
"""By what matmuls of any number of tokens have in common"""
_met: Counter[tuple[Any, Signature]] = Counter()
"""How often others were met"""


def tunings() -> list[Tuning]:
    """What this process has measured, by kinds of matmuls, the oldest first."""
    return [tuning for of_kind in _tunings.values() for tuning in of_kind.values()]


@contextmanager
def alone(own: dict[Any, Any]) -> Iterator[None]:
    """Runs with `own` measurements, empty at first, as in a process that does nothing else: for benchmarks."""
    global _tunings, _met
    others, _tunings, _met = (_tunings, _met), own, Counter()
    try:
        yield
    finally:
        _tunings, _met = others


def may_gain(m: int, n: int, k: int) -> bool:
    """Whether a matmul (M, K) @ (K, N) is worth measuring."""
    return k <= TUNED_DEPTH and 2 * m * n * k >= TUNED_OPERATIONS


def run_fastest(matmul: Matmul) -> bool:
    """Runs a matmul by the algorithm that is the fastest for it, if it was measured or is to be measured now.

    Measuring runs it some dozens of times into `out` and waits for the device. False where the matmul has not run: if
    it lies in memory in a way that cuBLASLt cannot read or was not measured, without cuBLASLt, and while PyTorch is
    asked for deterministic algorithms.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    signature = Signature.of(matmul)
    if signature is None:
        return False
    with on_device(matmul.out.device):
        tuning = _tuning(matmul, signature)
        if tuning is None or tuning.algorithm is None:
            return False
        return _descriptor(signature).run(matmul, tuning.algorithm)


def _tuning(matmul: Matmul, signature: Signature) -> Tuning | None:
    """What is known about such a matmul, or measured now; None where it is neither."""
    # Of logits, V and H are the sizes of b, of sums of dW those of out.
    sizes = matmul.out.shape if matmul.accumulate else matmul.b.shape
    kind = (*sizes, matmul.accumulate, signature.device_index, signature.a.dtype, signature.out.dtype)
    known = _tunings.get(kind, {})
    tuning = known.get(signature)
    if tuning is not None or torch.cuda.is_current_stream_capturing():
        return tuning
    if len(known) >= _AT_ONCE:
        if len(_met) >= _MOST_MET:
            _met.clear()
        _met[kind, signature] += 1
        if _met[kind, signature] < _OFTEN or len(known) >= _MOST_TUNINGS:
            return None
    elif not known and len(_tunings) >= _MOST_KINDS:
        _tunings.clear()
    _tunings[kind] = known | {signature: (tuning := _measure(matmul, signature))}
    return tuning


def _measure(matmul: Matmul, signature: Signature) -> Tuning:
    start = time.perf_counter()
    runs = []
    try:
        descriptor = _descriptor(signature)
        same = _with_the_bits_of_the_first(matmul, descriptor.candidates)
        tries = [partial(descriptor.run, matmul, each, alpha=_MEASURED_FACTOR) for each in same]
        runs = [run for run in tries if run()]
    except RuntimeError as error:
        warnings.warn(f"cuBLASLt cannot be asked for algorithms, PyTorch runs all matmuls: {error}", stacklevel=2)
    algorithm, gain, seconds = None, 1.0, math.nan
    if runs:
        index, gain, seconds = fastest(runs, _seconds)
        algorithm = runs[index].args[1]
    (m, n), k = matmul.out.shape, matmul.a.shape[1]
    taken = {"milliseconds": seconds * 1e3, "seconds": time.perf_counter() - start}
    return Tuning(sizes=(m, n, k), algorithm=algorithm, gain=gain, **taken)


def _with_the_bits_of_the_first(matmul: Matmul, candidates: Sequence[Algorithm]) -> list[Algorithm]:
    """The algorithms with which the first rows of a matmul have the bits that they have with the first of them."""
    part = matmul._replace(a=matmul.a[:_COMPARED_ROWS], accumulate=False)
    signature, found, first = None, [], None
    for algorithm in candidates:
        # Poisoned, so that nothing is the same that was not written.
        out = matmul.out.new_full((part.a.shape[0], matmul.out.shape[1]), math.nan)
        part = part._replace(out=out)
        signature = signature or Signature.of(part)
        if signature is None:
            return list(candidates[:1])
        if not _descriptor(signature).run(part, algorithm):
            continue
        first = out if first is None else first
        if torch.equal(out.view(_BITS[out.itemsize]), first.view(_BITS[out.itemsize])):
            found.append(algorithm)
    return found


def fastest(
    runs: Sequence[Callable[[], object]], seconds: Callable[[Sequence[Callable[[], object]]], list[float]]
) -> tuple[int, float, float]:
    """The index of the one of `runs` to choose, how many times as long the first one takes, and its seconds.

    The one expected to be the fastest comes first, and is chosen unless another is clearly faster. Each has run once,
    as a kernel's first run takes longer; `seconds` gives the time of each of some runs, which follow at once.
    """

    def in_turns(indices: Sequence[int], turns: int) -> dict[int, float]:
        laps = seconds([runs[index] for index in indices] * turns)
        return {index: statistics.median(laps[at :: len(indices)]) for at, index in enumerate(indices)}

    times = in_turns(range(len(runs)), _LOOKS)
    close = [index for index in times if index and times[index] <= _CLOSE * min(times.values())]
    # The first is always among them: it is what the others are compared with.
    finalists = [0, *sorted(close, key=times.__getitem__)[: _FINALISTS - 1]]
    if len(finalists) > 1:
        turns = round(_TURNS_SECONDS / sum(times[index] for index in finalists))
        times = in_turns(finalists, min(max(turns, _TURNS[0]), _TURNS[1]))
    winner = min(finalists, key=times.__getitem__)
    if times[0] < _WORTH * times[winner]:
        winner = 0
    return winner, times[0] / times[winner], times[winner]


def _seconds(runs: Sequence[Callable[[], object]]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    events[0].record()
    for run, end in zip(runs, events[1:], strict=True):
        run()
        end.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]
