"""The mutations still apply to the source, and leave it valid Python."""

import ast
from collections import defaultdict

import pytest

from mutations import KINDS, MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.before}")
def test_applies(mutation):
    assert mutation.kind in KINDS and mutation.before != mutation.after
    ast.parse(mutation.applied((ROOT / mutation.path).read_text(encoding="utf-8")))


def test_every_kind_in_every_file():
    kinds = defaultdict(set)
    for mutation in MUTATIONS:
        kinds[mutation.file].add(mutation.kind)
    # What maps logits is in a file with no mask and no index.
    del kinds["row_kernels/__init__.py"]
    assert all(found == set(KINDS) for found in kinds.values()), kinds
