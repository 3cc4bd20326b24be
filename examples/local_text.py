"""Tokens of a text that every machine has: Python's standard library."""

import random
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SEED = 1


def standard_library(size: int) -> list[str]:
    """Returns modules of Python's standard library, about `size` bytes in all, the same at each call."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    paths = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    random.Random(SEED).shuffle(paths)
    documents = []
    for path in paths:
        if size <= 0:
            break
        documents.append(path.read_text("utf-8", errors="replace"))
        size -= len(documents[-1])
    return documents


def train_tokenizer(documents: list[str], vocab: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer that is trained on the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenize(documents: list[str], vocab: int) -> tuple[Tensor, int]:
    """Trains a tokenizer on the documents; returns their tokens (T,) and the size of the vocabulary."""
    tokenizer = train_tokenizer(documents, vocab)
    tokens = [token for encoding in tokenizer.encode_batch(documents) for token in encoding.ids]
    return torch.tensor(tokens), tokenizer.get_vocab_size()
