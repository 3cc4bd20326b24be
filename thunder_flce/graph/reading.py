"""Reads a trace of thunder as a `Program`."""

from typing import Any

from thunder.core import devices, dtypes, prims
from thunder.core.proxies import NumberProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch.utils._pytree import tree_map

from thunder_flce.matching.program import Op, Program, Source, Tensor, tensors_in

_NLL_LOSS = ("weight", "ignore_index", "reduction")


def read(trace: TraceCtx) -> Program:
    """Returns the `Program` that a trace computes."""
    with_grad = _tensors_that_need_grad(trace)
    tensors: dict[str, Tensor] = {}

    def converted(value: Any) -> Any:
        if isinstance(value, TensorProxy):
            if value.name not in tensors:
                tensors[value.name] = tensor_of(value, needs_grad=value.name in with_grad)
            return tensors[value.name]
        if isinstance(value, dtypes.dtype):
            return dtypes.to_torch_dtype(value)
        return value

    ops: list[Op] = []
    results: list[Tensor] = []
    for bsym in trace.bound_symbols:
        args, kwargs = tree_map(converted, (tuple(bsym.args), dict(bsym.kwargs)))
        if bsym.sym.id == prims.PrimIDs.RETURN:
            results = tensors_in((args, kwargs))
            continue
        name, output = bsym.sym.name, tree_map(converted, bsym.output)
        if bsym.sym.executor is not None:
            # An executor's own operator need not be PyTorch's operator of the same name.
            name += f" of {bsym.sym.executor.name}"
        elif name == "nll_loss":
            args, kwargs = args[:2], {**dict(zip(_NLL_LOSS, args[2:], strict=False)), **kwargs}
        elif name in ("torch_max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
            name, args = ("minimum" if name == "min" else "maximum"), args[:2]
        elif name == "view" and output.dtype != args[0].dtype:
            name += " of bits"
        elif name == "unpack_trivial":
            args, output = (), None  # Its outputs are arguments of the program.
        ops.append(
            Op(
                name,
                args,
                kwargs,
                output,
                source_of(bsym),
                writes=tuple(map(converted, tensors_written(bsym))),
                is_random=_is_random(bsym),
                handle=bsym,
            )  # fmt: skip
        )
    return Program(ops, results)


def tensor_of(proxy: TensorProxy, *, needs_grad: bool, storage: str | None = None) -> Tensor:
    """Returns a proxy as a tensor of the program; a tensor of integers never needs a gradient."""
    needs_grad = needs_grad and dtypes.is_inexact_dtype(proxy.dtype)
    device, dtype = devices.to_torch_device(proxy.device), dtypes.to_torch_dtype(proxy.dtype)
    return Tensor(
        proxy.name, tuple(proxy._shape), dtype, device, needs_grad, proxy, storage, type(proxy) is TensorProxy
    )


def source_of(bsym: BoundSymbol) -> Source:
    """File and line of the user's code that called the operation, as far as thunder knows them."""
    return Source(bsym.source_filename, getattr(bsym.source_positions, "lineno", None))


def _tensors_that_need_grad(trace: TraceCtx) -> set[str]:
    """Names of all tensors of a trace through which a gradient flows; thunder itself marks only the trace's inputs.

    The set may be too large, since an operation whose derivative is zero counts as passing the gradient on.
    """
    needed = {arg.name for arg in trace.args or () if isinstance(arg, TensorProxy) and arg.requires_grad}
    for bsym in trace.bound_symbols:
        stops = bsym.sym.name in ("detach", "stop_gradient")
        if not stops and any(arg.name in needed for arg in bsym.flat_proxy_args):
            needed |= {out.name for out in bsym.flat_proxy_outs if isinstance(out, TensorProxy) and carries_grad(out)}
    return needed


def carries_grad(tensor: TensorProxy) -> bool:
    """Whether a gradient can flow through a tensor; False for a tensor that was computed under `torch.no_grad`."""
    return dtypes.is_inexact_dtype(tensor.dtype) and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in tensor.tags


def may_need_grad(tensor: TensorProxy) -> bool:
    """Whether a tensor may need a gradient. Only arguments have a history, and `requires_grad` is exact for them."""
    return carries_grad(tensor) and (tensor.requires_grad or tensor.history is None)


def loss_dtype(tensor: TensorProxy) -> dtypes.dtype:
    """Dtype of the loss and of every value that is one number per row: float64 for float64, otherwise float32."""
    return dtypes.float64 if dtypes.to_strong_dtype(tensor.dtype) is dtypes.float64 else dtypes.float32


def is_static(*values: Any) -> bool:
    """Whether all shapes and numbers are known when a trace is compiled: False with thunder's symbolic values."""
    # Reading `shape` would add a symbol to the trace.
    sizes = [size for value in values if isinstance(value, TensorProxy) for size in value._shape]
    return not any(isinstance(value, NumberProxy) for value in (*values, *sizes))


def _is_random(bsym: BoundSymbol) -> bool:
    return prims.OpTags.RANDOM_OP in (bsym.sym.tags or ()) or any(map(_is_random, bsym.subsymbols))


def tensors_written(bsym: BoundSymbol) -> list[TensorProxy]:
    """Returns the tensors that an operation, or one of its subsymbols, changes in place."""
    written: list[Proxy] = [tensor for inner in bsym.subsymbols for tensor in tensors_written(inner)]
    if bsym.sym.id == prims.PrimIDs.COPY_:
        written.append(bsym.args[1])
    elif bsym.sym.name.endswith("_") or "setitem" in bsym.sym.name:
        written.append(bsym.args[0])
    return list({proxy.name: proxy for proxy in written if isinstance(proxy, TensorProxy)}.values())
