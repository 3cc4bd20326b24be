"""Which of cuBLAS's algorithms runs a large matmul: the one that was the fastest when the matmul first ran.

cuBLAS's first candidate, the one that PyTorch runs, is not the fastest where outputs are large for the operations that
they take. At 2048 × 128256 × 4096 in bfloat16 on an H200, another takes 11% to 15% less time for what is added to dW
(15% to 27% at 512 tokens) and up to 8% less for the logits (15%); dX, whose output is small, gains up to 11% where a
single chunk holds all tokens, and 27% at 512 × 256000 × 2304 (`tuned_products` in traces/h200/regions.jsonl).

Only on Hopper: elsewhere nobody has looked whether all candidates add in the same order.
"""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any

import torch

from thunder_flce.device import is_hopper, on_device
from thunder_flce.execution.matmul import cublaslt
from thunder_flce.execution.matmul.cublaslt import Algorithm, MatmulDescriptor, Signature
from thunder_flce.execution.matmul.layout import Kind, Matmul

# Matmuls of so many operations, half a millisecond on an H200, are worth measuring, which takes 0.1 to 0.6 s. Of 27
# with 2e11 or more, but fewer, 24 gained 2% or less, the others 3% to 5% (`tuned_products` in traces/h200).
TUNED_OPERATIONS = 4e11

# Candidates that take up to this much longer than the fastest, run once or twice, are measured again, at length: under
# load a GPU lowers its clock, and then an algorithm that moves less data gains. Two bursts of each take 0.3 s.
_CLOSE = 1.05
_FINALISTS = 4
_BURST_SECONDS = 0.03
_UNLUCKY = 1.2
# What a matmul is multiplied by while it is measured, the smallest number above 0. Added to a sum, it changes nothing
# but the sign of a 0 and, in 32 bits, a sum near 0. (cuBLAS need not compute what is multiplied by 0.)
_MEASURED_FACTOR = 2.0**-149

# After so many matmuls of a kind, what was measured for up to twice or half as many tokens will do, until a number of
# tokens has come often: training with lengths that differ is not interrupted at each step. S1 with 60% of its targets
# ignored took 1.08 times as long for good after steps without (1.01 now, traces/h200/against-d2037ff.jsonl).
_MEASURED_RUNS = 100
_OFTEN = 30

# Which of the sizes M, N and K is the number of tokens. It changes from chunk to chunk, so what was measured serves
# all numbers of tokens between the same powers of two, and others where nothing can be measured. Of dX, a quarter of
# those: it has few tiles, and it matters how they fill the last wave of thread blocks.
_TOKENS = {"logits": 0, "dX": 0, "dW": 2}
_SIZES_PER_OCTAVE = {"logits": 1, "dX": 4, "dW": 1}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was measured about a matmul out (M, N) = a (M, K) @ b (K, N)."""

    product: Kind
    sizes: tuple[int, int, int]
    """M, N and K"""
    algorithm: Algorithm | None
    """The fastest; None where cuBLAS has no candidate"""
    gain: float
    """The time of cuBLAS's first candidate over that of the fastest"""
    milliseconds: float
    """The time of the fastest, in a burst"""
    seconds: float
    """What measuring has taken"""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "algorithm"}


_tunings: dict[tuple, dict[int, Tuning]] = {}
"""By what a matmul is but for its tokens, and by `_bucket` of these."""
_runs: Counter[tuple] = Counter()
"""How many matmuls there were of each kind, and of each kind with so many tokens."""


def tunings() -> list[Tuning]:
    """All of this process: those of one kind of matmul after each other."""
    return [tuning for of_kind in _tunings.values() for tuning in of_kind.values()]


def can_tune(operations: float, *, dtype: torch.dtype, device_type: str) -> bool:
    """Whether the algorithm of a matmul of 2·M·N·K operations is chosen here; a GPU not there is taken for a Hopper."""
    return operations >= TUNED_OPERATIONS and cublaslt.supports(dtype, device_type) and is_hopper(None)


def run(matmul: Matmul) -> bool:
    """Runs a matmul by the algorithm that is the fastest for it, measured when its kind is new or its size comes often.

    Measuring runs it some dozens of times into `out` and waits for the device. While a CUDA graph is captured, what was
    measured for the nearest number of tokens has to do. False where it has not run: if it is small, lies in memory in a
    way that cuBLASLt cannot read or was not measured, or while PyTorch is asked for deterministic algorithms.
    """
    if 2 * math.prod(matmul.sizes) < TUNED_OPERATIONS or torch.are_deterministic_algorithms_enabled():
        return False
    signature = Signature.of(matmul)
    if signature is None or not is_hopper(matmul.out.device):
        return False
    with on_device(matmul.out.device):
        algorithm = _algorithm(matmul, signature)
        return algorithm is not None and _descriptor(signature).run(matmul, algorithm)


def _algorithm(matmul: Matmul, signature: Signature) -> Algorithm | None:
    """The fastest for such matmuls, as is known or measured now; None where it cannot be.

    The first term of the logits is measured apart from those that are added to it. Chunks add to dW, and blocks of the
    vocabulary to dX, but for the first, which then runs by the same algorithm.
    """
    sizes, adds = list(matmul.sizes), matmul.kind == "logits" and matmul.accumulate
    tokens = _bucket(matmul.kind, sizes.pop(_TOKENS[matmul.kind]))
    a, b = signature.a, signature.b
    kind = (matmul.kind, *sizes, *signature[:3], a.is_transposed, b.is_transposed, signature.has_bias, adds)
    of_kind = _tunings.setdefault(kind, {})
    _runs.update([kind, (kind, tokens)])
    if tokens not in of_kind:
        distance = {known: max(known / tokens, tokens / known) for known in of_kind}
        nearest = min(distance, key=distance.__getitem__, default=tokens)
        is_rare = _runs[kind] > _MEASURED_RUNS and _runs[kind, tokens] <= _OFTEN
        will_do = is_rare and distance.get(nearest, math.inf) <= 2
        if will_do or torch.cuda.is_current_stream_capturing():
            tokens = nearest
        else:
            of_kind[tokens] = _measure(matmul, signature)
    tuning = of_kind.get(tokens)
    return None if tuning is None else tuning.algorithm


def _bucket(kind: Kind, tokens: int) -> int:
    """The largest number of tokens that shares what is measured for this one."""
    octave = 2 ** ((tokens - 1).bit_length() - 1)
    step = max(octave // _SIZES_PER_OCTAVE[kind], 1)
    return -(-tokens // step) * step


_descriptor = lru_cache(maxsize=64)(MatmulDescriptor)


def _measure(matmul: Matmul, signature: Signature) -> Tuning:
    start = time.perf_counter()
    # dW is measured as a sum even for the first chunk, since it is one for all others; whatever is in its memory then
    # does not matter. Where it is never a sum, that may cost 3% (S2; at S1, S3 and U1 the same one is the fastest).
    measured = matmul._replace(accumulate=matmul.accumulate or matmul.kind == "dW")
    runs = []
    try:
        descriptor = _descriptor(signature)
        tries = [partial(descriptor.run, measured, each, alpha=_MEASURED_FACTOR) for each in descriptor.candidates()]
        runs = [run for run in tries if run()]
    except RuntimeError as error:
        warnings.warn(f"cuBLASLt cannot be asked for algorithms, PyTorch runs all matmuls: {error}", stacklevel=2)
    algorithm, gain, seconds = None, 1.0, math.nan
    if runs:
        index, gain, seconds = fastest(runs, _seconds)
        algorithm = runs[index].args[1]
    taken = {"milliseconds": seconds * 1e3, "seconds": time.perf_counter() - start}
    return Tuning(product=matmul.kind, sizes=matmul.sizes, algorithm=algorithm, gain=gain, **taken)


def fastest(
    runs: Sequence[Callable[[], object]], seconds: Callable[[Callable[[], object], int], float]
) -> tuple[int, float, float]:
    """The index of the fastest of `runs`, how many times as long the first one takes, and the fastest one's seconds.

    The one expected to be the fastest comes first; `seconds` gives the mean time of one, run so many times in a row.
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
