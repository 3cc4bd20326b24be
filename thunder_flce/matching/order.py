"""The order in which operations and regions run, and whether there is one in which each reads what it has to."""

from collections.abc import Sequence

from thunder_flce.matching.decisions import NotFused, Reason
from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.program import Op, Program, Tensor, gives_a_size, live
from thunder_flce.matching.regions import Region


def ordered(regions: Sequence[Region], interpreter: Interpreter) -> list[Op | Region]:
    """Returns operations and regions, each after those whose results it reads.

    A region returns all its results at once, at the place of the first; operations that use one earlier move behind it.
    Dead code is left out, and so are operations and regions that depend on their own results.
    """
    missing = {tensor for region in regions for tensor in region.returned}
    results = (*interpreter.program.results, *(tensor for region in regions for tensor in region.read_at))
    dropped = dropped_writes(regions, interpreter)
    ops = live(interpreter.program.ops, results, computed=frozenset(missing), dropped=dropped)
    items: list[Op | Region] = [*regions, *ops]
    items.sort(key=lambda item: (item if isinstance(item, Op) else item.place).position)
    # If a region's parts are far from each other, operations that it reads may be behind its place.
    missing |= {out for item in items if isinstance(item, Op) for out in item.outs}
    order: list[Op | Region] = []
    waiting: list[tuple[Op | Region, set[Tensor]]] = []
    for item in items:
        waiting.append((item, {*(item.read_at if isinstance(item, Region) else (*item.operands, *item.numbers))}))
        while (
            at := next((at for at, (_, reads) in enumerate(waiting) if missing.isdisjoint(reads)), None)
        ) is not None:
            ready, _ = waiting.pop(at)
            order.append(ready)
            missing.difference_update(ready.returned if isinstance(ready, Region) else ready.outs)
    return order


def dropped_writes(regions: Sequence[Region], interpreter: Interpreter) -> set[Op]:
    """Returns the in-place changes that regions replace."""
    writes: set[Op] = set()
    for region in regions:
        writes |= region.total.writes if region.total else set()
        storages = {tensor.storage for part in region.parts for tensor in part.linears}
        writes.update(op for op in interpreter.followed if op.writes[0].storage in storages)
    return writes


def find_stuck(regions: Sequence[Region], interpreter: Interpreter) -> tuple[Region, NotFused] | None:
    """Returns a region that cannot run, and why: it reads its own results, or would move across an in-place change."""
    order = ordered(regions, interpreter)
    if stuck := [region for region in regions if region not in order]:
        sums = [region for region in stuck if region.total is not None]
        return (sums or stuck)[0], NotFused(Reason.LOGITS_USED, "the loss depends on their argmax or entropy")
    last, region = -1, None
    for item in order:
        if isinstance(item, Region):
            region = item
        elif region is not None and item.position < last and gives_a_size(item):
            # Nodes that check that size, or have it as a number, would not move with the operation.
            return region, NotFused(Reason.LOGITS_USED, f"by {item}, whose size depends on the values of a tensor")
        last = max(last, item.position if isinstance(item, Op) else item.place.position)
    return _moved_across_a_write(order, interpreter)


def _moved_across_a_write(order: Sequence[Op | Region], interpreter: Interpreter) -> tuple[Region, NotFused] | None:
    """Returns a region for which a read would move across an in-place change of the memory, and the reason for that."""
    program, places = interpreter.program, {item: place for place, item in enumerate(order)}
    reads = {item: _reads_of(item, program) for item in order}
    for writer in (op for op in program.writers if op in places):
        # Autograd takes a view for a leaf if its base gets its gradient from a later in-place change.
        gives_gradient = writer.grad_mode and any(operand.needs_grad for operand in writer.operands)
        for item in (each for each in order if each is not writer):
            is_before, region = places[item] < places[writer], item if isinstance(item, Region) else None
            if isinstance(item, Op) and is_before and not gives_gradient and _is_view(item):
                continue
            if region is not None and region.total is not None and writer in region.total.writes:
                continue  # What it changes is one of the region's own terms, which something else reads, too.
            again = region.read_at if region is not None and region.reads_again else ()
            for tensor, position in reads[item].items():
                was_before = position < writer.position
                is_changed = was_before != is_before or (was_before and tensor in again)
                if is_changed and writer.may_change(tensor):
                    # Operations only move because they wait for a region.
                    regions = [each for each in order[: max(places[item], places[writer])] if isinstance(each, Region)]
                    return region or regions[-1], NotFused(Reason.OPERAND_MODIFIED, f"by {writer.name}")
    return None


def _reads_of(item: Op | Region, program: Program) -> dict[Tensor, int]:
    """Returns the tensors that an operation or a region reads, with positions.

    For a region, these include its rows, or with a sum, the rows and other tensors from which the sum is computed.
    """
    if isinstance(item, Op):
        return dict.fromkeys(item.operands, item.position)
    computed = {tensor for part in item.parts for tensor in part.rows}
    if item.total is not None:
        for op in program.ops:
            if not op.writes and not computed.isdisjoint(op.operands):
                computed.update(op.outs)
        before_sum = {item.total.place}
        for op in reversed(program.ops):
            if not before_sum.isdisjoint(op.outs):
                before_sum.update(op.operands)
        computed &= before_sum
    return dict.fromkeys(computed, item.place.position) | item.read_at


def _is_view(op: Op) -> bool:
    """Whether all results are views of the operands, so that the operation reads no elements."""
    return not op.writes and bool(op.outs) and all(out.shares_memory(each) for out in op.outs for each in op.operands)
