"""The definitions of nvFuser's fusions that planned regions run."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from thunder_flce.engine.kernels import dispatch
from thunder_flce.engine.kernels.layout import row_stride
from thunder_flce.engine.printing import program
from thunder_flce.matching.decisions import PlannedRegion
from thunder_flce.operation.loss import RowCoefficients
from thunder_flce.operation.pointwise import VARIABLES, uses


def definitions(regions: Iterable[PlannedRegion]) -> dict[str, str]:
    """Each as nvFuser prints it, by direction and name; where two of one name differ, the names are numbered."""
    texts: dict[str, dict[str, None]] = {}
    for region in regions:
        for direction, fusions in _fusions(region):
            for name, fusion in fusions.items():
                texts.setdefault(f"{direction}: {name}", {})[str(fusion).strip()] = None
    return {
        f"{name} {number}" if number > 1 else name: text
        for name, of_name in texts.items()
        for number, text in enumerate(of_name, 1)
    }


def _fusions(region: PlannedRegion) -> Iterator[tuple[str, dict[str, Any]]]:
    """Directions and fusions; none where others run the row work."""
    call, plan = region
    loss, dtype, device_type = call.loss, plan.logits_dtype(call.dtype), call.device.type
    if dispatch.library(plan.row_kernels, dtype=dtype, device_type=device_type) != "nvFuser":
        return
    from thunder_flce.engine.kernels import nvfuser_rows

    stride, primitives = row_stride(call.vocab, dtype=dtype, device_type=device_type), program(call, plan).primitives
    kind: dict[str, Any] = {"dtype": dtype, "stride": stride, "vocab": call.vocab}
    made_by = partial(nvfuser_rows.definitions, loss.logit_map, **kind)
    has_class_weight = "weight" in call.tensors and bool(loss.label_smoothing)
    if "both_" in primitives:
        yield "forward", made_by(method="both_")
    if "results" in primitives:
        yield "forward", made_by(method="statistics")
        if loss.moments:
            yield "forward", made_by(method="moments", names=loss.moments, has_class_weight=has_class_weight)
    if "gradient_" in primitives:
        derivatives = {*loss.differentiable_outputs, *(name for name in VARIABLES if uses(loss.token_loss, name))}
        has_uniform = loss.label_smoothing or "mean_logit" in derivatives
        coefficients = RowCoefficients(1, 1, 1 if has_uniform else None, 1 if "entropy" in derivatives else None)
        of_call = partial(made_by, out_dtype=call.dtype, column_sums=call.bias_grad, has_class_weight=has_class_weight)
        direction = "backward" if plan.reads_statistics(call) else "forward"
        yield direction, of_call(method="gradient_", coefficients=coefficients)
