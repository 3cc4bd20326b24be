"""Runs tests of Triton kernels on a GPU or, in a separate process with TRITON_INTERPRET=1, in Triton's interpreter."""

import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")


def prepare_row_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `triton_rows` run in the interpreter.

    The interpreter has no device library, runs one program after another, so that no program may wait for a later one,
    and does not accept its own tensors as the end of a loop.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    from thunder_flce.engine.kernels import triton_rows, triton_tokens

    def log1p(x):
        # The rounding of 1 + x cancels, since both the logarithm and the difference have it.
        return tl.where(1.0 + x == 1.0, x, tl.log(1.0 + x) * (x / tl.where(1.0 + x == 1.0, 1.0, (1.0 + x) - 1.0)))

    def expm1(x):
        half = tl.sqrt(tl.exp(x))
        sinh = tl.where(x * x < 0.01, x / 2 + x * x * x / 48, (half - 1 / half) / 2)
        return 2 * half * sinh

    functions = {"exp": lambda x: tl.exp(x), "log": lambda x: tl.log(x), "expm1": expm1, "log1p": log1p}
    libdevice = SimpleNamespace(**functions, tanh=lambda x: 1 - 2 / (tl.exp(2 * x) + 1))
    for module in (triton_rows, triton_tokens):
        monkeypatch.setattr(module, "libdevice", libdevice)
    monkeypatch.setattr(triton_rows, "_LARGEST_ROW_BYTES", 2**30)
    patch_tensor, patch_language, patched = interpreter._patch_lang_tensor, interpreter._patch_lang, set()

    def patch_index_too(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def patch_once(fn):
        """Patches once per launch instead of for each function called in it, in two thirds of the time."""
        languages = frozenset(name for name in ("tl", "core") if name in fn.__globals__)
        if languages in patched:
            return None
        scope = patch_language(fn)
        if scope is not None:  # Older versions of Triton restore nothing.
            patched.add(languages)
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_index_too)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
