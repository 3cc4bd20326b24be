"""Exact results to compare with: eager PyTorch in float64, and the error of eager PyTorch in the tested dtype."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_flce import calls, linear_cross_entropy, operators
from thunder_flce.engine.plan import Plan
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS


@dataclass
class Case:
    """Inputs of one loss; `bias` and `class_weight` may be None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None = None
    terms: tuple[tuple[Tensor, Tensor], ...] = ()  # (x, weight) of linears that are added to the logits
    incoming: dict[Any, list[Tensor]] = field(default_factory=dict, init=False, repr=False)  # See `incoming_gradients`.

    def operands(self) -> list[Tensor]:
        """Returns the tensors that may need a gradient."""
        tensors = self.x, self.weight, self.bias, *(tensor for term in self.terms for tensor in term)
        return [tensor for tensor in tensors if tensor is not None]

    def needing_grad(self) -> list[Tensor]:
        return [tensor for tensor in self.operands() if tensor.requires_grad]

    def mapped(self, map_rows: Callable[[Tensor], Tensor], map_columns: Callable[[Tensor], Tensor]) -> "Case":
        """Returns the case with each operand replaced: inputs by one function, weights and the bias by another."""
        terms = tuple((map_rows(x), map_columns(weight)) for x, weight in self.terms)
        bias = None if self.bias is None else map_columns(self.bias)
        return replace(self, x=map_rows(self.x), weight=map_columns(self.weight), bias=bias, terms=terms)

    def exact(self) -> "Case":
        """Returns the case in float64."""
        return replace(self.mapped(doubled, doubled), class_weight=doubled(self.class_weight))

    def exact_logits(self, **settings) -> Tensor:
        """Returns the logits (..., V) of a call with these settings, in float64 and without gradients."""
        settings = {name: settings[name] for name in ("softcap", "logit_scale", "vocab_size") if name in settings}
        return map_logits(linear(self.exact()).detach(), **settings)


OF_TOKENS = ("token_weights", "target_weights", "token_inputs")
"""Settings that are tensors with a row for each token"""


def doubled(value):
    """Returns a floating-point tensor in float64 and others unchanged; maps tuples, and None to None."""
    if value is None or isinstance(value, tuple):
        return value and tuple(map(doubled, value))
    return value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value


def linear(case: Case) -> Tensor:
    """Returns the sum of the linears, (..., V), as computed by a model with an adapter beside its head."""
    products = F.linear(case.x, case.weight, case.bias)
    for x, weight in case.terms:
        products = products + F.linear(x, weight)
    return products


def make_case(
    *, tokens: int = 37, hidden: int = 24, vocab: int = 101, dtype: torch.dtype = torch.float32, device: str = "cpu",
    bias: bool = False, ignored: float = 0.3, scale: float = 1.0, class_weight: bool = False,
    ranks: tuple[int, ...] = (),
) -> Case:  # fmt: skip
    """Returns random inputs, with logits of standard deviation about `scale` and a fraction of the targets ignored.

    Additional terms have hidden sizes `ranks`.
    """

    def randn(*shape, factor=1.0):
        return (torch.randn(*shape, device=device, dtype=torch.float32) * factor).to(dtype).requires_grad_()

    target = torch.randint(0, vocab, (tokens,), device=device)
    target[torch.rand(tokens, device=device) < ignored] = -100
    x, weight = randn(tokens, hidden), randn(vocab, hidden, factor=scale * hidden**-0.5)
    linear_bias = randn(vocab, factor=scale) if bias else None
    weights = torch.rand(vocab, device=device).to(dtype) if class_weight else None
    terms = tuple((randn(tokens, rank), randn(vocab, rank, factor=scale * rank**-0.5)) for rank in ranks)
    return Case(x, weight, linear_bias, target, weights, terms)


@dataclass
class Result:
    """A loss, its requested outputs, and the gradients of `Case.needing_grad`."""

    loss: Tensor
    gradients: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()


def results_of(case: Case, **settings) -> Tensor | tuple[Tensor, ...]:
    """Returns the results of `linear_cross_entropy` for the case."""
    operands = {"linear_bias": case.bias, "weight": case.class_weight, "terms": case.terms}
    return linear_cross_entropy(case.x, case.weight, case.target, **operands, **settings)


def ours(case: Case, grad: Tensor | None = None, **settings) -> Result:
    """Returns the loss and gradients that this project computes."""
    results = results_of(case, **settings)
    return differentiate(results, case, grad, settings.get("outputs", ()))


def eager(case: Case, grad: Tensor | None = None, **settings) -> Result:
    """Returns the result of eager PyTorch in the case's dtype, with logits cast to float32 as in models."""
    logits = linear(case)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    results = composed(logits, case.target.long(), case.class_weight, **settings)
    return differentiate(results, case, grad, settings.get("outputs", ()))


def truth(case: Case, grad: Tensor | None = None, **settings) -> Result:
    """Returns the result of eager PyTorch in float64."""
    settings |= {name: doubled(settings[name]) for name in OF_TOKENS if name in settings}
    return eager(case.exact(), None if grad is None else grad.double(), **settings)


def composed(
    products: Tensor, target: Tensor, class_weight: Tensor | None = None,
    *, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, z_loss: float = 0.0, vocab_size: int | None = None,
    num_items: Tensor | float | None = None, outputs: tuple[str, ...] = (), detached: tuple[str, ...] = (),
    token_weights: Tensor | None = None, target_weights: Tensor | None = None,
    token_loss: Callable[..., Tensor] | None = None, token_inputs: tuple[Tensor, ...] = (),
    expected_gradient: Tensor | float | None = None,  # Changes no result.
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Returns the results of `linear_cross_entropy` for the products (..., V) of the linear, by their definitions."""
    shape = products.shape[:-1]
    logits = _by_rows(map_logits(products, softcap=softcap, logit_scale=logit_scale, vocab_size=vocab_size))
    target, factors = _rows_of_targets(shape, target, ignore_index, token_weights)
    factors = factors.to(logits.dtype)
    valid = factors != 0

    def of_tokens(values: Tensor, fill: float = 0) -> Tensor:
        """Returns a number for each token from those of the valid ones."""
        result = values.new_full((*valid.shape, *values.shape[1:]), fill).index_put((valid,), values)
        return result.reshape((*shape, *values.shape[1:]))

    # From here on, only valid rows.
    z, y, factors = logits[valid], target[valid], factors[valid]
    log_probs, log_sum_exp = z.log_softmax(1), z.logsumexp(1)
    log_prob = log_probs.gather(1, y[:, None])[:, 0] if target_weights is None else None
    probabilities = log_probs.exp()
    # p log p is 0 for p = 0, even though log p is -inf.
    entropy = -(probabilities * log_probs.masked_fill(probabilities == 0, 0)).sum(1)
    if class_weight is not None:
        class_weight = class_weight[:vocab_size].to(z.dtype)

    if target_weights is not None:
        is_label, weights = y != ignore_index, target_weights.reshape(target.shape)[valid]
        weights = weights.where(is_label, 0).to(z.dtype)
        label_log_probs = log_probs.gather(1, y.where(is_label, 0))
        losses = -(label_log_probs.masked_fill(weights == 0, 0) * weights).sum(1)
        log_prob = label_log_probs.where(is_label, 0)
    elif token_loss is not None:
        keywords = {"log_sum_exp": log_sum_exp, "mean_logit": z.mean(1)}
        keywords = {name: keywords[name] for name in keywords if name in inspect.signature(token_loss).parameters}
        losses = token_loss(log_prob, entropy, *(values.reshape(-1)[valid] for values in token_inputs), **keywords)
    else:
        losses = F.cross_entropy(z, y, class_weight, reduction="none", label_smoothing=label_smoothing)
    losses = losses * factors
    z_terms = factors * z_loss * log_sum_exp.square() if z_loss else torch.zeros_like(losses)

    if reduction == "none":
        loss = of_tokens(losses + z_terms)
    elif reduction == "mean" and num_items is None:
        divisor = factors.sum() if class_weight is None else (factors * class_weight[y]).sum()
        loss = losses.sum() / divisor + (z_terms.sum() / factors.sum() if z_loss else 0)
    else:
        loss = losses.sum() + z_terms.sum()
        if reduction == "mean":
            loss = loss / num_items if num_items != 0 else loss * 0

    definitions = {
        "log_prob": lambda: of_tokens(log_prob),
        "entropy": lambda: of_tokens(entropy),
        "log_sum_exp": lambda: of_tokens(log_sum_exp),
        "mean_logit": lambda: of_tokens(z.mean(1)),
        "max_logit": lambda: of_tokens(z.amax(1)),
        "log_sum_sq_probs": lambda: of_tokens((2 * log_probs).logsumexp(1)),
        "argmax": lambda: logits.argmax(1).reshape(shape),
        "valid_argmax": lambda: of_tokens(z.argmax(1), -1),
        "accuracy": lambda: (z.argmax(1) == y).to(z.dtype).mean(),
    }
    # The loss of a token loss is the only result with a gradient.
    detached = outputs if token_loss is not None else detached
    results = {name: definitions[name]() for name in outputs}
    results = (result.detach() if name in detached else result for name, result in results.items())
    return (loss, *results) if outputs else loss


def _rows_of_targets(
    shape: torch.Size, target: Tensor, ignore_index: int, token_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns targets as (T,) or (T, K), and the factor of each token's loss: 0 if it is ignored."""
    target = target.reshape(shape.numel(), *target.shape[len(shape) :])
    has_label = (target != ignore_index).reshape(len(target), math.prod(target.shape[1:])).any(1)
    return target, has_label.float() if token_weights is None else token_weights.reshape(-1).where(has_label, 0)


def _by_rows(logits: Tensor) -> Tensor:
    return logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])


def map_logits(products: Tensor, *, softcap=None, logit_scale=1.0, vocab_size=None) -> Tensor:
    """Returns the logits of a linear's output (..., V)."""
    logits = logit_scale * products[..., :vocab_size]
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def differentiate(
    results: Tensor | tuple[Tensor, ...], case: Case, grad: Tensor | None, outputs: tuple[str, ...] = ()
) -> Result:
    """Returns results and gradients, for the upstream gradient `grad` (None: ones) and random ones of `outputs`."""
    loss, *others = results if outputs else (results,)
    inputs = case.needing_grad()
    if not inputs:
        return Result(loss, (), tuple(others))
    grad = torch.ones_like(loss) if grad is None else grad.to(loss.dtype)
    differentiable = (other for name, other in zip(outputs, others, strict=True) if name in DIFFERENTIABLE_OUTPUTS)
    pairs = zip(differentiable, incoming_gradients(case, outputs, loss.dtype), strict=True)
    # Detached outputs have no gradient.
    results, grads = zip((loss, grad), *(pair for pair in pairs if pair[0].requires_grad), strict=True)
    gradients = torch.autograd.grad(results, inputs, grads)
    return Result(loss.detach(), gradients, tuple(other.detach() for other in others))


def incoming_gradients(case: Case, outputs: tuple[str, ...], dtype: torch.dtype) -> list[Tensor]:
    """Returns random upstream gradients of each differentiable output, the same at each call."""
    # They are kept, since nothing may be copied from the host while a CUDA graph is captured.
    if (outputs, dtype) not in case.incoming:
        generator = torch.Generator().manual_seed(len(outputs))
        names = filter(DIFFERENTIABLE_OUTPUTS.__contains__, outputs)
        shapes = (case.target.shape if name == "log_prob" else case.x.shape[:-1] for name in names)
        random = (torch.randn(shape, generator=generator) for shape in shapes)
        case.incoming[outputs, dtype] = [tensor.to(case.x.device, dtype) for tensor in random]
    return case.incoming[outputs, dtype]


PLANS = {
    "one chunk": Plan(strategy="gradients_in_forward", chunk_rows=64),
    "chunks": Plan(strategy="gradients_in_forward", chunk_rows=10),
    "float32 accumulator": Plan(strategy="gradients_in_forward", chunk_rows=10, float32_accumulator=True),
    "frequent rows": Plan(strategy="gradients_in_forward", chunk_rows=10, float32_rows=256),
    "save logits": Plan(strategy="save_logits"),
    "save some logits": Plan(strategy="save_logits", saved_rows=14, chunk_rows=10, float32_accumulator=True),
    "recompute logits": Plan(strategy="recompute_logits", chunk_rows=10, float32_accumulator=True),
}
"""One plan of each kind, for few tokens"""


def run_by(monkeypatch, plan: Plan) -> None:
    """Makes all calls run by one plan."""
    for module in (calls, operators):
        monkeypatch.setattr(module, "plan_for", lambda *_, **__: plan)
    # Forget the plans of earlier calls.
    monkeypatch.setattr(calls, "_settings_cache", {})


def poison_memory(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Fills uninitialised floating-point memory with NaN, so that elements that are never written show in results."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return wrapper

    for name in ("empty", "empty_like"):
        set_attribute(torch, name, poisoned(getattr(torch, name)))


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Warms up a step and captures it; returns the CUDA graph and the captured step's result."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        return graph, step()


def run_inside(mode: TorchDispatchMode, function, arguments, settings):
    """Runs an operation inside a dispatch mode, which then also sees the operations of `linear_cross_entropy`."""
    if function is not torch.ops.thunder_flce.linear_cross_entropy.default:
        return function(*arguments, **(settings or {}))
    with mode:
        return operators.run_forward(*arguments, **settings)


class Recorder(TorchDispatchMode):
    """Records the operations within it, and their arguments; also those of `linear_cross_entropy`."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        self.calls.append((function, arguments))
        return run_inside(self, function, arguments, settings)

    def of(self, function) -> list[Any]:
        """Returns the arguments of each call of one operation."""
        return [arguments for called, arguments in self.calls if called is function]


def errors(result: Result, exact: Result) -> list[float]:
    """Returns the errors of the loss and of all gradients."""
    pairs = zip((result.loss, *result.gradients), (exact.loss, *exact.gradients), strict=True)
    return [error(*pair) for pair in pairs]


def error(result: Tensor, exact: Tensor) -> float:
    """Returns ‖result − exact‖ / ‖exact‖; ‖result − exact‖ if exact is 0."""
    difference = torch.linalg.vector_norm(result.double() - exact.double())
    size = torch.linalg.vector_norm(exact.double())
    return (difference / size).item() if size else difference.item()


def assert_as_exact_as_eager(
    case: Case, grad: Tensor | None = None, *, factor: float = 1.25, tiny: bool = False, options=None, **settings
):
    """Asserts that loss, outputs and gradients have errors of at most `factor` times those of eager PyTorch."""
    assert_close_to_truth(ours(case, grad, options=options, **settings), case, grad, factor, tiny, **settings)


def assert_close_to_truth(
    result: Result, case: Case, grad: Tensor | None = None, factor: float = 1.25, tiny: bool = False, **settings
):
    """Asserts the same for a result that was computed in another way.

    A few units of rounding are always allowed, since eager's error can be zero by luck. In a tiny problem it often is:
    `tiny` then allows for the rounding of each result, and of terms that may nearly cancel.
    """
    peer, exact = eager(case, grad, **settings), truth(case, grad, **settings)
    no_terms = 0.0, 0.0, [0.0] * len(case.needing_grad())
    loss_size, output_size, gradient_sizes = _sizes(case, grad, **settings) if tiny else no_terms

    def check(what: str, got: Tensor, theirs: Tensor, right: Tensor, size: float) -> None:
        assert got.shape == theirs.shape, f"{what}: {tuple(got.shape)}, not {tuple(theirs.shape)}"
        assert torch.equal(got.isnan(), right.isnan()), f"{what}: NaN elsewhere than in PyTorch"
        infinities = [torch.where(tensor.isinf(), tensor, 0).sign().double() for tensor in (got, right)]
        assert torch.equal(*infinities), f"{what}: infinity elsewhere than in PyTorch"
        got, theirs, right = (tensor.double().nan_to_num(0, 0, 0) for tensor in (got, theirs, right))
        slack = _tiny_slack(case, right, size) if tiny else 8 * torch.finfo(row_dtype).eps * right.norm()
        if what == "loss" and case.terms and case.x.dtype.itemsize < 4:
            # The linears are summed and rounded in another order than in eager. Errors of rows have random signs.
            slack += torch.finfo(case.x.dtype).eps / 2 * right.norm() / math.sqrt(case.target.numel() or 1)
        bound = factor * (theirs - right).norm() + slack
        assert (got - right).norm() <= bound, f"{what} errs by {(got - right).norm():.2e} > {bound:.2e}"

    row_dtype = torch.float64 if case.x.dtype == torch.float64 else torch.float32
    assert result.loss.dtype == row_dtype
    check("loss", result.loss, peer.loss, exact.loss, loss_size)
    names = settings.get("outputs", ())
    for name, got, theirs, right in zip(names, result.outputs, peer.outputs, exact.outputs, strict=True):
        assert got.dtype == (torch.int64 if "argmax" in name else row_dtype)
        if name in ("argmax", "valid_argmax", "accuracy"):
            _check_choice(name, got, case, **settings)
            continue
        if name in ("mean_logit", "log_sum_exp"):
            # It is computed relative to the largest logit, so an infinite logit leaves no value.
            got = torch.where(case.exact_logits(**settings).amax(-1).isinf(), right.to(got.dtype), got)
        check(name, got, theirs, right, output_size)
    for operand, size, *gradients in zip(
        case.needing_grad(), gradient_sizes, result.gradients, peer.gradients, exact.gradients, strict=True
    ):
        assert gradients[0].dtype == operand.dtype
        check(f"gradient {tuple(operand.shape)}", *gradients, size)


def _tiny_slack(case: Case, right: Tensor, size: float) -> Tensor:
    """Returns the error that is allowed beside eager's in a tiny problem's result, whose terms are of this size."""
    # A BLAS sums the V terms of a single row one by one. Terms of equal columns have equal rounding errors.
    vocab, has_equal_columns = case.weight.shape[0], case.weight.stride(0) == 0
    units = 64 + max(4 * math.sqrt(vocab), vocab / 8 if has_equal_columns else 0)
    dtype, norm = case.x.dtype, right.norm()
    slack = units * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (norm + size)
    if dtype.itemsize < 4:
        # The rounding of the logits, which may differ between the two, and of the result.
        slack += torch.finfo(dtype).eps * (norm + size / 2)
    if dtype is torch.float16:
        # Gradients of logits below the normal numbers, whose distance is the smallest subnormal number.
        slack += torch.finfo(dtype).smallest_normal * 2**-11 * math.sqrt(vocab * right.numel())
    return slack


def _sizes(case: Case, grad: Tensor | None, **settings) -> tuple[float, float, list[float]]:
    """Returns rough upper bounds of the loss, outputs and gradients, as if no terms cancelled."""
    rows = max(case.target.numel(), 1)
    z_loss, names, num_items = settings.get("z_loss", 0.0), settings.get("outputs", ()), settings.get("num_items")
    logits = case.exact_logits(**settings).nan_to_num(0, 0, 0)
    logit = float(logits.abs().max()) + math.log(logits.shape[-1]) if logits.numel() else 0.0
    class_weight = 1.0 if case.class_weight is None else max(1.0, float(case.class_weight.max()))
    terms = 1.0 if settings.get("reduction", "mean") == "mean" else rows
    if num_items:
        terms = rows / float(num_items)
    incoming = 1.0 if grad is None or not grad.numel() else float(grad.abs().max())
    incoming *= terms * (class_weight + 2 * z_loss * logit)
    for output_grad in incoming_gradients(case, names, torch.float64):
        incoming += float(output_grad.abs().sum()) * (1 + logit)
    # The sum over rows of the products' gradients. The relative error of a probability grows with its logit.
    product_gradients = incoming * abs(settings.get("logit_scale", 1.0)) * max(1.0, logit / 32)
    pairs = (case.x, case.weight), *case.terms
    others = {id(one): other for pair in pairs for one, other in (pair, pair[::-1])}

    def largest_norm(operand: Tensor) -> float:
        other = others.get(id(operand), torch.ones(1))  # A bias is in no product.
        return float(other.detach().double().nan_to_num(0).norm(dim=-1).max()) if other.numel() else 0.0

    gradients = [product_gradients * largest_norm(operand) for operand in case.needing_grad()]
    return terms * (class_weight * logit + z_loss * logit**2), rows * logit, gradients


def _check_choice(name: str, got: Tensor, case: Case, **settings) -> None:
    """Checks "argmax", "valid_argmax" and "accuracy", except where the rounding of logits decides."""
    ignore_index, token_weights = settings.get("ignore_index", -100), settings.get("token_weights")
    target, factors = _rows_of_targets(case.x.shape[:-1], case.target.long(), ignore_index, token_weights)
    valid = torch.ones_like(factors, dtype=torch.bool) if name == "argmax" else factors != 0
    logits = _by_rows(case.exact_logits(**settings))[valid]
    if not logits.numel():
        assert got.isnan() if name == "accuracy" else (got == -1).all()
        return
    # A product is rounded once, after a sum in float32, or once per term; a softcap only moves logits closer.
    cases = case.exact(), *(Case(*doubled(term), None, case.target) for term in case.terms)
    products = (_by_rows(linear(part).detach())[valid].nan_to_num(0, 0, 0) for part in cases)
    size = sum(product.abs().max() for product in products)
    rounding = (torch.finfo(case.x.dtype).eps + 1e-6) * abs(settings.get("logit_scale", 1.0)) * size
    largest, has_nan = logits.max(1).values, logits.isnan().any(1)
    if name == "accuracy":
        target = target[valid][:, None]
        at_target, others = logits.gather(1, target)[:, 0], logits.scatter(1, target, float("-inf")).max(1).values
        possible = (at_target >= largest - 2 * rounding) | has_nan
        certain = at_target > others + 2 * rounding
        assert certain.double().mean() - 1e-6 <= got <= possible.double().mean() + 1e-6, "accuracy"
    else:
        got = got.reshape(-1)
        assert (got[~valid] == -1).all()
        chosen = logits.gather(1, got[valid][:, None]).squeeze(1)
        assert ((chosen >= largest - 2 * rounding) | has_nan).all(), "argmax is not the largest logit"
