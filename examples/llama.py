"""A tiny Llama of transformers with random parameters, compiled by torch.compile with the backend "thunder_flce".

The model returns its logits with the loss, so that all logits would have to be in memory; `loss_only` drops them.

    python examples/llama.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import thunder_flce
from gain import print_gain


def main() -> None:
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, use_cache=False, **sizes)).to(device)
    input_ids = torch.randint(32000, (4, 256), device=device)
    labels = input_ids.clone()
    labels[:, :64] = -100  # The prompt is ignored.

    options = {"strict": True, "chunk_rows": 256}
    compiled = torch.compile(thunder_flce.loss_only(model), backend="thunder_flce", options=options)

    def eager_step() -> list[torch.Tensor]:
        loss = model(input_ids, labels=labels).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    def fused_step() -> list[torch.Tensor]:
        loss = compiled(input_ids, labels=labels)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    torch.testing.assert_close(fused_step(), eager_step(), rtol=1e-3, atol=1e-5)
    print("The loss and all gradients are the same, up to rounding. What was decided:")
    print(f"  {thunder_flce.explain(compiled).decisions[0]}")
    print_gain(f"forward and backward on {device}", {"eager": eager_step, "backend thunder_flce": fused_step}, device)


if __name__ == "__main__":
    main()
