"""`tokenizer.json`: the parts that published files have are read; others, and parts without bounds, are refused."""

from __future__ import annotations

import base64
import json
import shutil

import pytest
from chat_folders import chat_folder

from kvcache import BatchEngine, SamplingParams
from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine
from kvcache.errors import CheckpointError
from kvcache.sampling.text_stream import TextStream
from kvcache.server.logprobs import TokenTexts

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.one_build

OWN = json.loads((DIRECTORY / "tokenizer.json").read_text())
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}
THRICE = TEMPLATE | {"single": TEMPLATE["single"] * 3}
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def string(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def regex(pattern, content):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def split(pattern, behavior="Isolated"):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def sequence(name, *parts):
    return {"type": "Sequence", name: list(parts)}


SENTENCEPIECE = sequence(
    "decoders", string("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
# As the files of these families have them.
PUBLISHED = {
    "gpt-2": {"pre_tokenizer": BYTES, "post_processor": BYTES, "decoder": BYTES},
    "llama-2": {
        "normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, string(" ", "▁")),
        "post_processor": TEMPLATE, "decoder": SENTENCEPIECE,
    },
    "llama-3": {
        "pre_tokenizer": sequence("pretokenizers", split(GPT4O), BYTES),
        "post_processor": sequence("processors", BYTES, TEMPLATE), "decoder": BYTES,
    },
    "mistral": {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "post_processor": TEMPLATE, "decoder": SENTENCEPIECE,
    },
    "gemma": {
        "normalizer": string(" ", "▁"), "post_processor": TEMPLATE,
        "pre_tokenizer": split(" ", "MergedWithPrevious") | {"pattern": {"String": " "}},
        "decoder": sequence("decoders", string("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}),
    },
    "qwen": {
        "normalizer": {"type": "NFC"}, "pre_tokenizer": sequence("pretokenizers", split(GPT4O), BYTES),
        "post_processor": BYTES, "decoder": BYTES,
    },
    "smollm": {
        "pre_tokenizer": sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, BYTES),
        "decoder": BYTES,
    },
    "gpt-oss": {"pre_tokenizer": sequence("pretokenizers", split(GPT4O, "Removed"), BYTES), "decoder": BYTES},
    "deepseek": {
        "normalizer": sequence("normalizers"), "post_processor": TEMPLATE, "decoder": BYTES,
        "pre_tokenizer": sequence("pretokenizers", split(r"\p{N}{1,3}"), split("[一-龥]+"), split(GPT4O), BYTES),
    },
    "xlm-r": {
        "normalizer": sequence("normalizers", {"type": "NFKC"}, regex(" {2,}", " "), {"type": "Strip",
                               "strip_left": True, "strip_right": True}),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    },
}


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(DIRECTORY, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def load(folder, **sections):
    sections = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None} | sections
    (folder / "tokenizer.json").write_text(json.dumps(OWN | sections))
    return InferenceEngine.from_pretrained(folder, num_blocks=8)


@pytest.mark.parametrize("family", PUBLISHED)
def test_parts_of_published_files(folder, family):
    tokenizer = load(folder, **PUBLISHED[family]).tokenizer
    alone = tokenizers.Tokenizer.from_str(json.dumps(OWN | {"pre_tokenizer": None} | PUBLISHED[family]))
    assert tokenizer.encode("def walk(a):").ids == alone.encode("def walk(a):").ids


def test_the_first_files_of_gpt2_do_not_say_what_their_model_is(folder):
    model = {key: value for key, value in OWN["model"].items() if key != "type"}
    load(folder, pre_tokenizer=BYTES, model=model)
    tokenizer = InferenceEngine.from_pretrained(folder).tokenizer
    assert tokenizer.encode("def").ids == InferenceEngine.from_pretrained(DIRECTORY).tokenizer.encode("def").ids


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"normalizer": {"type": "Unknown"}}, r"normalizer: expected one of Sequence, .*, got 'Unknown'"),
        ({"normalizer": {"pattern": {"String": "a"}, "content": "b"}}, "normalizer: expected one .*, got None"),
        ({"normalizer": [1]}, r"normalizer: expected one of Sequence, .*, got \[1\]"),
        ({"normalizer": string("", "x")}, "Replace: pattern: expected a text of 1 to 4096 characters"),
        ({"normalizer": string("a", 5)}, "Replace: content: expected a text .*, got 5"),
        ({"normalizer": sequence("normalizers", *[string("a", "aa")] * 36)}, "a tokenizer that encodes"),
        ({"normalizer": sequence("normalizers", *[regex("b?", "aa")] * 6)}, "a tokenizer that encodes"),
        ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 100)}, "normalizer: expected at most 64 parts"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 500}}, "encodes a text to at most 128 times its length"),
        ({"normalizer": string("a", "b" * 64), "pre_tokenizer": BYTES}, "got 320 times"),
        ({"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 9)}, "a tokenizer that encodes"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "FixedLength: length: expected at least 1, got 0"),
        ({"pre_tokenizer": {"type": "Split", "pattern": "a"}}, "a String or a Regex, got 'a'"),
        ({"decoder": sequence("decoders", *[string("e", "e" * 8)] * 12)}, "a tokenizer that decodes"),
        ({"post_processor": TEMPLATE | {"single": TEMPLATE["single"] * 64}}, "a template of at most 64 pieces"),
        ({"post_processor": sequence("processors", *[THRICE] * 9)}, "encodes"),
        ({"post_processor": TEMPLATE | {"special_tokens": {"a": {"ids": [1] * 99}}}}, "tokens of at most 64 ids"),
        ({"model": {"type": "Other"}}, "model: expected one of BPE, Unigram, WordLevel, WordPiece, got 'Other'"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, "per_word: expected at most 1000"),
        ({"model": OWN["model"] | {"continuing_subword_prefix": "#" * 30}}, "package, got an error: range end"),
    ],
)
def test_parts_that_are_not_read(folder, sections, message):
    engine = load(folder, **sections)
    with pytest.raises(CheckpointError, match=message) as caught:
        _ = engine.tokenizer
    assert str(folder / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "precompiled_charsmap: expected a table of SentencePiece"),
        (b"\0\0\0", "precompiled_charsmap: expected a table of SentencePiece"),
        (b"\xff\xff\xff\xff", "precompiled_charsmap: expected a table of SentencePiece"),
        (b"\x04\0\0\0" + bytes(4) + b"\xff\0", "precompiled_charsmap: expected a table of SentencePiece"),
        (b"\x04\0\0\0" + bytes(4) + b"a", "texts that end with a zero"),
        (b"\x04\0\0\0" + bytes(4) + b"a" * 999 + b"\0", "to at most 128 times its length, got 999 times"),
    ],
)
def test_tables_of_sentencepiece(folder, data, message):
    part = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
    with pytest.raises(CheckpointError, match=message):
        _ = load(folder, normalizer=part).tokenizer


def test_a_key_twice(folder):
    """The package and Python might take different ones."""
    text = json.dumps(OWN).replace('"normalizer": null', '"normalizer": {"type": "NFC", "type": "Replace"}')
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="keys: expected each once in an object, got one twice"):
        _ = InferenceEngine.from_pretrained(folder).tokenizer


STRIPS = sequence("decoders", {"type": "Strip", "content": "a", "start": 0, "stop": 3}, OWN["decoder"])
UNKNOWN = TEMPLATE | {"special_tokens": {}}


def test_a_tokenizer_that_panics_fails_by_name(folder):
    """The package raises an exception that is no `Exception` then."""
    engine, a = load(folder, post_processor=UNKNOWN, decoder=STRIPS), OWN["model"]["vocab"]["a"]
    for call in (engine.complete, engine.generate, lambda text: list(engine.stream(text))):
        for text in ("def", "def " * 2000):
            with pytest.raises(CheckpointError, match="tokenizer: expected the tokens of a text, got an error"):
                call(text)
    texts = TokenTexts(engine.tokenizer)
    for call in (lambda: TextStream(engine.tokenizer).extend([a] * 9, ended=True), lambda: texts.of(a)):
        with pytest.raises(CheckpointError, match="tokenizer: expected the text of tokens, got an error"):
            call()


def test_a_tokenizer_that_panics_in_a_step_ends_its_request_alone(folder):
    load(folder, decoder=STRIPS)
    a = OWN["model"]["vocab"]["a"]
    with BatchEngine.from_pretrained(folder) as engine:
        good = engine.submit(range(300, 340), SamplingParams(max_tokens=50, temperature=0.0))
        bad = engine.submit(range(300, 340), SamplingParams(max_tokens=4, stop="zz", logit_bias={a: 1e6}))
        with pytest.raises(CheckpointError, match="tokenizer: expected the text of tokens, got an error"):
            bad.result(timeout=60)
        assert engine.is_running
        assert len(good.result(timeout=60)) == 50


def test_a_conversation_for_a_tokenizer_that_panics(tmp_path):
    folder = chat_folder(tmp_path / "folder", "{{ messages[0].content }}")
    (folder / "tokenizer.json").unlink()  # a link to the demo's
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}
    (folder / "tokenizer.json").write_text(json.dumps(OWN | {"pre_tokenizer": None, "model": model}))
    engine = InferenceEngine.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="tokenizer: expected the tokens of a text, got an error"):
        engine.apply_chat_template([{"role": "user", "content": "def"}], tokenize=True)
