"""PyTorch's caches on disk, from which a second process takes what the first has compiled."""

import json
import os
import subprocess
import sys
from functools import partial
from threading import Lock

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import check_node_safe
from torch.distributed.device_mesh import init_device_mesh

import thunder_flce
from front_ends import fused_graph, operands
from ranks import as_threads
from test_patterns import _arguments, patterns

# Prints how often each program was found, was not, or could not be. None has a kernel that Inductor would compile.
PROGRAM = """
import json
from functools import partial
import torch, torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from thunder_flce import Options, linear_cross_entropy, linear_kl_divergence

def unfused(h, w, y):
    return F.cross_entropy(F.linear(h, w), y, reduction="none")

def divergence(h, w, y):
    return linear_kl_divergence(h, w, h.detach(), teacher_weight, y, reduction="none")

def unfused_divergence(h, w, y):
    student, teacher = (F.log_softmax(F.linear(*pair), -1) for pair in ((h, w), (h.detach(), teacher_weight)))
    return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)

def run(program, tensors):
    for tensor in tensors:
        tensor.grad = None
    losses = program(*tensors)
    losses.backward(torch.arange(1.0, 6))
    return [losses, *(tensor.grad for tensor in tensors[:2])]

def found(program, reference, **settings):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(program, **settings)
    torch.testing.assert_close(run(compiled, tensors), run(reference, tensors))
    return [counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")]

config.cpp.vec_isa_ok = True  # Otherwise Inductor compiles a program to find out.
torch.manual_seed(0)
tensors = torch.randn(5, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True), torch.randint(16, (5,))
losses, teacher_weight = partial(linear_cross_entropy, reduction="none"), torch.randn(16, 8)
programs = [
    (lambda h, w, y: losses(h, w, y), unfused, {}),
    (lambda h, w, y: losses(h, w, y, options=Options(chunk_rows=2)), unfused, {}),
    (unfused, unfused, {"backend": "thunder_flce"}),
    (unfused, unfused, {"backend": "thunder_flce", "options": {"chunk_rows": 2}}),
    (divergence, unfused_divergence, {}),
]
results = [found(program, reference, **settings) for program, reference, settings in programs]
with config.patch(unsafe_marked_cacheable_functions=dict.fromkeys(config.unsafe_marked_cacheable_functions, "")):
    results += [found(program, reference, **settings) for program, reference, settings in programs[:3:2]]
print(json.dumps(results))
"""


def test_two_processes(tmp_path):
    """The second finds all programs; other options, or other code of this package, make other programs."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for counts in ([0, 1, 0], [1, 0, 0]):
        run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert not run.returncode, run.stderr
        assert json.loads(run.stdout) == [counts] * 7


@pytest.mark.parametrize("name", [
    "num_items_in_batch", "losses_on_one_head", "clipped_ratio_with_entropy", "entropy_beside_cross_entropy",
])  # fmt: skip
def test_what_is_written_may_be_on_the_disk(name):
    """PyTorch looks up no program with a node that it does not know to be safe."""
    program = getattr(patterns, name)
    for node in fused_graph(program, *_arguments(program)).graph.nodes:
        check_node_safe(node)


_ONE_AT_A_TIME = Lock()
"""Dynamo of torch 2.15 mixes up the grad modes of threads that compile at once"""


def _code(**arguments):
    with _ONE_AT_A_TIME:
        return fused_graph(partial(thunder_flce.linear_cross_entropy, **arguments), *operands(6)).code


def test_what_is_in_the_code():
    """By which PyTorch finds programs on the disk: autocast's dtypes and devices, and the number of ranks."""
    codes = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            codes.append(_code())
    torch.set_autocast_enabled("cuda", True)
    try:
        codes.append(_code())
    finally:
        torch.set_autocast_enabled("cuda", False)
    for ranks in (1, 2):
        codes.append(as_threads(ranks, lambda _, n=ranks: _code(vocab_parallel=init_device_mesh("cpu", (n,))))[0])
    assert len(set(codes)) == len(codes) == 5
