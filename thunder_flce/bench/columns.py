"""The columns of the tables: fields of the rows, their titles and formats."""

from typing import NamedTuple


class Column(NamedTuple):
    """A column of numbers."""

    field: str
    """The field of the row."""
    title: str
    form: str
    """As in str.format."""


_TIME = "{:.2f}"
_GB = "{:.4g}"
_ERROR = "{:.1e}"

REGIONS = [
    Column("time_ms", "both, ms", _TIME),
    Column("forward_ms", "forward", _TIME),
    Column("backward_ms", "backward", _TIME),
    Column("ratio", "× products", "{:.3f}"),
    Column("tflops", "TFLOP/s", "{:.4g}"),
    Column("memory_gb", "peak, GB", _GB),
    Column("above_outputs_gb", "− gradients", _GB),
    Column("loss_error", "loss error", _ERROR),
    Column("dx_error", "dX error", _ERROR),
    Column("dw_error", "dW error", _ERROR),
    Column("dbias_error", "db error", _ERROR),
    Column("first_call_s", "first call, s", "{:.1f}"),
]
MODELS = [
    Column("time_ms", "step, ms", _TIME),
    Column("forward_ms", "forward", _TIME),
    Column("backward_ms", "backward", _TIME),
    Column("optimizer_ms", "optimizer", _TIME),
    Column("memory_gb", "peak, GB", _GB),
    Column("first_call_s", "first step, s", "{:.1f}"),
    Column("loss_error", "loss error", _ERROR),
]
KERNELS = [
    Column("time_ms", "time, ms", "{:.3f}"),
    Column("gb_per_s", "GB/s", "{:.0f}"),
    Column("copy_gb_per_s", "copy, GB/s", "{:.0f}"),
    Column("ratio", "of the copy", "{:.1%}"),
]
