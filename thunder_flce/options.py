"""What a user can choose about how the loss is computed; the defaults suit training on one device."""

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, TypeGuard, cast

import torch

STRATEGIES = ("gradients_in_forward", "save_logits", "recompute_logits")
ACCUMULATE = ("auto", "parameter", "float32")
IGNORED_ROWS = ("auto", "skip", "compute")
LOGITS_DTYPES = ("input", "float32")
ROW_KERNELS = ("auto", "triton", "nvfuser", "torch")


def as_options(options: "Options | tuple[Any, ...] | None") -> "Options":
    """The defaults in place of None; and the values of the fields, as `functional.one_call` gives them to Dynamo.

    Raises:
        TypeError: for anything but `Options`.
    """
    if options is None:
        return _DEFAULTS
    if isinstance(options, tuple) and options[:1] == (FIELDS,):
        return Options(**dict(zip(OPTIONS, map(plain, options[1:]), strict=True)))
    if not isinstance(options, Options):
        raise TypeError(f"options must be thunder_flce.Options or None, but got {type(options).__name__}")
    return options


def plain(number: Any) -> Any:
    """A number as Python's own, where it may be NumPy's, or a compiler's symbol, of which another one compiles anew."""
    if number is None or type(number) in (int, float, bool):
        return number
    if isinstance(number, Integral | torch.SymInt):
        return int(number)
    return float(number) if isinstance(number, Real | torch.SymFloat) else number


class PlainValues:
    """A dataclass of what a graph carries as plain values, such as `Options`, `Loss` and `Plan`."""

    written_always: ClassVar[tuple[str, ...]] = ()
    """Fields that a trace shows even where they are as by default."""

    def non_defaults(self) -> dict[str, Any]:
        """The fields that differ from their defaults, by name, which is what a trace carries; none without a `repr`."""
        found = {f.name: (getattr(self, f.name), f.default) for f in fields(cast(Any, self)) if f.repr}
        return {
            name: value.non_defaults() if isinstance(value, PlainValues) else value
            for name, (value, default) in found.items()
            if value != default or name in self.written_always
        }


@dataclass(frozen=True, kw_only=True)
class Options(PlainValues):
    """Choices that change time and memory, never the result beyond rounding.

    Raises:
        ValueError: when a field is out of range; the message names the field and what it accepts.
    """

    memory_budget: int | float | None = None
    """Temporary memory of the loss above its gradients: bytes (int), or a fraction of the device's memory (float
    in (0, 1)). None: chunks as small as they can be without costing more than 3% of the time, which take at most a
    twentieth of the device's memory, down to 512 rows; and logits are saved for a backward that would compute them
    again while they take at most 4 GiB and such a twentieth, whatever of it is free (never on a CPU)."""

    strategy: str | None = None
    """One of `STRATEGIES`, or None to let the plan choose."""

    chunk_rows: int | None = None
    """Tokens in a chunk, or None to let the plan choose. Tokens whose logits are saved are one chunk, of any size."""

    accumulate: str = "auto"
    """Where the weight's gradient is summed over chunks: "parameter" (the weight's own dtype), "float32", or "auto":
    the parameter's dtype while that is as good (`engine.choose.EXACT_CHUNKS`), else float32."""

    ignored_rows: str = "auto"
    """"skip": rows whose target is ignore_index are dropped before the first matmul, at the price of one device
    synchronisation on CUDA. "compute": no synchronisation (but once, to tune matmuls) and static shapes, as CUDA graphs
    need; this is also what happens by itself while a CUDA graph is captured. "auto": "skip" on a CPU and where the
    matmuls take long enough (8 ms or more) for the wait to be worth it, "compute" elsewhere."""

    logits_dtype: str = "input"
    """What the logits of 16-bit operands are rounded to, in forward and backward alike: "input", the operands' dtype,
    as an unfused model does, or "float32", as the matmul has summed them, for three times the memory a chunk."""

    row_kernels: str = "auto"
    """Which softmax kernels run, which are everything but the matmuls: "triton", "nvfuser" or "torch" (PyTorch's
    operations), or "auto": the fastest that is installed and runs on the device. Neither Triton nor nvFuser runs
    float64, or on a CPU; to ask for them there is an error."""

    expected_gradient: float | None = None
    """The upstream gradient that gradients in the forward are finished for, where it is not 1: such as the reciprocal
    of the number of accumulation steps by which a training loop divides the loss. Another one is also right, but then
    16-bit gradients are rounded once more. In a program that is compiled, that of its results: factors that follow a
    loss which is fused are found by themselves; those behind a call of `linear_cross_entropy` are not."""

    tune_products: bool | None = None
    """Whether, on an NVIDIA GPU, large matmuls of 16-bit operands try the algorithms that cuBLAS proposes, and then run
    with the fastest of those that give the same bits: the logits' with hidden sizes up to 2048, and what chunks of up
    to 2048 tokens add to dW. That waits for the device, and takes up to a third of a second for each, once a process:
    for the first two numbers of tokens in a chunk at once, for others when they come the thousandth time. None: on
    Hopper, where it was measured what that gains. Without it, and while `torch.use_deterministic_algorithms` is on,
    PyTorch's run."""

    batch_invariant: bool = False
    """Whether a token's log-probability and loss have the same bits in any batch, alone, in any chunk, with gradients
    or without: as a policy's and its trainer's should. The logits' matmul then sums in an order that only V, H and the
    dtype decide, and statistics are made apart from gradients. On a CPU for all operands; on CUDA for those in 16 bits,
    with Triton's kernels, whose matmul of the logits takes about a seventh longer than cuBLAS's (H100). Devices,
    numbers of threads and versions of libraries may differ."""

    def __post_init__(self):
        for name in ("memory_budget", "chunk_rows", "expected_gradient"):
            # NumPy's are no ints; one is a float, but Dynamo takes it for a tensor.
            object.__setattr__(self, name, plain(getattr(self, name)))
        budget, rows, factor = self.memory_budget, self.chunk_rows, self.expected_gradient
        if isinstance(factor, int) and not -(2**63) <= factor < 2**63:
            raise ValueError(f"expected_gradient must be a float or fit 64 bits, but has {factor.bit_length()} bits")
        is_fraction = isinstance(budget, float) and 0 < budget < 1
        is_factor = (_is_int(factor) or isinstance(factor, float)) and factor != 0 and math.isfinite(factor)
        rules = {
            "memory_budget": (
                budget is None or is_fraction or (_is_int(budget) and budget > 0),
                "a positive int (bytes) or a float in (0, 1) (a fraction of the device's memory)",
            ),
            "chunk_rows": (rows is None or (_is_int(rows) and rows > 0), "None or a positive int"),
            "expected_gradient": (factor is None or is_factor, "None or a finite number other than 0"),
            "strategy": (self.strategy in (None, *STRATEGIES), f"one of {(None, *STRATEGIES)}"),
            "accumulate": (self.accumulate in ACCUMULATE, f"one of {ACCUMULATE}"),
            "ignored_rows": (self.ignored_rows in IGNORED_ROWS, f"one of {IGNORED_ROWS}"),
            "logits_dtype": (self.logits_dtype in LOGITS_DTYPES, f"one of {LOGITS_DTYPES}"),
            "row_kernels": (self.row_kernels in ROW_KERNELS, f"one of {ROW_KERNELS}"),
            "tune_products": (isinstance(self.tune_products, bool | None), "None, True or False"),
            "batch_invariant": (isinstance(self.batch_invariant, bool), "True or False"),
        }
        for name, (is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(f"{name} must be {expected}, but got {getattr(self, name)!r}")

    def has_float32_logits(self, dtype: torch.dtype) -> bool:
        """Whether the logits of operands of `dtype` are wanted in a wider dtype than theirs."""
        return self.logits_dtype == "float32" and dtype.itemsize < 4


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_DEFAULTS = Options()
FIELDS = "fields of thunder_flce.Options"
"""What comes before their values where a tuple stands for an object."""

OPTIONS = tuple(field.name for field in fields(Options))
"""The names of the fields."""
