"""cuBLASLt through ctypes: lists the candidate algorithms of a matmul, and runs a chosen one.

PyTorch always runs the algorithm that cuBLAS's heuristic puts first. This module calls the library that PyTorch has
loaded. Names and numbers are those of cublasLt.h, the same in CUDA 12 and 13:
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api.
"""

import ctypes
import os
import threading
import weakref
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.device import ALIGNED_BYTES

DTYPES_16_BIT = (torch.float16, torch.bfloat16)

# Major versions of CUDA whose cublasLt.h has the same names and numbers.
_KNOWN_VERSIONS = ("12", "13")
_ASKED_FOR, _MOST_CANDIDATES = 16, 8
# Values of enums: ctypes passes a Python int as a C int, the type of an enum.
_COMPUTE_32F = 68
_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSED, _EPILOGUE_BIAS = ctypes.c_int32(1), ctypes.c_uint32(4)
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 4, 7, 8
_PREFERENCE_WORKSPACE, _PREFERENCE_ALIGNMENTS = 1, (5, 6, 7, 8)
_ALGORITHM_SPLIT_K = 2

_run_lock = threading.Lock()


class Matmul(NamedTuple):
    """out (M, N) = a (M, K) @ b (K, N) + bias (N,), summed in float32 and rounded to out's dtype.

    a and b have one dtype; out and bias have the same one or float32. Only without a bias may `accumulate` be True,
    which adds the product to `out`.
    """

    out: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    accumulate: bool = False


class StoredMatrix(NamedTuple):
    """The memory layout of a matrix, or of its transpose: row-major, with each row at a multiple of 16 bytes."""

    dtype: torch.dtype
    rows: int
    columns: int
    row_stride: int
    """Elements from one row to the next"""
    is_transposed: bool = False
    """Whether the stored matrix is the transpose of the operand"""

    @classmethod
    def of(cls, matrix: Tensor) -> "StoredMatrix | None":
        """Returns the layout of a matrix; None if rows are not contiguous, or not all at multiples of 16 bytes."""
        (rows, columns), (stride, last_stride) = matrix.shape, matrix.stride()
        is_transposed = last_stride != 1
        if is_transposed:
            rows, columns, stride, last_stride = columns, rows, last_stride, stride
        starts = matrix.data_ptr() | stride * matrix.itemsize
        is_readable = last_stride == 1 and stride >= columns and starts % ALIGNED_BYTES == 0
        return cls(matrix.dtype, rows, columns, stride, is_transposed) if is_readable else None


class Signature(NamedTuple):
    """Everything about a matmul except addresses: out (M, N) = a (M, K) @ b (K, N) [+ bias (N,)] [+ out]."""

    device_index: int
    out: StoredMatrix
    a: StoredMatrix
    b: StoredMatrix
    has_bias: bool

    @classmethod
    def of(cls, matmul: Matmul) -> "Signature | None":
        """Returns a matmul's signature; None for dtypes and layouts that are left to PyTorch, and without cuBLASLt."""
        out, a, b, bias, _ = matmul
        if a.dtype not in DTYPES_16_BIT or b.dtype != a.dtype or out.dtype not in (a.dtype, torch.float32):
            return None
        if bias is not None:
            if bias.dtype != out.dtype or not bias.is_contiguous() or bias.data_ptr() % ALIGNED_BYTES:
                return None
        out_matrix, a_matrix, b_matrix = map(StoredMatrix.of, (out, a, b))
        if out_matrix is None or out_matrix.is_transposed or a_matrix is None or b_matrix is None:
            return None
        if not a.is_cuda or loaded() is None:
            return None
        return cls(a.device.index, out_matrix, a_matrix, b_matrix, bias is not None)


class Algorithm(ctypes.Structure):
    """An opaque algorithm with its configuration; plain data that may outlive the descriptor that listed it."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _HeuristicResult(ctypes.Structure):
    _fields_ = [("algorithm", Algorithm), ("workspace_bytes", ctypes.c_size_t), ("status", ctypes.c_int)]
    _fields_ += [("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


class MatmulDescriptor:
    """A matmul of one `Signature`, ready to run.

    cuBLAS reads matrices as column-major, so it sees a row-major matrix as its transpose, and computes outᵀ (N, M) =
    bᵀ (N, K) @ aᵀ (K, M).
    """

    def __init__(self, signature: Signature):
        self._handle = _handle(signature.device_index)
        self._descriptor = _create("MatmulDesc", _COMPUTE_32F, _DATA_TYPES[torch.float32])
        for attribute, stored in ((_DESC_TRANSA, signature.b), (_DESC_TRANSB, signature.a)):
            if stored.is_transposed:
                _set("MatmulDesc", self._descriptor, attribute, _TRANSPOSED)
        if signature.has_bias:
            _set("MatmulDesc", self._descriptor, _DESC_EPILOGUE, _EPILOGUE_BIAS)
        self._a, self._b, self._out = map(_layout, (signature.a, signature.b, signature.out))
        layouts = [("MatrixLayout", layout) for layout in (self._a, self._b, self._out)]
        for kind, value in [("MatmulDesc", self._descriptor), *layouts]:
            # Not at process exit, when the library may be unloaded already.
            weakref.finalize(self, _call, f"{kind}Destroy", value).atexit = False

    @cached_property
    def candidates(self) -> list[Algorithm]:
        """The algorithms that cuBLAS's heuristic finds, the one that it expects to be the fastest first.

        Algorithms that need a workspace or split the sum over K between thread blocks are left out. On Hopper, the
        others all add in the same order and give the same bits; `algorithms` checks that nevertheless.
        """
        preference = _create("MatmulPreference")
        _set("MatmulPreference", preference, _PREFERENCE_WORKSPACE, ctypes.c_uint64(0))
        for attribute in _PREFERENCE_ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, ctypes.c_uint32(ALIGNED_BYTES))
        buffer, count = (_HeuristicResult * _ASKED_FOR)(), ctypes.c_int()
        operands = self._descriptor, self._b, self._a, self._out, self._out, preference
        status = _status("MatmulAlgoGetHeuristic", self._handle, *operands, _ASKED_FOR, buffer, ctypes.byref(count))
        _call("MatmulPreferenceDestroy", preference)
        # If no algorithm fits, cuBLAS returns a status other than 0.
        results = [] if status else buffer[: count.value]
        return [r.algorithm for r in results if r.status == 0 and _split_k(r.algorithm) == 1][:_MOST_CANDIDATES]

    def run(self, matmul: Matmul, algorithm: Algorithm, *, alpha: float = 1.0) -> bool:
        """Computes alpha times a matmul of the signature on the current stream.

        Returns False if cuBLAS refuses, as for an algorithm of another signature; `out` is then left as it is.
        """
        out, a, b = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (matmul.out, matmul.a, matmul.b))
        factor, beta = ctypes.byref(ctypes.c_float(alpha)), ctypes.byref(ctypes.c_float(matmul.accumulate))
        operands = factor, b, self._b, a, self._a, beta, out, self._out, out, self._out
        stream = ctypes.c_void_p(torch.cuda.current_stream(matmul.out.device).cuda_stream)
        execution = ctypes.byref(algorithm), ctypes.c_void_p(), ctypes.c_size_t(0), stream  # Without a workspace
        # The descriptor holds the bias's address, and a handle must not be used by two threads at a time.
        with _run_lock:
            if matmul.bias is not None:
                pointer = ctypes.c_void_p(matmul.bias.data_ptr())
                _set("MatmulDesc", self._descriptor, _DESC_BIAS_POINTER, pointer)
            return _status("Matmul", self._handle, self._descriptor, *operands, *execution) == 0


def library_name() -> str | None:
    """Returns the file name of the cuBLASLt that PyTorch is built for; None for unknown versions, or outside Linux."""
    major = (torch.version.cuda or "").partition(".")[0]
    return f"libcublasLt.so.{major}" if major in _KNOWN_VERSIONS and hasattr(os, "RTLD_NOLOAD") else None


@cache
def loaded() -> ctypes.CDLL | None:
    """Returns the cuBLASLt that PyTorch has loaded, if its version is known; never loads one."""
    name = library_name()
    try:
        return None if name is None else ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _status(function: str, *arguments: object) -> int:
    return getattr(loaded(), f"cublasLt{function}")(*arguments)


def _call(function: str, *arguments: object) -> None:
    if status := _status(function, *arguments):
        raise RuntimeError(f"cublasLt{function} returned status {status}")


@cache
def _handle(device_index: int) -> ctypes.c_void_p:
    """Returns the device's handle, which is created once and never destroyed."""
    with torch.cuda.device(device_index):
        return _create("")


def _create(kind: str, *arguments: object) -> ctypes.c_void_p:
    value = ctypes.c_void_p()
    _call(f"{kind}Create", ctypes.byref(value), *arguments)
    return value


def _set(kind: str, descriptor: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
    _call(f"{kind}SetAttribute", descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _layout(stored: StoredMatrix) -> ctypes.c_void_p:
    """Returns the layout descriptor of a stored matrix, whose rows are columns to cuBLAS."""
    sizes = ctypes.c_uint64(stored.columns), ctypes.c_uint64(stored.rows), ctypes.c_int64(stored.row_stride)
    return _create("MatrixLayout", _DATA_TYPES[stored.dtype], *sizes)


def _split_k(algorithm: Algorithm) -> int:
    value, written = ctypes.c_int32(), ctypes.c_size_t()
    destination = ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(written)
    _call("MatmulAlgoConfigGetAttribute", ctypes.byref(algorithm), _ALGORITHM_SPLIT_K, *destination)
    # 0 if the algorithm has no such setting
    return max(value.value, 1)
