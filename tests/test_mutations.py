"""The mutations still apply to the source, and leave it valid Python."""

import ast
from collections import defaultdict

import pytest

from mutations import KINDS, MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.before}")
def test_applies(mutation):
    assert mutation.kind in KINDS and mutation.before != mutation.after
    ast.parse(mutation.applied((ROOT / mutation.path).read_text(encoding="utf-8")))


def test_every_kind_where_there_are_formulas():
    kinds = defaultdict(set)
    for mutation in MUTATIONS:
        kinds[mutation.file].add(mutation.kind)
    with_formulas = [
        "operation/loss.py",
        "execution/row_kernels/torch_rows.py",
        "execution/row_kernels/nvfuser_rows.py",
        "execution/row_kernels/triton_rows.py",
    ]
    with_formulas += [
        "execution/row_loss.py",
        "execution/matmul/matmul.py",
        "execution/matmul/tuning.py",
        "execution/row_selection.py",
    ]
    assert all(kinds[file] == set(KINDS) for file in with_formulas), kinds
