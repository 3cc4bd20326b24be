"""The shapes that are measured, by name, and their inputs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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

    frozen: bool = False
    """Whether the weight requires no gradient."""

    rank: int = 0
    """Of a low-rank adapter beside the weight: the logits have a second term, y Bᵀ, with y (tokens, rank) and B (vocab,
    rank), which both require a gradient; 0 for none."""

    def __str__(self) -> str:
        extras = (", bias" if self.bias else "") + (f", {self.ignored:.0%} ignored" if self.ignored else "")
        extras += (", frozen head" if self.frozen else "") + (f", rank {self.rank}" if self.rank else "")
        if self.dtype is not torch.bfloat16:
            extras += f", {dtype_name(self.dtype)}"
        return f"{self.name} {self.tokens} × {self.vocab} × {self.hidden}{extras}"

    def as_record(self) -> dict[str, Any]:
        """The fields for JSON, and "shape", which is all of them for people."""
        return {"shape": str(self), **vars(self), "dtype": dtype_name(self.dtype)}

    @property
    def output_bytes(self) -> int:
        """Bytes of the gradients alone: what every method has to write."""
        elements = self.tokens * self.hidden + (self.tokens + self.vocab) * self.rank
        elements += self.vocab * self.hidden * (not self.frozen) + self.vocab * self.bias
        return elements * self.dtype.itemsize

    @property
    def ignored_tokens(self) -> int:
        """How many targets are ignore_index."""
        return round(self.ignored * self.tokens)

    @property
    def operations(self) -> int:
        """Floating-point operations of the matmuls that the loss and the gradients need, over the tokens that count.

        Those are the logits, dX and dW, but for dW of a frozen head, and the same three of an adapter.
        """
        columns = (2 if self.frozen else 3) * self.hidden + 3 * self.rank
        return 2 * (self.tokens - self.ignored_tokens) * self.vocab * columns


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="S1", tokens=8192, vocab=128256, hidden=4096),
        Shape(name="S1i", tokens=8192, vocab=128256, hidden=4096, ignored=0.6),
        Shape(name="S1a", tokens=8192, vocab=128256, hidden=4096, frozen=True, rank=16),
        Shape(name="S2", tokens=32768, vocab=128256, hidden=768, bias=True),
        Shape(name="S3", tokens=8192, vocab=256000, hidden=2304),
        Shape(name="S4", tokens=4096, vocab=152064, hidden=3584),
        Shape(name="U1", tokens=8192, vocab=128257, hidden=4096),
        Shape(name="U2", tokens=8192, vocab=50257, hidden=1600),
        Shape(name="deepseek-v3", tokens=4096, vocab=129280, hidden=7168),
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
        Shape(name="tiny-a", tokens=64, vocab=500, hidden=32, dtype=torch.float32, frozen=True, rank=4),
    )
}
"""S1 to S4 and the uneven U1 and U2 are those of lab/performance.md; then the heads of models.

S1 is the head of Llama 3.1 8B, and S3 that of Gemma 2 2B. "i" stands for ignored tokens, "a" for an adapter.
"""


def parse_shape(text: str) -> Shape:
    """A shape by name, or by fields, as in "tokens=8192,vocab=32000,hidden=4096,bias=1", or both, as in "S1,bias=1".

    In place of a name, the path of a Hugging Face model's config.json, whose vocabulary and hidden size it has, with
    fields, as in "…/config.json,tokens=8192".

    Raises:
        ValueError: where the text is none of these.
    """
    name, *changes = text.split(",")
    try:
        if name in SHAPES:
            known = vars(SHAPES[name])
        elif name.endswith(".json"):
            config = json.loads(Path(name).read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            model = Path(config.get("_name_or_path") or Path(name).resolve().parent).name
            known = {"name": model, "vocab": config["vocab_size"], "hidden": config["hidden_size"]}
        else:
            known, changes = {"name": "custom"}, [name, *changes]
        pairs = [pair.split("=", 1) for pair in changes]
        shape = Shape(**{**known, **{field: _FIELDS[field](value) for field, value in pairs}})
        if min(shape.tokens, shape.vocab, shape.hidden) < 1 or shape.rank < 0 or not 0 <= shape.ignored <= 1:
            raise ValueError
        return shape
    except OSError as error:
        raise ValueError(f"no shape can be read from {name!r}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        names = ", ".join(SHAPES)
        raise ValueError(
            f"a shape must be one of {names}, tokens=…,vocab=…,hidden=…, or a model's config.json,tokens=…, with "
            "positive sizes and ignored between 0 and 1, but got "
            f"{text!r}"
        ) from None


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


_FIELDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("tokens", "vocab", "hidden", "rank"), int),
    **dict.fromkeys(("bias", "frozen"), {"0": False, "1": True}.__getitem__),
    "ignored": float,
    "dtype": DTYPES.__getitem__,
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a method gets: tensors that require a gradient, but for target and a frozen weight."""

    x: Tensor
    """(T, H)"""
    weight: Tensor
    """(V, H)"""
    bias: Tensor | None
    """(V,)"""
    target: Tensor
    """(T,) int64"""
    terms: tuple[tuple[Tensor, Tensor], ...] = ()
    """Low-rank adapters, pairs of y (T, r) and B (V, r): the logits are the sum of x Wᵀ and all y Bᵀ."""

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
        adapter = (shape.tokens, shape.rank), (shape.vocab, shape.rank)
        return cls(
            x=randn(shape.tokens, shape.hidden),
            weight=randn(shape.vocab, shape.hidden, scale=shape.hidden**-0.5).requires_grad_(not shape.frozen),
            bias=randn(shape.vocab) if shape.bias else None,
            target=target,
            terms=((randn(*adapter[0]), randn(*adapter[1], scale=shape.rank**-0.5)),) if shape.rank else (),
        )

    def without_gradients(self) -> "Inputs":
        """The same, and nothing requires a gradient."""
        return self._with_operands(Tensor.detach)

    def widened(self) -> "Inputs":
        """The same for a reference: float32 for 16 bits, otherwise float64, and all of it requires a gradient."""
        dtype = torch.float32 if self.x.element_size() == 2 else torch.float64
        return self._with_operands(lambda tensor: tensor.detach().to(dtype).requires_grad_())

    def _with_operands(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        return Inputs(
            x=change(self.x),
            weight=change(self.weight),
            bias=None if self.bias is None else change(self.bias),
            target=self.target,
            terms=tuple((change(input), change(weight)) for input, weight in self.terms),
        )

    def logits(self, rows: slice) -> Tensor:
        """(n, V) those of some tokens."""
        terms = (F.linear(y[rows], b) for y, b in self.terms)
        return sum(terms, F.linear(self.x[rows], self.weight, self.bias))

    def named_operands(self) -> dict[str, Tensor]:
        """What gets a gradient, by the gradient's name: "dx", "dw", "dbias" and, of an adapter, "dy" and "db"."""
        tensors = {"dx": self.x, "dw": self.weight, "dbias": self.bias}
        for term in self.terms:
            tensors |= zip(("dy", "db"), term, strict=True)
        return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}
