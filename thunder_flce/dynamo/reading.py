"""Reads Dynamo's graph as a `Program`."""

import inspect
import operator
import os
import re
from collections import Counter
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import eager_transforms
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map

from thunder_flce.matching.interpreter import LINEARS, LOSSES, NORMALISERS
from thunder_flce.matching.program import Op, Program, Source, Tensor, agree, is_number, same, tensors_in

_NUMPY_PARAMETERS = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x1": "input", "x2": "other"}
_ATEN_LOSSES = {
    "cross_entropy_loss": "cross_entropy", "nll_loss_nd": "nll_loss", "nll_loss": "nll_loss", "kl_div": "kl_div"
}  # fmt: skip
"""ATen's losses, as in the graph of an exported module; their reduction is a number."""
_CAST_BY_AUTOCAST = (*LINEARS, *LOSSES, *NORMALISERS, "softmax")
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_TORCH_LIBRARIES = ("torch", "_operator", "builtins", "aten", "prims", "")
"""Libraries whose operations have PyTorch's names"""
_FILLED = ("zeros", "ones", "empty", "full")
_LIKE_OTHERS = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape", "type_as": "to", "to": "to"}
_RANDOM = re.compile(r"(alpha_|feature_)*dropout|rand|bernoulli|multinomial|normal(?!ize)|rrelu")
_RESHAPES_IN_PLACE = {
    "as_strided_", "detach_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
    "unsqueeze_",
}  # fmt: skip
"""Operations with ATen's tag `inplace_view`"""


def name_of(node: Node) -> str:
    """Returns the name of a node's operation without its library, such as "view" or "div_"."""
    name = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
    return name if name != "getattr" or len(node.args) < 2 else str(node.args[1])


def value_of(node: Node) -> Any:
    """Returns Dynamo's example value of a node: a fake tensor, a symbolic size, a tuple; None if there is none."""
    return node.meta.get("example_value")


def source_of(node: Node) -> Source:
    """Returns the line of the user's code that a node comes from, rather than a line of PyTorch."""
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(_TORCH_FOLDER)] or frames
    return Source(frames[-1][0], int(frames[-1][1])) if frames else Source()


def read(gm: GraphModule) -> Program:
    """Returns the program of a graph, with the operations of checkpointed functions; see `Op.inside`.

    The graph is first written in fewer ways: autocast's casts are nodes, a tensor is read as its latest change in place
    left it, and logits that are read for their sizes alone are not read. It computes the same as before.
    """
    reader = _Reader()
    results = reader.read(gm, inside=None)
    return Program(reader.ops, tensors_in(results))


class _Reader:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._values: dict[Node, Any] = {}
        self._numbers: dict[Node, tuple[Tensor, ...]] = {}
        """The tensors from which a number is read and computed"""
        self._reshapes: Counter[int] = Counter()
        """For each example value, which Dynamo reshapes with its tensor, the number of in-place reshapes to come"""
        self._grad_mode = torch.is_grad_enabled()
        """Whether autograd records the next node; at first, as at the entry of the graph"""

    def read(self, gm: GraphModule, inside: Node | None) -> Any:
        """Reads all nodes of a graph; returns the graph's output."""
        _erase_checks(gm)
        for node in gm.graph.nodes:
            _write_joined(node)
            if inside is None:  # What a checkpointed function returns may be changed outside of it.
                _write_unstacked(node)
        _redirect_reads(gm)
        self._reshapes.update(_reshaped_in_place(gm.graph))
        for node in gm.graph.nodes:
            if node.target is torch._C._set_grad_enabled:
                self._grad_mode = bool(node.args[0])
            elif node in self._values or node.op == "output":
                continue
            elif node.op in ("placeholder", "get_attr"):
                self._values[node] = tree_map(lambda value, node=node: tensor_of(value, node), value_of(node))
            elif is_checkpoint(node):
                self._read_checkpoint(gm, node, inside)
            else:
                self._add(node, inside)
        (output,) = gm.graph.find_nodes(op="output")
        return map_arg(output.args[0], self._values.__getitem__)

    def _read_checkpoint(self, gm: GraphModule, node: Node, inside: Node | None) -> None:
        body, (_, *operands) = body_of(gm, node), node.args
        for inner, outer in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True):
            self._values[inner] = map_arg(outer, self._values.__getitem__)
            self._numbers[inner] = self._numbers.get(outer, ())  # type: ignore[arg-type]
        self._values[node] = self.read(body, inside or node)
        # The results of the node are tensors of the body; outside of it, they have nodes of their own.
        for user in node.users:
            result = self._values[user] = self._values[node][user.args[1]]
            if isinstance(result, Tensor) and result.handle.graph is body.graph:
                result.handle = user

    def _add(self, node: Node, inside: Node | None) -> None:
        value = self._example_value(node)
        self._reshapes[id(value)] -= name_of(node) in _RESHAPES_IN_PLACE
        numbers = tuple(tensor for each in node.all_input_nodes for tensor in self._numbers.get(each, ()))
        written = [each for each in written_by(node) if isinstance(value_of(each), torch.Tensor)]
        outs = [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]
        reads_tensors = any(isinstance(value_of(each), torch.Tensor) for each in node.all_input_nodes)
        if not outs and not written and (value is not None or not reads_tensors):
            # A size, or a switch such as that of autocast: tensors depend on it only by the values that Dynamo has.
            self._values[node] = value
            if name_of(node) == "item":
                tensor = self._values[node.args[0]]  # type: ignore[index]
                tensor.is_number_read, numbers = True, (tensor,)
            if numbers:
                self._numbers[node] = numbers
                item = Op("item", numbers, {}, None, source_of(node), handle=node, inside=inside, grad_mode=False)
                self.ops.append(item)
            return
        if node.target is operator.getitem and isinstance(value_of(node.args[0]), tuple | list):  # type: ignore[arg-type]
            self._values[node] = self._values[node.args[0]][node.args[1]]  # type: ignore[index]
            if isinstance(self._values[node], Tensor):
                self._values[node].handle = node
            return
        self._write_sizes(node, inside)
        name = _full_name(node, is_written=bool(written))
        if _is_cast_by_autocast(name, node):
            self._write_casts(node, value.dtype, inside)
        args, kwargs = map_arg((tuple(node.args), dict(node.kwargs)), self._values.__getitem__)
        name, args, kwargs = _as_function(node, name, args, kwargs)
        output = tree_map(lambda each: tensor_of(each, node), value)
        for tensor, out in zip(tensors_in(output), outs, strict=True):
            tensor.needs_grad = out.requires_grad and (self._grad_mode or _has_grad_fn(out))
            tensor.is_reshaped = self._reshapes[id(out)] > 0
        is_reshaped = any(tensor.is_reshaped for tensor in tensors_in((args, kwargs, output)))
        writes = tuple(dict.fromkeys(self._values[each] for each in written))
        for tensor in writes if name == "set" else ():
            tensor.storage = None  # Dynamo only says which storage it has after the change.
        self.ops.append(
            Op(
                name,
                args,
                kwargs,
                output,
                source_of(node),
                writes=writes,
                handle=node,
                inside=inside,
                is_random=bool(_RANDOM.match(name)) or " of " in name or isinstance(node.target, HigherOrderOperator),
                is_reshaped=is_reshaped and name not in LOSSES,
                numbers=numbers,
                grad_mode=self._grad_mode,
            )  # fmt: skip
        )
        self._values[node] = output

    def _example_value(self, node: Node) -> Any:
        """Returns a node's example value; computes that of an element that `tolist` reads, which Dynamo does not."""
        container = value_of(node.args[0]) if node.target is operator.getitem else None  # type: ignore[arg-type]
        if value_of(node) is None and isinstance(container, FakeTensor):
            node.meta["example_value"] = container[node.args[1]]  # type: ignore[index]
        return value_of(node)

    def _write_sizes(self, node: Node, inside: Node | None) -> None:
        """Replaces an operand that is read only for its sizes, dtype and device by these, since it may be logits."""
        name, args, value = name_of(node), list(node.args), value_of(node)
        filled = name.removesuffix("_like").removeprefix("new_")
        is_filled, like = filled in (*_FILLED, "rand", "randn") and filled != name, _LIKE_OTHERS.get(name)
        at = 0 if is_filled else 1
        if not (args if is_filled else like and len(args) == 2):
            return
        other = args.pop(at)
        example = value_of(other) if isinstance(other, Node) and other.op != "placeholder" else None
        if type(example) is not FakeTensor or set(node.kwargs) - {"dtype", "device"}:
            return
        if self._values[other].is_reshaped:  # type: ignore[index]
            return
        if name.endswith("_like") or like not in (None, "to"):
            if not value.is_contiguous() and is_filled:
                return  # It takes the strides of the operand, too.
            sizes: list[Any] = list(example.shape)
            for dim, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt):
                    with node.graph.inserting_before(node):
                        sizes[dim] = node.graph.call_method("size", (other, dim))
                    sizes[dim].meta = {**node.meta, "example_value": size}
                    self._add(sizes[dim], inside)
            args.insert(at, tuple(sizes))
        if is_filled or like == "to":
            options: dict[str, Any] = {"dtype": example.dtype, "device": example.device}
            node.kwargs = options | {name: each for name, each in node.kwargs.items() if each is not None}
        node.op = "call_function" if is_filled else "call_method"
        node.target, node.args = getattr(torch, filled) if is_filled else str(like), tuple(args)

    def _write_casts(self, node: Node, dtype: torch.dtype, inside: Node | None) -> None:
        """Adds the casts that autocast makes, to the result's dtype; without it, operands have that dtype."""
        for operand in node.all_input_nodes:
            example = value_of(operand)
            if not isinstance(example, FakeTensor) or self._values[operand].is_reshaped:
                continue
            if example.is_floating_point() and example.dtype != dtype:
                with node.graph.inserting_before(node):
                    cast = node.graph.call_method("to", (operand, dtype))
                with example.fake_mode, torch.set_grad_enabled(self._grad_mode):
                    # Detached first: autograd cannot read a view whose base was changed in place since.
                    value = example.detach().to(dtype).requires_grad_(self._grad_mode and example.requires_grad)
                cast.meta = {**node.meta, "example_value": value}
                node.replace_input_with(operand, cast)
                self._add(cast, inside)


def _library_of(node: Node) -> str:
    return str(getattr(node.target, "__module__", None) or "").removeprefix("torch._ops.")


def _is_of_torch(node: Node) -> bool:
    return _library_of(node).partition(".")[0] in _TORCH_LIBRARIES


def _full_name(node: Node, *, is_written: bool) -> str:
    """Returns an operation's name without the underscore of an in-place one, and with its library if not PyTorch's."""
    name = name_of(node)
    if is_written and name.endswith("_") and not name.endswith("__"):
        name = name.removesuffix("_")
    if not _is_of_torch(node):
        # An operator of another library, or a user's function in the graph, is not PyTorch's operation of that name.
        return f"{name} of {_library_of(node)}"
    is_bit_view = name == "view" and value_of(node).dtype != value_of(node.all_input_nodes[0]).dtype
    return "view of bits" if is_bit_view else name


def _is_cast_by_autocast(name: str, node: Node) -> bool:
    """Whether autocast may cast the operands: not of a product in more than 16 bits, which has an out_dtype."""
    value = value_of(node)
    if name not in _CAST_BY_AUTOCAST or not isinstance(value, torch.Tensor):
        return False
    labels: Any = node.kwargs.get("target", *node.args[1:2]) if name == "cross_entropy" else None
    if labels and value_of(labels).is_floating_point():
        return False  # The targets are class probabilities.
    return name not in LINEARS or value.dtype.itemsize == 2


def _as_function(node: Node, name: str, args: Any, kwargs: Any) -> tuple[str, Any, Any]:
    """Returns the name and arguments of PyTorch's function for a method, or for ATen's or NumPy's function."""
    kwargs = {_NUMPY_PARAMETERS.get(key, key): each for key, each in kwargs.items()}
    if name == "where" and node.op == "call_method":
        arguments = dict(zip(("input", "condition", "other"), args, strict=False)) | kwargs
        args, kwargs = (arguments["condition"], arguments["input"], arguments["other"]), {}
    if name in _ATEN_LOSSES and _library_of(node) == "aten":
        weight = () if name == "kl_div" else ("weight",)
        names = ("input", "target", *weight, "reduction", "ignore_index", "label_smoothing")
        loss_arguments: Any = {"reduction": 1, **dict(zip(names, args, strict=False)), **kwargs}
        loss_arguments["reduction"] = ("none", "mean", "sum")[loss_arguments["reduction"]]
        name, args, kwargs = _ATEN_LOSSES[name], (), loss_arguments
    return name, args, kwargs


def _has_grad_fn(out: torch.Tensor) -> bool:
    """Whether autograd has recorded a tensor, or it is a leaf.

    A view that was made under `torch.no_grad` says that it requires a gradient if its base does, though none is known.
    """
    try:
        return not out._is_view() or out.grad_fn is not None
    except RuntimeError:  # It was changed in place since.
        return False


def _erase_checks(gm: GraphModule) -> None:
    """Erases checks of a tensor's dtype, device and layout that hold, as before each cast of an exported program.

    Dynamo has guards on them, and the check would be another reader of the logits.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        arguments = dict(zip(("a", "size", "stride", "dtype"), node.args, strict=False)) | node.kwargs
        value = value_of(arguments.pop("a"))
        # Sizes and strides are never equal to the methods of these names: such a check stays.
        if all(getattr(value, name) == expected for name, expected in arguments.items() if expected is not None):
            gm.graph.erase_node(node)


def _reshaped_in_place(graph: Graph) -> list[int]:
    """Returns the identity of each example value that Dynamo has reshaped in place, once for each such operation."""
    return [id(value_of(node)) for node in graph.nodes if name_of(node) in _RESHAPES_IN_PLACE]


def _redirect_reads(gm: GraphModule) -> None:
    """Has nodes that read a tensor after an in-place change read the result of the change, which is the same tensor."""
    for node in gm.graph.nodes:
        _write_fill(node)
        written = written_by(node)
        # Another library's operator may return another tensor than it changes.
        is_same = isinstance(value_of(node), torch.Tensor) and _is_of_torch(node) and not _is_numpy_call(node)
        if is_same and written and written == list(node.args[:1]):
            written[0].replace_all_uses_with(node, node.__lt__)


def _write_joined(filled: Node) -> None:
    """Replaces a new tensor that is filled part by part, as by a loop over chunks, by a join of these parts."""
    if name_of(filled).removesuffix("_like").removeprefix("new_") not in _FILLED or "out" in filled.kwargs:
        return
    whole, graph = value_of(filled), filled.graph
    writes = sorted(user for user in filled.users if user.target is operator.setitem and user.args[0] is filled)
    readers = [user for user in filled.users if user not in writes]
    parts: list[Any] = [each.args[2] for each in writes]
    values: list[Any] = [value_of(each) if isinstance(each, Node) else None for each in parts]
    if not writes or filled in parts or any(each < writes[-1] for each in readers):
        return
    between = [each for each in graph.nodes if writes[0] < each < writes[-1] and each not in writes]
    written = [value_of(tensor) for each in between for tensor in written_by(each)]
    if not all(isinstance(each, FakeTensor) and each.device == whole.device for each in (whole, *values, *written)):
        return
    storages = {StorageWeakRef(value.untyped_storage()) for value in values}
    changes_part = any(StorageWeakRef(each.untyped_storage()) in storages for each in written)
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    changes_part |= not {*map(id, values)}.isdisjoint(_reshaped_in_place(graph))
    if changes_part or not set(between).isdisjoint(switches):
        return
    keys: list[Any] = [key if isinstance(key := write.args[1], tuple) and key else (key,) for write in writes]
    dim, is_stack, end = len(keys[0]) - 1, type(keys[0][-1]) is int, 0
    for (*others, key), value in zip(keys, values, strict=True):
        start = key.start or 0 if isinstance(key, slice) and key.step in (None, 1) and not is_stack else key
        sizes: list[Any] = [*value.shape[:dim], *[1] * is_stack, *value.shape[dim:]]
        is_next = type(start) is int and agree(start, end) and len(sizes) == whole.ndim
        if not is_next or others != [slice(None)] * dim:
            return
        if not all(at == dim or agree(size, whole.shape[at]) for at, size in enumerate(sizes)):
            return
        end += sizes[dim]
    if not agree(end, whole.shape[dim]):
        return
    join = torch.stack if is_stack else torch.cat
    has_grad = next((bool(each.args[0]) for each in switches[::-1] if each < writes[-1]), torch.is_grad_enabled())
    # Without Python's dispatcher, torch 2.8 has no views of symbolic sizes.
    with whole.fake_mode, enable_python_dispatcher(), torch.set_grad_enabled(has_grad):
        values = [each.to(whole.dtype) for each in values]
        like = join(values, dim)
    if not all(map(same, like.stride(), whole.stride())) or like.requires_grad != whole.requires_grad:
        return  # It may have another memory format, for example.
    meta = writes[-1].meta
    with graph.inserting_before(writes[-1]):
        for position, value in enumerate(values):
            if value is not value_of(parts[position]):
                parts[position] = graph.call_method("to", (parts[position], whole.dtype))
                parts[position].meta = {**meta, "example_value": value}
        joined = graph.call_function(join, (parts, dim))
    # With the example value of the whole: its views share that storage.
    joined.meta = {**meta, "example_value": whole}
    filled.replace_all_uses_with(joined, delete_user_cb=lambda user: user in readers)
    for write in writes:
        graph.erase_node(write)


def _write_unstacked(stacked: Node) -> None:
    """Has readers of one of several stacked outputs of linears, such as of heads, read that output itself."""
    is_of_linears = {*map(name_of, stacked.all_input_nodes)} == {"linear"}
    if stacked.target is not torch.stack or not is_of_linears or not stacked.args:
        return
    arguments: Any = *stacked.args, *stacked.kwargs.values(), 0
    tensors, dim = arguments[:2]
    values: list[Any] = [value_of(each) for each in (stacked, *tensors)]
    written: list[Any] = [value_of(tensor) for each in stacked.graph.nodes for tensor in written_by(each)]
    if not all(isinstance(each, FakeTensor) for each in (*values, *written)):
        return
    # The stacked tensor is a copy, and has a gradient of its own.
    memory, *changed = (StorageWeakRef(each.untyped_storage()) for each in (values[0], *written))
    is_only_read = memory not in changed and sum(len(each.users) for each in {*tensors}) == len(tensors)
    are_equal = len({(each.dtype, each.requires_grad) for each in values}) == 1
    users: list[Any] = [(user, user.args[1] if user.target is operator.getitem else ()) for user in stacked.users]
    keys = [(user, list(key) if isinstance(key, tuple) else [key]) for user, key in users]
    selects_one = all(key[:dim] == [slice(None)] * dim and [*map(type, key[dim:][:1])] == [int] for _, key in keys)
    if is_only_read and are_equal and dim >= 0 and selects_one:
        for user, key in keys:
            user.args = tensors[key.pop(dim)], tuple(key) or Ellipsis
        stacked.graph.erase_node(stacked)


def _write_fill(node: Node) -> None:
    """Replaces `x[mask] = number` by the equivalent `masked_fill_`, which returns x."""
    if node.target is not operator.setitem:
        return
    number: Any
    written, mask, number = (value_of(each) if isinstance(each, Node) else each for each in node.args)
    if not (isinstance(written, torch.Tensor) and isinstance(mask, torch.Tensor) and is_number(number)):
        return
    # Only an assignment accepts fractions for integers, and numbers that overflow in float16.
    if mask.dtype is not torch.bool or not written.is_floating_point() or mask.ndim != written.ndim:
        return
    fits = abs(number) <= torch.finfo(written.dtype).max
    if fits and all(map(agree, mask.shape, written.shape)):
        node.op, node.target, node.meta = "call_method", "masked_fill_", {**node.meta, "example_value": written}


def tensor_of(value: Any, node: Node) -> Any:
    """Returns the program's tensor for a fake tensor; symbolic sizes and other values stay as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    # A tensor inside of a vmap has no storage to ask for.
    is_wrapped = is_traceable_wrapper_subclass(value) or torch._C._functorch.is_functorch_wrapped_tensor(value)
    is_plain = value.layout is torch.strided and not is_wrapped
    shape = tuple(size if isinstance(size, int) else _plain_size(size) for size in value.shape)
    storage = StorageWeakRef(value.untyped_storage()) if is_plain else None
    return Tensor(node.name, shape, value.dtype, value.device, value.requires_grad, node, storage, is_plain)


def _plain_size(size: Any) -> Any:
    expression = size.node.expr
    return int(expression) if expression.is_Integer else size


def is_checkpoint(node: Node) -> bool:
    """Whether a node is a checkpointed function without a policy of its own: with one, PyTorch has to run it."""
    return node.op == "call_function" and name_of(node) == "tag_activation_checkpoint"


def body_of(gm: GraphModule, checkpoint: Any) -> GraphModule:
    """Returns the graph of a checkpointed function."""
    return attrgetter(checkpoint.args[0].target)(gm)


# In-place operators, such as operator.iadd: without the i, the name is that of another operator.
_WRITING_OPERATORS = {operator.setitem, eager_transforms._set_tensor_requires_grad} | {
    each for name, each in vars(operator).items() if name[0] == "i" and f"__{name[1:]}__" in vars(operator)
}


def written_by(node: Node) -> list[Node]:
    """Returns the tensors that an operation changes in place."""
    target, written = node.target, [node.kwargs.get("out")]
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, *target.overloads())
    if name_of(node) == "triton_kernel_wrapper_mutation" or _is_numpy_call(node):
        written += node.all_input_nodes  # The user's kernel, or NumPy's function, may write to any argument.
    elif isinstance(target, torch._ops.OpOverload):
        schema = target._schema.arguments
        args = {**dict(zip([each.name for each in schema], node.args, strict=False)), **node.kwargs}
        written += [args.get(each.name) for each in schema if each.alias_info is not None and each.alias_info.is_write]
    elif isinstance(first := node.args[0] if node.args else node.kwargs.get("input"), Node | list | tuple):
        name = name_of(node)
        # The names of some of Python's operators, such as and_, have an underscore only to avoid a keyword.
        is_by_name = name.endswith("_") and not name.endswith("__") and target not in vars(operator).values()
        # Methods such as __iadd__ have underscores on both sides.
        is_operator = not _WRITING_OPERATORS.isdisjoint((target, vars(operator).get(name.strip("_"))))
        if is_by_name or is_operator:
            # If the first argument is a list, as for torch._fused_adamw_, further arguments may change, too.
            written += [first] if isinstance(first, Node) else node.all_input_nodes
        elif getattr(target, "__module__", "") == F.__name__:
            written += _written_by_functional(node)
    return [each for each in tree_flatten(written)[0] if isinstance(each, Node)]


def _is_numpy_call(node: Node) -> bool:
    """Whether a node is Dynamo's call of a NumPy function."""
    return getattr(node.target, "__module__", "") == "torch._dynamo.utils"


def _written_by_functional(node: Node) -> list[Any]:
    """Returns what a function of torch.nn.functional changes: input, running statistics, or an embedding's weight."""
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    arguments, names = bound.arguments, []
    if arguments.get("inplace"):
        names += ["input"]
    if arguments.get("training") or arguments.get("use_input_stats"):
        names += ["running_mean", "running_var"]
    if arguments.get("max_norm") is not None:
        names += ["weight"]
    return [arguments.get(name) for name in names]
