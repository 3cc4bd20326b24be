"""Prints two backward traces side by side, reduced to the operations of the loss."""

from collections.abc import Iterable
from dataclasses import dataclass

import thunder
from rich import box
from rich.console import Console, Group
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

import thunder_flce
from thunder_flce.inspection.report import format_bytes


@dataclass(frozen=True)
class LossRegion:
    """The operations of a backward trace for the loss and for the linear that computes its logits."""

    lines: list[str]
    saved: list[TensorProxy]
    """Saved tensors that these operations read, without parameters"""
    others: list[TensorProxy]
    """Saved tensors that the rest of the trace reads, without parameters"""


def loss_region(trace: TraceCtx, *, logits_numel: int, parameters: Iterable[str]) -> LossRegion:
    """Extracts the loss region from a backward trace.

    It consists of operations that read or write a tensor of the logits' size, operations of thunder_flce, and all
    operations that these depend on.

    Args:
        trace: the last backward trace of a jitted module.
        logits_numel: tokens × vocabulary.
        parameters: the names of the module's parameters.
    """
    parameters = {"t_" + name.replace(".", "_") for name in parameters}
    is_helper = {PrimIDs.UNPACK_SEQUENCE, PrimIDs.UNPACK_TRIVIAL, PrimIDs.DEL, PrimIDs.RETURN}
    wanted: set[str] = set()
    region: list[BoundSymbol] = []
    for bsym in reversed(trace.bound_symbols):
        if bsym.sym.id in is_helper:
            continue
        tensors = _tensors([*bsym.flat_proxy_args, *bsym.flat_proxy_outs])
        if (
            any(tensor.numel == logits_numel for tensor in tensors)
            or any(out.name in wanted for out in bsym.flat_proxy_outs)
            or bsym.sym.executor is thunder_flce.executor
        ):
            region.append(bsym)
            wanted |= {arg.name for arg in bsym.flat_proxy_args}

    unpacked = next(
        bsym.flat_proxy_outs
        for bsym in trace.bound_symbols
        if bsym.sym.id is PrimIDs.UNPACK_SEQUENCE and bsym.args[0].name == "C0"
    )
    saved = [tensor for tensor in _tensors(unpacked) if tensor.name not in parameters]
    # Drop the type of the result at the end of each line; the list of saved tensors shows types more readably.
    lines = [line.split("  # ")[0] for bsym in reversed(region) for line in bsym.python(0, print_depth=1)]
    return LossRegion(
        lines=lines,
        saved=[tensor for tensor in saved if tensor.name in wanted],
        others=[tensor for tensor in saved if tensor.name not in wanted],
    )


def print_side_by_side(console: Console, regions: dict[str, LossRegion], *, logits_numel: int) -> None:
    """Prints the loss regions under their names, and marks saved tensors of the logits' size."""
    table = Table(box=box.ROUNDED, expand=True, show_lines=True)
    for name in regions:
        table.add_column(name, ratio=1)
    table.add_row(*(_saved(region, logits_numel) for region in regions.values()))
    table.add_row(*(_lines(region) for region in regions.values()))
    console.print(table)


def _saved(region: LossRegion, logits_numel: int) -> Group:
    tensors = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left"):
        tensors.add_column(justify=justify)
    for tensor in region.saved:
        is_logits = tensor.numel == logits_numel
        style = "red" if is_logits else ""
        tensors.add_row(
            tensor.name, _type(tensor), format_bytes(_bytes(tensor)), "◀ T × V" if is_logits else "", style=style
        )
    tensors.add_row("together", "", format_bytes(sum(map(_bytes, region.saved))), style="bold")
    others = f"and {len(region.others)} for the layers below, {format_bytes(sum(map(_bytes, region.others)))}"
    return Group(Text("saved by the forward for the loss", style="dim"), tensors, Text(others, style="dim"))


def _lines(region: LossRegion) -> Group:
    code = Syntax("\n".join(region.lines), "python", theme="ansi_dark", background_color="default", word_wrap=True)
    return Group(Text("the loss in the last backward trace", style="dim"), code)


def _tensors(proxies: Iterable[Proxy]) -> list[TensorProxy]:
    return [proxy for proxy in proxies if isinstance(proxy, TensorProxy)]


def _type(tensor: TensorProxy) -> str:
    return f"{thunder.core.dtypes.to_strong_dtype(tensor.dtype).shortname()} [{', '.join(map(str, tensor.shape))}]"


def _bytes(tensor: TensorProxy) -> int:
    return tensor.numel * tensor.dtype.bytes
