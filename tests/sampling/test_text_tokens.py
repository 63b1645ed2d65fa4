"""Token ids of texts: the GIL is free meanwhile, and the length of a text says when it cannot fit."""

import json
import subprocess
import sys

import pytest
import tokenizers
from threads_at_once import longest_pause
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from kvcache import BatchEngine, InferenceEngine, SamplingParams
from kvcache.demo import DIRECTORY
from kvcache.sampling.text_tokens import TooManyTokens, encoded, encoded_with_ends, least_tokens

pytestmark = pytest.mark.one_build

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


@pytest.fixture(scope="module")
def demo():
    return InferenceEngine.from_pretrained(DIRECTORY)


def bytewise(normalizer=None, pre_tokenizer=None, added=(), pieces=("abcd",)):
    """BPE over bytes, whose longest token has four."""
    vocab = {piece: i for i, piece in enumerate([*sorted(ByteLevel.alphabet()), "ab", "cd", *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("c", "d"), ("ab", "cd")]))
    steps = [] if pre_tokenizer is None else [pre_tokenizer]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(**each) for each in added])
    return tokenizer


def with_bytes():
    """BPE of SentencePiece, whose longest token is a byte."""
    vocab = BYTES | {"▁": 256, "ab": 257, "a": 258, "b": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


TEXTS = [
    "", "abcd" * 50, "x" * 99, " \n" * 70, "🐈 " * 9, "<x>" * 20, " \t<x>  " * 20, "가" * 30,
    "\u1112\u1161\u11ab" * 30, "\u212a" * 40, "ab cd  é\u0301 \U0001d6da\u0345 \u2126\u0314\u0342\u0345" * 20,
]


@pytest.mark.parametrize(
    "tokenizer",
    [
        bytewise(), bytewise(added=[{"content": "<x>", "lstrip": True, "rstrip": True}]), with_bytes(),
        bytewise(normalizers.NFC()), bytewise(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_how_many_tokens_are_before_a_place(tokenizer):
    """A token that goes on behind it is not counted; nothing else differs from `encoded`, in long texts too."""
    for text in (*TEXTS, "".join(TEXTS) * 4):
        ends = [*range(0, len(text) + 1, max(1, len(text) // 50)), len(text)]
        ids, counts = encoded_with_ends(tokenizer, text, "x", ends)
        assert ids == encoded(tokenizer, text, "x", add_special_tokens=False)
        stops = [stop for _, stop in tokenizer.encode(text, add_special_tokens=False).offsets]
        assert counts == [sum(stop <= end for stop in stops) for end in ends]
    with pytest.raises(TooManyTokens, match="x: expected at most 3 tokens, got a text of 200 bytes"):
        encoded_with_ends(bytewise(), "abcd" * 50, "x", [1], most=3)


@pytest.mark.parametrize(
    ("tokenizer", "longest"),
    [
        (bytewise(), 4),
        (bytewise(added=[{"content": "<|longer|>"}]), 10),
        (bytewise(added=[{"content": "<x>", "lstrip": True, "rstrip": True}]), 4),
        (bytewise(normalizers.NFC()), 4),
        (bytewise(normalizers.NFKC()), 4),
        (bytewise(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.Strip()])), 4),
        (bytewise(pre_tokenizer=pre_tokenizers.Split(" ", "isolated")), 4),
        (bytewise(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), 4),
        (bytewise(normalizers.Replace(" ", "  ")), 4),
        (with_bytes(), 6),
    ],
)
def test_no_text_has_fewer_tokens_than_its_length_says(tokenizer, longest):
    least = {text: least_tokens(tokenizer, text) for text in TEXTS}
    assert all(count <= len(tokenizer.encode(text).ids) for text, count in least.items())
    assert least["x" * 99] == -(-99 // longest)


@pytest.mark.parametrize(
    "tokenizer",
    [
        bytewise(normalizers.Replace(" ", "")),
        bytewise(normalizers.Replace(tokenizers.Regex(" +"), " ")),
        bytewise(normalizers.StripAccents()),
        bytewise(normalizers.BertNormalizer()),
        bytewise(pre_tokenizer=pre_tokenizers.Split("x", "removed")),
        Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
        Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True)),
        Tokenizer(models.WordLevel({"?": 0}, unk_token="?")),
        Tokenizer(models.WordPiece({"?": 0}, unk_token="?")),
        Tokenizer(models.Unigram([("?", 0.0)], unk_id=0)),
    ],
)
def test_where_a_token_may_stand_for_any_text_no_length_counts(tokenizer):
    assert least_tokens(tokenizer, "x" * 1000) == 0


def test_a_tokenizer_without_tokens():
    assert least_tokens(Tokenizer(models.BPE(vocab={}, merges=[], byte_fallback=True)), "x" * 1000) == 0


def test_long_texts_have_the_ids_of_short_calls(demo):
    text = json.dumps(json.loads((DIRECTORY / "tokenizer.json").read_text())["model"]["merges"])[:20_000]
    assert encoded(demo.tokenizer, text, "prompt") == demo.tokenizer.encode(text).ids
    with pytest.raises(ValueError, match="prompt: expected Unicode text, got a lone surrogate"):
        encoded(demo.tokenizer, "\ud800" * 9000, "prompt")


def test_other_threads_run_while_a_text_is_encoded(demo):
    """A text of 1 MB of one digit takes a second; none of it holds the GIL."""
    assert longest_pause(lambda: encoded(demo.tokenizer, "1" * 1_000_000, "prompt")) < 1 / 3


def test_a_text_that_cannot_fit_is_not_encoded(demo, monkeypatch):
    """Engines refuse it by its length, whatever the request is."""
    positions = demo.config.max_position_embeddings
    longest = max(map(len, demo.tokenizer.get_vocab()))
    text = "x" * (positions * longest + 1)
    engine = BatchEngine(demo.model, SamplingParams(max_tokens=1))
    engine._text = demo.requests.text
    calls = [demo.complete, demo.generate, engine.submit, lambda text: engine.score_batch([text + "x" * longest])]
    monkeypatch.setattr(demo.tokenizer, "encode_batch_fast", None, raising=False)
    for call in calls:
        with pytest.raises(TooManyTokens, match=r"prompt: expected at most 204[89] tokens, got a text of \d+ bytes"):
            call(text)
    monkeypatch.undo()
    assert len(encoded(demo.tokenizer, "x" * positions, "prompt", most=positions)) <= positions


LARGE = """
from pathlib import Path
from resource import getpagesize
from tokenizers import Tokenizer
from kvcache.demo import DIRECTORY
from kvcache.sampling.text_tokens import encoded

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()

tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
encoded(tokenizer, "def walk " * 100, "prompt")
before = resident()
print(len(encoded(tokenizer, "def walk " * 60_000, "prompt")), resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_large_text_comes_back():
    """In a process of its own: what others have allocated between the pages of a text keeps these."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    tokens, kept = map(int, done.stdout.split())
    assert tokens > 150_000
    assert kept < 20e6  # the tokens take 60 MB
