"""What a user can choose about how the loss is computed; the defaults suit training on one device."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

STRATEGIES = ("gradients_in_forward", "save_logits", "recompute_logits")
ACCUMULATE = ("auto", "parameter", "float32")
IGNORED_ROWS = ("skip", "compute")
LOGITS_DTYPES = ("input", "float32")
ROW_KERNELS = ("auto", "triton", "nvfuser", "torch")


def as_options(options: "Options | None") -> "Options":
    """The defaults in place of None.

    Raises:
        TypeError: for anything but `Options`.
    """
    if options is None:
        return _DEFAULTS
    if not isinstance(options, Options):
        raise TypeError(f"options must be thunder_flce.Options or None, but got {type(options).__name__}")
    return options


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices that change time and memory, never the result beyond rounding.

    Raises:
        ValueError: when a field is out of range; the message names the field and what it accepts.
    """

    memory_budget: int | float | None = None
    """Temporary memory of the region on top of its gradients: bytes (int), or a fraction of the device's memory (float
    in (0, 1)). None: chunks as small as they can be without costing time; and logits are saved for a backward that
    would compute them again while they take at most 4 GiB, an eighth of the device's memory and half of what is free
    when the plan is made (never on a CPU, whose memory belongs to everybody)."""

    strategy: str | None = None
    """One of `STRATEGIES`, or None to let the plan choose."""

    chunk_rows: int | None = None
    """Tokens in a chunk, or None to let the plan choose. Tokens whose logits are saved are one chunk, of any size. The
    first chunk may be larger where that takes no more memory, as its logits lie where dW will be (`staged_logits`)."""

    accumulate: str = "auto"
    """Where the weight's gradient is summed over chunks: "parameter" (the weight's own dtype), "float32", or "auto":
    the parameter's dtype while that is as good (`planning.choose.EXACT_CHUNKS`), else float32."""

    ignored_rows: str = "skip"
    """"skip": rows whose target is ignore_index are dropped before the first matmul, at the price of one device
    synchronisation on CUDA. "compute": no synchronisation (but once, to tune matmuls) and static shapes, as CUDA graphs
    need; this is also what happens by itself while a CUDA graph is captured."""

    logits_dtype: str = "input"
    """What the logits of 16-bit operands are rounded to, in forward and backward alike: "input", the operands' dtype,
    as an unfused model does, or "float32", as the matmul has summed them, for three times the memory a chunk."""

    row_kernels: str = "auto"
    """Who runs the row work, which is everything but the matmuls: "triton", "nvfuser" or "torch" (PyTorch operations),
    each alone, or "auto": the fastest that is installed. Neither Triton nor nvFuser runs
    float64, or on a CPU; to ask for them there is an error."""

    expected_gradient: float | None = None
    """The upstream gradient that gradients in the forward are finished for, where it is not 1: such as the reciprocal
    of the number of accumulation steps by which a training loop divides the loss. Another one is right, too, but then
    16-bit gradients are rounded once more. In a jitted program, that of its results: constants that follow the loss in
    the program are found by themselves."""

    tune_products: bool = True
    """Whether, on a Hopper GPU, the large matmuls of 16-bit operands try the algorithms that cuBLAS proposes when they
    first run (after a while, when their number of tokens has come often), and then run with the fastest. That waits for
    the device, and takes a third of a second or so for each kind of matmul, once a process: for logits, dX and dW of
    some size, for each power of two of tokens (for dX, four sizes between two of them). Without it, and while
    `torch.use_deterministic_algorithms` is on, PyTorch's run."""

    batch_invariant: bool = False
    """Whether a token's log-probability and loss have the same bits in any batch, alone, in any chunk, with gradients
    or without: as a policy's and its trainer's should. The logits' matmul then sums in an order that only V, H and the
    dtype decide, and statistics are made apart from gradients. On a CPU for all operands; on CUDA for those in 16 bits,
    H a multiple of 8, with Triton's row kernels. Devices, numbers of threads and versions of libraries may differ."""

    def __post_init__(self):
        budget = self.memory_budget
        if budget is not None:
            whole_bytes = isinstance(budget, int) and not isinstance(budget, bool) and budget > 0
            fraction = isinstance(budget, float) and 0.0 < budget < 1.0
            if not (whole_bytes or fraction):
                raise ValueError(
                    f"memory_budget must be a positive int (bytes) or a float in (0, 1) (a fraction of the device's "
                    f"memory), but got {budget!r}"
                )
        if self.chunk_rows is not None and (
            isinstance(self.chunk_rows, bool) or not isinstance(self.chunk_rows, int) or self.chunk_rows < 1
        ):
            raise ValueError(f"chunk_rows must be None or a positive int, but got {self.chunk_rows!r}")
        for name, choices in (
            ("strategy", (None, *STRATEGIES)),
            ("accumulate", ACCUMULATE),
            ("ignored_rows", IGNORED_ROWS),
            ("logits_dtype", LOGITS_DTYPES),
            ("row_kernels", ROW_KERNELS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, but got {getattr(self, name)!r}")
        expected = self.expected_gradient
        is_number = isinstance(expected, int | float) and not isinstance(expected, bool)
        if isinstance(expected, int) and not -(2**63) <= expected < 2**63:
            raise ValueError(f"expected_gradient must be a float or fit 64 bits, but has {expected.bit_length()} bits")
        if expected is not None and not (is_number and math.isfinite(expected) and expected != 0):
            raise ValueError(f"expected_gradient must be None or a finite number other than 0, but got {expected!r}")
        for name in ("memory_budget", "expected_gradient"):
            if isinstance(number := getattr(self, name), float):
                # NumPy's is a float, too, but Dynamo takes it for a tensor.
                object.__setattr__(self, name, float(number))
        for name in ("tune_products", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, but got {getattr(self, name)!r}")

    def non_defaults(self) -> dict[str, Any]:
        """The fields that differ from their defaults, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def has_float32_logits(self, dtype: torch.dtype) -> bool:
        """Whether the logits of operands of `dtype` are wanted in a wider dtype than theirs."""
        return self.logits_dtype == "float32" and dtype.itemsize < 4


_DEFAULTS = Options()
