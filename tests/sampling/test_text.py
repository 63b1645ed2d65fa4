"""Text as its tokens come: the pieces are the whole text, and stop strings end it."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine
from kvcache.sampling.text import TextStream

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


class Bytes:
    """A tokenizer whose ids are bytes of UTF-8; 256 is the word "stop"."""

    def decode(self, ids):
        return b"".join(b"stop" if token == 256 else bytes([token]) for token in ids).decode(errors="replace")


class Words:
    """A tokenizer of words that drops the space before the first one, as SentencePiece does."""

    def decode(self, ids):
        return " ".join("abcdefgh"[token] for token in ids)


class Fallback:
    """A tokenizer of letters and of bytes, as Llama's: a run of bytes is invalid as a whole."""

    def decode(self, ids):
        text = ""
        for is_letter, run in groupby(ids, lambda token: token < 128):
            found = bytes(run)
            try:
                text += found.decode()
            except UnicodeDecodeError:
                assert not is_letter
                text += "\ufffd" * len(found)
        return text


def pieces(tokenizer, tokens, prompt=(), stop=()):
    stream = TextStream(tokenizer, prompt, stop)
    return [*map(stream.add, tokens), stream.end()], stream.stopped


def test_characters_of_several_tokens_come_whole():
    parts, stopped = pieces(Bytes(), "aé€😀b".encode())
    assert parts == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]
    assert not stopped


def test_an_unfinished_character_comes_at_the_end():
    assert pieces(Bytes(), "a€".encode()[:-1]) == (["a", "", "", "\ufffd"], False)


def test_the_first_space_depends_on_the_prompt():
    assert "".join(pieces(Words(), [1, 2], [0])[0]) == " b c"
    assert "".join(pieces(Words(), [1, 2])[0]) == "b c"
    assert "".join(pieces(Words(), [1], range(8))[0]) == " b"


def test_a_prompt_that_ends_in_characters_of_several_tokens():
    """A context of eight tokens begins within the second one."""
    parts, _ = pieces(Fallback(), "鱻鱻a".encode(), "鱻鱻鱻鱻".encode())
    assert "".join(parts) == "鱻鱻a"
    assert pieces(Fallback(), "鱻ab".encode(), "鱻鱻鱻鱻".encode(), ["鱻a"]) == (["", "", "", "", "", ""], True)


@pytest.mark.parametrize("tokenizer", [Bytes(), Fallback()])
def test_a_prompt_that_ends_within_a_character(tokenizer):
    """The character comes as a whole, once, and nothing of the text behind it is lost."""
    for before in ("", "a", "鱻鱻鱻", "é🐈🐈"):
        for cut in (1, 2, 3):
            prompt, new = before.encode() + "🐈".encode()[:cut], "🐈bcd".encode()[cut:]
            assert "".join(pieces(tokenizer, new, prompt)[0]) == "🐈bcd"
            assert "".join(pieces(tokenizer, new, prompt, ["cd"])[0]) == "🐈b"
            assert "".join(pieces(tokenizer, new[: 4 - cut], prompt)[0]) == "🐈"
            assert "".join(pieces(tokenizer, b"bcd", prompt)[0]) == "bcd"
            assert pieces(tokenizer, [], prompt) == ([""], False)


@given(st.text("aé鱻🐈", max_size=8), st.text("aé鱻🐈", max_size=8))
def test_texts_behind_prompts_of_bytes(prompt, text):
    assert "".join(pieces(Fallback(), text.encode(), prompt.encode())[0]) == text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two", ["two"], "one "),
        ("one two", ["o", "one"], ""),
        ("one two", ["e t", "ne"], "o"),
        ("aab", ["ab"], "a"),
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd"], "abc"),
        ("ab", ["abc"], "ab"),
        ("xay", ["ab", "xb"], "xay"),
        ("€😀", ["😀"], "€"),
    ],
)
def test_the_text_ends_before_a_stop_string(text, stop, expected):
    parts, stopped = pieces(Bytes(), text.encode(), stop=stop)
    assert "".join(parts) == expected
    assert stopped == any(string in text for string in stop)


def test_a_stop_string_that_begins_in_the_middle_of_a_token():
    stream = TextStream(Bytes(), stop=["topx"])
    assert [stream.add(256), stream.add(ord("x")), stream.add(ord("y")), stream.end()] == ["s", "", "", ""]
    assert stream.stopped


@given(
    st.text("ab€", max_size=12),
    st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 255), max_size=9),
)
def test_pieces_against_the_whole_text(text, stop, prompt):
    parts, stopped = pieces(Bytes(), text.encode(), [*prompt, ord(" ")], stop)
    # Where a token completes several stop strings, the first place counts; here a token completes one character.
    ends = [text.find(string) + len(string) for string in stop if string in text]
    expected = text
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.find(string) for string in stop if string in seen)]
    assert "".join(parts) == expected
    assert stopped == bool(ends)


def test_with_a_real_tokenizer():
    pytest.importorskip("tokenizers")
    tokenizer = InferenceEngine.from_pretrained(DIRECTORY).tokenizer
    text = "def f(x):\n    return 'é€😀' + x  # ± 1\n" * 3
    tokens = tokenizer.encode(text).ids
    for cut in range(0, len(tokens), 5):
        before = tokenizer.decode(tokens[:cut])
        if not before.endswith("\ufffd"):  # not within a character
            assert before + "".join(pieces(tokenizer, tokens[cut:], tokens[:cut])[0]) == text
    parts, stopped = pieces(tokenizer, tokens, stop=["return '€", "'é€"])
    assert stopped
    assert "".join(parts) == "def f(x):\n    return "
