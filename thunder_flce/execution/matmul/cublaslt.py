"""cuBLASLt through ctypes, as far as it takes to choose the algorithm of a matmul.

PyTorch always runs the algorithm that cuBLAS's heuristic puts first. Here the library that PyTorch has loaded gives all
its candidates, and runs the one that the caller wants. Names and numbers are those of cublasLt.h, the same in CUDA 12
and 13: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api.
"""

import ctypes
import os
import threading
import weakref
from functools import cache
from typing import NamedTuple

import torch

from thunder_flce.device import ALIGNED_BYTES
from thunder_flce.execution.matmul.layout import DTYPES_16_BIT, Matmul, StoredMatrix

_MOST_CANDIDATES = 16
_COMPUTE_32F = ctypes.c_int(68)
_DATA_TYPES = {torch.float32: ctypes.c_int(0), torch.float16: ctypes.c_int(2), torch.bfloat16: ctypes.c_int(14)}
_TRANSPOSED, _EPILOGUE_BIAS = ctypes.c_int32(1), ctypes.c_uint32(4)
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 4, 7, 8
_PREFERENCE_WORKSPACE, _PREFERENCE_ALIGNMENTS = 1, (5, 6, 7, 8)
_ALGORITHM_SPLIT_K = ctypes.c_int(2)

_running = threading.Lock()


class Algorithm(ctypes.Structure):
    """An opaque algorithm with its configuration; plain data that may outlive the descriptor it was found for."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _HeuristicResult(ctypes.Structure):
    _fields_ = [("algorithm", Algorithm), ("workspace_bytes", ctypes.c_size_t), ("status", ctypes.c_int)]
    _fields_ += [("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


class Signature(NamedTuple):
    """What a matmul is, but for the addresses: out (M, N) = a (M, K) @ b (K, N) [+ bias (N,)] [+ out]."""

    device_index: int
    operand_dtype: torch.dtype
    out_dtype: torch.dtype
    out: StoredMatrix
    a: StoredMatrix
    b: StoredMatrix
    has_bias: bool

    @classmethod
    def of(cls, matmul: Matmul) -> "Signature | None":
        """That of a matmul; None for dtypes and memory layouts that are left to PyTorch."""
        a, bias, dtype, out_dtype = matmul.a, matmul.bias, matmul.a.dtype, matmul.out.dtype
        if not (supports(dtype, a.device.type) and dtype == matmul.b.dtype and out_dtype in (dtype, torch.float32)):
            return None
        if bias is not None and (
            bias.dtype != out_dtype or not bias.is_contiguous() or bias.data_ptr() % ALIGNED_BYTES
        ):
            return None
        stored_out, stored_a, stored_b = matmul.stored
        if stored_out is None or stored_a is None or stored_b is None or stored_out.is_transposed or loaded() is None:
            return None
        return cls(a.device.index, dtype, out_dtype, stored_out, stored_a, stored_b, bias is not None)


class MatmulDescriptor:
    """A matmul of one `Signature`, ready to run.

    cuBLAS stores matrices column by column, so that outᵀ is to it what out is to us: it computes outᵀ (N, M) =
    bᵀ (N, K) @ aᵀ (K, M).
    """

    def __init__(self, signature: Signature):
        self._handle = _handle(signature.device_index)
        self._descriptor = _created("MatmulDesc", _COMPUTE_32F, _DATA_TYPES[torch.float32])
        for attribute, stored in ((_DESC_TRANSA, signature.b), (_DESC_TRANSB, signature.a)):
            if stored.is_transposed:
                _set("MatmulDesc", self._descriptor, attribute, _TRANSPOSED)
        if signature.has_bias:
            _set("MatmulDesc", self._descriptor, _DESC_EPILOGUE, _EPILOGUE_BIAS)
        self._a = _layout(signature.a, signature.operand_dtype)
        self._b = _layout(signature.b, signature.operand_dtype)
        self._out = _layout(signature.out, signature.out_dtype)
        layouts = [("MatrixLayout", layout) for layout in (self._a, self._b, self._out)]
        for kind, value in [("MatmulDesc", self._descriptor), *layouts]:
            # Not when the process ends: by then the library may be gone.
            weakref.finalize(self, _call, f"{kind}Destroy", value).atexit = False

    def candidates(self) -> list[Algorithm]:
        """The algorithms that cuBLAS's heuristic finds, the one that it expects to be the fastest first.

        Only those that need no workspace and do not split the sum over K between thread blocks. On Hopper they all
        add in the same order, so that the choice among them does not change a bit of the result (tests/test_tuning.py).
        """
        preference = _created("MatmulPreference")
        _set("MatmulPreference", preference, _PREFERENCE_WORKSPACE, ctypes.c_uint64(0))
        for attribute in _PREFERENCE_ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, ctypes.c_uint32(ALIGNED_BYTES))
        found, count = (_HeuristicResult * _MOST_CANDIDATES)(), ctypes.c_int()
        operands = self._descriptor, self._b, self._a, self._out, self._out, preference
        most = ctypes.c_int(_MOST_CANDIDATES)
        status = _status("MatmulAlgoGetHeuristic", self._handle, *operands, most, found, ctypes.byref(count))
        _call("MatmulPreferenceDestroy", preference)
        # Where nothing fits, cuBLAS says so by a status.
        results = [] if status else found[: count.value]
        return [r.algorithm for r in results if r.status == 0 and _split_k(r.algorithm) == 1]

    def run(self, matmul: Matmul, algorithm: Algorithm, *, alpha: float = 1.0) -> bool:
        """Computes alpha times a matmul of the signature on the current stream.

        False where cuBLAS has refused, as for an algorithm found for another matmul; `out` is left as it is.
        """
        out, a, b = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (matmul.out, matmul.a, matmul.b))
        factor, beta = ctypes.byref(ctypes.c_float(alpha)), ctypes.byref(ctypes.c_float(matmul.accumulate))
        operands = factor, b, self._b, a, self._a, beta, out, self._out, out, self._out
        workspace = ctypes.c_void_p(), ctypes.c_size_t(0)
        stream = ctypes.c_void_p(torch.cuda.current_stream(matmul.out.device).cuda_stream)
        # The bias is a part of the descriptor, and handles are not meant to be shared at the same time.
        with _running:
            if matmul.bias is not None:
                pointer = ctypes.c_void_p(matmul.bias.data_ptr())
                _set("MatmulDesc", self._descriptor, _DESC_BIAS_POINTER, pointer)
            how = ctypes.byref(algorithm), *workspace, stream
            return _status("Matmul", self._handle, self._descriptor, *operands, *how) == 0


def supports(dtype: torch.dtype, device_type: str) -> bool:
    """Whether operands of a dtype, on a device, are those of a matmul that is run here."""
    return device_type == "cuda" and dtype in DTYPES_16_BIT


@cache
def loaded() -> ctypes.CDLL | None:
    """The cuBLASLt that PyTorch runs, if it is built for CUDA 12 or later and has loaded it: no other one."""
    major = (torch.version.cuda or "0").partition(".")[0]
    if int(major) < 12 or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _status(function: str, *arguments: object) -> int:
    return getattr(loaded(), f"cublasLt{function}")(*arguments)


def _call(function: str, *arguments: object) -> None:
    if status := _status(function, *arguments):
        raise RuntimeError(f"cublasLt{function} returned status {status}")


@cache
def _handle(device_index: int) -> ctypes.c_void_p:
    """One a device, kept for good."""
    with torch.cuda.device(device_index):
        return _created("")


def _created(kind: str, *arguments: object) -> ctypes.c_void_p:
    value = ctypes.c_void_p()
    _call(f"{kind}Create", ctypes.byref(value), *arguments)
    return value


def _set(kind: str, descriptor: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
    _call(f"{kind}SetAttribute", descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _layout(stored: StoredMatrix, dtype: torch.dtype) -> ctypes.c_void_p:
    """That of the matrix as stored, which to cuBLAS has a column for each row."""
    sizes = ctypes.c_uint64(stored.columns), ctypes.c_uint64(stored.rows), ctypes.c_int64(stored.row_stride)
    return _created("MatrixLayout", _DATA_TYPES[dtype], *sizes)


def _split_k(algorithm: Algorithm) -> int:
    value, written = ctypes.c_int32(), ctypes.c_size_t()
    into = ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(written)
    _call("MatmulAlgoConfigGetAttribute", ctypes.byref(algorithm), _ALGORITHM_SPLIT_K, *into)
    # 0 where the algorithm knows no such thing
    return max(value.value, 1)
