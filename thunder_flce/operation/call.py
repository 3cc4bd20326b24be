"""A call of `linear_cross_entropy` or `linear_kl_divergence`: its tensors by name, each with a role.

An argument's role decides how it is checked, cast and flattened, how ranks compare it, which part of it a rank has, and
whether it has a gradient. So a new argument is a new line of `ARGUMENTS`.
Legend: T tokens, H hidden size, V vocabulary, K targets a token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._subclasses.fake_tensor import is_fake

from thunder_flce.device import Device
from thunder_flce.operation.loss import Loss
from thunder_flce.options import PlainValues

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")

HIDDEN = "hidden"
"""(..., H): a vector per token, the input of a linear"""
COLUMN = "column"
"""(V, H) or (V,): a row or a number per column of the logits; each rank that divides the vocabulary has a part"""
CLASS = "class"
"""(V,): a number per column of the logits, whole on every rank"""
TOKEN = "token"
"""(...) or (..., K): a number per token, or per target of a token"""
SCALAR = "scalar"
"""(): one number"""
TOKEN_ROLES = (HIDDEN, TOKEN)
"""Roles of arguments whose first dimensions are the tokens"""


class Argument(NamedTuple):
    """Properties of an argument that hold for all calls."""

    role: str
    dtypes: tuple[str, ...] = FLOATS
    dtype_of: str | None = None
    """Name of the argument whose dtype this one must have"""
    differentiable: bool = False


ARGUMENTS = {
    "input": Argument(HIDDEN, differentiable=True),
    "linear_weight": Argument(COLUMN, dtype_of="input", differentiable=True),
    "target": Argument(TOKEN, INTEGERS),
    "linear_bias": Argument(COLUMN, dtype_of="input", differentiable=True),
    "weight": Argument(CLASS, dtype_of="input"),
    "token_weights": Argument(TOKEN),
    "target_weights": Argument(TOKEN),
    "num_items": Argument(SCALAR, (*INTEGERS, *FLOATS)),
    "expected_gradient": Argument(SCALAR),
    "token_inputs": Argument(TOKEN, (*FLOATS, *INTEGERS, "bool")),
    "terms.input": Argument(HIDDEN, dtype_of="input", differentiable=True),
    "terms.weight": Argument(COLUMN, dtype_of="input", differentiable=True),
    "teacher_input": Argument(HIDDEN),
    "teacher_weight": Argument(COLUMN, dtype_of="teacher_input"),
    "divergence_weights": Argument(TOKEN),
    "label_weights": Argument(TOKEN),
}
"""Arguments by name. Items of the sequences `token_inputs` and `terms` are named token_inputs[0], terms[0].input …"""


# Default of both sequences. Comparing by identity spares most calls from checking them.
_EMPTY = ()


@cache
def argument(name: str) -> Argument:
    """Returns the properties of a tensor of a call, by its name."""
    base, bracket, rest = name.partition("[")
    return ARGUMENTS[base + rest.partition("]")[2] if bracket else name]


@cache
def have_token_dimensions(names: tuple[str, ...]) -> tuple[bool, ...]:
    """Returns for each name whether that tensor's first dimensions are the tokens."""
    return tuple([argument(name).role in TOKEN_ROLES for name in names])


def named_tensors(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors among the arguments of a function, by name, in the order of `ARGUMENTS`, without None.

    Raises:
        TypeError: if terms are not pairs, or token_inputs is not a sequence.
    """
    tensors = {name: arguments[name] for name in ARGUMENTS if name in arguments and arguments[name] is not None}
    if (inputs := tensors.pop("token_inputs", _EMPTY)) is not _EMPTY:
        tensors |= {f"token_inputs[{number}]": tensor for number, tensor in enumerate(checked_token_inputs(inputs))}
    if (terms := arguments.get("terms")) is not None and terms is not _EMPTY:
        for number, (x, weight) in enumerate(_checked_pairs(terms)):
            tensors |= {f"terms[{number}].input": x, f"terms[{number}].weight": weight}
    return tensors


def checked_token_inputs(inputs: Any) -> Sequence[Any]:
    """Returns token_inputs; raises a `TypeError` if they are not a sequence."""
    if not _is_sequence(inputs):
        raise TypeError(f"token_inputs must be a sequence of tensors, but got {type(inputs).__name__}")
    return inputs


def _checked_pairs(terms: Any) -> Sequence[tuple[Any, Any]]:
    if not _is_sequence(terms):
        raise TypeError(f"terms must be a sequence of pairs (input, weight), but got {type(terms).__name__}")
    for number, term in enumerate(terms):
        if not _is_sequence(term) or len(term) != 2:
            problem = f"has length {len(term)}" if _is_sequence(term) else f"got {type(term).__name__}"
            raise TypeError(f"terms[{number}] must be a pair (input, weight), but {problem}")
    return terms


def _is_sequence(value: Any) -> bool:
    # A `Spec` is a tuple, but stands for a tensor.
    return isinstance(value, Sequence) and not is_tensor(value)


def is_tensor(value: Any) -> TypeGuard[Any]:
    """Whether a value is a tensor, a `Spec` or thunder's proxy of a tensor."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "requires_grad")


def is_traced(tensor: Any) -> bool:
    """Whether a value is a tensor in a program that is compiled, traced or exported, or a tensor without values."""
    is_of_program = torch.compiler.is_compiling() or torch._C._is_tracing()
    return isinstance(tensor, torch.Tensor) and (is_of_program or tensor.is_meta or is_fake(tensor))


class Spec(NamedTuple):
    """A tensor's properties without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False


class Linear(NamedTuple):
    """Names of the operands of x Wᵀ, one of the linears whose sum is the logits."""

    x: str
    weight: str


HEAD, TEACHER = Linear("input", "linear_weight"), Linear("teacher_input", "teacher_weight")


@dataclass(frozen=True, kw_only=True)
class Shard(PlainValues):
    """This rank's columns if ranks divide the vocabulary. The ranks' parts are contiguous, in any order of ranks."""

    group: str
    """Name under which torch.distributed registers the process group."""
    ranks: int
    rank: int
    start: int
    """First of this rank's columns."""
    columns: int
    """Number of this rank's columns; may be 0."""
    largest: int
    """Number of columns of the rank with the most."""
    vocab: int
    """Number of columns of all ranks together."""
    reduces_input_grad: bool = True
    """Whether dX is summed over the ranks; otherwise each rank returns the contribution of its columns."""
    float32_input_grad: bool = True
    """Whether dX is summed in float32 (float64 for float64) and rounded once."""
    sequence_parallel: bool = False
    """Whether the ranks also divide the tokens, into equal parts in the order of ranks."""
    input_grad_factor: int = 1
    """Factor of the sum of dX over the ranks: their number if data parallel training will average it, otherwise 1."""
    # Further results of the ranks' agreement. A trace does not carry them, since its plan is made already.
    weight_rows: int = field(default=0, repr=False)
    """Rows of the whole weight."""
    device: Device | None = field(default=None, repr=False)
    """The ranks' device with the least memory, so that all make the same plan; None without a weight."""
    most_tokens: int = field(default=0, repr=False)
    """Number of tokens of the rank with the most, with `data_parallel`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The tensors of a call, or their `Spec`s, and everything about the call that is a plain value.

    Calls of specs are compared by all of this, and can be hashed.
    """

    tensors: Mapping[str, Any]
    """The given tensors, by name"""
    loss: Loss
    needs_grad: tuple[str, ...] = ()
    """Names of the tensors whose gradient is needed, in their order"""
    shard: Shard | None = None
    """This rank's columns, if ranks divide the vocabulary"""
    vocab_parallel: str | None = None
    """In a program, the ranks that divide the vocabulary, from `as_literal`; the operator has them agree on `shard`"""

    @classmethod
    def of_mean(cls, tokens: int, vocab: int, hidden: int, *, dtype: torch.dtype, device: torch.device) -> "Call":
        """Returns a call of specs: a mean loss without further arguments, with gradients of input and weight."""
        x, weight = Spec((tokens, hidden), dtype, device), Spec((vocab, hidden), dtype, device)
        tensors = {"input": x, "linear_weight": weight, "target": Spec((tokens,), torch.int64, device)}
        return cls(tensors=tensors, loss=Loss(), needs_grad=("input", "linear_weight"))

    def map(self, function: Callable[[str, Any], Any]) -> "Call":
        """Returns the same call with each tensor replaced by `function(name, tensor)`."""
        return replace(self, tensors={name: function(name, tensor) for name, tensor in self.tensors.items()})

    @cached_property
    def roles(self) -> dict[str, str]:
        """The role of each tensor, by name."""
        return {name: argument(name).role for name in self.tensors}

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The head, then the terms that are added to it, such as a low-rank adapter."""
        names = [name for name in self.tensors if name.startswith("terms")]
        return (HEAD, *map(Linear, names[::2], names[1::2]))

    @property
    def token_inputs(self) -> tuple[Any, ...]:
        """The further tensors that the token loss reads, each (...)."""
        return tuple(tensor for name, tensor in self.tensors.items() if name.startswith("token_inputs"))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's operands."""
        return self.tensors["input"].dtype

    @cached_property
    def row_dtype(self) -> torch.dtype:
        """Dtype of the loss and of all vectors with one number per row."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @cached_property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.tensors["input"].device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (...) of this rank's tokens."""
        return tuple(self.tensors["input"].shape[:-1])

    @cached_property
    def own_tokens(self) -> int:
        """Number of tokens in this rank's input."""
        return prod(self.shape)

    @cached_property
    def token_parts(self) -> int:
        """Number of ranks that divide the tokens."""
        return 1 if self.shard is None or not self.shard.sequence_parallel else self.shard.ranks

    @cached_property
    def tokens(self) -> int:
        """T, the number of tokens of all ranks that divide them."""
        return self.own_tokens * self.token_parts

    @cached_property
    def targets_per_token(self) -> int | None:
        """K, with target weights; None without, for one target per token."""
        return self.tensors["target_weights"].shape[-1] if "target_weights" in self.tensors else None

    @property
    def weight_rows(self) -> int:
        """Rows of this rank's weights."""
        return self.tensors["linear_weight"].shape[0]

    @cached_property
    def whole_vocab(self) -> int:
        """V, the number of columns of the logits on all ranks."""
        return (self.loss.vocab_size or self.weight_rows) if self.shard is None else self.shard.vocab

    @cached_property
    def vocab(self) -> int:
        """Number of columns of the logits on this rank."""
        return self.whole_vocab if self.shard is None else self.shard.columns

    @property
    def hidden(self) -> int:
        """Sum of the hidden sizes of all linears: the number of products in a logit."""
        return sum(self.tensors[linear.x].shape[-1] for linear in self.linears)

    @cached_property
    def bias_grad(self) -> bool:
        """Whether db is needed."""
        return "linear_bias" in self.needs_grad

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the needed gradients, which every method has to write."""
        return sum(prod(self.tensors[name].shape) for name in self.needs_grad) * self.dtype.itemsize

    @cached_property
    def ignores_rows(self) -> bool:
        """Whether the call may have ignored rows."""
        return self.loss.ignores_rows or "token_weights" in self.tensors

    @property
    def largest_part(self) -> "Call":
        """The call, of specs, of a rank with the largest part of a divided vocabulary; the same on all ranks."""
        if self.shard is None:
            return self
        columns = self.shard.largest

        def widened(name: str, spec: Any) -> Any:
            return spec._replace(shape=(columns, *spec.shape[1:])) if argument(name).role == COLUMN else spec

        shard = replace(self.shard, rank=0, start=0, columns=columns)
        return replace(self.specs().map(widened), shard=shard)

    def specs(self, *, tokens: int | None = None) -> "Call":
        """Returns the same call of specs; with `tokens`, of that number of tokens in one dimension."""
        dimensions = len(self.shape)

        def spec(name: str, tensor: Any) -> Spec:
            shape = tuple(tensor.shape)
            if tokens is not None and argument(name).role in TOKEN_ROLES:
                shape = (tokens, *shape[dimensions:])
            return Spec(shape, tensor.dtype, tensor.device, tensor.requires_grad)

        return self.map(spec)

    def _values(self) -> tuple[Any, ...]:
        return tuple(self.tensors.items()), self.loss, self.needs_grad, self.shard, self.vocab_parallel

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Call) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def flat(self, tensors: Sequence[Any] | None = None) -> "Call":
        """Returns the call with tokens in one dimension; scalars and floating-point token tensors get the row dtype.

        Numbers per token are those of all ranks, if ranks divide the tokens and these have been gathered. With
        `tensors`, in order, it is the call of these, of the same sizes except for the number of tokens.
        """
        flat, row_dtype, has_several = {}, self.row_dtype, self.targets_per_token is not None
        given = self.tensors.values() if tensors is None else tensors
        for (name, role), tensor in zip(self.roles.items(), given, strict=True):
            if role is HIDDEN or (has_several and name in ("target", "target_weights")):
                if tensor.ndim != 2:
                    # Not -1, which is ambiguous if there are no elements.
                    tensor = tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
            elif role is TOKEN and tensor.ndim != 1:
                tensor = tensor.reshape(-1)
            if role is HIDDEN:
                # For rows that are not contiguous, libraries would add the bias only after rounding.
                tensor = tensor if tensor.stride(1) == 1 else tensor.contiguous()
            # Integers of tokens stay as they are: float32 is not exact beyond 2²⁴.
            elif role is SCALAR or (role is TOKEN and tensor.dtype.is_floating_point):
                tensor = tensor if tensor.dtype is row_dtype else tensor.to(row_dtype)
            flat[name] = tensor
        own_tokens = flat["input"].shape[0]
        return self.with_tensors(flat, own_tokens=own_tokens, tokens=own_tokens * self.token_parts)

    def with_tensors(self, tensors: Mapping[str, Any], **tokens: int) -> "Call":
        """Returns the call with tensors of the same sizes, or another number `tokens`; keeps cached properties."""
        call = object.__new__(Call)
        call.__dict__.update(self.__dict__, tensors=tensors, **tokens)
        return call


RankPart = tuple[Call, Callable[[Sequence[Any]], Sequence[Any]]]
"""This rank's part of a call, and a function that makes the results of the call from those of the part"""


@cache
def gradient_name(operand: str) -> str:
    """Returns the name of an operand's gradient, such as dX, dW, db or dX1."""
    if operand == "linear_bias":
        return "db"
    kind = "dX" if argument(operand).role == HIDDEN else "dW"
    return kind if not operand.startswith("terms") else f"{kind}{int(operand[6:].partition(']')[0]) + 1}"


def operand_names(names: Iterable[str]) -> tuple[str, ...]:
    """Returns those of some names whose tensors may have a gradient: the operands of the (student's) linears."""
    return tuple(name for name in names if argument(name).differentiable)
