"""The training text of the demo model: the Python sources of CPython's standard library.

The corpus is the ``*.py`` files below one ``lib/python3.x`` directory, without ``site-packages``, without
machine-generated tables and without files that describe the local machine.  Whole top-level modules (and their
tests) are held out by name, so that the model is never measured on text that it was trained on.
"""

from __future__ import annotations

import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

#: Modules and packages that training never sees.  Ordinary hand-written modules of varied kinds: text, data
#: formats, network protocols, algorithms, numbers, debugging.  Their ``test_<name>`` files are dropped.
HELD_OUT = (
    "bdb", "calendar", "cmd", "colorsys", "configparser", "csv", "ftplib", "fractions", "gettext", "graphlib", "heapq",
    "json", "netrc", "plistlib", "queue", "sched", "selectors", "shelve", "statistics", "textwrap", "tomllib", "trace",
    "wave", "wsgiref", "zipapp",
)

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096

#: How many times as often a library file is drawn as a test file.  Tests are 70 % of the text, but the model is meant
#: to continue library code.
LIBRARY_WEIGHT = 5

#: Shares of the documents with renamed identifiers, and of the sequences with repeated spans and with planted
#: names (see Sampler).
RENAME_SHARE, COPY_SHARE, RECALL_SHARE = 0.12, 0.08, 0.25
MIXTURE = {
    "library_weight": LIBRARY_WEIGHT, "rename_share": RENAME_SHARE, "copy_share": COPY_SHARE,
    "recall_share": RECALL_SHARE,
}

_SKIP_DIRS = {"site-packages", "__pycache__", "pydoc_data", "lib-dynload"}
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class Document:
    """One source file: its path relative to the library directory, its text, and whether it is a test."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        parts = self.path.split("/")
        return parts[0] == "test" or "idle_test" in parts


def default_stdlib() -> Path:
    """The standard library directory of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def _looks_generated(text: str) -> bool:
    """True if a file is a table rather than code: mostly digits, escapes and punctuation, or a charmap codec."""
    if "decoding_table" in text or "decoding_map" in text:
        return True
    plain = sum(1 for c in text if c.isalpha() or c in " _\n") / max(1, len(text))
    return plain < 0.7 or (not text.isascii() and sum(map(str.isascii, text)) < 0.9 * len(text))


def read_library(stdlib: Path) -> list[Document]:
    """Every usable ``*.py`` file below ``stdlib``, sorted by path."""
    docs = []
    for path in sorted(stdlib.rglob("*.py")):
        rel = path.relative_to(stdlib)
        if _SKIP_DIRS & set(rel.parts) or rel.parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            docs.append(Document(rel.as_posix(), text))
    return docs


def module_of(path: str) -> str:
    """The top-level module or package that a relative path belongs to."""
    return path.split("/")[0].removesuffix(".py")


def split(docs: list[Document]) -> tuple[list[Document], list[Document]]:
    """Return (training documents, held-out documents); tests of held-out modules are in neither."""
    names = set(HELD_OUT)
    held = [d for d in docs if module_of(d.path) in names]
    # A test belongs to module m if any part of its path is test_m, m_tests, or test_m_<something>.
    any_name = "|".join(names)
    leak = re.compile(rf"(^|/)(test_({any_name})(_\w+)?|({any_name})_?tests?)(/|\.py$)")
    train = []
    for doc in docs:
        if module_of(doc.path) in names or leak.search(doc.path) or _looks_generated(doc.text):
            continue
        train.append(doc)
    return train, held


def train_tokenizer(docs: list[Document]) -> Tokenizer:
    """A byte-level BPE: lossless on any text, trained on the training split alone."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Weighted as in training, so that tests do not dominate the merges.
    texts = (d.text for d in docs for _ in range(1 if d.is_test else LIBRARY_WEIGHT))
    tok.train_from_iterator(texts, trainer)
    return tok


class Sampler:
    """An unlimited source of training batches: shuffled documents, joined by end-of-text tokens, cut into sequences.

    Three augmentations, made from the same text, train the model to copy:

    * In ``RENAME_SHARE`` of the documents, one to four recurring identifiers are replaced throughout by a made-up
      name.  Only copying predicts such a name.
    * In ``COPY_SHARE`` of the sequences, spans of 32 to 256 tokens are repeated at a random later place.
    * In ``RECALL_SHARE`` of the sequences, short stretches of text with a made-up name occur twice, at random
      places: the few tokens before the name must suffice to find it.
    """

    def __init__(self, docs: list[Document], tok: Tokenizer, seed: int):
        self.docs, self.tok, self.rng = docs, tok, random.Random(seed)
        words = sorted(w for w in tok.get_vocab() if len(w) > 1 and w.isalpha() and w.isascii())
        self.word_ids = [tok.token_to_id(w) for w in words]
        self.eot = tok.token_to_id(END_OF_TEXT)
        self.ids = [np.array(e.ids, dtype=np.int32) for e in tok.encode_batch([d.text for d in docs])]
        self.order: list[int] = []
        self.buffer = np.empty(0, dtype=np.int32)
        self.pool: list[np.ndarray] = []
        self.passes = 0

    def tokens_per_pass(self) -> int:
        """Tokens in one pass over the weighted corpus."""
        return sum(len(i) * (1 if d.is_test else LIBRARY_WEIGHT) for i, d in zip(self.ids, self.docs, strict=True))

    def _next_document(self) -> np.ndarray:
        if not self.order:
            self.order = [i for i, d in enumerate(self.docs) for _ in range(1 if d.is_test else LIBRARY_WEIGHT)]
            self.rng.shuffle(self.order)
            self.passes += 1
        i = self.order.pop()
        if self.rng.random() < RENAME_SHARE:
            return np.array(self.tok.encode(rename_identifiers(self.docs[i].text, self.rng)).ids, dtype=np.int32)
        return self.ids[i]

    def _sequence(self, length: int) -> np.ndarray:
        parts, have = [self.buffer], len(self.buffer)
        while have < length + 1:
            doc = self._next_document()
            parts += [np.array([self.eot], dtype=np.int32), doc]
            have += len(doc) + 1
        whole = np.concatenate(parts) if len(parts) > 1 else self.buffer
        self.buffer = whole[length:]  # the last token of one sequence is the first of the next
        seq = whole[: length + 1].copy()
        draw = self.rng.random()
        if draw < COPY_SHARE:
            self._repeat_spans(seq)
        elif draw < COPY_SHARE + RECALL_SHARE:
            self._plant_names(seq)
        return seq

    def _repeat_spans(self, seq: np.ndarray) -> None:
        """Overwrite parts of ``seq`` with earlier spans of it."""
        n = len(seq)
        for _ in range(max(1, n // 256)):
            size = self.rng.randint(32, min(256, n // 4))
            src = self.rng.randrange(0, n - 2 * size)
            dst = self.rng.randrange(src + size, n - size)
            seq[dst : dst + size] = seq[src : src + size].copy()

    def _plant_names(self, seq: np.ndarray) -> None:
        """Overwrite parts of ``seq`` with short stretches that contain a made-up name, each at two places."""
        n = len(seq)
        for _ in range(max(1, n // 128)):
            if self.rng.random() < 0.5:
                name = self.tok.encode(made_up_name(self.rng)).ids
            else:
                name = self.rng.choices(self.word_ids, k=self.rng.randint(2, 6))
            at, lead, tail = self.rng.randrange(n - 16), self.rng.randint(3, 10), self.rng.randint(1, 5)
            stretch = np.concatenate([seq[at : at + lead], name, seq[at + lead : at + lead + tail]])
            size = len(stretch)
            src = self.rng.randrange(0, n - 2 * size)
            dst = self.rng.randrange(src + size, n - size + 1)
            seq[src : src + size] = stretch
            seq[dst : dst + size] = stretch

    def batch(self, rows: int, length: int) -> np.ndarray:
        """An int64 array (rows, length + 1): inputs are [:, :-1], targets [:, 1:].

        Rows are drawn at random from a pool of some three million tokens: consecutive sequences come from the same
        file, and a batch of them would not represent the corpus.
        """
        if self.pool and len(self.pool[0]) != length + 1:
            self.pool = []
        out = []
        for _ in range(rows):
            while len(self.pool) < 3_000_000 // length:
                self.pool.append(self._sequence(length))
            i = self.rng.randrange(len(self.pool))
            self.pool[i], self.pool[-1] = self.pool[-1], self.pool[i]
            out.append(self.pool.pop())
        return np.stack(out).astype(np.int64)


def made_up_name(rng: random.Random) -> str:
    """A random identifier made of syllables; the evaluation makes its names differently."""

    def word() -> str:
        return "".join(
            rng.choice("bcdfghjklmnpqrstvwxz") + rng.choice("aeiouy") + rng.choice(["", "", "n", "r", "s"])
            for _ in range(rng.randint(1, 3))
        )

    kind = rng.randrange(4)
    words = [word() for _ in range(rng.randint(1, 3))]
    if kind == 0:
        return "".join(w.capitalize() for w in words)
    if kind == 1:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789_"
        return "x" + "".join(rng.choice(letters) for _ in range(rng.randint(4, 12))) + "k"
    return "_".join(words)


def rename_identifiers(text: str, rng: random.Random) -> str:
    """Replace one to four recurring identifiers of ``text`` by made-up names, consistently."""
    counts: dict[str, int] = {}
    for w in _WORD.findall(text):
        if len(w) > 4:
            counts[w] = counts.get(w, 0) + 1
    names = sorted(w for w, c in counts.items() if c >= 3)
    if not names:
        return text
    table = {w: made_up_name(rng) for w in rng.sample(names, min(len(names), rng.randint(1, 4)))}
    return _WORD.sub(lambda m: table.get(m.group(), m.group()), text)
