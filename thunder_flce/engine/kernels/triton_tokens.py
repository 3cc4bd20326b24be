"""Token losses as Triton kernels: translates the text of `operation.pointwise` into one launch for a chunk of rows.

The kernel computes each row's log-probability, entropy, log-sum-exp and mean logit, the token loss of these, and the
coefficients of the row's gradient. Token losses with an operation that has no expression below are left to PyTorch's
operations. Legend: C rows in a chunk.
"""

import ast
import linecache
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.engine.kernels.launch import contiguous, kernel, launch
from thunder_flce.engine.kernels.triton_rows import _logits
from thunder_flce.operation.loss import LogitMap, RowCoefficients
from thunder_flce.operation.pointwise import VARIABLES, TokenLoss, input_name

_NUMBERS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "neg": "-{0}", "abs": "tl.abs({0})", "square": "{0} * {0}", "reciprocal": "1.0 / {0}",
    "exp": "libdevice.exp({0})", "expm1": "libdevice.expm1({0})", "log": "libdevice.log({0})",
    "log1p": "libdevice.log1p({0})", "sqrt": "tl.sqrt_rn({0})", "rsqrt": "1.0 / tl.sqrt_rn({0})",
    "tanh": "libdevice.tanh({0})", "sigmoid": "1.0 / (1.0 + libdevice.exp(-{0}))",
    "relu": "tl.where({0} <= 0.0, 0.0, {0})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "sign": "({0} > 0.0).to(tl.float32) - ({0} < 0.0).to(tl.float32)",
    "sgn": "({0} > 0.0).to(tl.float32) - ({0} < 0.0).to(tl.float32)",
    "clamp_min": "tl.where({0} < {1}, {1}, {0})", "clamp_max": "tl.where({0} > {1}, {1}, {0})",
    "tanh_backward": "{0} * (1.0 - {1} * {1})", "sigmoid_backward": "{0} * (1.0 - {1}) * {1}",
    "threshold_backward": "tl.where({1} <= {2}, 0.0, {0})",
    "clone": "{0}", "detach": "{0}", "_to_copy": "{0}",
}  # fmt: skip
"""Expressions of the operations from numbers to a number, for each row; a mask counts as 1 and 0."""
_FRACTIONS = ("div", "reciprocal", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid")
"""Operations among these that give floating-point numbers for integers, too."""
_POWERS = {"1": 1, "2": 2, "3": 3, "4": 4, "2.0": 2, "3.0": 3, "4.0": 4}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_MASK_OPERATORS = {"logical_and": "&", "logical_or": "|", "bitwise_and": "&", "bitwise_or": "|"}


class _Statements:
    """The statements of a token loss in Triton's language; raises a KeyError for an operation without an expression."""

    def __init__(self, text: TokenLoss, masks: Sequence[str], integers: Mapping[str, torch.dtype]):
        self.lines: list[str] = []
        self._masks, self._integers = {*masks, "True", "False"}, dict(integers)
        """The names of masks, and the dtypes of integers by name: inputs, which may exceed what float32 represents, and
        small integers that operations make of masks and numbers"""
        for statement in ast.parse(text.replace("; ", "\n")).body:
            assert isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name)
            self.lines.append(f"{target.id} = {self._expression(target.id, statement.value)}")

    def _expression(self, name: str, node: Any) -> str:
        if isinstance(node, ast.Name):
            if node.id in self._masks:
                self._masks.add(name)
            return node.id
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if keywords not in ({}, {"dtype": "row"}):
            raise KeyError(node.func.attr)
        operation, operands = node.func.attr, [ast.unparse(operand) for operand in node.args]
        are_masks = [operand in self._masks for operand in operands]
        are_integers = [operand in (*self._integers, "None") or operand.lstrip("-").isdigit() for operand in operands]
        if operation in _COMPARISONS and all(are_integers):
            for limits in [torch.iinfo(self._integers[operand]) for operand in operands if operand in self._integers]:
                if any(each not in self._integers and not limits.min <= int(each) <= limits.max for each in operands):
                    raise KeyError(operation)  # PyTorch converts the constant to the input's dtype, which changes it.
            self._masks.add(name)
            return f" {_COMPARISONS[operation]} ".join(operands)
        if operation in _MASK_OPERATORS and all(are_masks):
            self._masks.add(name)
            return f" {_MASK_OPERATORS[operation]} ".join(operands)
        if operation in ("logical_not", "bitwise_not") and all(are_masks):
            self._masks.add(name)
            return f"{operands[0]} == 0"
        if not keywords and operation not in (*_COMPARISONS, *_FRACTIONS):
            typed = slice(1 if operation in ("full_like", "masked_fill") else None)
            if all(map(operator.or_, are_integers[typed], are_masks[typed])):
                if all(are_masks[typed]) or not set(operands[typed]).isdisjoint(self._integers):
                    raise KeyError(operation)  # The result would be a mask or an integer of the input's dtype.
                self._integers[name] = torch.int64
        if operation == "full_like" and (keywords or not are_masks[0]):
            return f"tl.full([BLOCK], {self._number(operands[1])}, tl.float32)"
        if operation == "where" and are_masks[0]:
            return f"tl.where({operands[0]}, {self._number(operands[1])}, {self._number(operands[2])})"
        if operation == "masked_fill" and are_masks[1]:
            return f"tl.where({operands[1]}, {self._number(operands[2])}, {self._number(operands[0])})"
        numbers = [self._number(operand) for operand in operands]
        if operation in _COMPARISONS:
            self._masks.add(name)
            return f" {_COMPARISONS[operation]} ".join(numbers)
        if operation == "clamp":
            least, most = [*operands[1:], "None"][:2]
            value = numbers[0] if least == "None" else _NUMBERS["clamp_min"].format(numbers[0], self._number(least))
            return value if most == "None" else _NUMBERS["clamp_max"].format(f"({value})", self._number(most))
        if operation == "pow" and operands[1] in _POWERS:
            return " * ".join(numbers[:1] * _POWERS[operands[1]])
        if (operation == "_to_copy") != bool(keywords) or (operation in ("add", "mul", "clone") and all(are_masks)):
            raise KeyError(operation)  # A cast to another dtype, or a sum of masks, which is a mask.
        return _NUMBERS[operation].format(*numbers)

    def _number(self, text: str) -> str:
        if text in self._masks or text in self._integers:
            return f"{float(text == 'True')}" if text in ("True", "False") else f"({text}).to(tl.float32)"
        return f'float("{text}")' if text in ("inf", "nan") else f'-float("{text[1:]}")' if text == "-inf" else text


@triton.jit
def _product(upstream, derivative):
    """Returns the product, and 0 if either factor is 0: the other may be infinite or NaN, as in an ignored row."""
    return tl.where((upstream == 0.0) | (derivative == 0.0), 0.0, upstream * derivative)


_KERNEL = """
def token_kernel(
    row_max, row_log_sum, z_y, expected, shifted_sum, s, {inputs}value, probability, one_hot, uniform, entropy_out,
    rows, columns,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = number < rows
    largest = tl.load(row_max + number, mask=is_row, other=0.0)
    log_sum = tl.load(row_log_sum + number, mask=is_row, other=0.0)
    log_prob = _logits(tl.load(z_y + number, mask=is_row, other=0.0), SCALE, SOFTCAP, True) - largest - log_sum
    log_sum_exp = largest + log_sum
    entropy = log_sum_exp
    if expected is not None:
        entropy = log_sum - tl.load(expected + number, mask=is_row, other=0.0)
    mean_logit = largest
    if shifted_sum is not None:
        mean_logit += tl.load(shifted_sum + number, mask=is_row, other=0.0) / columns
    {loads}
    {statements}
    tl.store(value + number, loss, mask=is_row)
    upstream = tl.load(s + number, mask=is_row, other=0.0)
    g_log_prob = _product(upstream, {d_log_prob})
    share = _product(upstream, {d_log_sum_exp}) - g_log_prob
    if entropy_out is not None:
        factor = _product(upstream, {d_entropy})
        share += factor * (log_sum - entropy)
        tl.store(entropy_out + number, factor, mask=is_row)
    if uniform is not None:
        factor = _product(upstream, {d_mean_logit})
        tl.store(uniform + number, -factor / columns, mask=is_row)
    tl.store(probability + number, share, mask=is_row)
    tl.store(one_hot + number, -g_log_prob, mask=is_row)
"""
_BLOCK, _THREADS = 512, 128
# A loss with a number that changes at each step would be compiled at each step. After this many losses that differ only
# in their numbers, PyTorch's operations compute the next ones.
_MOST_NUMBERS, _MOST_TEXTS = 16, 1024
_counts: Counter[TokenLoss] = Counter()
"""How many losses there were, by their text without its numbers"""


@lru_cache(maxsize=256)
def kernel_for(
    token_loss: TokenLoss, input_dtypes: tuple[torch.dtype, ...], logit_map: LogitMap
) -> Callable[..., tuple[Tensor, RowCoefficients]] | None:
    """Returns the function that computes a token loss and its coefficients, (C,) each; None: PyTorch's operations do.

    It takes the statistics, z at the targets, the moments, the upstream gradients s, and the token inputs in float32,
    bool or integers, (C,) each; and the number of columns.
    """
    if len(_counts) >= _MOST_TEXTS:
        _counts.clear()
    _counts[without_numbers := re.sub(r"\b\d[\d.]*(e[+-]\d+)?", "", token_loss)] += 1
    if _counts[without_numbers] > _MOST_NUMBERS:
        return None
    names = [input_name(number) for number in range(len(input_dtypes))]
    try:
        dtypes = dict(zip(names, input_dtypes, strict=True))
        masks = [name for name in names if dtypes[name] is torch.bool]
        integers = {name: dtypes[name] for name in names if not dtypes[name].is_floating_point and name not in masks}
        lines = _Statements(token_loss, masks, integers).lines
    except (KeyError, SyntaxError):
        return None
    loads = [f"{name} = tl.load({name}_ptr + number, mask=is_row, other=0)" for name in names]
    # Integers of all dtypes are computed in int64.
    loads += [f"{name} = {name}.to(tl.int64)" for name in integers]
    assigned = {line.partition(" = ")[0] for line in lines}
    source = _KERNEL.format(
        inputs="".join(f"{name}_ptr, " for name in names), loads="\n    ".join(loads), statements="\n    ".join(lines),
        **{f"d_{name}": f"d_{name}" if f"d_{name}" in assigned else "0.0" for name in VARIABLES},
    )  # fmt: skip
    # Triton gets a function's source from Python's linecache.
    file = f"<token loss {abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {function.__name__: function for function in (_logits, _product)}
    scope |= {"tl": tl, "libdevice": libdevice, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)  # noqa: S102 (made of the expressions above)
    jitted = kernel(0, "rows", "columns")(scope["token_kernel"])
    settings = {"SCALE": logit_map.scale, "SOFTCAP": logit_map.softcap, "BLOCK": _BLOCK, "threads": _THREADS}

    def run(
        statistics: RowStatistics, z_y: Tensor, moments: Mapping[str, Tensor], s: Tensor, inputs: Sequence[Tensor], *,
        columns: int,
    ) -> tuple[Tensor, RowCoefficients]:  # fmt: skip
        rows = z_y.shape[0]
        names = [name for name in ("d_mean_logit", "d_entropy") if name in assigned]
        value, probability, one_hot, *others = z_y.new_empty(3 + len(names), rows, dtype=torch.float32).unbind()
        optional = dict(zip(names, others, strict=True))
        outputs = [value, probability, one_hot, optional.get("d_mean_logit"), optional.get("d_entropy")]
        vectors = contiguous(*statistics, z_y, moments.get("expected"), moments.get("shifted_sum"), s, *inputs)
        launch(jitted, -(-rows // _BLOCK), [*vectors, *outputs], settings, rows, columns)
        return value, RowCoefficients(*outputs[1:])

    return run
