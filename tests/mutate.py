"""Breaks the package at random places, and shows which changes the tests do not notice.

    python tests/mutate.py --count 50 --seed 1                      # changes in operation/ and engine/
    python tests/mutate.py thunder_flce/labels.py --tests tests/distributed/test_labels.py

A mutant swaps + and -, * and /, & and |, `and` and `or`, < and <= (and so on), 0 and 1, or minimum and maximum, drops a
`not` or an element of a tuple or a set, such as a key, or deletes a statement that is executed for its effect. For each
mutant, the tests run on a changed copy of the package, in a separate process. A surviving mutant means a missing test,
or that the change has no effect.
"""

import argparse
import ast
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FILES = ("thunder_flce/operation/*.py", "thunder_flce/engine/**/*.py")
TESTS = ("tests/api/test_properties.py::test_every_plan", "tests/api/test_numerics.py")
_PAIRS: list[tuple[Any, Any]] = [
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or)),
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *(("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("argmin", "argmax")),
]
_OTHER = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


class Mutant(NamedTuple):
    """A file with a change at one place."""

    path: Path
    text: str
    change: str


def mutants_of(text: str, path: Path) -> Iterator[Mutant]:
    encoded = text.encode()
    starts = [0, *itertools.accumulate(map(len, encoded.splitlines(keepends=True)))]
    for node in _code(ast.parse(text)):
        start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        for after in _changed(node):
            changed = encoded[:start] + after.encode() + encoded[stop:]
            before, after = (" ".join(part.split()) for part in (encoded[start:stop].decode(), after))
            yield Mutant(path, changed.decode(), f"{path}:{node.lineno}: {before}  →  {after}")


def _code(node: ast.AST) -> Iterator[Any]:
    """Yields statements and expressions that compute: no annotations, decorators, docstrings and errors."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, (ast.stmt, ast.expr)):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _changed(node: Any) -> Iterator[str]:
    """Yields replacements of a node, as source text."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _OTHER:
        yield _with(node, op=_OTHER[type(node.op)]())
    elif isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            yield _with(node, ops=[*node.ops[:at], _OTHER[type(op)](), *node.ops[at + 1 :]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)) and node.value in (0, 1):
        yield repr(type(node.value)(1 - node.value))
    elif isinstance(node, ast.Name) and node.id in _OTHER:
        yield _OTHER[node.id]
    elif isinstance(node, ast.Attribute) and node.attr in _OTHER:
        yield _with(node, attr=_OTHER[node.attr])
    elif isinstance(node, (ast.Tuple, ast.Set)) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        is_index = any(isinstance(each, ast.Slice) for each in node.elts)
        for at in range(0 if is_index or len(node.elts) == 1 else len(node.elts)):
            yield _with(node, elts=[*node.elts[:at], *node.elts[at + 1 :]])
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"


def _with(node: Any, **fields: Any) -> str:
    changed = type(node)(**{**vars(node), **fields})
    return ast.unparse(changed) if isinstance(node, ast.stmt) else f"({ast.unparse(changed)})"


def outcome(mutant: Mutant | None, tests: list[str], *, seconds: float | None = None) -> str:
    """Runs the tests on a copy with the change; returns "survived", "caught", or why they proved nothing."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        if mutant:
            Path(folder, mutant.path).write_text(mutant.text, encoding="utf-8")
        search_path = [folder, str(Path(folder, "tests")), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *tests]
        # A failure without a change is shown.
        settings = {"cwd": folder, "env": environment, "capture_output": mutant is not None, "timeout": seconds}
        try:
            process = subprocess.run(command, check=False, text=True, **settings)
        except subprocess.TimeoutExpired:
            return "caught"  # An endless loop.
    output = (process.stdout or "")[-500:] + (process.stderr or "")  # None if they are shown
    return {0: "survived", 1: "caught"}.get(process.returncode, f"NO PROOF: {output}")


def main(arguments: list[str] | None = None) -> int:
    """Tests a sample of the mutants and prints each outcome; returns 1 unless all were caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES, help="patterns of files, relative to the repository's root")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="arguments for pytest")
    parser.add_argument("--count", type=int, default=20, help="number of mutants (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    chosen = parser.parse_args(arguments)
    paths = sorted({path.relative_to(ROOT) for pattern in chosen.files for path in ROOT.glob(pattern)})
    mutants = [m for path in paths for m in mutants_of((ROOT / path).read_text(encoding="utf-8"), path)]
    began = time.perf_counter()
    if outcome(None, chosen.tests) != "survived":
        raise SystemExit("the tests do not pass without a change")
    seconds = 60 + 5 * chosen.jobs * (time.perf_counter() - began)
    sample = random.Random(chosen.seed).sample(mutants, min(chosen.count, len(mutants)))
    caught = 0
    with ThreadPoolExecutor(chosen.jobs) as pool:
        outcomes = pool.map(lambda mutant: outcome(mutant, chosen.tests, seconds=seconds), sample)
        for mutant, result in zip(sample, outcomes, strict=True):
            print(f"{result:8}  {mutant.change}", flush=True)
            caught += result == "caught"
    print(f"{caught} of {len(sample)} caught, drawn from {len(mutants)}")
    return 0 if caught == len(sample) else 1


if __name__ == "__main__":
    sys.exit(main())
