"""Divergences in Triton: on a GPU and, in a process of its own, in Triton's interpreter; and what they compile to."""

import re

import pytest
import torch

from interpreted import (
    DEVICE,
    INTERPRETED,
    needs_compiler,
    on_device,
    prepare_row_kernels,
    run_in_the_interpreter,
)
from reference import error
from test_triton_rows import Compiler
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.row_kernels import torch_divergence
from thunder_flce.execution.row_kernels.interface import LogitMap, LogitsBuffer
from thunder_flce.operation.divergence import KINDS, Divergence

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    prepare_row_kernels(monkeypatch)


def _buffer(rows, vocab, dtype, scale=4.0):
    """Random logits between padding that must not matter; one is -inf."""
    layout = VocabLayout.aligned(vocab)
    padded = torch.full((rows, layout.row_stride), float("nan"), dtype=dtype, device=DEVICE)
    padded[:, :vocab] = torch.randn(rows, vocab, device=DEVICE).mul_(scale)
    return LogitsBuffer(padded, layout)


@on_device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "dtypes", "in_place"),
    [(33, (FP32, BF16), False), (2049, (BF16, BF16), True), (16385, (FP16, FP32), True), (4096, (FP32, FP32), True)],
    ids=str,
)
def test_rows(kind, vocab, dtypes, in_place):
    """With and without gradients; one of the student's logits is -inf, and one of the teacher's where it may be."""
    from thunder_flce.execution.row_kernels.triton_divergence import divergence_

    student, teacher = (_buffer(3, vocab, dtype) for dtype in dtypes)
    divergence = Divergence(kind=kind, beta=0.3, temperature=1.7)
    if kind != "forward":
        student.logits[1, 2] = float("-inf")
    if kind != "reverse":
        teacher.logits[1, 3] = float("-inf")
    factors = torch.tensor([1.0, -0.3, 0.0], device=DEVICE) * vocab
    doubled = [LogitsBuffer(of.logits.double(), VocabLayout.contiguous(vocab)) for of in (student, teacher)]
    right = torch_divergence.divergence_(*doubled, divergence, factors=factors.double(), out=doubled[0])
    loss_only = divergence_(student, teacher, divergence, factors=None, out=student)
    out = student if in_place else _buffer(3, vocab, BF16)
    got = divergence_(student, teacher, divergence, factors=factors, out=out)
    assert error(got, right) < 1e-5 and error(loss_only, right) < 1e-5
    rounding = torch.finfo(out.padded.dtype).eps
    assert error(out.logits, doubled[0].logits) < max(rounding, 1e-5)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_factors", [True, False])
def test_compiled(kind, has_factors):
    """Rows are loaded and stored 16 bytes at a time."""
    from thunder_flce.execution.row_kernels import triton_divergence, triton_rows

    block, divergence = triton_rows._STATISTICS_BLOCKS[1], Divergence(kind=kind, beta=0.3)
    compiler, vocab = Compiler("bf16", LogitMap()), 128256
    compiler._types |= dict.fromkeys(("student", "teacher"), "*bf16")
    log_student, log_teacher = divergence.log_shares or (0.0, 0.0)
    strides = dict.fromkeys(("STUDENT_STRIDE", "TEACHER_STRIDE", "OUT_STRIDE", "VOCAB"), vocab)
    shares = {"OF_STUDENT": divergence.of_student, "OF_TEACHER": divergence.of_teacher}
    ptx = compiler.ptx(
        triton_divergence._divergence_kernel, block, absent=() if has_factors else ("factors",),
        **strides, **shares, LOG_STUDENT=log_student, LOG_TEACHER=log_teacher,
    )  # fmt: skip
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 4
    assert (len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) > 0) == has_factors


@needs_compiler
def test_in_the_interpreter():
    """The tests above without a GPU."""
    run_in_the_interpreter(__file__)
