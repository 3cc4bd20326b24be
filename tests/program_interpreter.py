"""Evaluates the text that traces print of a region, as a reader would: by its words alone, in float64.

Numbers of one a row are (N, 1) here, and those of one a column (1, V), so that they broadcast with a matrix (N, V);
what only serves as an index, such as the most frequent targets, is (K,). There must be two rows at least, or none.
The words are those of `thunder_flce.execution.record`.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

LIBRARIES = ("cuBLAS", "Triton", "nvFuser", "PyTorch")

_TITLE = re.compile(
    r"for (?:the only |the first |a |each )(?P<over>chunk|block),? of (?P<sizes>.+?) "
    r"(?:tokens|columns of the vocabulary)(?:, (?P<count>\d+) in all)?(?:, from (?:token|column) (?P<start>\d+) on)?:"
)
_SIZE = re.compile(r"(\d+)(?: \((\d+) times\))?")
_STEP = re.compile(
    r"(?P<indent>  )?(?P<results>\S.*?)(?: (?P<type>(?:f64|f32|bf16|f16|i64|b8)\[[^]]*\]))? (?P<operator>\+?=) "
    rf"(?P<words>.*?)(?:  \((?P<note>[^()]*)\))?(?: +(?P<library>(?:{'|'.join(LIBRARIES)})\S*(?: .*)?))?"
)


def evaluate(lines: Iterable[str], names: dict[str, Tensor], vocab: int, *, check_types: bool = False) -> None:
    """Runs what the lines say.

    Args:
        lines: as `trace_printer.stage_lines` has them.
        names: what is known, vectors as above; everything that the lines assign is added.
        vocab: V, the columns of the logits.
        check_types: whether sizes must be those printed. They are where no row is ignored.
    """
    reader = _Reader(names, vocab, check_types)
    loop: _Loop | None = None
    for line in lines:
        if line.startswith("for "):
            if loop is not None:
                reader.run_loop(loop)
            loop = _Loop.of(line)
            continue
        step = _Step.of(line)
        if loop is not None and not step.is_indented:
            reader.run_loop(loop)
            loop = None
        if loop is not None:
            loop.steps.append(step)
        else:
            assert not step.is_indented, f"indented, but in no loop: {line}"
            reader.run(step)
    if loop is not None:
        reader.run_loop(loop)


@dataclass
class _Step:
    results: list[ast.expr]
    indices: dict[ast.expr, Any]
    """Compiled, where a result is a part of something"""
    type: str | None
    adds: bool
    words: list[Any]
    """Compiled, one for each result"""
    is_indented: bool
    text: str

    @classmethod
    @cache
    def of(cls, line: str) -> "_Step":
        match = _STEP.fullmatch(line)
        assert match, f"not a step: {line!r}"
        words = ast.parse(match["words"], mode="eval").body
        results = ast.parse(match["results"], mode="eval").body
        several = results.elts if isinstance(results, ast.Tuple) else [results]
        each = words.elts if len(several) > 1 else [words]
        assert len(several) == len(each), f"not one expression for each result: {line!r}"
        compiled = [_compiled(expression) for expression in each]
        indices = {result: _compiled(result.slice) for result in several if isinstance(result, ast.Subscript)}
        return cls(several, indices, match["type"], match["operator"] == "+=", compiled, bool(match["indent"]), line)


@dataclass
class _Loop:
    over: str
    slices: list[slice]
    steps: list[_Step]

    @classmethod
    def of(cls, line: str) -> "_Loop":
        match = _TITLE.fullmatch(line)
        assert match, f"not a title: {line!r}"
        sizes = []
        for part in re.split(", | and ", match["sizes"]):
            size = _SIZE.fullmatch(part)
            assert size, f"not a size: {part!r} in {line!r}"
            sizes += [int(size[1])] * int(size[2] or 1)
        sizes *= int(match["count"] or 1)
        start, slices = int(match["start"] or 0), []
        for size in sizes:
            slices.append(slice(start, start + size))
            start += size
        return cls(match["over"], slices, [])


def loop_sizes(line: str) -> tuple[str, list[int]] | None:
    """("chunk" or "block", the sizes of all parts) of a title; None for any other line."""
    if not line.startswith("for "):
        return None
    loop = _Loop.of(line)
    return loop.over, [part.stop - part.start for part in loop.slices]


class _Reader:
    def __init__(self, names: dict[str, Tensor], vocab: int, check_types: bool):
        self._names = names
        self._vocab = vocab
        self._check_types = check_types
        self._part_size: int | None = None

    def run_loop(self, loop: _Loop) -> None:
        given = [step.results for step in loop.steps if not step.adds]
        of_rows = {result.id for results in given for result in results if isinstance(result, ast.Name)}
        before, parts = dict(self._names), {name: [] for name in of_rows}
        for part in loop.slices:
            self._names[loop.over], self._part_size = part, part.stop - part.start
            for step in loop.steps:
                self.run(step)
            for name in of_rows:
                parts[name].append(self._names[name])
        del self._names[loop.over]
        self._part_size = None
        if loop.over == "chunk":
            start = loop.slices[0].start
            for name, values in parts.items():
                earlier = [before[name][:start]] if start else []
                self._names[name] = torch.cat([*earlier, *values])

    def run(self, step: _Step) -> None:
        # Of several results, each may use those before it.
        for result, words in zip(step.results, step.words, strict=True):
            scope = {**self._names, **_FUNCTIONS, "scatter": self._scatter, "v": self._columns()}
            value = torch.as_tensor(eval(words, {"__builtins__": {}}, scope))
            shape = self._shape(step.type)
            if value.ndim == 0 and isinstance(result, ast.Subscript):
                value = value.double().expand(*([1] if len(shape) == 1 else []), *shape)
            if self._check_types and shape is not None:
                _check(value, shape, step)
            if isinstance(result, ast.Name):
                old = self._names.get(result.id)
                self._names[result.id] = value if old is None or not step.adds else old + value
            else:
                index = eval(step.indices[result], {"__builtins__": {}}, {**scope, "slice": slice})
                old = self._names.get(result.value.id)
                if len(shape) == 1:
                    # One a column, such as db.
                    index = (slice(None), index)
                self._names[result.value.id] = _with_part(old, index, value, step.adds)

    def _columns(self) -> Tensor:
        columns = torch.arange(self._vocab)[None]
        block = self._names.get("block")
        return columns if block is None else columns[:, block]

    def _scatter(self, rows: Tensor, fill: float = 0) -> Tensor:
        valid = self._names["valid"][:, 0]
        everywhere = torch.full((len(valid), rows.shape[1]), fill, dtype=rows.dtype)
        everywhere[valid] = rows
        return everywhere

    def _shape(self, type_name: str | None) -> tuple[int, ...] | None:
        if type_name is None:
            return None
        sizes = re.findall(r"\w+", type_name.partition("[")[2])
        return tuple(self._part_size if size in ("C", "K") else int(size) for size in sizes)


def _check(value: Tensor, shape: tuple[int, ...], step: _Step) -> None:
    """A number may stand for a vector of equal ones."""
    if value.ndim == 0:
        assert len(shape) < 2, step.text
        return
    if value.ndim == 1:
        assert value.shape == shape, step.text
        return
    assert (shape in ((value.shape[0],), (value.shape[1],)) and 1 in value.shape) or shape == value.shape, (
        f"{tuple(value.shape)}, not {shape}: {step.text}"
    )


def _with_part(memory: Tensor | None, index: Any, value: Tensor, adds: bool) -> Tensor:
    """Memory after a part of it was written; it grows as needed, and holds NaN until it is written."""
    if isinstance(index, Tensor):
        result = memory.clone()
        result[index] = value
        return result
    of_rows, of_columns = index if isinstance(index, tuple) else (index, slice(None))
    if memory is not None and value.shape[0] == 0 and of_columns == slice(None):
        # Rows behind the last valid one.
        return memory
    rows = (of_rows.start or 0) + value.shape[0]
    columns = (of_columns.start or 0) + value.shape[1]
    old_rows, old_columns = (0, 0) if memory is None else memory.shape
    result = torch.full((max(rows, old_rows), max(columns, old_columns)), float("nan"), dtype=torch.float64)
    if memory is not None:
        result[:old_rows, :old_columns] = memory
    part = result[rows - value.shape[0] : rows, columns - value.shape[1] : columns]
    part.copy_(part.nan_to_num(0) + value if adds else value)
    return result


class _At:
    """What `matrix[index]` means."""

    def __init__(self, values: Tensor):
        self._values = values

    def __getitem__(self, index: Any) -> Tensor:
        values = self._values
        if values.ndim == 0:
            return values
        if isinstance(index, tuple):
            rows, columns = index
            return values[rows, columns]
        if isinstance(index, slice):
            return values[:, index] if values.shape[0] == 1 else values[index]
        if index.dtype == torch.bool:
            return values[index[:, 0]]
        if index.ndim == 1:
            return values[index]
        # One column a row: its entry in each.
        return values.expand(index.shape[0], -1).gather(1, index)


class _Words(ast.NodeTransformer):
    """[v == y] is a matrix of zeros and ones, and indexing is what `_At` makes of it."""

    def visit_List(self, node: ast.List) -> ast.AST:
        self.generic_visit(node)
        (condition,) = node.elts
        return condition

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """sum_k(B * [v == y]), of several targets y (N, K), is one sum of such matrices."""
        (first, *_), name = node.args or [None], getattr(node.func, "id", "")
        if name == "sum_k" and isinstance(first, ast.BinOp) and isinstance(first.right, ast.List):
            (condition,) = first.right.elts
            node = ast.Call(ast.Name("_one_hots", ast.Load()), [first.left, condition.left, *condition.comparators], [])
        self.generic_visit(node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name("_at", ast.Load()), [node.value], [])
        return node


def _compiled(expression: ast.expr) -> Any:
    if isinstance(expression, ast.Slice | ast.Tuple):
        expression = _as_calls(expression)
    tree = ast.fix_missing_locations(ast.Expression(_Words().visit(expression)))
    return compile(tree, "<printed>", "eval")


def _as_calls(index: ast.expr) -> ast.expr:
    """An index as an expression of its own, with calls of `slice`."""
    if isinstance(index, ast.Tuple):
        return ast.Tuple([_as_calls(element) for element in index.elts], ast.Load())
    if isinstance(index, ast.Slice):
        ends = [ast.Constant(None) if end is None else end for end in (index.lower, index.upper)]
        return ast.Call(ast.Name("slice", ast.Load()), ends, [])
    return index


def _one_hots(values: Tensor, columns: Tensor, target: Tensor) -> Tensor:
    return sum(values[:, k : k + 1] * (columns == target[:, k : k + 1]) for k in range(target.shape[1]))


def _most_frequent(target: Tensor, *weights_and_count: Any) -> Tensor:
    *weights, count = weights_and_count
    of_targets = weights[0].reshape(-1) if weights else None
    occurrences = torch.bincount(target.reshape(-1), of_targets, minlength=count)
    return occurrences.topk(count).indices


def _first_in_column(target: Tensor, counts: Tensor) -> Tensor:
    """1 for the first of a row's targets in a column, of those that count."""
    first = torch.zeros(target.shape, dtype=torch.float64)
    for row, columns in enumerate(target.tolist()):
        for k, column in enumerate(columns):
            is_known = any(counts[row, j] and columns[j] == column for j in range(k))
            first[row, k] = bool(counts[row, k]) and not is_known
    return first


_FUNCTIONS = {
    "_at": _At,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "where": torch.where,
    "inf": float("inf"),
    "minimum": lambda values, largest: torch.minimum(values, torch.as_tensor(largest, dtype=values.dtype)),
    **{
        name: getattr(torch, name)
        for name in ("abs", "clamp", "log1p", "logical_and", "logical_not", "sign", "sigmoid", "sqrt")
    },
    "sum": lambda values: values.double().sum(),
    "sum_k": lambda matrix: matrix.sum(1, keepdim=True),
    "any_k": lambda matrix: matrix.any(1, keepdim=True),
    "_one_hots": _one_hots,
    "sum_v": lambda matrix: matrix.sum(1, keepdim=True),
    "sum_t": lambda matrix: matrix.sum(0, keepdim=True),
    "max_v": lambda matrix: matrix.amax(1, keepdim=True),
    "argmax_v": lambda matrix: matrix.argmax(1, keepdim=True),
    "argmin_v": lambda matrix: matrix.argmin(1, keepdim=True),
    "most_frequent": _most_frequent,
    "first_in_column": _first_in_column,
}
