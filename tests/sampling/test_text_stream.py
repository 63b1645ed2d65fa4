"""Text as its tokens come: the pieces are the whole text, and stop strings end it."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.demo import DIRECTORY
from kvcache.engine import InferenceEngine
from kvcache.sampling.text_stream import TextStream

pytestmark = pytest.mark.one_build


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


class Parts:
    """A tokenizer whose tokens are any bytes: several characters, or parts of two."""

    def __init__(self, tokens):
        self.tokens = tokens

    def decode(self, ids):
        return b"".join(self.tokens[token] for token in ids).decode(errors="replace")


class Counting:
    """Counts the tokens that a tokenizer decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.count = tokenizer, 0

    def decode(self, ids):
        self.count += len(ids)
        return self.tokenizer.decode(ids)


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


HALVES = [
    b"a", b"\xf0\x9f", b"\x98", b"\x80", b"\xf0", b"\xff", b"\xff\xff", b"\x80\xf0", b"\x9f\x98\x80\xf0", b"\xc3\xa9",
    b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", b"\xe4", b"\xff\xf0\x9f", b"\xef\xbf\xbd", b"",
]


@given(st.lists(st.integers(0, len(HALVES) - 1), max_size=80))
def test_any_bytes_give_the_text_of_all_tokens(ids):
    """Characters, parts of characters and bytes that are none, however they lie in tokens."""
    tokenizer = Parts(HALVES)
    stream, text = TextStream(tokenizer), ""
    for count, token in enumerate(ids, 1):
        text += stream.add(token)
        whole = tokenizer.decode(ids[:count])
        assert whole.startswith(text) or whole[:-1] == text[: len(whole) - 1]
        # No text waits for longer than three tokens.
        assert len(text) >= len(tokenizer.decode(ids[: max(0, count - 3)]).removesuffix("\ufffd"))
    assert text + stream.end() == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [Bytes(), Fallback()])
def test_bytes_that_are_no_character_do_not_wait(tokenizer):
    stream = TextStream(tokenizer, b"ab")
    assert [len(stream.add(0xFF)) for _ in range(50)][3:] == [1] * 47
    text = "".join(map(stream.add, "你好a".encode()))
    assert text + stream.end() == "\ufffd" * 3 + "你好a"


@given(st.lists(st.sampled_from([b"\xff", b"\x80", "你".encode(), b"a", "é".encode()]), max_size=30))
def test_runs_of_byte_tokens(parts):
    """As many characters of U+FFFD, at most, as a decoder has that finds a run invalid as a whole."""
    tokens = b"".join(parts)
    text = "".join(pieces(Fallback(), tokens)[0])
    best, worst = tokens.decode(errors="replace"), Fallback().decode(tokens)
    assert best.count("\ufffd") <= text.count("\ufffd") <= worst.count("\ufffd")
    assert all(worst.count(each) <= text.count(each) <= best.count(each) for each in "你aé")
    if "\ufffd" not in worst:
        assert text == worst


@pytest.mark.parametrize("kind", [b"a", b"\xff", b"\xf0", "é".encode(), b"", b"\x9f\x98\x80\xf0"])
@pytest.mark.parametrize("make", [Parts, lambda tokens: Fallback()])
def test_each_token_takes_the_same_time(kind, make):
    counts = []
    for number in (200, 400):
        tokenizer = Counting(make([kind]))
        stream = TextStream(tokenizer)
        for token in [0] * number if make is Parts else kind * number:
            stream.add(token)
        counts.append(tokenizer.count)
    assert counts[1] <= 2.2 * counts[0]
    assert counts[0] <= 200 * 160 * max(1, len(kind))


@pytest.mark.parametrize(
    "stop", [["a" * 20_000 + "b"], ["ab" * 10_000 + "c"], ["a" * n for n in range(19_990, 20_000)]]
)
def test_the_search_takes_time_linear_in_text_and_stop_strings(stop):
    """It took hours."""
    text = "ab" * 15_000 if "ab" in stop[0] else "a" * 30_000
    found, stopped = pieces(Bytes(), text.encode(), stop=stop)
    assert (stopped, "".join(found)) == ((True, "") if len(stop) > 1 else (False, text))
