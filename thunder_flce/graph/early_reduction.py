"""The reduction of dW over data-parallel ranks, right after the region's backward instead of at the end of all others.

`thunder.distributed.ddp` and `fsdp` put a `synchronize` of each parameter at the start of the program. So thunder's
backward divides and sums the gradients of all of them at its end, and nothing runs beside that. dW, the largest, is
there first. Where nothing but a region uses a parameter:

    # before                                              # after
    W = synchronize(w, group, …)                          x = …
    x = …                                                 W = averaged_synchronize(w, group, …)
    loss = linear_cross_entropy(x, W, labels, …)          loss = linear_cross_entropy(x, W, labels, …)

In its backward the ranks average dW themselves, in its memory: there is no division, and no copy.
"""

from typing import Any

import thunder.torch as ltorch
import torch.distributed as dist
from thunder.core.proxies import DistParallelType, FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from torch import Tensor
from torch.distributed import ProcessGroup

from thunder_flce.graph import symbols
from thunder_flce.graph.executor import executor
from thunder_flce.graph.matching.trace_index import TraceIndex
from thunder_flce.graph.thunder_private import (
    DistributedPrimIDs,
    distributed_prims,
    get_skip_data_parallel_grad_sync,
    register_augmented_forward,
    register_backward,
)
from thunder_flce.graph.trace_arguments import call_of, region_arguments
from thunder_flce.operation.call import operand_names

averaged_synchronize = Symbol(
    name="averaged_synchronize",
    meta=distributed_prims.synchronize.meta,
    id="thunder_flce.averaged_synchronize",
    is_prim=True,
)


def _average_meta(grad: TensorProxy, group: ProcessGroup, kind: DistParallelType) -> FutureTensorProxy:
    rows = grad.shape[0] // (group.size() if kind is DistParallelType.FULLY_SHARDED else 1)
    return FutureTensorProxy(shape=(rows, *grad.shape[1:]), like=grad)


def _average(grad: Tensor, group: ProcessGroup, kind: DistParallelType) -> tuple[Any, Tensor]:
    """Starts to average a gradient over ranks: this rank's rows, if these are divided, or in its memory.

    thunder's own reductions take no averages, so that a division would come first: half a millisecond for 1 GB.
    """
    if kind is not DistParallelType.FULLY_SHARDED:
        return dist.all_reduce(grad, dist.ReduceOp.AVG, group, async_op=True), grad
    part = grad.new_empty(grad.shape[0] // group.size(), *grad.shape[1:])
    return dist.reduce_scatter_tensor(part, grad.contiguous(), dist.ReduceOp.AVG, group, async_op=True), part


average_gradient = executor.register_operator("average_gradient", meta=_average_meta, fn=_average)


@register_augmented_forward(averaged_synchronize.id)
def _forward(
    parameter: TensorProxy, group: ProcessGroup, kind: DistParallelType
) -> tuple[TensorProxy, tuple[ProcessGroup, DistParallelType]]:
    """As that of thunder's own `synchronize`."""
    if kind is DistParallelType.FULLY_SHARDED:
        return distributed_prims.all_gather(parameter, group, True).wait(), (group, kind)
    return parameter, (group, kind)


@register_backward(averaged_synchronize.id)
def _backward(group: ProcessGroup, kind: DistParallelType, grad: TensorProxy) -> tuple[TensorProxy, None]:
    return distributed_prims.wait(average_gradient(grad, group, kind)), None


def reduce_early(trace: TraceCtx) -> TraceCtx:
    """The trace with parameters that only a region uses synchronized right before that."""
    index = TraceIndex(trace)
    moved: dict[int, list[BoundSymbol]] = {}
    for bsym in index.bsyms:
        if bsym.sym.id is DistributedPrimIDs.SYNCHRONIZE and not _is_local(bsym):
            *steps, user = _uses(bsym, index)
            if symbols.is_region(user) and steps[-1].output.name in _operands_that_need_grad(user):
                parameter, group, kind = bsym.args
                averaged = averaged_synchronize.bind(parameter, group, kind, output=bsym.output)
                moved.setdefault(id(user), []).extend((averaged, *steps[1:]))
    if not moved:
        return trace
    written = {out.name for steps in moved.values() for bsym in steps for out in bsym.flat_proxy_outs}
    reduced = from_trace(trace)
    for bsym in index.bsyms:
        reduced.bound_symbols += moved.get(id(bsym), [])
        if not any(out.name in written for out in bsym.flat_proxy_outs):
            reduced.bound_symbols.append(bsym)
    reduced.set_provenance(TraceProvenance("Reduce gradients of regions early"))
    return reduced


def _is_local(synchronize: BoundSymbol) -> bool:
    """Whether gradients stay with their rank: in `no_sync` of ddp."""
    return get_skip_data_parallel_grad_sync() and synchronize.args[2] is DistParallelType.REPLICATED


def _uses(synchronize: BoundSymbol, index: TraceIndex) -> list[BoundSymbol]:
    """A synchronization, the slices that take the padding of fsdp away, and the only user of their result.

    Where there are several users, the synchronization itself stands in place of the user.
    """
    steps = [synchronize]
    while len(users := index.users(steps[-1].output)) == 1 and users[0].sym.id == ltorch.getitem.id:
        steps.append(users[0])
    return [*steps, users[0] if len(users) == 1 else synchronize]


def _operands_that_need_grad(region: BoundSymbol) -> set[str]:
    """The names of the tensors that need a gradient and are only one of the operands."""
    call = call_of(region_arguments(*region.args, **region.kwargs))
    names = [call.tensors[name].name for name in operand_names(call.tensors)]
    return {name for name in (call.tensors[each].name for each in call.needs_grad) if names.count(name) == 1}
