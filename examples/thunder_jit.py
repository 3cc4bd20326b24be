"""thunder with and without the fusion: jit a loss, read both backward traces, and measure both.

python examples/thunder_jit.py      or run the cells (# %%) in an editor or notebook
"""

# %% A head and its loss: 2 sequences of 256 tokens, a vocabulary of 32000.
import thunder_flce  # isort: skip  # With torch 2.13 or newer, import it before thunder.
import thunder
import torch
import torch.nn.functional as F
from torch import Tensor

from gain import print_gain

device = "cuda" if torch.cuda.is_available() else "cpu"
hidden = torch.randn(2, 256, 128, device=device, requires_grad=True)
weight = torch.randn(32000, 128, device=device, requires_grad=True)
labels = torch.randint(32000, (2, 256), device=device)


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# %% thunder alone. The forward saves a tensor as large as the logits; from it, the backward computes another one.
plain = thunder.jit(loss_of)
plain(hidden, weight, labels).backward()
print("# The backward of thunder alone", thunder.last_backward_traces(plain)[-1], sep="\n")

# %% With the fusion. The forward has computed both gradients; the backward multiplies them by the upstream gradient.
fused = thunder_flce.jit(loss_of)  # or thunder.jit(…, executors=[thunder_flce.executor, …], transforms=[…])
fused(hidden, weight, labels).backward()
print("\n# The backward with the fusion", thunder.last_backward_traces(fused)[-1], sep="\n")

# %% The program that the forward runs for each chunk, and the decision about the loss.
print("\n# The forward with the fusion", thunder.last_traces(fused)[-1], sep="\n")
print(thunder_flce.explain(fused))

# %% Both give the same numbers; time and memory of a step.
steps = {
    name: lambda jitted=jitted: torch.autograd.grad(jitted(hidden, weight, labels), (hidden, weight))
    for name, jitted in {"thunder.jit": plain, "thunder_flce.jit": fused}.items()
}
torch.testing.assert_close(steps["thunder_flce.jit"](), steps["thunder.jit"](), rtol=1e-3, atol=1e-5)
print_gain(f"forward and backward on {device}", steps, device)
