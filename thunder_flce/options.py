"""Options that a user can set for how the loss is computed; the defaults suit training on one device."""

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, TypeGuard, cast

import torch

GRADIENTS_IN_FORWARD = "gradients_in_forward"
"""The forward turns the logits of each chunk into gradients for the expected upstream gradient.

If each row has its own upstream gradient and the head is frozen, the forward computes dX for an upstream gradient of 1,
and the backward multiplies each row by its factor."""
SAVE_LOGITS = "save_logits"
"""The forward saves logits, and the backward turns them into gradients, in place."""
RECOMPUTE_LOGITS = "recompute_logits"
"""The forward saves only the rows' statistics, and the backward computes the logits again."""
STRATEGIES = (GRADIENTS_IN_FORWARD, SAVE_LOGITS, RECOMPUTE_LOGITS)

ACCUMULATE = ("auto", "parameter", "float32")
IGNORED_ROWS = ("auto", "skip", "compute")
LOGITS_DTYPES = ("input", "float32")
ROW_KERNELS = ("auto", "triton", "nvfuser", "torch")


def checked_strict(strict: Any) -> bool:
    """Returns the argument strict; raises a TypeError for anything but a bool."""
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, but got {strict!r}")
    return strict


def as_options(options: "Options | tuple[Any, ...] | None") -> "Options":
    """Returns an `Options`: the defaults for None, and the fields' values for a tuple that `functional.one_call` made.

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
    """Returns a NumPy number, or a compiler's symbol, which it specialises, as a Python number; others as they are."""
    if number is None or type(number) in (int, float, bool):
        return number
    if isinstance(number, Integral | torch.SymInt):
        return int(number)
    return float(number) if isinstance(number, Real | torch.SymFloat) else number


class PlainValues:
    """Base of the dataclasses that a graph carries as plain values, such as `Options`, `Loss` and `Plan`."""

    written_always: ClassVar[tuple[str, ...]] = ()
    """Fields that a trace shows even if they have their default value."""

    def non_defaults(self) -> dict[str, Any]:
        """Returns the fields that a trace shows, by name: those that have a `repr`, and differ from their default.

        Fields in `written_always` are shown in any case.
        """
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(cast(Any, self)) if f.repr}
        return {
            name: value.non_defaults() if isinstance(value, PlainValues) else value
            for name, (value, default) in values.items()
            if value != default or name in self.written_always
        }


@dataclass(frozen=True, kw_only=True)
class Options(PlainValues):
    """Choices that change time and memory, but never the result beyond rounding.

    Raises:
        ValueError: if a field is out of range; the message names the field and the values that it accepts.
    """

    memory_budget: int | float | None = None
    """Memory that the loss may take in addition to its gradients: bytes (int), or a fraction of the device's memory
    (float in (0, 1)). None: chunks are as small as they can be without costing more than 3% of the time, and take at
    most a twentieth of the device's memory, unless they have only 512 rows. Logits that the backward would compute
    again are saved while they take at most 4 GiB and at most such a twentieth (never on a CPU). How much memory is
    free does not matter."""

    strategy: str | None = None
    """When gradients are computed: "gradients_in_forward"; "save_logits", in the backward from saved logits;
    "recompute_logits", in the backward, which computes the logits again; or None to let the plan choose."""

    chunk_rows: int | None = None
    """Tokens in a chunk, or None to let the plan choose. Tokens whose logits are saved are one chunk, of any size."""

    accumulate: str = "auto"
    """Dtype in which the weight's gradient is summed over chunks: "parameter" (the weight's own), "float32", or "auto":
    the parameter's dtype as long as that is as accurate (`engine.choose.EXACT_CHUNKS`), otherwise float32."""

    ignored_rows: str = "auto"
    """"skip": rows whose target is ignore_index are dropped before the first matmul, at the price of one host/device
    synchronisation on CUDA. "compute": all rows are computed, with static shapes and without a synchronisation (except
    once, to tune matmuls), as CUDA graphs need; a call always does this while a CUDA graph is captured. "auto": "skip"
    on a CPU and if the matmuls take long enough (8 ms or more) to be worth the wait, otherwise "compute"."""

    logits_dtype: str = "input"
    """Dtype to which the logits of 16-bit operands are rounded, in forward and backward alike: "input", the operands'
    dtype, as in an unfused model, or "float32", in which the matmul sums them, for three times the memory per chunk."""

    row_kernels: str = "auto"
    """The softmax kernels, which do everything but the matmuls: "triton", "nvfuser", "torch" (PyTorch's operations), or
    "auto": the fastest ones that are installed and run on the device. Neither Triton's nor nvFuser's kernels run on a
    CPU or in float64; choosing them there raises an error."""

    expected_gradient: float | None = None
    """The upstream gradient for which the forward finishes gradients, if it is not 1: such as the reciprocal of the
    number of accumulation steps, if a training loop divides the loss by that number. Any other upstream gradient gives
    right gradients, too, but rounds 16-bit ones once more. In a compiled program, it is the upstream gradient of the
    program's results: factors that the program applies to a fused loss are found automatically, but those that it
    applies to the result of `linear_cross_entropy` are not."""

    tune_products: bool | None = None
    """Whether large matmuls of 16-bit operands on an NVIDIA GPU try the algorithms that cuBLAS proposes, and then use
    the fastest of those that give the same bits. These are the matmuls of logits with hidden sizes up to 2048, and of
    dW in chunks of up to 2048 tokens. A trial waits for the device and takes up to a third of a second, once per
    process and number of tokens in a chunk: at once for the first two numbers, for others when they occur the
    thousandth time. None: on Hopper GPUs only, where the gain was measured. Without it, and while
    `torch.use_deterministic_algorithms` is on, PyTorch's choice of algorithm is used."""

    batch_invariant: bool = False
    """Whether a token's log-probability and loss have the same bits alone, in any batch and in any chunk, with or
    without gradients, as they should in a policy and its trainer. The order in which the logits' matmul sums then
    depends only on V, H and the dtype, and statistics are computed separately from gradients. Available on a CPU for
    all dtypes, and on CUDA for 16-bit operands with Triton's kernels, whose matmul of the logits takes about a seventh
    longer than cuBLAS's (H100). Bits may differ between devices, numbers of threads and versions of libraries."""

    def __post_init__(self):
        for name in ("memory_budget", "chunk_rows", "expected_gradient"):
            # NumPy's integers are no ints. Its float64 is a float, but Dynamo takes it for a tensor.
            object.__setattr__(self, name, plain(getattr(self, name)))
        budget, rows, factor, tune = self.memory_budget, self.chunk_rows, self.expected_gradient, self.tune_products
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
            # Dynamo of torch 2.8 does not trace `isinstance` with a union of types.
            "tune_products": (tune is None or isinstance(tune, bool), "None, True or False"),
            "batch_invariant": (isinstance(self.batch_invariant, bool), "True or False"),
        }
        for name, (is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(f"{name} must be {expected}, but got {getattr(self, name)!r}")

    def has_float32_logits(self, dtype: torch.dtype) -> bool:
        """Whether the logits of operands of `dtype` are kept in float32, which is wider."""
        return self.logits_dtype == "float32" and dtype.itemsize < 4


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_DEFAULTS = Options()
FIELDS = "fields of thunder_flce.Options"
"""First item of a tuple of field values that stands for an `Options` in a graph."""

OPTIONS = tuple(field.name for field in fields(Options))
"""Names of the fields of `Options`."""
