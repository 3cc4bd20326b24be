"""Shapes to measure, by name, and their inputs."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_flce.operation.checks import dtype_name

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and properties of one loss region."""

    name: str
    tokens: int
    vocab: int
    hidden: int
    bias: bool = False
    ignored: float = 0.0  # the fraction of targets that are ignore_index
    dtype: torch.dtype = torch.bfloat16
    frozen: bool = False  # whether the weight requires no gradient

    def __str__(self) -> str:
        extras = {
            "bias": self.bias,
            f"{self.ignored:.0%} ignored": self.ignored,
            "frozen head": self.frozen,
            dtype_name(self.dtype): self.dtype is not torch.bfloat16,
        }
        sizes = f"{self.name} {self.tokens} × {self.vocab} × {self.hidden}"
        return ", ".join([sizes, *(extra for extra, is_there in extras.items() if is_there)])

    def as_record(self) -> dict[str, Any]:
        """Returns the fields for JSON, with "shape" as a text of all of them."""
        return {"shape": str(self), **vars(self), "dtype": dtype_name(self.dtype)}


_HEADS = {
    "deepseek-v3": (4096, 129280, 7168), "gemma-2-2b": (8192, 256000, 2304), "gemma-2-9b": (8192, 256000, 3584),
    "gpt2": (32768, 50257, 768), "gpt2-xl": (8192, 50257, 1600), "gpt-oss-20b": (8192, 201088, 2880),
    "llama-2-7b": (8192, 32000, 4096), "llama-3.1-8b": (8192, 128256, 4096), "llama-3.1-70b": (8192, 128256, 8192),
    "llama-3.2-1b": (16384, 128256, 2048), "mistral-7b": (8192, 32768, 4096), "phi-4": (8192, 100352, 5120),
    "qwen2.5-0.5b": (32768, 151936, 896), "qwen2.5-7b": (8192, 152064, 3584), "qwen3-8b": (8192, 151936, 4096),
}  # fmt: skip
SHAPES = {
    **{name: Shape(name=name, tokens=of[0], vocab=of[1], hidden=of[2]) for name, of in _HEADS.items()},
    "cpu": Shape(name="cpu", tokens=512, vocab=32000, hidden=512, dtype=torch.float32),
    "tiny": Shape(name="tiny", tokens=64, vocab=500, hidden=32, dtype=torch.float32),
}
"""Shapes of models' heads, and two small shapes for a CPU"""

GRAMMAR = (
    f"{', '.join(SHAPES)}; tokens=…,vocab=…,hidden=…[,bias=1][,ignored=…][,dtype=…][,frozen=1]; "
    "both, as in gpt2,bias=1; or a Hugging Face model's config.json,tokens=…"
)
"""Texts that `parse_shape` accepts"""

_FIELDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("tokens", "vocab", "hidden"), int),
    **dict.fromkeys(("bias", "frozen"), {"0": False, "1": True}.__getitem__),
    "ignored": float,
    "dtype": DTYPES.__getitem__,
}


def given_fields(pairs: Iterable[str], readers: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Reads pairs such as "tokens=8192", each by the reader of its name; a KeyError or ValueError if that fails."""
    return {name: readers[name](value) for name, value in (pair.split("=", 1) for pair in pairs)}


def parse_shape(text: str, *, without: tuple[str, ...] = ()) -> Shape:
    """Reads a shape: a name, fields, or both; a model's config.json gives the vocabulary and the hidden size.

    Raises:
        ValueError: if the text is none of these, or the shape sets a field in `without`.
    """
    name, *changes = text.split(",")
    try:
        if name in SHAPES:
            fields = vars(SHAPES[name])
        elif name.endswith(".json"):
            config = json.loads(Path(name).read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            model = Path(config.get("_name_or_path") or Path(name).resolve().parent).name
            fields = {"name": model, "vocab": config["vocab_size"], "hidden": config["hidden_size"]}
        else:
            fields, changes = {"name": "custom"}, [name, *changes]
        shape = Shape(**{**fields, **given_fields(changes, _FIELDS)})
        if min(shape.tokens, shape.vocab, shape.hidden) < 1 or not 0 <= shape.ignored <= 1:
            raise ValueError
    except OSError as error:
        raise ValueError(f"no shape can be read from {name!r}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"a shape must be one of {GRAMMAR}, with positive sizes and ignored between 0 and 1, but got {text!r}"
        ) from None
    if any(getattr(shape, name) for name in without):
        raise ValueError(f"this benchmark takes shapes without {', '.join(without)}, but got {shape}")
    return shape


class Inputs(NamedTuple):
    """Inputs of a method: tensors that require a gradient, except the target and a frozen weight."""

    x: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    target: Tensor  # (T,) int64
    bias: Tensor | None = None  # (V,)

    @classmethod
    def random(cls, shape: Shape, device: str) -> "Inputs":
        """Returns normal x, weights for which logits have a standard deviation of about 1, and uniform targets."""
        generator = torch.Generator(device).manual_seed(0)

        def randn(*size: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(*size, device=device, dtype=shape.dtype, generator=generator)
            return values.mul_(scale).requires_grad_()

        target = torch.randint(0, shape.vocab, (shape.tokens,), device=device, generator=generator)
        dropped = torch.randperm(shape.tokens, device=device, generator=generator)
        target[dropped[: round(shape.ignored * shape.tokens)]] = -100
        return cls(
            x=randn(shape.tokens, shape.hidden),
            weight=randn(shape.vocab, shape.hidden, scale=shape.hidden**-0.5).requires_grad_(not shape.frozen),
            target=target,
            bias=randn(shape.vocab) if shape.bias else None,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Returns inputs with changed operands; after `map(Tensor.detach)`, no operand requires a gradient."""
        return Inputs(*(tensor if tensor is None or tensor is self.target else change(tensor) for tensor in self))  # type: ignore[arg-type]

    def apply(self, method: Callable[..., Any]) -> Any:
        """Returns what a method computes from these inputs; the keyword bias is given only if there is a bias."""
        bias = {} if self.bias is None else {"bias": self.bias}
        return method(self.x, self.weight, self.target, **bias)

    def logits(self, rows: slice) -> Tensor:
        """Returns the logits of some tokens, (n, V)."""
        return F.linear(self.x[rows], self.weight, self.bias)

    def named_operands(self) -> dict[str, Tensor]:
        """Returns the operands that get a gradient, by the gradient's name: "dx", "dw" and "dbias"."""
        named = zip(("dx", "dw", "target", "dbias"), self, strict=True)
        return {name: tensor for name, tensor in named if tensor is not None and tensor.requires_grad}
