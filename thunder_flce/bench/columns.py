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
    Column("ratio", "× matmuls", "{:.3f}"),
    Column("tflops", "TFLOP/s", "{:.4g}"),
    Column("energy_j", "energy, J", "{:.1f}"),
    Column("memory_gb", "peak, GB", _GB),
    Column("above_outputs_gb", "− gradients", _GB),
    Column("loss_error", "loss error", _ERROR),
    Column("dx_error", "dX error", _ERROR),
    Column("dw_error", "dW error", _ERROR),
    Column("dbias_error", "dbias error", _ERROR),
    Column("dy_error", "dy error", _ERROR),
    Column("db_error", "dB error", _ERROR),
    Column("first_call_s", "first call, s", "{:.1f}"),
]
AGAINST = [
    Column("time_ms", "both, ms", _TIME),
    Column("base_time_ms", "base", _TIME),
    Column("ratio", "ratio", "{:.4f}"),
    Column("pairs", "pairs", "{}"),
    Column("above_outputs_gb", "peak − gradients, GB", _GB),
    Column("base_above_outputs_gb", "base", _GB),
    Column("memory_ratio", "ratio", "{:.3f}"),
]
PREDICTIONS = [
    Column("predicted_ms", "predicted, ms", _TIME),
    Column("time_ms", "measured", _TIME),
    Column("ratio", "ratio", "{:.3f}"),
    Column("predicted_gb", "predicted peak, GB", _GB),
    Column("memory_gb", "measured", _GB),
    Column("memory_ratio", "ratio", "{:.3f}"),
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
LOSSES = [
    Column("time_ms", "both, ms", _TIME),
    Column("matmuls", "matmuls", "{}"),
    Column("ratio", "× matmuls", "{:.3f}"),
    Column("memory_gb", "peak − gradients, GB", _GB),
    Column("loss_error", "loss error", _ERROR),
    Column("dx_error", "dX error", _ERROR),
    Column("dw_error", "dW error", _ERROR),
    Column("first_call_s", "first call, s", "{:.1f}"),
]
DISTRIBUTED = [
    Column("ranks", "ranks", "{}"),
    Column("time_ms", "both, ms", _TIME),
    Column("ratio", "× products", "{:.3f}"),
    Column("exposed_ms", "exposed, ms", "{:.3f}"),
    Column("memory_gb", "peak − gradients, GB", _GB),
    Column("dx_error", "dX error", _ERROR),
    Column("dw_error", "dW error", _ERROR),
    Column("moved_gb", "moved, GB", _GB),
    Column("same_bits", "same bits", "{}"),
]
CONVERGENCE = [
    Column("seed", "seed", "{}"),
    Column("final_loss", "final loss", "{:.4f}"),
    Column("held_out_loss", "held out", "{:.4f}"),
    Column("time_ms", "step, ms", _TIME),
]
SOAK = [
    Column("steps", "steps", "{}"),
    Column("time_ms", "step, ms", _TIME),
    Column("drift", "drift", "{:.3f}"),
    Column("growth_gb", "growth, GB", _GB),
    Column("peak_growth_gb", "of the peak", _GB),
    Column("host_growth_gb", "of the host", _GB),
    Column("compilations", "compilations", "{}"),
    Column("last_compilation", "last at step", "{}"),
]
KERNELS = [
    Column("backend", "backend", "{}"),
    Column("time_ms", "time, ms", "{:.3f}"),
    Column("gb_per_s", "GB/s", "{:.0f}"),
    Column("copy_gb_per_s", "copy, GB/s", "{:.0f}"),
    Column("ratio", "of the copy", "{:.1%}"),
]
