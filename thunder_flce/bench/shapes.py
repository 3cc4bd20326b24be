"""The shapes that are measured, by name, and their inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One loss region."""

    name: str
    tokens: int
    vocab: int
    hidden: int
    bias: bool = False
    ignored: float = 0.0
    """The fraction of targets that are ignore_index."""

    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        extras = (", bias" if self.bias else "") + (f", {self.ignored:.0%} ignored" if self.ignored else "")
        if self.dtype is not torch.bfloat16:
            extras += f", {dtype_name(self.dtype)}"
        return f"{self.name} {self.tokens} × {self.vocab} × {self.hidden}{extras}"

    @property
    def output_bytes(self) -> int:
        """Bytes of the gradients alone: what every method has to write."""
        elements = self.tokens * self.hidden + self.vocab * self.hidden + (self.vocab if self.bias else 0)
        return elements * self.dtype.itemsize

    @property
    def ignored_tokens(self) -> int:
        """How many targets are ignore_index."""
        return round(self.ignored * self.tokens)

    @property
    def operations(self) -> int:
        """Floating point operations of the three products, over the tokens that count."""
        return 6 * (self.tokens - self.ignored_tokens) * self.vocab * self.hidden


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="S1", tokens=8192, vocab=128256, hidden=4096),
        Shape(name="S1i", tokens=8192, vocab=128256, hidden=4096, ignored=0.6),
        Shape(name="S2", tokens=32768, vocab=128256, hidden=768, bias=True),
        Shape(name="S3", tokens=8192, vocab=256000, hidden=2304),
        Shape(name="S4", tokens=4096, vocab=152064, hidden=3584),
        Shape(name="U1", tokens=8192, vocab=128257, hidden=4096),
        Shape(name="U2", tokens=8192, vocab=50257, hidden=1600),
        Shape(name="deepseek-v3", tokens=4096, vocab=129280, hidden=7168),
        Shape(name="gemma-2-2b", tokens=8192, vocab=256000, hidden=2304),
        Shape(name="gemma-2-9b", tokens=8192, vocab=256000, hidden=3584),
        Shape(name="gpt2", tokens=32768, vocab=50257, hidden=768),
        Shape(name="gpt-oss-20b", tokens=8192, vocab=201088, hidden=2880),
        Shape(name="llama-2-7b", tokens=8192, vocab=32000, hidden=4096),
        Shape(name="llama-3.1-8b", tokens=8192, vocab=128256, hidden=4096),
        Shape(name="llama-3.1-70b", tokens=8192, vocab=128256, hidden=8192),
        Shape(name="llama-3.2-1b", tokens=16384, vocab=128256, hidden=2048),
        Shape(name="mistral-7b", tokens=8192, vocab=32768, hidden=4096),
        Shape(name="phi-4", tokens=8192, vocab=100352, hidden=5120),
        Shape(name="qwen2.5-0.5b", tokens=32768, vocab=151936, hidden=896),
        Shape(name="qwen2.5-7b", tokens=8192, vocab=152064, hidden=3584),
        Shape(name="qwen3-8b", tokens=8192, vocab=151936, hidden=4096),
        Shape(name="cpu", tokens=512, vocab=32000, hidden=512, dtype=torch.float32),
        Shape(name="tiny", tokens=64, vocab=500, hidden=32, dtype=torch.float32),
    )
}
"""S1 to S4 and the uneven U1 and U2 are those of the README; then the heads of models, with tokens that fill a GPU."""


def parse_shape(text: str) -> Shape:
    """A shape by name, or as "tokens=8192,vocab=32000,hidden=4096[,bias=1][,ignored=0.5][,dtype=float32]".

    Raises:
        ValueError: where the text is neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    kinds = {"tokens": int, "vocab": int, "hidden": int, "bias": lambda v: bool(int(v)), "ignored": float}
    kinds["dtype"] = DTYPES.__getitem__
    try:
        fields = dict(pair.split("=", 1) for pair in text.split(","))
        return Shape(name="custom", **{name: kinds[name](value) for name, value in fields.items()})
    except (ValueError, KeyError, TypeError):
        names = ", ".join(SHAPES)
        raise ValueError(f"a shape must be one of {names}, or tokens=…,vocab=…,hidden=…, but got {text!r}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class Inputs:
    """What a method gets; x, weight and bias require a gradient."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor

    @classmethod
    def random(cls, shape: Shape, device: str) -> "Inputs":
        """Normal x, weights that give logits of standard deviation about 1, and uniform targets."""
        generator = torch.Generator(device).manual_seed(0)

        def randn(*size: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(*size, device=device, dtype=shape.dtype, generator=generator)
            return values.mul_(scale).requires_grad_()

        target = torch.randint(0, shape.vocab, (shape.tokens,), device=device, generator=generator)
        dropped = torch.randperm(shape.tokens, device=device, generator=generator)
        target[dropped[: shape.ignored_tokens]] = -100
        return cls(
            randn(shape.tokens, shape.hidden),
            randn(shape.vocab, shape.hidden, scale=shape.hidden**-0.5),
            randn(shape.vocab) if shape.bias else None,
            target,
        )

    def operands(self) -> list[Tensor]:
        """What gets a gradient."""
        return [tensor for tensor in (self.x, self.weight, self.bias) if tensor is not None]
