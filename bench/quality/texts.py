"""Windows of text for `python -m bench quality --model`: of what every Python has, and of the network's own chats.

documentation  the help topics of `pydoc_data.topics`
code           modules of the standard library
chats          questions of a person and answers that the network draws, by the template of its checkpoint
licences       of Python and of the packages that are installed: many repeat each other, and networks know some by
               heart, so they lose more than other texts
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcache import BatchEngine, InferenceEngine, SamplingParams

__all__ = ["KINDS", "chats", "kinds_of", "texts", "windows"]

Tokens = npt.NDArray[np.uint32]

KINDS = ("documentation", "code", "chats", "licences")
ANSWER = {"max_tokens": 220, "temperature": 0.7}
QUESTIONS = (
    "What is a good way to learn to cook?", "Why is the sky blue?", "Can you explain how a hash table works?",
    "Write a short story about a lighthouse keeper.", "What should I pack for a week in the mountains?",
    "How do vaccines work?", "Give me three ideas for the birthday party of a child.",
    "What is the difference between a list and a tuple in Python?", "Summarise the history of the printing press.",
    "How can I sleep better?", "Write a Python function that counts the words of a text.", "Who was Marie Curie?",
    "What are the advantages of solar power?", "How do I write a letter of complaint?",
    "Explain the rules of chess to a beginner.", "What causes the seasons?",
    'Translate "good morning, how are you?" into French and Spanish.', "Give me a recipe for a simple soup.",
    "What is inflation, in simple words?", "How do I repair a flat tyre of a bicycle?",
    "Tell me about the life of whales.", "Write a poem about the autumn.", "What does a compiler do?",
    "How can a small shop find new customers?",
)

_MODULES = ("argparse", "textwrap", "shutil", "csv", "heapq", "zipfile", "tarfile", "configparser", "difflib")


def kinds_of(engine: InferenceEngine) -> tuple[str, ...]:
    """The three kinds for a checkpoint: licences in the place of chats where it has no template."""
    return ("documentation", "code", "chats" if engine.chat_template else "licences")


def texts() -> dict[str, str]:
    """The texts that every Python has, by kind."""
    from pydoc_data.topics import topics

    library, installed = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    files = [library / f"{name}.py" for name in _MODULES]  # some are packages from Python 3.12 on
    files = [path if path.exists() else path.with_suffix("") / "__init__.py" for path in files]
    code = [path.read_text(encoding="utf-8") for path in files]
    places = [library / "LICENSE.txt", *sorted(installed.glob("*/**/*LICENSE*"))]
    found = [path.read_text(encoding="utf-8", errors="replace") for path in places if path.is_file()]
    licences = dict.fromkeys(text for text in found if len(text) > 1000)
    return {
        "documentation": "\n".join(topics[name] for name in sorted(topics)), "code": "".join(code),
        "licences": "\n".join(licences),
    }


def chats(engine: InferenceEngine, context: int, count: int) -> list[Tokens]:
    """So many chats of `context` tokens: questions in a fixed order, answers of the network, by fixed seeds.

    All chats are answered at once, over an f32 cache.
    """
    batch = BatchEngine(engine.model, num_blocks=count * (context // 16 + 20))
    params, talks = SamplingParams(**ANSWER), [[] for _ in range(count)]  # type: ignore[var-annotated]
    found: dict[int, Tokens] = {}
    turn = 0
    while len(found) < count:
        requests = {}
        for number in [each for each in range(count) if each not in found]:
            question = QUESTIONS[(7 * number + 5 * turn) % len(QUESTIONS)]
            talks[number].append({"role": "user", "content": question})
            prompt = engine.apply_chat_template(talks[number], tokenize=True)
            requests[number] = batch.submit(prompt, replace(params, seed=1000 * number + turn))
        for number, request in requests.items():
            answer = engine.tokenizer.decode(request.result()).strip()
            talks[number].append({"role": "assistant", "content": answer})
            ids = engine.apply_chat_template(talks[number], tokenize=True, add_generation_prompt=False)
            if len(ids) >= context:
                found[number] = np.array(ids[:context], np.uint32)
        turn += 1
    return [found[number] for number in range(count)]


def _read(path: str) -> str:
    """A file of the caller's. SystemExit: there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SystemExit(f"--texts: expected {', '.join(KINDS)} or a file, got {path}: {error.strerror}") from error


def windows(
    engine: InferenceEngine, context: int, total: int, kinds: Sequence[str], folder: Path | None = None
) -> Iterator[Tokens]:
    """Windows of `context` tokens, the kinds of text in turn, `total` tokens or a little more.

    Args:
        kinds: of `KINDS`, or paths of files of text.
        folder: keeps the chats, which take a minute; None: nowhere.
    """
    each = -(-total // (context * len(kinds)))
    known, cut = texts() | {kind: _read(kind) for kind in kinds if kind not in KINDS}, {}
    for kind in kinds:
        if kind == "chats":
            kept = None if folder is None else folder / f"chats-{each}-{context}.npy"
            if kept is not None and kept.exists():
                cut[kind] = list(np.load(kept))
            else:
                cut[kind] = chats(engine, context, each)
                if kept is not None:
                    np.save(kept, cut[kind])
            continue
        ids = np.array(engine.tokenizer.encode(known[kind]).ids, np.uint32)
        count = min(each, len(ids) // context)
        if not count:
            raise SystemExit(f"--texts: expected at least {context:,} tokens (--context), got {len(ids):,} in {kind}")
        starts = [i * context + (len(ids) - count * context) * i // max(1, count) for i in range(count)]
        cut[kind] = [ids[at : at + context] for at in starts]
    for i in range(each):
        for some in cut.values():
            if i < len(some):
                yield some[i]
