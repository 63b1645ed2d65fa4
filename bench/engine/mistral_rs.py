"""mistral.rs, which takes and gives texts: prompts are letters of which each is one token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine.streamed import Streamed
from kvcache.gguf import GgufFile

__all__ = ["MistralRs", "letters_of", "text_of"]

Tokens = npt.NDArray[np.uint32]
_LETTERS = "cdefghijklmnopqrstuvwxyz"  # no merge of the random vocabularies has one of them
_WORD = 8  # letters of a word, with the space before it
_PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def letters_of(tokens: Tokens) -> str:
    """A text with as many tokens of a random vocabulary, which begins as that of tokens that begin in the same way."""
    ids = tokens.astype(np.int64)
    letters = np.array([*_LETTERS])[ids % len(_LETTERS)]
    letters[_WORD - 1 :: _WORD] = " "
    return "".join(letters.tolist())


def text_of(tokens: Tokens, pieces: Sequence[str]) -> str:
    """The text of tokens of a byte-level vocabulary; what is no character is replaced."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*plain})
    byte_of = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    letters = "".join(pieces[token] for token in tokens)
    return bytes(byte_of[letter] for letter in letters if letter in byte_of).decode(errors="replace")


class MistralRs(Streamed):
    """mistral.rs on the CPU with its defaults: K and V in f16, activations quantised, sequences kept as prefixes.

    Args:
        running: sequences at a time.
        as_letters: whether ids become letters, as those of random vocabularies do; else the text of the ids.
    """

    name = "mistral.rs"

    def __init__(self, path: Path, threads: int, running: int = 1, *, as_letters: bool = True) -> None:
        os.environ |= {"RAYON_NUM_THREADS": str(threads), "RUST_LOG": "error", "HF_HUB_OFFLINE": "1"}
        import mistralrs

        self._library: Any = mistralrs
        with TemporaryDirectory() as folder:
            template = Path(folder, "plain.jinja")
            template.write_text(_PLAIN)
            file = mistralrs.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
            self._runner: Any = mistralrs.Runner(file, max_seqs=running, jinja_explicit=str(template))
        self._pieces = None if as_letters else GgufFile(path).metadata["tokenizer.ggml.tokens"]
        self._lock = Lock()  # a runner has one call at a time, but many streams

    @staticmethod
    def version() -> str:
        from importlib.metadata import version

        import mistralrs  # noqa: F401

        return version("mistralrs")

    def text(self, tokens: Tokens) -> str:
        """A text of these tokens, or of as many."""
        return letters_of(tokens) if self._pieces is None else text_of(tokens, self._pieces)

    def times(self, tokens: Tokens, new: int) -> Iterator[float]:
        """Run a greedy request and yield the clock at each new token.

        A token that ends inside of a character comes with the next one: those that are missing come at the end.
        """
        request = self._library.ChatCompletionRequest(
            messages=[{"role": "user", "content": self.text(tokens)}], model="default", max_tokens=new,
            temperature=0.0, ignore_eos=True, stream=True,
        )
        with self._lock:
            chunks = self._runner.send_chat_completion_request(request)
        count = 0
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content and count < new:
                count += 1
                yield perf_counter()
        for _ in range(new - count):
            yield perf_counter()
