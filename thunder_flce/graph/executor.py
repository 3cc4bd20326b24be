"""The executor `flce`, to which all symbols belong, and what the symbols have in common."""

from thunder.core import prims
from thunder.extend import OperatorExecutor, get_executor, register_executor

from thunder_flce.graph.thunder_private import get_compile_data

executor = OperatorExecutor("flce", version="0.1")
register_executor(executor)

# No pass may run a forward again in the backward: nvFuser's rematerialisation skips REDUCTION_OP, thunder's own skips
# DONT_RECOMPUTE_IN_BACKWARD.
FORWARD_TAGS = (prims.OpTags.REDUCTION_OP, prims.OpTags.DONT_RECOMPUTE_IN_BACKWARD)


def executors_allow_nvfuser() -> bool:
    """Whether the list of executors of the current compilation has nvFuser.

    True where thunder has no nvFuser executor, as without a GPU: then the list says nothing about it.
    """
    nvfuser, compile_data = get_executor("nvfuser"), get_compile_data()
    return nvfuser is None or compile_data is None or nvfuser in compile_data.executors_list
