"""Chooses cuBLASLt's fastest algorithm for a matmul, by measuring the candidates.

cuBLAS's first candidate, which PyTorch runs, is not the fastest if the output is large for its number of operations:
the logits of small hidden sizes, and dW of chunks with few tokens. Other matmuls do not gain in whole steps what they
gain alone (lab/experiments.md). The gain was measured on Hopper only; on other GPUs, users have to ask for it.
Candidates whose results differ in any bit from the first one's are left out.
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

# Matmuls of this many operations or more, half a millisecond on an H200, are worth measuring, which takes about 0.15 s.
# Of 27 matmuls between 2e11 and this number, 24 gained 2% or less, the others 3% to 5% (H200).
TUNED_OPERATIONS = 4e11
# The largest K of a matmul that is worth measuring: the hidden size for logits, the tokens of a chunk for dW.
TUNED_DEPTH = 2048

# Candidates run in turns, because under load a GPU lowers its clock from one run to the next: all of them _LOOKS times,
# then the first one and the fastest of those within _CLOSE of the minimum, _FINALISTS at most. A candidate replaces the
# first one if the first one takes _WORTH times as long or more.
_CLOSE = 1.05
_LOOKS = 2
_FINALISTS = 3
_TURNS, _TURNS_SECONDS = (3, 20), 0.06
_WORTH = 1.02
# Number of rows of which the candidates' results are compared: all rows are summed in the same order.
_COMPARED_ROWS = 256
# The factor of a matmul while it is measured, the smallest float32 above 0. A product with it, added to a sum, changes
# only the sign of a 0 and, in 32 bits, a sum near 0. (With the factor 0, cuBLAS might skip the computation.)
_MEASURED_FACTOR = 2.0**-149

# The most tunings of a kind, logits or sums of dW of one V and H, and the most kinds.
_MOST_TUNINGS, _MOST_KINDS = 64, 256

# The fastest algorithm for one number of tokens may be the slowest for another: on an H100, 1680 × 128256 × 2048 took
# 5.2 ms by the algorithm chosen for 1536 tokens, and 4.2 by cuBLAS's first. So each number of tokens is measured by
# itself: the first _AT_ONCE at once, since most trainings have no more, and others when they have come _OFTEN
# times, so that measuring takes a tenth of the time that their matmuls took. The gain, about 3%, pays for that later.
# Logits that are computed early, while the host waits, have a number of tokens of their own.
_AT_ONCE = 2
_OFTEN = 1000
_MOST_COUNTED = 4096

_descriptor = lru_cache(maxsize=64)(MatmulDescriptor)

# Integer dtypes by itemsize: as integers, equal bits of NaN are equal.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The measurement of a matmul out (M, N) = a (M, K) @ b (K, N)."""

    sizes: tuple[int, int, int]
    """M, N and K"""
    algorithm: Algorithm | None
    """The chosen one: the fastest, or cuBLAS's first if that is nearly as fast; None if there are no candidates"""
    gain: float
    """The time of cuBLAS's first candidate divided by that of the chosen algorithm"""
    milliseconds: float
    """The time of the chosen algorithm, measured in turns with the others"""
    seconds: float
    """The time that measuring took"""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for `json.dump`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "algorithm"}


_tunings: dict[tuple[Any, ...], dict[Signature, Tuning]] = {}
"""Tunings by kind, which leaves out the number of tokens, and by signature"""
_call_counts: Counter[tuple[Any, Signature]] = Counter()
"""How often matmuls without a tuning have come"""


def tunings() -> list[Tuning]:
    """Returns the measurements of this process, grouped by kind of matmul, the oldest first."""
    return [tuning for kind_tunings in _tunings.values() for tuning in kind_tunings.values()]


@contextmanager
def alone(measurements: dict[Any, Any]) -> Iterator[None]:
    """Uses `measurements`, at first an empty dict, in place of the process's: for benchmarks."""
    global _tunings, _call_counts
    previous, _tunings, _call_counts = (_tunings, _call_counts), measurements, Counter()
    try:
        yield
    finally:
        _tunings, _call_counts = previous


def may_gain(m: int, n: int, k: int) -> bool:
    """Whether a matmul (M, K) @ (K, N) is worth measuring."""
    return k <= TUNED_DEPTH and 2 * m * n * k >= TUNED_OPERATIONS


def run_fastest(matmul: Matmul) -> bool:
    """Runs a matmul by its fastest algorithm, if that was measured or is to be measured now; otherwise returns False.

    Measuring runs the matmul some dozens of times into `out`, and waits for the device. The matmul does not run if
    cuBLASLt cannot read the operands' memory layout, if it is not measured, without cuBLASLt, or while
    `torch.use_deterministic_algorithms` is on.
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
    """Returns the measurement of such a matmul, made now if it is due; None if there is none yet."""
    # V and H: the sizes of b for logits, the sizes of out for sums of dW.
    sizes = matmul.out.shape if matmul.accumulate else matmul.b.shape
    kind = (*sizes, matmul.accumulate, signature.device_index, signature.a.dtype, signature.out.dtype)
    kind_tunings = _tunings.get(kind, {})
    tuning = kind_tunings.get(signature)
    if tuning is not None or torch.cuda.is_current_stream_capturing():
        return tuning
    if len(kind_tunings) >= _AT_ONCE:
        if len(_call_counts) >= _MOST_COUNTED:
            _call_counts.clear()
        _call_counts[kind, signature] += 1
        if _call_counts[kind, signature] < _OFTEN or len(kind_tunings) >= _MOST_TUNINGS:
            return None
    elif not kind_tunings and len(_tunings) >= _MOST_KINDS:
        _tunings.clear()
    _tunings[kind] = kind_tunings | {signature: (tuning := _measure(matmul, signature))}
    return tuning


def _measure(matmul: Matmul, signature: Signature) -> Tuning:
    start = time.perf_counter()
    runs = []
    try:
        descriptor = _descriptor(signature)
        candidates = _bitwise_equal_candidates(matmul, descriptor.candidates)
        attempts = [partial(descriptor.run, matmul, candidate, alpha=_MEASURED_FACTOR) for candidate in candidates]
        runs = [run for run in attempts if run()]
    except RuntimeError as error:
        warnings.warn(f"tune_products has no effect, because cuBLASLt lists no algorithms: {error}", stacklevel=2)
    algorithm, gain, seconds = None, 1.0, math.nan
    if runs:
        index, gain, seconds = fastest(runs, _seconds)
        algorithm = runs[index].args[1]
    (m, n), k = matmul.out.shape, matmul.a.shape[1]
    times = {"milliseconds": seconds * 1e3, "seconds": time.perf_counter() - start}
    return Tuning(sizes=(m, n, k), algorithm=algorithm, gain=gain, **times)


def _bitwise_equal_candidates(matmul: Matmul, candidates: Sequence[Algorithm]) -> list[Algorithm]:
    """Returns the candidates that compute the first rows of a matmul with the same bits as the first candidate."""
    part = matmul._replace(a=matmul.a[:_COMPARED_ROWS], accumulate=False)
    signature, equal, first = None, [], None
    for algorithm in candidates:
        # Filled with NaN, so that an element that was not written differs.
        out = matmul.out.new_full((part.a.shape[0], matmul.out.shape[1]), math.nan)
        part = part._replace(out=out)
        signature = signature or Signature.of(part)
        if signature is None:
            return list(candidates[:1])
        if not _descriptor(signature).run(part, algorithm):
            continue
        first = out if first is None else first
        if torch.equal(out.view(_BITS[out.itemsize]), first.view(_BITS[out.itemsize])):
            equal.append(algorithm)
    return equal


def fastest(
    runs: Sequence[Callable[[], object]], seconds: Callable[[Sequence[Callable[[], object]]], list[float]]
) -> tuple[int, float, float]:
    """Returns the index of the chosen run, how many times as long the first run takes, and the chosen run's seconds.

    The first of `runs` is expected to be the fastest, and is chosen unless another is clearly faster. The caller has
    run each once, because a kernel's first run takes longer. `seconds` runs a sequence without gaps and returns the
    time of each run.
    """

    def in_turns(indices: Sequence[int], turns: int) -> dict[int, float]:
        laps = seconds([runs[index] for index in indices] * turns)
        return {index: statistics.median(laps[at :: len(indices)]) for at, index in enumerate(indices)}

    times = in_turns(range(len(runs)), _LOOKS)
    close = [index for index in times if index and times[index] <= _CLOSE * min(times.values())]
    # The first is always a finalist: the others are compared with it.
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
