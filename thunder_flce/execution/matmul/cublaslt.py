"""cuBLASLt, as far as a matrix product needs it whose algorithm is chosen by hand; through ctypes.

PyTorch always runs the algorithm that cuBLAS proposes first, and has no way to ask for another. Here the library that
PyTorch has loaded is asked for all its proposals, and runs the one that the caller wants. Names and numbers are those
of cublasLt.h, the same in CUDA 12 and 13: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api.
"""

import ctypes
import os
import threading
import weakref
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# What TMA, through which the algorithms for 16-bit operands read and write, asks of addresses and strides, in bytes.
_ALIGNMENT = 16
_MOST_PROPOSALS = 16

_SUCCESS = 0
_COMPUTE_32F = 68
_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSED = 1
_EPILOGUE_BIAS = 4
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 4, 7, 8
_PREFERENCE_WORKSPACE, _PREFERENCE_ALIGNMENTS = 1, (5, 6, 7, 8)
_ALGORITHM_SPLIT_K = 2

_running = threading.Lock()


class Algorithm(ctypes.Structure):
    """An opaque algorithm with its configuration; plain data that may outlive what it was proposed for."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class StoredMatrix(NamedTuple):
    """How a matrix lies in memory, in cuBLAS's terms: column-major."""

    rows: int
    columns: int
    leading_dimension: int
    is_transposed: bool
    """Whether the matrix as stored is the transpose of the one meant"""

    @classmethod
    def of_transpose(cls, matrix: Tensor) -> "StoredMatrix | None":
        """How the transpose of `matrix` lies in memory, or None where cuBLASLt cannot read it at full speed."""
        rows, columns = matrix.shape
        for is_transposed, leading, (stored_rows, stored_columns) in (
            (False, matrix.stride(0), (columns, rows)),
            (True, matrix.stride(1), (rows, columns)),
        ):
            unit = matrix.stride(0) if is_transposed else matrix.stride(1)
            if unit == 1 and leading >= stored_rows and leading * matrix.element_size() % _ALIGNMENT == 0:
                return cls(stored_rows, stored_columns, leading, is_transposed)
        return None


class Signature(NamedTuple):
    """What a product is, but for the addresses: out (M, N) = a (M, K) @ b (K, N) [+ bias (N,)] [+ out]."""

    device_index: int
    operand_dtype: torch.dtype
    out_dtype: torch.dtype
    a: StoredMatrix
    b: StoredMatrix
    out: StoredMatrix
    has_bias: bool

    @classmethod
    def of(cls, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> "Signature | None":
        """That of a product, or None where cuBLASLt has to be left to PyTorch: see `available`."""
        tensors = [out, a, b, *([] if bias is None else [bias])]
        is_16_bit = a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)
        if not (a.is_cuda and is_16_bit and out.dtype in (a.dtype, torch.float32) and available()):
            return None
        if bias is not None and not (bias.dtype == out.dtype and bias.is_contiguous()):
            return None
        if any(tensor.data_ptr() % _ALIGNMENT for tensor in tensors):
            return None
        stored = [StoredMatrix.of_transpose(matrix) for matrix in (a, b, out)]
        if None in stored or stored[2].is_transposed:
            return None
        return cls(a.device.index, a.dtype, out.dtype, *stored, bias is not None)


class Product:
    """A product of one `Signature`, ready to run.

    cuBLAS counts column by column: it is asked for outᵀ (N, M) = bᵀ (N, K) @ aᵀ (K, M), which lies in memory as out
    does.
    """

    def __init__(self, signature: Signature):
        self._handle = _handle(signature.device_index)
        self._description = _created("MatmulDesc", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_DATA_TYPES[torch.float32]))
        for attribute, stored in ((_DESC_TRANSA, signature.b), (_DESC_TRANSB, signature.a)):
            if stored.is_transposed:
                self._describe(attribute, ctypes.c_int32(_TRANSPOSED))
        if signature.has_bias:
            self._describe(_DESC_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
        self._a = _layout(signature.a, signature.operand_dtype)
        self._b = _layout(signature.b, signature.operand_dtype)
        self._out = _layout(signature.out, signature.out_dtype)
        descriptors = [("MatmulDesc", self._description)]
        descriptors += [("MatrixLayout", layout) for layout in (self._a, self._b, self._out)]
        # Not when the process ends: by then the library may be gone.
        weakref.finalize(self, _destroy, descriptors).atexit = False

    def proposals(self) -> list[Algorithm]:
        """The algorithms that cuBLAS proposes, the one that it expects to be the fastest first.

        Only those that need no workspace and do not split the sum over K between thread blocks. On Hopper they all
        add in the same order, so that the choice among them does not change a bit of the result
        (tests/test_product_tuning.py).
        """
        preference = _created("MatmulPreference")
        for attribute, value in (
            (_PREFERENCE_WORKSPACE, ctypes.c_uint64(0)),
            *((attribute, ctypes.c_uint32(_ALIGNMENT)) for attribute in _PREFERENCE_ALIGNMENTS),
        ):
            _call("MatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), _size(value))
        found = (_Proposal * _MOST_PROPOSALS)()
        count = ctypes.c_int()
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            self._description,
            *(self._b, self._a, self._out, self._out),
            preference,
            ctypes.c_int(_MOST_PROPOSALS),
            found,
            ctypes.byref(count),
        )
        _call("MatmulPreferenceDestroy", preference)
        # Where nothing fits, cuBLAS says so by a status.
        proposals = [] if status else found[: count.value]
        return [p.algorithm for p in proposals if p.status == _SUCCESS and _split_k(p.algorithm) == 1]

    def run(
        self,
        algorithm: Algorithm,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        *,
        accumulate: bool,
        alpha: float = 1.0,
    ) -> bool:
        """Computes alpha times the product on the current stream, from tensors of the signature.

        Returns:
            Whether it does. If not, cuBLAS has refused, as it does where an algorithm was proposed for another product,
            and `out` is left as it is.
        """
        factors = ctypes.c_float(alpha), ctypes.c_float(float(accumulate))
        # The bias is a part of the description, and handles are not meant to be shared at the same time.
        with _running:
            if bias is not None:
                self._describe(_DESC_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
            status = _library().cublasLtMatmul(
                self._handle,
                self._description,
                ctypes.byref(factors[0]),
                *(ctypes.c_void_p(b.data_ptr()), self._b),
                *(ctypes.c_void_p(a.data_ptr()), self._a),
                ctypes.byref(factors[1]),
                *(ctypes.c_void_p(out.data_ptr()), self._out),
                *(ctypes.c_void_p(out.data_ptr()), self._out),
                ctypes.byref(algorithm),
                *(ctypes.c_void_p(), ctypes.c_size_t(0)),
                ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
            )
        return status == _SUCCESS

    def _describe(self, attribute: int, value: ctypes._SimpleCData) -> None:
        _call("MatmulDescSetAttribute", self._description, attribute, ctypes.byref(value), _size(value))


def available() -> bool:
    """Whether PyTorch is built for CUDA 12 or later and has loaded cuBLASLt."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "0").partition(".")[0]
    if int(major) < 12 or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        # Only the one that PyTorch runs: another version would be a second library in this process.
        return ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _call(function: str, *arguments: object) -> None:
    status = getattr(_library(), f"cublasLt{function}")(*arguments)
    if status:
        raise RuntimeError(f"cublasLt{function} returned status {status}")


@cache
def _handle(device_index: int) -> ctypes.c_void_p:
    """One a device, for good."""
    with torch.cuda.device(device_index):
        handle = ctypes.c_void_p()
        _call("Create", ctypes.byref(handle))
    return handle


def _created(kind: str, *arguments: object) -> ctypes.c_void_p:
    value = ctypes.c_void_p()
    _call(f"{kind}Create", ctypes.byref(value), *arguments)
    return value


def _destroy(descriptors: list[tuple[str, ctypes.c_void_p]]) -> None:
    for kind, value in descriptors:
        _call(f"{kind}Destroy", value)


def _layout(stored: StoredMatrix, dtype: torch.dtype) -> ctypes.c_void_p:
    sizes = ctypes.c_uint64(stored.rows), ctypes.c_uint64(stored.columns), ctypes.c_int64(stored.leading_dimension)
    return _created("MatrixLayout", ctypes.c_int(_DATA_TYPES[dtype]), *sizes)


def _split_k(algorithm: Algorithm) -> int:
    value, written = ctypes.c_int32(), ctypes.c_size_t()
    _call(
        "MatmulAlgoConfigGetAttribute",
        ctypes.byref(algorithm),
        ctypes.c_int(_ALGORITHM_SPLIT_K),
        ctypes.byref(value),
        _size(value),
        ctypes.byref(written),
    )
    # 0 where the algorithm knows no such thing
    return max(value.value, 1)


def _size(value: ctypes._SimpleCData) -> ctypes.c_size_t:
    return ctypes.c_size_t(ctypes.sizeof(value))
