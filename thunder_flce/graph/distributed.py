"""What thunder and PyTorch do to distribute a program, as far as the fusion has to know, or its user has to be told."""

import warnings

from torch.distributed.fsdp import FSDPModule

from thunder_flce.graph.thunder_private import (
    TransformForTensorParallel,
    get_compile_data,
    get_skip_data_parallel_grad_sync,
)


def divided_weights() -> set[str]:
    """The weights that `column_parallel` or `row_parallel` divides among ranks, by their names in the trace.

    Their transforms run after the fusion, and insert what gathers the logits around each linear that they find.
    """
    # The data of a Dynamo graph has none.
    transforms = getattr(get_compile_data(), "transforms", ())
    divide = (transform for transform in transforms if isinstance(transform, TransformForTensorParallel))
    return {name for transform in divide for name in transform.chunked_param_name_to_layer_type}


def warn_of_gradients_that_are_not_summed() -> None:
    """Warns of programs whose gradients would be wrong without a word from anyone, with the fusion or without it."""
    data = get_compile_data()
    if data is None:
        return
    if getattr(data, "use_fsdp", False) and get_skip_data_parallel_grad_sync():
        _warn(
            "thunder.distributed.fsdp loses gradients in no_sync(): those of its micro-batches are written over, not "
            "added up. Leave no_sync() out, or use thunder.distributed.ddp"
        )
    if any(isinstance(module, FSDPModule) for module in data._thunder_module_map.values()):
        _warn(
            "fully_shard has no effect on a module that thunder compiles: each rank keeps the gradients of its own "
            "data. Use thunder.distributed.fsdp, or fully_shard the model and then compile it with "
            "thunder_flce.thunderfx"
        )


def _warn(message: str) -> None:
    warnings.warn(f"thunder_flce: {message}", stacklevel=4)
