"""Random programs with losses in them, any number of them, compiled and compared with eager PyTorch:

    python tests/random_programs.py --count 1000
    python tests/random_programs.py --count 100 --compiler thunder.jit

Program N is always the same: `--first N --count 1 --show` prints it, with what was decided.
"""

import argparse
import linecache
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import thunder_flce
from front_ends import decisions, run
from random_calls import chooser
from thunder_flce import backend
from thunder_flce.matching.decisions import Decision

COMPILERS = {
    "backend": lambda program: torch.compile(program, backend=backend.compile_graph),
    "thunder.jit": thunder_flce.jit,
}
ALONE = {"backend": partial(torch.compile, backend="eager"), "thunder.jit": thunder.jit}
"""The same without us"""
B, H, V = 4, 8, 19
LAYOUTS = {
    "BT": "", "N": ".flatten()", "TB": ".t()", "turned": ".t().flatten()", "BS": "[:, 1:]", "M": "[:, 1:].flatten()",
    "selected": "[m > 0]",
}  # fmt: skip
"""How a tensor of sequences × tokens becomes one in each layout of rows"""
MOVES = {
    ("BT", "N"): (".flatten(0, 1)", ".reshape(-1, V)", ".view(-1, V)"), ("BT", "TB"): (".transpose(0, 1)",),
    ("BT", "BS"): ("[:, :-1]", "[:, 1:]"), ("BT", "selected"): ("[m > 0]",), ("N", "BT"): (".view(B, -1, V)",),
    ("N", "selected"): ("[m.flatten() > 0]",), ("TB", "BT"): (".transpose(0, 1)",), ("BS", "M"): (".flatten(0, 1)",),
}  # fmt: skip
"""How logits in one layout get another; without the classes, numbers of rows"""
# h (B, T, H), w (V, H), b (V,), u (V, 2) and v (2, H) are trained. y and i (B, T) are labels, of which i has ignored
# ones, and k (B, T, 3) several, with weights c. a and m (B, T) are numbers and a mask, q (B, T, V) probabilities, x
# (B, T, H) and o (V, H) a teacher's, s and t numbers, d (V,) class weights, and n a number of Python.
PARAMETERS = "h, w, b, y, i, k, c, a, m, q, x, o, u, v, s, t, d, n"
INPUTS = (
    ("{}", "BT"), ("{}", "BT"), ("{}", "BT"), ("{}.flatten(0, 1)", "N"), ("{}[:, :-1]", "BS"), ("{}.flip(1)", "BT"),
    ("{}.transpose(0, 1)", "TB"), ("{}[m > 0]", "selected"), ("torch.tanh({})", "BT"), ("{}.detach()", "BT"),
)  # fmt: skip
HEADS = (
    "F.linear({}, w)", "F.linear({}, w)", "{} @ w.t()", "F.linear({}, w, b)", "F.linear({}, w) + b",
    "F.linear({0}, w) + F.linear(F.linear({0}, v), u)", "F.linear({}, w.detach())", "F.linear({}, w).to(WIDE)",
    "torch.einsum('...h,vh->...v', {}, w)", "F.linear({}, w * 0.5)", "F.linear({} * n, w)",
    "checkpoint(F.linear, {}, w, use_reentrant=False)", "torch.cat([{0}[:1], {0}[1:]]) @ w.t()",
    "torch.cat([F.linear({0}[:2], w), F.linear({0}[2:], w)])",
)  # fmt: skip
OF_LOGITS = (
    "{} / 2", "{} * 0.5", "{} / t", "3 * torch.tanh({} / 3)", "{0} - {0}.logsumexp(-1, keepdim=True)", "-{}", "{} + 1",
    "{0} - {0}.amax(-1, keepdim=True)", "{0} - {0}.max(-1, keepdim=True).values.detach()", "{} * {a}[..., None]",
    "{}.clone()", "{}.detach()", "{}.to(WIDE)", "{0} - {0}.mean(-1, keepdim=True)", "{}.contiguous()", "{} / n",
    "{}[..., : V - 2]", "torch.sigmoid({})",
)  # fmt: skip
IN_PLACE = ("{}.div_(2)", "{} /= t", "{} *= 0.5", "{}.mul_(-1)", "{} += 1")
LOG_PROBS = (
    "{}.log_softmax(-1)", "F.log_softmax({}, dim=-1)", "{0} - {0}.logsumexp(-1, keepdim=True)",
    "torch.log({}.softmax(-1))", "{0} - torch.logsumexp({0}, -1).unsqueeze(-1)",
)  # fmt: skip
PROBS = ("{}.softmax(-1)", "F.softmax({}, dim=-1)", "torch.softmax({} / 2, -1)")
ROWS_OF_LOG_PROBS = (
    "{}.gather(-1, {y}[..., None])[..., 0]", "{}.gather(-1, {y}.unsqueeze(-1)).squeeze(-1)",
    "torch.take_along_dim({}, {y}[..., None], -1)[..., 0]", "({} * F.one_hot({y}, V)).sum(-1)",
    "{}.gather(-1, {i}.clamp(min=0)[..., None])[..., 0] * ({i} != -100)", "({}.gather(-1, {k}) * {c}).sum(-1)",
    "-({0}.exp() * {0}).sum(-1)", "{}.mean(-1)", "{}.sum(-1)", "({}.argmax(-1) == {y}).to(WIDE)",
    "{}.gather(-1, {k}).logsumexp(-1)", "{}.gather(-1, {k}).mean(-1)",
)  # fmt: skip
ROWS_BESIDE_TEACHER = (
    "({p}.softmax(-1) * {}).sum(-1)", "-({p}.softmax(-1) * ({} - {p}.log_softmax(-1))).sum(-1)",
    "F.kl_div({}, {p}.softmax(-1), reduction='none').sum(-1)", "({0}.exp() * ({0} - {p}.log_softmax(-1))).sum(-1)",
    "F.kl_div({}, {p}.log_softmax(-1), reduction='none', log_target=True).sum(-1)",
    "F.kl_div({p}.log_softmax(-1), {}, reduction='none', log_target=True).sum(-1)",
    "({p}.softmax(-1) * {p}.log_softmax(-1)).sum(-1) - ({p}.softmax(-1) * {}).sum(-1)",
    "({0}.exp() * {0}).sum(-1) - ({0}.exp() * {p}.log_softmax(-1)).sum(-1)",
    "jensen_shannon({}, {p}.log_softmax(-1), 0.5).sum(-1)", "jensen_shannon_of_probs({}, {p}.log_softmax(-1)).sum(-1)",
)  # fmt: skip
CLASSES = ("{}", "-{0}.exp() * {0}", "{} * F.one_hot({y}, V)", "{}.exp() * 2", "F.one_hot({y}, V) * {} / 3")
CLASSES_BESIDE_TEACHER = (
    "F.kl_div({}, {p}.softmax(-1), reduction='none')", "{p}.softmax(-1) * {}",
    "F.kl_div({}, {p}.log_softmax(-1), reduction='none', log_target=True)",
    "{0}.exp() * ({0} - {p}.log_softmax(-1))", "({p}.softmax(-1) * {0}).masked_fill(torch.isinf({0}), 0)",
    "{p}.softmax(-1) * {p}.log_softmax(-1) - {p}.softmax(-1) * {}", "{0}.exp() * {p}.log_softmax(-1) - {0}.exp() * {0}",
    "jensen_shannon({}, {p}.log_softmax(-1), 0.3)", "jensen_shannon_of_probs({}, {p}.log_softmax(-1))",
    "jensen_shannon({}, {p}.log_softmax(-1), torch.tensor(0.6).to(WIDE))",
    "({0}.exp() * {0}).sub_({0}.exp() * {p}.log_softmax(-1))",
)  # fmt: skip
OF_CLASSES = (
    "{} * {m}[..., None]", "{a}.unsqueeze(-1) * {}", "{}.masked_fill({m}[..., None] == 0, 0.0)", "-{}", "{} * 0.5",
    "torch.where({m}.unsqueeze(-1) > 0, {}, 0.0)", "{} / {m}.sum()", "{} * {m}.sum(0, keepdim=True)[..., None]",
    "{}.clone()", "{}[1:]", "{}.transpose(0, 1).transpose(0, 1)", "{}.flatten(0, -2).view_as({})", "{} / 3",
)  # fmt: skip
SUMS_OF_CLASSES = ("{}.sum()", "{}.sum((-1, -2)).mean()", "{}.sum() / {m}.sum()", "{}.sum(-1).mean()", "{}.mean()")
ROWS_NOT_FUSED = (
    "({q} * {}).sum(-1)", "({q} * ({q}.log() - {})).sum(-1)", "F.kl_div({}, {q}, reduction='none').sum(-1)",
    "{}.amax(-1)", "{}.logsumexp(-1)", "{}[..., 3]", "({0} * {0}).sum(-1)", "{}.cumsum(-1)[..., 5]", "{}.std(-1)",
)  # fmt: skip
ROWS_OF_LOGITS = (
    "{}.gather(-1, {y}[..., None])[..., 0]", "{0}.gather(-1, {y}[..., None])[..., 0] - {0}.logsumexp(-1)",
    "{}.logsumexp(-1)", "{}.amax(-1).detach()", "{}.detach().max(-1).values", "({}.argmax(-1) == {y}).to(WIDE)",
    "{}.mean(-1)", "{0}.logsumexp(-1) - ({0}.softmax(-1) * {0}).sum(-1)",
    "torch.distributions.Categorical(logits={}).log_prob({y})", "torch.distributions.Categorical(logits={}).entropy()",
)  # fmt: skip
ROWS_OF_PROBS = (
    "{}.gather(-1, {y}[..., None])[..., 0]", "{}.gather(-1, {y}[..., None])[..., 0].log()", "{}.amax(-1).detach()",
    "-({0} * {0}.log()).sum(-1)", "-torch.special.entr({}).sum(-1)", "{}.gather(-1, {k}).sum(-1)",
)  # fmt: skip
ROWS_OF_PARTS = {
    "N": "torch.cat([F.cross_entropy({}.flatten(0, 1), own.flatten(), reduction='none') for part, own in {}])",
    "BT": "torch.cat([{}.log_softmax(-1).gather(-1, own.clamp(min=0)[..., None])[..., 0] for part, own in {}])",
}
"""By the layout of the rows"""
SETTINGS = ("", "", "", ", label_smoothing=0.1", ", ignore_index=3", ", weight=d", ", label_smoothing=0.2, weight=d")
LOSSES = (
    "F.cross_entropy({}, {}, reduction={!r}{})", "F.cross_entropy({}, {}, reduction={!r}{})",
    "F.nll_loss({}.log_softmax(1), {}, reduction={!r})", "torch.nn.CrossEntropyLoss(reduction={2!r})({0}, {1})",
)  # fmt: skip
PARTS = ("chunk(2)", "split(2)", "split([1, 3])", "unbind(0)", "chunk(2, 1)", "split(1)")
LOSSES_OF_PARTS = (
    "F.cross_entropy({}.flatten(0, -2), own.flatten())", "F.cross_entropy({}.flatten(0, -2), own.flatten()) * 0.5",
    "-{}.log_softmax(-1).gather(-1, own.clamp(min=0)[..., None])[..., 0].sum()",
)  # fmt: skip
OF_ROWS = (
    "-{}", "{} * 0.5", "{} / 3", "{} * {a}", "{} * {m}", "{} - {a}", "({} - {a}).exp()", "torch.exp({})", "{} ** 2",
    "torch.where({m} > 0, {}, 0.0)", "torch.clamp({}, -3, 2)", "{}.detach()", "torch.sigmoid({})", "{}.abs()",
    "{}.masked_fill({m} == 0, 0.0)", "torch.relu({})", "F.logsigmoid({})", "1 - {}", "{a} - {}", "{}.clone()",
    "{}.nan_to_num()", "{} / {}.detach()", "{} * s", "{} / {m}.sum()", "{}.cumsum(-1)", "{} - {}.mean()", "{}.flip(0)",
    "torch.cat([{0}[:1], {0}[1:]])", "{}.roll(1, -1)", "torch.zeros_like({0}).copy_({0})", "{}.sort(-1).values",
    "torch.zeros_like({0}).index_add_(0, torch.arange(len({0})).flip(0), {0})", "F.pad({}, (1, 0))[..., :-1]",
    "torch.log1p({}.abs())", "{} * ({i} != -100)", "{} / n", "checkpoint(torch.neg, {}, use_reentrant=False)",
)  # fmt: skip
OF_TWO_ROWS = (
    "{} + {}", "{} - {}", "{} * {}", "torch.min({}, {})", "torch.max({}, {})", "{} * {}.detach()", "{} + 0.1 * {}",
    "torch.where({m} > 0, {}, {})", "torch.stack([{}, {}]).sum(0)", "({} - {}).exp()",
)  # fmt: skip
CHANGES_OF_ROWS = ("{} *= {m}", "{}.neg_()", "{}[0] = 0", "{} += {a}", "{}.mul_(0.5)")
SUMS = (
    "{}.mean()", "{}.sum()", "({} * {m}).sum() / {m}.sum()", "{}.sum() / 7", "({} * {a}).mean()", "{}.sum(-1).mean()",
    "torch.dot({}.flatten(), {a}.flatten())", "{}[:3].sum()",
)  # fmt: skip
OTHER_SCALARS = (
    "({} ** 2).mean()", "{}.sum() ** 2", "{}.sum(-1).max()", "{}.std()", "torch.logsumexp({}.flatten(), 0)",
    "F.logsigmoid({}.sum(-1)).mean()", "{}.sum().exp().log()", "{}.nanmean()",
)  # fmt: skip
OF_SEQUENCES = (
    "(({} * {m}).sum(-1) / {m}.sum(-1)).mean()", "-F.logsigmoid({0}.sum(-1)[:2] - {0}.sum(-1)[2:]).mean()",
    "({}.mean(-1) * {a}[:, 0]).sum()", "sum(part.mean() for part in {}.unbind(0)) / 2",
    "sum((part * other).sum() for part, other in zip({}.split(2), {a}.split(2)))",
    "torch.stack([part.sum() for part in {}.chunk(2)]).mean()",
)  # fmt: skip
OF_SCALARS = ("{} / n", "{} * 2", "-{}", "{} / 3", "{} + h.square().mean()", "{} * s", "{} / m.sum()", "{}.detach()")
OTHER_LINES = (
    "h.mul_(2)", "i = torch.where(m > 0, i, -100)", "i = i.clone()", "i[:, 0] = -100", "y = (y + 1) % (V - 2)",
    "torch._dynamo.graph_break()", "m = m * (i != -100)", "i = F.pad(i, (0, 1), value=-100)[:, 1:]", "y.clamp_(min=2)",
    "a = a.detach() * 2", "a.mul_(2)", "i.masked_fill_(m == 0, -100)", "m = m.bool()", "i = i.int().long()",
)  # fmt: skip
"""Changes of what a program reads, between two of its lines"""


def jensen_shannon(log_p: Tensor, log_q: Tensor, share: Any) -> Tensor:
    """Returns the summands of the divergence, as TRL's `GKDTrainer` has it."""
    share = torch.as_tensor(share, dtype=log_p.dtype)
    log_m = torch.logsumexp(torch.stack([log_p + torch.log1p(-share), log_q + torch.log(share)]), dim=0)
    of_q, of_p = (F.kl_div(log_m, each, reduction="none", log_target=True) for each in (log_q, log_p))
    return share * of_q + (1 - share) * of_p


def jensen_shannon_of_probs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns the summands of the divergence, from the probabilities' mean."""
    p, q = log_p.exp(), log_q.exp()
    log_m = (0.5 * (p + q)).log()
    return q * (log_q - log_m) / 2 + 0.5 * (p * (log_p - log_m))


def of_classes(layout: str) -> str:
    """Returns how a tensor of sequences × tokens × classes becomes one in a layout of rows."""
    return LAYOUTS[layout].replace(".flatten()", ".flatten(0, 1)").replace(".t()", ".transpose(0, 1)")


class Writer:
    """Writes a program line by line. A variable's first letter says what it is: z are logits, l log-probabilities, p
    probabilities, r numbers of rows, e scalars, and f a teacher's logits.
    """

    def __init__(self, number: int):
        self.one_of = chooser("program", number)
        self.lines: list[str] = []
        self.names: dict[str, list[tuple[str, str]]] = {kind: [] for kind in "zlpre"}
        """The variables of each kind, each with its layout"""
        self.used: set[str] = set()
        for _ in range(self.one_of(1, 1, 1, 2)):
            template, layout = self.one_of(*INPUTS)
            self.let("z", layout, self.one_of(*HEADS).format(template.format("h")))
        for _ in range(self.one_of(0, 0, 1, 1, 2, 3)):
            self.change_logits()
        for _ in range(self.one_of(1, 1, 2, 3, 4)):
            self.reduce_classes()
        for _ in range(self.one_of(0, 1, 2, 3, 5)):
            self.one_of(self.change_rows, self.change_rows, self.change_rows, self.reduce_classes)()
        self.finish()

    @property
    def text(self) -> str:
        return f"def program({PARAMETERS}):\n" + "".join(f"    {line}\n" for line in self.lines)

    def rarely(self, times: int) -> bool:
        return self.one_of(*range(times)) == 0

    def let(self, kind: str, layout: str, template: str, *operands: str) -> str:
        expression = self.filled(template, layout, *operands) if operands else template
        name = f"{kind}{len(self.lines)}"
        if self.rarely(12) and kind in "lpr":
            self.lines.append(f"with torch.no_grad(): {name} = {expression}")
        else:
            self.lines.append(f"{name} = {expression}")
        if self.rarely(30):
            self.lines.append(self.one_of(*OTHER_LINES))
        self.used.update(operands)
        self.names[kind].append((name, layout))
        return name

    def pick(self, kind: str) -> tuple[str, str]:
        """Returns a variable and its layout; the last ones are the likeliest."""
        return self.one_of(*self.names[kind], *self.names[kind][-2:], self.names[kind][-1])

    def filled(self, template: str, layout: str, *operands: str) -> str:
        """Returns a template with its operands, and with the arguments that it names in the same layout."""
        arguments = {name: f"{name}{LAYOUTS[layout]}" for name in "yiam"} if layout else {}
        arguments |= {name: f"{name}{of_classes(layout)}" for name in "kcq"} if layout else {}
        if "{p}" in template:
            arguments["p"] = f"f{len(self.lines)}"
            factor = self.one_of("", "", " / 2", " * t")
            self.lines.append(f"{arguments['p']} = F.linear(x{of_classes(layout)}, o){factor}")
        return template.format(*operands, *operands, **arguments)

    def change_logits(self) -> None:
        z, layout = self.pick("z")
        moves = [(to, move) for (start, to), moves in MOVES.items() if start == layout for move in moves]
        kind = self.one_of("layout", "numbers", "numbers", "numbers", "in place")
        if kind == "layout" and moves:
            to, move = self.one_of(*moves)
            self.let("z", to, z + move.replace("V", f"{z}.size(-1)"))
            self.used.add(z)
        elif kind == "in place":
            self.lines.append(self.one_of(*IN_PLACE).format(z))
        else:
            self.let("z", layout, self.one_of(*OF_LOGITS), z)

    def reduce_classes(self) -> None:
        z, layout = self.pick("z")
        kind = self.one_of("loss", "l", "l", "l", "p", "logits", "parts", "classes")
        if kind == "loss":
            self.loss(z, layout)
        elif kind == "parts" and layout == "BT":
            part, whole = self.one_of(("part", z), ("F.linear(part, w)", "h"))
            loss, parts = self.one_of(*LOSSES_OF_PARTS).format(part), self.one_of(*PARTS)
            if self.one_of(False, True):
                parts, (to, rows) = self.one_of(*PARTS[:3]), self.one_of(*ROWS_OF_PARTS.items())
                self.let("r", to, rows.format(part, f"zip({whole}.{parts}, i.{parts})"))
                return
            how = self.one_of("sum({})", "torch.stack([{}]).mean()")
            self.let("e", "", how.format(f"{loss} for part, own in zip({whole}.{parts}, i.{parts})"))
        elif kind == "classes":
            log_probs = self.let("l", layout, self.one_of(*LOG_PROBS), z)
            makers = CLASSES_BESIDE_TEACHER if self.rarely(3) else CLASSES
            classes = self.filled(self.one_of(*makers), layout, log_probs)
            for _ in range(self.one_of(0, 1, 1, 2, 3)):
                template = self.one_of(*OF_CLASSES)
                # A tensor that is read twice has a name of its own.
                self.lines.append(f"d{len(self.lines)} = {classes}")
                classes = self.filled(template, layout, self.lines[-1].split()[0])
            self.let("e", "", self.filled(self.one_of(*SUMS_OF_CLASSES), layout, f"({classes})"))
        elif kind in "lp":
            makers, rows = {"l": (LOG_PROBS, ROWS_OF_LOG_PROBS), "p": (PROBS, ROWS_OF_PROBS)}[kind]
            if not self.names[kind] or self.one_of(False, True):
                self.let(kind, layout, self.one_of(*makers), z)
            name, layout = self.names[kind][-1]
            rows = ROWS_BESIDE_TEACHER if kind == "l" and self.rarely(6) else rows
            self.let("r", layout, self.one_of(*(ROWS_NOT_FUSED if self.rarely(20) else rows)), name)
        else:
            self.let("r", layout, self.one_of(*ROWS_OF_LOGITS), z)

    def loss(self, z: str, layout: str) -> None:
        logits, labels = z, f"i{LAYOUTS[layout]}"
        if layout in ("BT", "TB", "BS") and self.one_of(False, True):
            logits = f"{z}.transpose(1, 2)"
        elif layout in ("BT", "TB", "BS"):
            logits, labels = f"{z}.flatten(0, 1)", f"{labels}.flatten()"
            layout = {"BT": "N", "TB": "turned", "BS": "M"}[layout]
        reduction = self.one_of("none", "none", "mean", "sum")
        loss = self.one_of(*LOSSES).format(logits, labels, reduction, self.one_of(*SETTINGS))
        self.let("r" if reduction == "none" else "e", layout, loss)
        self.used.add(z)

    def change_rows(self) -> None:
        if not self.names["r"]:
            return self.reduce_classes()
        r, layout = self.pick("r")
        others = [name for name, other in self.names["r"] if other == layout]
        moves = [(to, move) for (start, to), moves in MOVES.items() if start == layout for move in moves]
        kind = self.one_of("one", "one", "two", "layout", "in place")
        if kind == "layout" and moves:
            to, move = self.one_of(*moves)
            self.let("r", to, r + move.replace(", V)", ")").replace("(0, 1)", "()" if "flat" in move else "(0, 1)"))
            self.used.add(r)
        elif kind == "in place":
            self.lines.append(self.filled(self.one_of(*CHANGES_OF_ROWS), layout, r))
        elif kind == "two" and len(others) > 1:
            self.let("r", layout, self.one_of(*OF_TWO_ROWS), r, self.one_of(*others))
        else:
            self.let("r", layout, self.one_of(*OF_ROWS), r)

    def finish(self) -> None:
        """Writes scalars, most of which are added up, and what is returned."""
        returned = []
        for r, layout in self.names["r"]:
            if r in self.used and not self.rarely(6):
                continue
            if self.rarely(5):
                returned.append(self.one_of(r, f"{r}.detach()", f"{r}.mean().detach()"))
                continue
            scalars = [*SUMS, *(OTHER_SCALARS if self.rarely(3) else ())]
            scalars += OF_SEQUENCES if layout in ("BT", "BS") and self.one_of(False, True) else ()
            self.let("e", layout, self.one_of(*scalars), r)
        for e, _ in list(self.names["e"]):
            if self.rarely(3):
                self.let("e", "", self.one_of(*OF_SCALARS), e)
        losses = [e for e, _ in self.names["e"] if e not in self.used or self.rarely(8)]
        if self.rarely(6):
            returned += losses
        elif losses:
            returned.append(" + ".join(e + self.one_of("", "", " * 0.5") for e in losses))
        self.lines.append(f"return {', '.join(returned)},")


def made(number: int, wide: torch.dtype) -> tuple[Callable, str]:
    """Returns a random program that may cast to a wider dtype, and its text."""
    text, file = Writer(number).text, f"<program {number}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names: dict[str, Any] = {"torch": torch, "F": F, "checkpoint": checkpoint, "B": B, "V": V, "WIDE": wide}
    names |= {each.__name__: each for each in (jensen_shannon, jensen_shannon_of_probs)}
    exec(compile(text, file, "exec"), names)
    return names["program"], text


def tensors_of(tokens: int, trained: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns a program's arguments, except for n; `trained` has the letters of those that need a gradient."""
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        # In 16 bits, so that all dtypes have the same numbers.
        return (torch.randn(shape, generator=generator) * scale).bfloat16().to(dtype)

    def chance(share: float) -> Tensor:
        chosen = torch.rand(B, tokens, generator=generator) < share
        chosen[:, -1] = False
        return chosen

    y, k = (torch.randint(V - 2, (B, tokens, *more), generator=generator) for more in ((), (3,)))
    tensors = {
        "h": randn(B, tokens, H), "w": randn(V, H, scale=H**-0.5), "b": randn(V), "y": y,
        "i": y.masked_fill(chance(0.2), -100), "k": k, "c": randn(B, tokens, 3), "a": randn(B, tokens),
        "m": (~chance(0.3)).to(dtype), "q": randn(B, tokens, V).softmax(-1), "x": randn(B, tokens, H),
        "o": randn(V, H), "u": randn(V, 2, scale=0.5), "v": randn(2, H, scale=0.3), "s": torch.tensor(1.5, dtype=dtype),
        "t": torch.tensor(0.75, dtype=dtype), "d": randn(V).abs() + 0.1,
    }  # fmt: skip
    return [tensor.requires_grad_(name in trained) for name, tensor in tensors.items()]


def results_of(program: Callable, tensors: list[Tensor]) -> list[Tensor]:
    """Returns results and gradients, in float64, of a program that may change its arguments in place."""
    results, gradients = run(lambda *args: program(*(each.clone() for each in args), args[0].shape[1] / 4), tensors)
    # A result whose gradient is 0 may say that it requires none, as a view does that is taken without gradients.
    gradients = gradients or [torch.zeros_like(each) for each in tensors if each.requires_grad]
    return [each.double() for each in (*results, *gradients)]


def results_in_eager(program: Callable, tensors: list[Tensor]) -> list[Tensor] | None:
    """Returns the results and gradients; None if PyTorch raises an error, or not all of them are finite."""
    try:
        results = results_of(program, tensors)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    return results if all(each.isfinite().all() for each in results) else None


def error(results: list[Tensor], exact: list[Tensor], eager: list[Tensor]) -> float:
    """Returns the largest error, relative to what rounding may make of a result; raises if a number is not finite."""
    assert all(each.isfinite().all() for each in results), "a number is not finite"
    return max(
        ((a - b).norm() / (2 * (c - b).norm() + 0.03 * b.norm() + 0.01 * b.numel() ** 0.5)).item()
        for a, b, c in zip(results, exact, eager, strict=True)
    )


def is_wrong(program: Callable, tensors: list[Tensor], exact: list[Tensor]) -> bool:
    """Whether a compiled program raises an error, or has other results."""
    try:
        return error(results_of(program, tensors), exact, exact) > 1
    except Exception:
        return True


def compare(number: int, compiler: str = "backend") -> list[Decision] | None:
    """Compares a program with eager PyTorch; returns what was decided, None if there is nothing to compare with."""
    one_of = chooser("settings", number)
    kind = one_of("float64", "float64", "float64", "bfloat16", "autocast")
    lengths, trained = one_of((5,), (5, 7), (6, 4, 9), (3, 1, 2)), one_of("hwbuv", "hwbuv", "hwu", "hu", "wu")
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16, "autocast": torch.float32}[kind]
    in_float64, text = made(number, torch.float64)
    program, _ = made(number, torch.promote_types(dtype, torch.float32))
    program = torch.autocast("cpu", torch.bfloat16)(program) if kind == "autocast" else program
    torch._dynamo.reset()
    compiled, errors, failure = COMPILERS[compiler](program), [], None
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=one_of(False, True)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tokens in lengths:
            exact = results_in_eager(in_float64, tensors_of(tokens, trained))
            eager = results_in_eager(program, tensors := tensors_of(tokens, trained, dtype))
            if exact is None or eager is None:
                return None
            try:
                results = results_of(compiled, tensors)
                if kind == "float64":
                    torch.testing.assert_close(results, exact, rtol=1e-6, atol=1e-8)
                errors.append(error(results, exact, eager))
            except Exception as problem:
                errors, failure = [], problem
                break
        # Rounding may move a number across a corner, such as of `clamp`, but not in every batch.
        if errors and min(errors) < 1:
            return decisions(compiled)
        # Dynamo and thunder themselves do not take, or get wrong, some programs that change a view in place.
        torch._dynamo.reset()
        if is_wrong(ALONE[compiler](program), tensors, exact):
            return None
    raise AssertionError(f"{kind}, {lengths} tokens, {trained} trained, errors {errors}:\n{text}") from failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--compiler", default="backend", choices=COMPILERS)
    parser.add_argument("--show", action="store_true", help="print each program, and what was decided")
    arguments = parser.parse_args()
    backend.Inductor.__call__ = lambda self, graph, inputs: graph  # It takes seconds for each.
    failed, outcomes, start = [], Counter[str](), time.time()
    for number in range(arguments.first, arguments.first + arguments.count):
        try:
            made_of = compare(number, arguments.compiler)
        except Exception:
            failed.append(number)
            print(f"program {number}: {traceback.format_exc()}", flush=True)
            continue
        if arguments.show:
            print(made(number, torch.float64)[1], *made_of or (), sep="\n")
        outcomes.update({"nothing to compare with"} if made_of is None else {"nothing found"} if not made_of else {
            f"fused, {each.plan.strategy}" if each.fused else f"not fused: {each.reason.name}" for each in made_of
        })  # fmt: skip
    print(*(f"{count:6} {outcome}" for outcome, count in outcomes.most_common()), sep="\n")
    print(f"{arguments.count} programs in {time.time() - start:.0f} s: {len(failed)} failed {failed[:50]}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
