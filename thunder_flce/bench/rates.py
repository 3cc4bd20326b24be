"""The rates of a device, the default plan there, and options that would be better: less than a minute on a GPU.

Plans were measured on an H100 and an H200. For other devices, plans follow from estimates and from two rates, which
this module measures.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from thunder_flce.bench.measure import MATMULS, Mark, Run, release
from thunder_flce.bench.methods import maker, with_options
from thunder_flce.bench.regions import add, add_matmuls, prepared, run_step
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.device import Device
from thunder_flce.engine.choose import choose, temporary_bytes
from thunder_flce.engine.kernels import dispatch
from thunder_flce.engine.plan import Plan
from thunder_flce.operation.call import Call
from thunder_flce.options import Options

WORTH_TIME, WORTH_MEMORY = 0.98, 0.9
"""Factors from which options count as better: 2% less time, or 10% less memory in no more than 1% more time"""
SAME_TIME = 1.01


def measure(shape: Shape, methods: list[str], run: Run) -> None:
    """Prints a report, and measures ways to run one shape.

    Args:
        shape: the shape; runs in float16 if a GPU has no matmuls in bfloat16.
        methods: names of `OURS` with options; "function" alone stands for all that are worth trying on this device.
        run: the device, and how long to measure.
    """
    torch_device = torch.device(run.device)
    assumed = Device.of(torch_device)
    if run.device == "cuda" and not (torch.version.hip or assumed.capability >= (8, 0)):
        shape = replace(shape, dtype=torch.float16)
    call = Call.of_mean(shape.tokens, shape.vocab, shape.hidden, dtype=shape.dtype, device=torch_device)
    measured = measured_rates(assumed, shape.dtype)
    plans = [choose(call, Options(), device) for device in (assumed, measured)]
    texts = [f"{plan.describe()}, {temporary_bytes(call, plan, assumed) / 1e9:.2f} GB" for plan in plans]
    print(f"- device: {assumed}")
    print(f"- rates: {_rates_text(measured)} measured; plans count on {_rates_text(assumed)}")
    print(f"- plan: {texts[0]}; by the measured rates {'the same' if plans[0] == plans[1] else texts[1]}")
    run.fields |= {"matmul_rate": measured.matmul_rate, "bandwidth": measured.bandwidth}
    run.fields |= {"plan": texts[0], "by_rates": texts[1]}
    inputs = prepared(shape, run)
    names = ways(*plans, tokens=shape.tokens, device=assumed) if methods == ["function"] else methods
    for name in names:
        with run.attempt(name):
            add(run, name, partial(run_step, inputs, maker(name)()), reference={})
    run.report()
    default_row: dict[str, Any] = next((row for row in run.rows if row["method"] == names[0]), {})
    for tuning in default_row.get("tuned_products", []):
        sizes = " × ".join(map(str, tuning["sizes"]))
        print(f"- {sizes} by another algorithm of cuBLAS: {tuning['gain']:.3f} times as fast")
    print(f"- better: {better(run.rows, names[0]) or 'none of the options tried is better than the defaults'}\n")


def measured_rates(assumed: Device, dtype: torch.dtype) -> Device:
    """Returns the device with measured rates: of the three matmuls of a chunk, and of a pass over memory in place."""
    device = assumed.kind
    tokens, vocab, hidden = (2048, 32768, 4096) if device == "cuda" else (512, 4096, 512)
    shape = Shape(name="", tokens=tokens, vocab=vocab, hidden=hidden, dtype=dtype)
    release(device)
    memory = torch.ones(2**28 if device == "cuda" else 2**24, device=device)

    def in_place(mark: Mark) -> None:
        memory.mul_(1.0)
        mark("pass")

    run = Run(device=device, rounds=3, calls=10, turn_ms=400, settle_ms=100, strict=True)
    add_matmuls(run, Inputs.random(shape, device), 3)
    run.added["pass"] = in_place, {}
    run.report()
    seconds = {row["method"]: row["time_ms"] / 1e3 for row in run.rows}
    matmul = 3 * 2 * tokens * vocab * hidden / seconds[MATMULS[3]]
    return replace(assumed, matmul_rate=matmul, bandwidth=2 * memory.nbytes / seconds["pass"])


def ways(plan: Plan, by_rates: Plan, *, tokens: int, device: Device) -> list[str]:
    """Returns the methods to try, the defaults first."""
    sizes = {plan.chunk_rows // 2, by_rates.chunk_rows, min(2 * plan.chunk_rows, tokens)} - {plan.chunk_rows, 0}
    options = [f"chunk_rows={rows}" for rows in sorted(sizes)]
    if device.is_nvidia:
        options.append(f"tune_products={not plan.tune_products}")
    if device.kind == "cuda":
        options += [f"row_kernels={name}" for name in dispatch.BACKENDS if name != "triton"]
    return ["function", *(f"function, {option}" for option in [*options, "batch_invariant=True"])]


def better(rows: list[dict[str, Any]], default: str) -> str:
    """Returns as text the options of rows that are better than the default's by `WORTH_TIME` or `WORTH_MEMORY`."""
    numbers = {row["method"]: (row["time_ms"], row["above_outputs_gb"]) for row in rows if "failed" not in row}
    time_ms, memory = numbers.pop(default, (float("inf"), float("inf")))
    gains = [
        f"Options({', '.join(f'{name}={value!r}' for name, value in with_options(method)[1].non_defaults().items())})"
        for method, (ms, gb) in numbers.items()
        if ms <= WORTH_TIME * time_ms or (gb <= WORTH_MEMORY * memory and ms <= SAME_TIME * time_ms)
    ]
    return ", ".join(gains)


def _rates_text(device: Device) -> str:
    matmul, bandwidth = device.matmul_rate, device.bandwidth
    return f"{matmul / 1e12:.3g} TFLOP/s and {bandwidth / 1e12:.3g} TB/s ({matmul / bandwidth:.0f} operations per byte)"
