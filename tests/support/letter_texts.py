"""Texts of single characters: a tokenizer and a chat template for any network, and greedy answers of letters."""

from __future__ import annotations

import string
from types import SimpleNamespace

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from kvcache import SamplingParams

__all__ = ["LETTERS", "answers", "text_side"]

LETTERS = string.ascii_lowercase
_SPECIAL = ("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
            "<think>", "</think>")


def text_side(template):
    """The text side of a checkpoint: a tokenizer of single characters and this template."""
    vocab = {each: i for i, each in enumerate(LETTERS + " \n.,?")}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.add_special_tokens([AddedToken(each) for each in _SPECIAL])
    tokenizer.decoder = Fuse()
    return SimpleNamespace(
        tokenizer=tokenizer, chat_template=template, template=lambda name: template, special_tokens={}
    )


def answers(vocab_size):
    """Greedy answers of letters alone, which a tokenizer reads as it wrote them."""
    return SamplingParams(
        temperature=0.0, max_tokens=7, logit_bias=dict.fromkeys(range(len(LETTERS), vocab_size), -100.0)
    )
