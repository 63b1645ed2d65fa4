"""Where the next requests of a conversation will part from its prompt, found with the chat template.

A template may write the beginning of an answer in another way once a message follows it: it leaves out thoughts, or an
empty block of them. So the tokens that the next turn shares are those of the same conversation with an answer and a
message more, as far as both are alike; and those that other conversations share end with the system prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from kvcache.engine.chat import chat_tokens_with_ends, render
from kvcache.sampling.tokenizer import CheckpointText, GgufText

__all__ = ["common", "parting_ends", "partings", "places_of", "prompt_with_partings"]

_ANSWER, _QUESTION = {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}
_SYSTEM = ("system", "developer")


def parting_ends(
    write: Callable[[list[Any]], str], text: str, messages: list[Any], tools: Any, *, continues: bool = False
) -> list[int]:
    """After how many characters of its text the next turn of a conversation, and other ones, are expected to differ.

    Args:
        write: makes the text of messages. ValueError, TypeError, KeyError: the template wants other ones.
        text: of the conversation.
        messages, tools: of it.
        continues: whether its answer goes on with the last message.

    Returns:
        Places in the text; none where the template does not take such conversations.
    """
    ends = []
    with suppress(ValueError, TypeError, KeyError):
        heads = [each for each in messages[:2] if each["role"] in _SYSTEM]
        others = [[*messages, *([] if continues else [_ANSWER]), _QUESTION]]
        others += [[*heads, _QUESTION]] if heads or tools else []
        ends = [common(text, write(other)) for other in others]
    return ends


def prompt_with_partings(
    text: CheckpointText | GgufText | None, messages: Any, tools: Any, template: Any, most: int | None
) -> tuple[list[int], tuple[int, ...]]:
    """The token ids of a conversation, and after how many of them the next turn and other ones are expected to differ.

    The arguments are those of `render` and `chat_tokens`, and so are the errors of the conversation itself.
    """

    def write(messages: Any) -> str:
        return render(text, messages, tools, template=template)

    rendered = write(messages)
    ids, counts = chat_tokens_with_ends(text, rendered, parting_ends(write, rendered, [*messages], tools), most)
    return ids, places_of(counts)


def partings(
    text: CheckpointText | GgufText | None, messages: Any, prompt: Sequence[int], tools: Any = None,
    template: Any = None,
) -> tuple[int, ...]:
    """After how many tokens of a prompt the next turn of its conversation, and other ones, are expected to differ.

    Args:
        messages, tools, template: those that the prompt was written of.
        prompt: its token ids; where they are not those of the template, as far as they are alike.

    Returns:
        The places, ascending; none where the template does not take such a conversation.
    """
    try:
        ids, places = prompt_with_partings(text, messages, tools, template, None)
    except (ValueError, TypeError):
        return ()
    given = [*prompt]
    if given == ids:
        return places
    # A text of the user may have other tokens, behind which the end is the same.
    alike = common(given, ids)
    ends = [len(given) - len(ids[place:]) for place in places]
    return places_of(
        end if place > alike and given[max(0, end) :] == ids[place:] else min(place, alike)
        for place, end in zip(places, ends, strict=True)
    )


def places_of(counts: Iterable[int]) -> tuple[int, ...]:
    """The numbers of tokens, ascending, each once, without 0."""
    return tuple(sorted({*counts} - {0}))


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many first elements of two texts, or of two lists, are alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # the rest is halved, so all slices together are as long as the shorter one
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
