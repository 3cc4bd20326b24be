"""Rewrites a trace: replaces each linear and the losses of its logits by a region with its plan."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import vjp
from thunder.torch import _torch_to_thunder_function_map as torch_to_thunder_functions
from torch.utils._pytree import tree_flatten, tree_map

from thunder_flce.graph import symbols
from thunder_flce.graph.reading import is_static, tensor_of
from thunder_flce.graph.trace_arguments import settings_of
from thunder_flce.matching.decisions import Decision, PlannedRegion
from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.order import ordered
from thunder_flce.matching.program import Op, Tensor, tensors_in
from thunder_flce.matching.regions import Region
from thunder_flce.matching.sums import PRODUCTS
from thunder_flce.matching.writing import write
from thunder_flce.operation.call import Call, operand_names
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import as_literal

_VIEWS = {torch.reshape, torch.flatten, torch.detach, torch.Tensor.to}
"""Functions whose result may share memory with their first argument, among those that make results of a program"""


def write_regions(
    trace: TraceCtx, regions: Sequence[Region], interpreter: Interpreter, *, options: Options
) -> tuple[TraceCtx, list[Decision]]:
    """Returns the trace with its regions, all planned, also those that the user wrote; and a decision about each."""
    writer = _Writer(trace, interpreter, options)
    for item in ordered(regions, interpreter):
        if isinstance(item, Op):
            writer.keep(item)
        else:
            writer.write(item)
    writer.add(trace.bound_symbols[-1])
    return writer.trace, writer.decisions


class _Writer:
    """`matching.writing.Writer` for thunder's traces."""

    def __init__(self, trace: TraceCtx, interpreter: Interpreter, options: Options):
        self.trace = from_trace(trace)
        self.decisions: list[Decision] = []
        self._interpreter, self._options = interpreter, options
        self._swapped: dict[Any, Proxy] = {}

    def keep(self, op: Op) -> None:
        """Adds an operation of the program as it is; a region that the user wrote gets a plan."""
        bsym = op.handle
        if symbols.is_region(bsym) and settings_of(bsym.kwargs).options is not None and is_static(*bsym.flat_args):
            self._add_recorded(bsym, lambda: self._plan_written_region(op))
        else:
            self.add(bsym)

    def add(self, bsym: BoundSymbol) -> None:
        """Adds a bound symbol, with operands swapped for their replacements."""
        self.trace.bound_symbols.append(bsym.from_bsym_swap_proxies(self._swapped) if self._swapped else bsym)

    def write(self, region: Region) -> None:
        """Adds a region."""
        self._add_recorded(region.place.handle, lambda: write(region, self, self._interpreter, self._options))

    def _add_recorded(self, source: BoundSymbol, write: Callable[[], tuple[dict[Tensor, Tensor], Decision]]) -> None:
        """Adds the symbols that `write` records, with the source line and tags of `source`."""
        scope: list[BoundSymbol] = []
        with tracectx(self.trace):
            self.trace.push_scope(scope)
            try:
                results, decision = write()
            finally:
                self.trace.pop_scope()
        location = {"source_filename": source.source_filename, "source_positions": source.source_positions}
        self.trace.bound_symbols += [bsym.from_bsym(**location, tags=source.tags | bsym.tags) for bsym in scope]
        self.decisions.append(decision)
        self._swapped |= {variableify(tensor.handle): new.handle for tensor, new in results.items()}

    def _plan_written_region(self, op: Op) -> tuple[dict[Tensor, Tensor], Decision]:
        settings, (tensors,) = settings_of(op.handle.kwargs), op.args
        call = settings.call(tensors)
        if any(out.needs_grad for out in op.outs):
            needs_grad = tuple(name for name in operand_names(settings.names) if call.tensors[name].needs_grad)
            call = replace(call, needs_grad=needs_grad)
        if call.needs_grad and (expected := self._options.expected_gradient) is not None:
            call = replace(call, tensors={**call.tensors, "expected_gradient": expected, **call.tensors})
        results, planned = self._region(call)
        return dict(zip(op.outs, results, strict=True)), Decision(op.source, planned)

    # See `matching.writing.Writer`.

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """Adds a call of a PyTorch function; returns its result."""
        needs_grad = function is not torch.detach and any(tensor.needs_grad for tensor in tensors_in((args, kwargs)))
        storage = args[0].storage if function in _VIEWS else None
        args, kwargs = tree_map(self._to_thunder, (args, kwargs))
        function = ltorch.getitem if function is operator.getitem else torch_to_thunder_functions[function]
        proxy = function(*args, **kwargs)
        return tensor_of(proxy, needs_grad=needs_grad, storage=storage or proxy.name)

    def _to_thunder(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._proxy(value)
        return devices.to_device(value) if isinstance(value, torch.device) else value

    def _proxy(self, tensor: Tensor) -> TensorProxy:
        return self._swapped.get(variableify(tensor.handle), tensor.handle)

    def weights(
        self, ops: Sequence[Op], operands: Sequence[Tensor], result: Tensor, *, values: Sequence[Tensor | None] | None
    ) -> list[Tensor]:
        """Returns the operations' gradients by thunder's vjp; with `values`, also the result."""
        # A linear function has the same derivative at 0. If the derivative reads only shapes, thunder drops the zeros.
        inputs: dict[str, TensorProxy] = {}
        for operand, value in zip(operands, values or [None] * len(operands), strict=True):
            like, dtype = operand.handle, _at_least_float32(operand.handle.dtype)
            if value is None:
                inputs[operand.name] = ltorch.zeros(operand.shape, device=like.device, dtype=dtype)
            else:
                inputs[operand.name] = ltorch.to(value.handle, dtype)
        made = {*inputs, *(out.name for op in ops for out in op.outs)}
        inputs |= {each.name: self._proxy(each) for op in ops for each in op.operands if each.name not in made}

        def linear_function(*proxies: TensorProxy) -> TensorProxy:
            env = dict(zip(inputs, proxies, strict=True))

            def replaced(arg: Any) -> Any:
                return env.get(arg.name, arg) if isinstance(arg, TensorProxy) else arg

            for op in ops:
                bsym = op.handle
                args, kwargs = tree_map(replaced, (tuple(bsym.args), dict(bsym.kwargs)))
                if op.name in PRODUCTS:
                    args, kwargs = _cast_to_widest_dtype((args, kwargs))
                returned = bsym.sym(*args, **kwargs)
                outs = returned if isinstance(returned, list | tuple) else (returned,)
                env.update(zip((out.name for out in op.outs), outs, strict=True))
            return env[result.name]

        one = ltorch.full((), 1.0, device=operands[0].handle.device, dtype=_at_least_float32(result.handle.dtype))
        scope = self.trace.peek_scope()
        start = len(scope)
        total, gradients = vjp(linear_function)((*inputs.values(),), (one,))
        for bsym in scope[start:]:
            for out in bsym.flat_proxy_outs:
                out.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        proxies = [*gradients[: len(operands)], *([] if values is None else [total])]
        return [tensor_of(proxy, needs_grad=False) for proxy in proxies]

    def region(self, call: Call, group: Any) -> tuple[list[Tensor], PlannedRegion]:
        """Adds the region's symbol with its plan; `group` are the ranks that divide the vocabulary, if any."""
        return self._region(call if group is None else replace(call, vocab_parallel=as_literal(group)))

    def _region(self, call: Call) -> tuple[list[Tensor], PlannedRegion]:
        proxy_call = call.map(lambda _, value: self._to_thunder(value))
        results, planned = symbols.add_region(proxy_call, self._options)
        with_grad = ("loss", *call.loss.differentiable_outputs) if call.needs_grad else ()
        names = ("loss", *call.loss.outputs)
        return [
            tensor_of(proxy, needs_grad=name in with_grad, storage=proxy.name)
            for name, proxy in zip(names, results, strict=True)
        ], planned


def _cast_to_widest_dtype(arguments: Any) -> Any:
    """Casts the arguments of a product to their widest dtype: it takes one dtype, but `weights` widens some of them."""

    def is_float(value: Any) -> bool:
        return isinstance(value, TensorProxy) and dtypes.is_float_dtype(value.dtype)

    floats = [value.dtype for value in tree_flatten(arguments)[0] if is_float(value)]
    widest = max(floats, key=lambda dtype: dtype.bytes)
    return tree_map(lambda value: ltorch.to(value, widest) if is_float(value) else value, arguments)


def _at_least_float32(dtype: dtypes.dtype) -> dtypes.dtype:
    return dtype if dtype.bytes >= 4 else dtypes.float32
