"""A tiny model of transformers, a tokenizer and data sets for tests of trainers; nothing is downloaded."""

import torch

WORDS = "the a cat dog bird tree house sees likes finds red blue big small and or not very here there".split()
CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' <eos> ' }}{% endgeneration %}{% else %}{{ message['content'] + ' ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
SPECIAL = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>")
VOCAB = 64


def tokenizer():
    """Returns a tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=CHAT, **names)


def model(name="Qwen2", **settings):
    """Returns a model, with the same parameters at each call."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": 1,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**sizes, **settings})
    made = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    with torch.no_grad():
        # Logits as large as those of a trained model, so that no two numbers of a test are equal by chance.
        made.get_output_embeddings().weight.mul_(20)
    return made


def sentences(count):
    """Returns random sentences of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 18, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths]


def rows(count):
    """Returns sentences as tokens, for transformers' Trainer."""
    made = tokenizer()
    return [{"input_ids": made(sentence)["input_ids"]} for sentence in sentences(count)]
