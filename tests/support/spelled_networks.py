"""A tokenizer for the networks of 256 tokens: ASCII, frequent pieces of JSON, and an end token."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

END = 2  # of `NETWORK.config`
PIECES = (
    "na", "me", "name", '{"', '":', '",', '"name', '"name":', "al", "alp", "ha", "alpha", "be", "ta", "beta", "ye",
    "yes", "no", "12",
)


def spelling(size=256):
    """A byte-level BPE tokenizer of `size` tokens."""
    alphabet = sorted(ByteLevel.alphabet(), key=ord)
    ascii_bytes = [character for character in alphabet if ord(character) < 128 or character in "ĠĊ"]
    vocab, merges = {"<pad>": 0, "<start>": 1, "<end>": END}, []
    for piece in ascii_bytes:
        vocab[piece] = len(vocab)
    for piece in PIECES:
        left = next(k for k in range(len(piece) - 1, 0, -1) if piece[:k] in vocab and piece[k:] in vocab)
        merges.append([piece[:left], piece[left:]])
        vocab[piece] = len(vocab)
    for number in range(len(vocab), size):
        vocab[f"<unused {number}>"] = number
    special = [name for name in vocab if name.startswith("<") and len(name) > 1]
    added = [
        {"id": vocab[name], "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for name in special
    ]
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    content = {"version": "1.0", "added_tokens": added, "pre_tokenizer": steps, "decoder": steps, "model": model}
    return Tokenizer.from_str(json.dumps(content))


def text_side():
    """The text side of a checkpoint with this tokenizer and nothing else."""
    return SimpleNamespace(tokenizer=spelling(), chat_template=None)
