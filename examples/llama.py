"""A transformers Llama, tiny and with random parameters, through `thunder_flce.jit`; compared with eager PyTorch."""

import warnings

warnings.filterwarnings("ignore", message="transformer_engine module not found")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import thunder_flce


def main() -> None:
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    # As it is, the model returns the logits beside the loss, so they would have to be there in full.
    module = thunder_flce.loss_only(LlamaForCausalLM(config).to(device))
    jitted = thunder_flce.jit(module)
    input_ids = torch.randint(config.vocab_size, (4, 64), device=device)
    labels = input_ids.clone()
    labels[:, :16] = -100  # A prompt that is not trained on.

    parameters = dict(module.named_parameters())
    results = {}
    for name, call in {"eager": module, "thunder_flce.jit": jitted}.items():
        loss = call(input_ids, labels=labels)
        results[name] = (loss, torch.autograd.grad(loss, list(parameters.values())))
        print(f"{name:18} loss {loss.item():.6f}")
    (loss, gradients), (fused_loss, fused_gradients) = results.values()
    errors = {
        name: ((fused - eager).norm() / eager.norm()).item()
        for name, eager, fused in zip(parameters, gradients, fused_gradients, strict=True)
    }
    worst = max(errors, key=errors.get)
    print(f"\nThe losses differ by {abs(fused_loss - loss).item():.1e}. Of {len(errors)} gradients, that of {worst}")
    print(f"differs most, by a relative {errors[worst]:.1e}. Expect both below 1e-4.\n")
    torch.testing.assert_close(fused_loss, loss, rtol=1e-4, atol=0)
    assert errors[worst] < 1e-4

    print("What thunder_flce decided; expect one line, which says that the loss is fused:")
    for compilation in thunder_flce.explain(jitted):
        for decision in compilation.decisions:
            print(f"  {decision}")


if __name__ == "__main__":
    main()
