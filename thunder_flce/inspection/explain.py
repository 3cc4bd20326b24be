"""`explain`: finds the decisions about the losses of a compiled function, whichever compiler it is from."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from thunder_flce.backend import compiled_graphs
from thunder_flce.inspection.report import Compilation, Report
from thunder_flce.matching.decisions import LOG


def explain(compiled: Callable | None = None) -> Report:
    """Reports the decision about each loss of a compiled function or module, or of this process.

    Args:
        compiled: a function or module returned by `thunder_flce.jit`, `thunder_flce.thunderfx`, `thunder.jit` with our
            executor or transform, `thunder.compile` with our plugin, or `torch.compile` with the backend
            "thunder_flce"; the same wrapped by Fabric or accelerate; or a trainer that has the mixin. None: the latest
            1024 decisions of this process, for programs that a trainer compiles.

    Returns:
        A `Report`: print it, call its `to_dict()`, or read `report[0].decisions[0]`.

    Raises:
        TypeError: if `compiled` is none of these.
        ValueError: if thunder compiled it without our fusion.
    """
    if compiled is None:
        return Report([Compilation(decisions=list(LOG), compiled_by="this process")] if LOG else [])
    for candidate in _unwrapped(compiled):
        if (graphs := compiled_graphs(candidate)) is not None:
            return Report([Compilation(decisions=graph, compiled_by="torch.compile") for graph in graphs])
        if "thunder" in sys.modules:
            from thunder_flce.inspection.thunder_report import compilations

            if (reports := compilations(candidate)) is not None:
                return Report(reports)
    raise TypeError(
        'compiled must be what thunder_flce.jit, thunder_flce.thunderfx or torch.compile(…, backend="thunder_flce") '
        f"returned, or a trainer with LossTrainerMixin, but got {type(compiled).__name__}"
    )


# Attributes that hold the wrapped function or module; "compiled_loss" is that of `LossTrainerMixin`.
_WRAPPED = ("_forward_module", "module", "_original_module", "_orig_mod", "__wrapped__", "forward", "compiled_loss")


def _unwrapped(compiled: Any) -> Iterator[Any]:
    """Yields a compiled function or module, then all that its attributes `_WRAPPED` hold, such as those of Fabric."""
    candidates = [compiled]
    for candidate in candidates:
        yield candidate
        attributes = vars(candidate) if hasattr(candidate, "__dict__") else {}
        # A module keeps its submodules in `_modules`, not among its attributes.
        attributes = {**attributes, **(attributes.get("_modules") or {})}
        inner = [attributes[name] for name in _WRAPPED if attributes.get(name) is not None]
        candidates += [new for new in inner if not any(new is known for known in candidates)]
