"""Which nodes of a graph of Dynamo's a loss region ends in, found without thunder, whose import takes seconds.

A cross-entropy is one. A log-probability or an entropy that a program spells out is one where a softmax and what reads
it (a gather, a sum) come from one linear. So a graph with gates or attention, and no loss, is left alone.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten

_T = TypeVar("_T")

LINEARS = ("linear", "matmul", "mm", "addmm")
_NORMALISERS = ("log_softmax", "softmax", "logsumexp")
# The same spelled out: an operation, and what makes its operand.
_LAST_OF_NORMALISERS = {("log", "sum"), ("truediv", "exp"), ("div", "exp")}
GATHERS = ("gather", "take_along_dim")
_FLATTENING = ("view", "reshape", "flatten")
_PRODUCTS = ("mul", "neg", "special_entr", "xlogy", "special_xlogy")
_CHOICES = ("where", "masked_fill")
_CHECKPOINT = "tag_activation_checkpoint"


def name_of(node: Node) -> str:
    """An operation's name, such as "view"."""
    if isinstance(node.target, str):
        return node.target.rpartition(".")[2]
    return getattr(node.target, "__name__", str(node.target))


def value_of(node: Node) -> Any:
    """What Dynamo has found a node to be: a fake tensor, a symbolic size, a tuple; None where it says nothing."""
    return node.meta.get("example_value")


def is_loss(node: Node) -> bool:
    """Whether a node is a cross-entropy or an nll_loss."""
    return node.op == "call_function" and node.target in (F.cross_entropy, F.nll_loss)


def is_linear(node: Node) -> bool:
    """Whether a node is a linear, or a matmul that may be one."""
    return is_call(node) and name_of(node) in LINEARS


def is_call(node: Node) -> bool:
    """Whether a node is an operation on tensors."""
    return node.op in ("call_function", "call_method")


def region_ends(graph: Graph) -> list[Node]:
    """The losses of a graph, and what may read a log-probability, an entropy, or single logits."""
    ends = {node: None for node in graph.nodes if is_loss(node)}
    widths: dict[Node, set[Any]] = {}
    """For each source, how many columns what is normalised or gathered may have."""
    for node in graph.nodes:
        operand = node.all_input_nodes[0] if is_call(node) and node.all_input_nodes else None
        if operand is not None and _gathers_or_normalises(node, operand):
            for source in sources_above(operand):
                sizes = [size for each in (source, operand) for size in _shape(value_of(each))[-1:]]
                widths.setdefault(source, set()).update(sizes)
    for source, sizes_of_source in widths.items():
        ends |= dict.fromkeys(_readers_below(source, sizes_of_source))
    return list(ends)


def above_ends(graph: Graph) -> dict[Node, None]:
    """From the end of each region up to the linears, these included."""
    return reached(region_ends(graph), lambda node: [] if is_linear(node) else node.all_input_nodes)


def _gathers_or_normalises(node: Node, operand: Node) -> bool:
    return name_of(node) in (*_NORMALISERS, *GATHERS) or (name_of(node), name_of(operand)) in _LAST_OF_NORMALISERS


def sources_above(node: Node) -> set[Node]:
    """The linears with a matrix that a floating-point tensor is computed from, and checkpoints, which may have them."""

    def is_source(node: Node) -> bool:
        return is_linear(node) or name_of(node) == _CHECKPOINT

    above = reached([node], lambda node: [] if is_source(node) else node.all_input_nodes)
    # What attention multiplies has more dimensions.
    return {node for node in above if is_source(node) and not (is_linear(node) and _rank(_matrix(node)) > 2)}


def _matrix(linear: Any) -> Any:
    """The second operand of a linear, given by position or by any of its names."""
    if len(linear.args) > 1:
        return linear.args[1]
    return next((linear.kwargs[name] for name in ("weight", "other", "mat1", "mat2") if name in linear.kwargs), None)


def _readers_below(source: Node, sizes: set[Any]) -> list[Node]:
    """The nodes that read one number a row of a source's logits, or of a tensor computed from the logits.

    Of these tensors, only those count that still have a dimension of one of the `sizes`, as the logits do.
    """

    def users(node: Node) -> Iterable[Node]:
        shape = _shape(value_of(node))
        is_flat = len(shape) == 1 and name_of(node) in _FLATTENING
        is_logits = node is source or not shape or is_flat or not sizes.isdisjoint(shape)
        return node.users if is_logits and not (node is not source and is_linear(node)) else ()

    return [node for node in reached([source], users) if _reads(node, source, sizes)]


def _reads(node: Node, source: Node, sizes: set[Any]) -> bool:
    if not is_call(node) or not node.args or not isinstance(node.args[0], Node):
        return is_call(node) and name_of(node) == "einsum" and _is_sum_of_products(node)
    name, operand = name_of(node), node.args[0]
    shape = _shape(value_of(operand))
    rest = tree_flatten([*node.args[1:], *node.kwargs.values()])[0]
    dimensions = [each for each in rest if type(each) is int and -len(shape) <= each < len(shape)]
    is_over_classes = any(shape[each] in sizes for each in dimensions)
    if name in ("sum", "nansum"):
        is_row = len(_shape(value_of(source))) == 1
        is_over_all = not _shape(value_of(node)) and (is_row or _multiplies_rows(operand, sizes))
        if name_of(operand) in _CHOICES and any(map(_is_log_softmax, operand.all_input_nodes)):
            masks = [each for each in operand.all_input_nodes if not _is_log_softmax(each)]
            return source not in reached(masks, _inputs_but_for_linears)
        return (is_over_classes or is_over_all) and name_of(operand) in _PRODUCTS
    if name == "kl_div":
        return bool(shape) and shape[-1] in sizes
    indices = [each for each in rest if isinstance(each, Node) and isinstance(value_of(each), Tensor)]
    if name == "getitem":
        key = node.args[1] if isinstance(node.args[1], tuple) else node.args[1:]
        is_gather = len(key) == len(shape) and all(map(_picks_elements, key))
        is_gather = is_gather and (len(shape) > 1 or _is_log_softmax(operand))
    elif name in ("index_select", "take"):
        is_gather = _is_log_softmax(operand)
    else:
        is_gather = name in GATHERS and is_over_classes
    # Columns that hang on the logits are choices, as of a gate's experts.
    return is_gather and source not in reached(indices, _inputs_but_for_linears)


def _picks_elements(part: Any) -> bool:
    """Whether a part of an index takes single elements by their numbers."""
    return isinstance(part, range | list) or isinstance(part, Node) and isinstance(value_of(part), Tensor)


def _is_log_softmax(node: Node) -> bool:
    """Whether a node is a log_softmax, flattened or not."""
    while is_call(node) and name_of(node) in _FLATTENING and isinstance(node.args[0], Node):
        node = node.args[0]
    return is_call(node) and name_of(node) == "log_softmax"


def _multiplies_rows(product: Node, sizes: set[Any]) -> bool:
    """Whether what is multiplied has rows and classes, all of it: not so in what balances the load of experts."""
    shapes = {_shape(value_of(operand)) for operand in product.all_input_nodes}
    return len(shapes) == 1 and all(len(shape) > 1 and shape[-1] in sizes for shape in shapes)


def _is_sum_of_products(einsum: Node) -> bool:
    """Whether it may be a sum, over one dimension or all of them, of the products of two tensors."""
    shapes = [_shape(value_of(operand)) for operand in einsum.all_input_nodes]
    operands = [arg for arg in einsum.args if isinstance(arg, Node)]
    return len(operands) == 2 and len(set(shapes)) == 1 and _rank(einsum) in (0, len(shapes[0]) - 1)


def _inputs_but_for_linears(node: Node) -> Iterable[Node]:
    """What the values of a node depend on; of a result of `broadcast_tensors`, not what only its shape depends on."""
    above = node.args[0] if node.args else None
    if isinstance(above, Node) and name_of(node) == "getitem" and name_of(above) == "broadcast_tensors":
        return [above.args[node.args[1]]]  # type: ignore[index, list-item]
    return [] if is_linear(node) else node.all_input_nodes


def reached(start: Iterable[_T], following: Callable[[_T], Iterable[_T]]) -> dict[_T, None]:
    """All that is reached from `start`, that included, the nearest first."""
    found: dict[_T, None] = {}
    waiting = deque(start)
    while waiting:
        each = waiting.popleft()
        if each not in found:
            found[each] = None
            waiting += following(each)
    return found


def _shape(value: Any) -> tuple[Any, ...]:
    """The sizes of a tensor, symbolic ones as expressions: to compare these is no guard."""
    sizes = value.shape if isinstance(value, Tensor) else ()
    return tuple(size.node.expr if isinstance(size, SymInt) else size for size in sizes)


def _rank(operand: Any) -> int:
    return len(_shape(value_of(operand))) if isinstance(operand, Node) else 0
