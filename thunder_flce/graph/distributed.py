"""Transforms of thunder and PyTorch for several ranks: what the fusion has to handle, and what users are warned of."""

import warnings
from copy import copy
from dataclasses import replace
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.trace import TraceCtx
from thunder.distributed import get_skip_data_parallel_grad_sync
from thunder.distributed.tensor_parallel.common import TensorParallelLayerType, TransformForTensorParallel
from thunder.transforms import LORATransform
from thunder.transforms.quantization import BitsAndBytesLinearQuant4bit
from torch.distributed.fsdp import FSDPModule

from thunder_flce.matching.algebra import Class
from thunder_flce.matching.decisions import NotFused, Reason
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import Op, Tensor

_REWRITE_LINEARS = (TransformForTensorParallel, LORATransform, BitsAndBytesLinearQuant4bit)


def defers_fusion(fusion: Any, trace: TraceCtx) -> bool:
    """Whether a later transform rewrites linears; if so, appends a copy of the fusion that runs after that transform.

    `thunder.distributed` appends its transforms to those of a function that is already jitted.
    """
    if fusion.original is not None:
        _restore_sources(trace, fusion.original)
        return False
    # The compile data of a Dynamo graph has no transforms.
    transforms = getattr(get_compile_data(), "transforms", [])
    position = next((index for index, transform in enumerate(transforms) if transform is fusion), len(transforms))
    if not any(isinstance(transform, _REWRITE_LINEARS) for transform in transforms[position + 1 :]):
        return False
    if getattr(transforms[-1], "original", None) is None:
        transforms.append(copy(fusion))
    transforms[-1].original = trace
    return True


@rule("synchronize_tensor_parallel_output")
def _columns_of_all_ranks(interpreter: Interpreter, op: Op, input: Tensor, group: Any, layer_type: Any) -> Class:
    """Rule for the operation by which `thunder.distributed.column_parallel` gathers a linear's columns from all ranks.

    Before the linear, `column_parallel` has put an operation that sums the input's gradient over the ranks. The rule
    drops that operation, since a region sums the gradient itself.
    """
    columns = interpreter.get(input)
    if not isinstance(columns, Class) or not columns.is_logits or len(columns.logits.terms) > 1:
        raise NotFused(Reason.TENSOR_PARALLEL)
    (term,) = columns.logits.terms
    producer = term.input.op
    is_column = layer_type is TensorParallelLayerType.COLUMN_PARALLEL_LINEAR
    if not is_column or producer is None or producer.name != "synchronize_tensor_parallel_input":
        raise NotFused(Reason.TENSOR_PARALLEL)
    term = replace(term, input=producer.operands[0])
    return replace(columns, logits=replace(columns.logits, terms=(term,), group=group), shape=op.output.shape)


def divided_weights() -> set[str]:
    """Names in the trace of the weights that `column_parallel` or `row_parallel` divides among ranks."""
    transforms = getattr(get_compile_data(), "transforms", ())
    dividing = (transform for transform in transforms if isinstance(transform, TransformForTensorParallel))
    return {name for transform in dividing for name in transform.chunked_param_name_to_layer_type}


def _restore_sources(trace: TraceCtx, original: TraceCtx) -> None:
    """Restores the source lines of the user's calls, which tensor parallelism of thunder drops from a trace."""
    for sym_id in {bsym.sym.id for bsym in trace.bound_symbols}:
        sources, bsyms = ([bsym for bsym in each.bound_symbols if bsym.sym.id == sym_id] for each in (original, trace))
        # If the rewriting added calls of an operation, nothing tells the user's calls apart from these.
        if len(sources) == len(bsyms):
            for bsym, source in zip(bsyms, sources, strict=True):
                bsym.source_filename, bsym.source_positions = source.source_filename, source.source_positions


def warn_of_unsummed_gradients() -> None:
    """Warns of programs whose gradients are silently wrong, with the fusion or without it."""
    data = get_compile_data()
    if data is None:
        return
    if getattr(data, "use_fsdp", False) and get_skip_data_parallel_grad_sync():
        _warn(
            "thunder.distributed.fsdp loses gradients in no_sync(): each micro-batch overwrites the gradients of the "
            "one before. Do not use no_sync(), or use thunder.distributed.ddp"
        )
    if any(isinstance(module, FSDPModule) for module in data._thunder_module_map.values()):
        _warn(
            "fully_shard has no effect on a module that thunder compiles: gradients are not reduced over the ranks. "
            "Use thunder.distributed.fsdp, or call fully_shard on the model and then compile it with "
            "thunder_flce.thunderfx"
        )


def _warn(message: str) -> None:
    warnings.warn(f"thunder_flce: {message}", stacklevel=4)
