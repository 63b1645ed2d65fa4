"""Masks, compared with the tokens that a plain list of all texts allows; they depend on the tokens so far alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.errors import GrammarError
from kvcache.grammar import json_schema, regex

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
from spelled_networks import END, spelling

from kvcache.grammar.compiler import GrammarCompiler
from kvcache.grammar.mask_batch import MaskBatch

pytestmark = pytest.mark.one_build

TOKENIZER = spelling()
BYTES = [TOKENIZER.decode([i]) for i in range(256)]
COMPILER = GrammarCompiler(lambda: TOKENIZER, 256, [END])
LOGITS = np.arange(256, dtype=np.float32)


def allowed(matcher):
    return np.flatnonzero(np.isfinite(matcher.masked(LOGITS))).tolist()


def by_the_list(texts, before):
    """The tokens that may follow `before` in a language of these texts, and whether its next bytes are forced."""
    rests = [text[len(before) :] for text in texts if text.startswith(before)]
    found = [i for i in range(256) if BYTES[i] and any(rest.startswith(BYTES[i]) for rest in rests)]
    return sorted([*found, END] if "" in rests else found), len({rest[:1] for rest in rests}) == 1


@given(
    st.lists(st.text("aelnmpy ", max_size=5).map(lambda s: s + "name"[: len(s)]), min_size=1, max_size=5, unique=True),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_masks_of_a_finite_language(texts, seed):
    matcher = COMPILER.compile(regex("|".join(texts))).fresh([END])
    rng, text = np.random.default_rng(seed), ""
    for _ in range(40):
        got, (want, forced) = allowed(matcher), by_the_list(texts, text)
        assert got == want or (forced and len(got) == 1 and got[0] in want), (texts, text)
        token = int(rng.choice(got))
        if token == END:
            assert text in texts
            return
        matcher.advance(token)
        text += BYTES[token]
        longer = [each for each in texts if each.startswith(text) and each != text]
        assert matcher.is_complete == (not longer), (texts, text)
        if matcher.is_complete:
            assert text in texts
            return
    raise AssertionError("no text of the language is so long")


SCHEMA = json_schema(
    {
        "type": "object", "properties": {
            "name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "minimum": -9, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "maxItems": 3},
        },
        "required": ["name", "tags"], "additionalProperties": False,
    }
)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_masks_depend_on_the_tokens_alone(data):
    """However a matcher came to its place: with guesses asked for, masks prepared in a batch, or from the start."""
    start, batch = COMPILER.compile(SCHEMA), MaskBatch()
    plain, busy, text = start.fresh([END]), start.fresh([END]), []
    for _ in range(30):
        for action in data.draw(st.lists(st.sampled_from(["forced", "holds", "batch", "mask"]), max_size=2)):
            if action == "forced":
                forced = busy.forced()
                assert busy.holds(forced) == len(forced)
            elif action == "holds":
                busy.holds(data.draw(st.lists(st.integers(0, 255), max_size=3)))
            elif action == "batch":
                guess = data.draw(st.lists(st.integers(3, 255), max_size=3))
                guess = guess[: busy.holds(guess)]
                batch.prepare([(busy, guess), (start.fresh([END]), [])])
            else:
                busy.masked(LOGITS)
        want = allowed(plain)
        assert allowed(busy) == want
        assert allowed(start.fresh([END], text)) == want
        token = data.draw(st.sampled_from(want))
        if token == END:
            break
        text.append(token)
        plain.advance(token)
        busy.advance(token)
        assert plain.is_complete == busy.is_complete
        if plain.is_complete:
            break


def test_prepared_masks_are_used_along_the_guess():
    start, batch = COMPILER.compile(regex("(yes|no|name)+")), MaskBatch()
    matcher, other = start.fresh([END]), start.fresh([END])
    guess = TOKENIZER.encode("yesno").ids
    want = []
    for token in guess:
        want.append(allowed(other))
        other.advance(token)
    batch.prepare([(matcher, guess), (start.fresh([END]), [])])
    matcher._mask = None  # a mask that is not prepared fails
    for token, each in zip(guess, want, strict=True):
        assert allowed(matcher) == each
        matcher.advance(token)
    assert allowed(matcher) == allowed(other)


def test_a_token_that_ends_the_text_is_allowed_where_it_may_end():
    matcher = COMPILER.compile(regex("(no)+")).fresh([END, 77])
    assert not {END, 77} & {*allowed(matcher)}
    matcher.advance(TOKENIZER.token_to_id("no"))
    assert {END, 77} <= {*allowed(matcher)}
    matcher.advance(77)
    assert {END, 77} <= {*allowed(matcher)}, "the place is the same"
    assert not matcher.is_complete


def test_a_token_that_may_not_follow():
    matcher = COMPILER.compile(regex("yes")).fresh([END])
    with pytest.raises(GrammarError, match="grammar: expected the next tokens within the limits of a step, got"):
        matcher.advance(TOKENIZER.token_to_id("no"))
