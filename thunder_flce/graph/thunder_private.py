# ruff: noqa: F401
"""The names of thunder that are used though thunder does not document them: a newer version may lack one.

All other modules import them from here, so that a missing name is one clear error.
"""

from importlib.metadata import version

SUPPORTED_VERSIONS = ">=0.2.6,<0.3"

try:
    from thunder.core.compile_data import _compile_data as compile_data_and_stats
    from thunder.core.compile_data import get_compile_data
    from thunder.core.interpreter import INTERPRETER_SIGNALS, do_raise, unwrap, wrap_const
    from thunder.core.interpreter import _interpret_call as interpret_call
    from thunder.core.jit_ext import _general_jit_lookaside_map as general_jit_lookasides
    from thunder.core.jit_ext import (
        ensure_recursive_proxies,
        get_jit_ctx,
        interpreter_needs_wrap,
        record_source_loc_in_symbol_header,
        recursively_proxy,
        register_general_jit_lookaside,
        should_register_for_prologue,
    )
    from thunder.core.symbol import default_python_printer
    from thunder.core.trace import get_tracectx
    from thunder.core.transforms import (
        get_grad,
        put_grad,
        register_grad,
        vjp,
    )
    from thunder.distributed import get_skip_data_parallel_grad_sync
    from thunder.distributed.tensor_parallel.common import TensorParallelLayerType, TransformForTensorParallel
    from thunder.dynamo.compiler import ThunderCompiler, ThunderFXCompiledObject
    from thunder.executors.nvfuserex import nvfuser_available
    from thunder.torch import _torch_to_thunder_function_map as torch_to_thunder_functions
    from thunder.torch.langctx import register_method
    from thunder.transforms.autocast import disable_autocast, maybe_downcast_to, register_autocast_rule

    if nvfuser_available():
        from thunder.executors.nvfuserex_impl import getnv, lcdtype_to_nvdtype, register_supported
        from thunder.executors.nvfuserex_impl import reshape as nvfuser_reshape
except ImportError as error:
    raise ImportError(
        f"thunder_flce works with lightning-thunder {SUPPORTED_VERSIONS}; version {version('lightning-thunder')} lacks "
        f"a name that it uses: {error}"
    ) from error
