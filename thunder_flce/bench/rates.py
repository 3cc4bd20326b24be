"""What a device reaches, what the defaults do there, and which options would be better: less than a minute on a GPU.

Plans were tried on an H200. For other devices they rest on two rates, which are measured here, and on estimates. The
report is plain text, for a terminal or for an issue.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from thunder_flce.bench.measuring import TOTAL, Schedule, Session, release
from thunder_flce.bench.methods import ours
from thunder_flce.bench.regions import Comparison, RegionStep, Row, run_step
from thunder_flce.bench.shapes import Inputs, Shape, dtype_name
from thunder_flce.device import Device, Rates
from thunder_flce.engine.choose import choose, temporary_bytes
from thunder_flce.engine.kernels import dispatch
from thunder_flce.engine.matmul.algorithms import tunings
from thunder_flce.engine.plan import Plan
from thunder_flce.operation.call import Call, Spec
from thunder_flce.operation.loss import Loss
from thunder_flce.options import Options

SCHEDULE = Schedule(rounds=3, calls=10, turn_ms=400, settle_ms=100)

WORTH_TIME, WORTH_MEMORY = 0.98, 0.9
"""What counts as better: 2% less time, or 10% less memory in no more than 1% more time."""
SAME_TIME = 1.01

SIZES = {
    "cuda": (
        (8192, 128256, 4096),
        (8192, 32000, 4096),
        (8192, 151936, 1024),
        (16384, 262144, 2560),
        (8192, 50257, 1600),
    ),
    "cpu": ((2048, 128256, 2048), (2048, 32000, 768)),
}
"""Of calls whose plans are shown: tokens, vocabulary, hidden size. The first one is measured, if it fits."""
MEASURED_ON_CPU = (256, 8192, 256)

LEAST_MEMORY = 16 * 10**9
"""Of a GPU, for the first of these to run beside the memory that others use"""


def report(device: str, context: dict[str, str], progress: Callable[[str], None]) -> Iterator[str]:
    """Lines of the report, each as soon as it is known; the last one is all of it as JSON.

    Args:
        device: "cuda" or "cpu".
        context: what is measured, from `records.context`.
        progress: told what is measured next.
    """
    known = Device.of(torch.device(device))
    yield f"device     {context['device']}: {_words(known)}"
    versions = {name: value for name, value in context.items() if name not in ("device", "command", "date")}
    yield f"versions   {', '.join(f'{name} {value}' for name, value in versions.items() if value)}"
    progress("rates")
    session = Session(device=device, schedule=SCHEDULE, progress=progress, write=lambda row: None)
    found = measured_rates(session)
    yield f"rates      {_rates_words(found)} measured; plans count on {_rates_words(_rates_of(known))}"
    measured = replace(known, matmul_rate=found.matmul, bandwidth=found.bandwidth)

    yield "plans      tokens × vocabulary × hidden size, by default, and what the measured rates would make of it"
    plans = []
    for sizes in SIZES[device]:
        call = a_call(sizes, device)
        chosen, other = (choose(call, Options(), each) for each in (known, measured))
        instead = "the same" if other == chosen else other.describe()
        memory = temporary_bytes(call, chosen, known) / 1e9
        yield f"           {_sizes_words(sizes)}: {chosen.describe()}, {memory:.2f} GB; {instead}"
        plans.append({"sizes": sizes, "plan": chosen.describe(), "by_measured_rates": other.describe()})

    sizes = _measured_sizes(device, known)
    call = a_call(sizes, device)
    chosen, by_rates = (choose(call, Options(), each) for each in (known, measured))
    yield f"times      {_sizes_words(sizes)}, {dtype_name(call.dtype)}, forward and backward"
    tried = ways(chosen, by_rates, tokens=sizes[0], device=known)
    of_ways = measured_ways(tried, sizes, session)
    for way in of_ways:
        result = way.failed or f"{way.time_ms:9.3f} ms  {way.above_outputs_gb:6.3f} GB"
        yield f"           {way.method:<24} {result}"
    for tuning in tunings():
        yield f"           {tuning.product} by another algorithm of cuBLAS: {tuning.gain:.3f} times as fast"
    invariant = is_batch_invariant(device)
    yield f"bits       batch_invariant: {invariant}"
    better = [way for way in of_ways[1:] if is_better(way, of_ways[0])]
    words = [
        f"Options({', '.join(f'{name}={value!r}' for name, value in tried[way.method].items())})" for way in better
    ]
    yield f"better     {', '.join(words) or 'nothing that was tried is better than the defaults'}"
    everything = {
        "subset": "rates", **context, "known": asdict(known), "matmul_rate": found.matmul, "bandwidth": found.bandwidth,
        "plans": plans, "sizes": sizes, "ways": [_as_record(way, tried[way.method]) for way in of_ways],
        "tuned_products": [tuning.to_dict() for tuning in tunings()], "batch_invariant": invariant, "better": words,
    }  # fmt: skip
    yield json.dumps(everything)


def measured_rates(session: Session) -> Rates:
    """As plans count them: of the three matmuls of a chunk, in 16 bits, and of a pass over memory in place.

    Raises:
        RuntimeError: where one of them cannot be measured.
    """
    device, dtype = session.device, _dtype(session.device)
    tokens, vocab, hidden = (2048, 32768, 4096) if device == "cuda" else (512, 4096, 512)
    release(device)
    x, weight, dlogits = (
        torch.randn(*shape, device=device).to(dtype) for shape in ((tokens, hidden), (vocab, hidden), (tokens, vocab))
    )
    out, dx, dw = torch.empty_like(dlogits), torch.empty_like(x), torch.empty_like(weight)
    memory = torch.ones(2**28 if device == "cuda" else 2**24, device=device)

    def matmuls(mark: Any) -> None:
        torch.mm(x, weight.t(), out=out)
        torch.mm(dlogits, weight, out=dx)
        torch.mm(dlogits.t(), x, out=dw)
        mark("matmuls")

    def in_place(mark: Any) -> None:
        memory.mul_(1.0)
        mark("pass")

    rows: list[Any] = []
    found = replace(session, write=rows.append).take_turns({"matmuls": matmuls, "pass": in_place})
    if rows:
        raise RuntimeError("; ".join(f"{row.method} cannot be measured here: {row.failed}" for row in rows))
    seconds = {name: outcome.median(TOTAL) / 1e3 for name, outcome in found.items()}
    return Rates(6 * tokens * vocab * hidden / seconds["matmuls"], 2 * memory.nbytes / seconds["pass"])


def ways(chosen: Plan, by_rates: Plan, *, tokens: int, device: Device) -> dict[str, dict[str, Any]]:
    """Options to try, by a name, the defaults first."""
    found: dict[str, dict[str, Any]] = {"default": {}}
    sizes = chosen.chunk_rows // 2, by_rates.chunk_rows, min(2 * chosen.chunk_rows, tokens)
    for rows in sorted({*sizes} - {chosen.chunk_rows, 0}):
        found[f"chunk_rows={rows}"] = {"chunk_rows": rows}
    if device.is_nvidia:
        found[f"tune_products={not chosen.tune_products}"] = {"tune_products": not chosen.tune_products}
    if device.kind == "cuda":
        found |= {f"row_kernels={name}": {"row_kernels": name} for name in dispatch.BACKENDS if name != "triton"}
    return found


def measured_ways(tried: dict[str, dict[str, Any]], sizes: tuple[int, int, int], session: Session) -> list[Row]:
    """Time and memory of each, in turns."""
    tokens, vocab, hidden = sizes
    shape = Shape(name="", tokens=tokens, vocab=vocab, hidden=hidden, dtype=_dtype(session.device))
    rows: list[Row] = []
    compared = Comparison(shape, replace(session, write=rows.append))
    for name, options in tried.items():
        compared.add(name, partial(_step, compared.inputs, options), reference=None)
    compared.report()
    return sorted(rows, key=lambda row: [*tried].index(row.method))


def _step(inputs: Inputs, options: dict[str, Any]) -> RegionStep:
    return partial(run_step, inputs, ours(Options(**options)))


def _as_record(way: Row, options: dict[str, Any]) -> dict[str, Any]:
    numbers = {"time_ms": way.time_ms, "memory_gb": way.above_outputs_gb, "failed": way.failed}
    return {"name": way.method, "options": options, **numbers}


def is_better(way: Row, default: Row) -> bool:
    """Whether a way gains as much as is worth an option."""
    if way.time_ms is None or default.time_ms is None:
        return way.time_ms is not None
    assert way.above_outputs_gb is not None and default.above_outputs_gb is not None
    ratio, memory = way.time_ms / default.time_ms, default.above_outputs_gb
    return ratio <= WORTH_TIME or (way.above_outputs_gb <= WORTH_MEMORY * memory and ratio <= SAME_TIME)


def is_batch_invariant(device: str) -> str:
    """What became of a small call that asks for it, in words."""
    shape = Shape(name="", tokens=4, vocab=32000, hidden=1024, dtype=_dtype(device))
    try:
        ours(Options(batch_invariant=True))(Inputs.random(shape, device))
    except (RuntimeError, ValueError) as error:
        return f"no: {error}"
    return "yes: a row has the same bits alone and among others"


def a_call(sizes: tuple[int, int, int], device: str) -> Call:
    """Specs of a plain mean loss with gradients of all."""
    (tokens, vocab, hidden), place, dtype = sizes, torch.device(device), _dtype(device)
    tensors = {
        "input": Spec((tokens, hidden), dtype, place), "linear_weight": Spec((vocab, hidden), dtype, place),
        "target": Spec((tokens,), torch.int64, place),
    }  # fmt: skip
    return Call(tensors=tensors, loss=Loss(), needs_grad=("input", "linear_weight"))


def _measured_sizes(device: str, known: Device) -> tuple[int, int, int]:
    if device == "cpu":
        return MEASURED_ON_CPU
    tokens, vocab, hidden = SIZES[device][0]
    return (tokens, vocab, hidden) if (known.memory or 0) >= LEAST_MEMORY else (tokens // 2, vocab // 2, hidden // 2)


def _dtype(device: str) -> torch.dtype:
    """Of 16 bits, where a GPU multiplies in them."""
    if device == "cpu":
        return torch.float32
    capability = Device.of(torch.device(device)).capability
    return torch.bfloat16 if torch.version.hip or capability is None or capability >= (8, 0) else torch.float16


def _words(device: Device) -> str:
    if device.kind == "cpu":
        return f"{device.multiprocessors} threads"
    capability = ".".join(map(str, device.capability or ()))
    memory = f"{(device.memory or 0) / 1e9:.0f} GB"
    return (
        f"{'HIP' if device.is_hip else 'capability'} {capability}, {device.multiprocessors} multiprocessors, {memory}"
    )


def _rates_of(device: Device) -> Rates:
    return Rates(device.matmul_rate, device.bandwidth)


def _rates_words(rates: Rates) -> str:
    ratio = rates.matmul / rates.bandwidth
    return f"{rates.matmul / 1e12:.3g} TFLOP/s and {rates.bandwidth / 1e12:.3g} TB/s ({ratio:.0f} operations a byte)"


def _sizes_words(sizes: tuple[int, int, int]) -> str:
    return " × ".join(map(str, sizes))
