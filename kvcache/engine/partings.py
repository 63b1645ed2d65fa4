"""Where the next requests of a conversation will part from its prompt, found with the chat template.

A template may write the beginning of an answer in another way once a message follows it: it leaves out thoughts, or an
empty block of them. So the tokens that the next turn shares are those of the same conversation with an answer and a
message more, as far as both are alike; and those that other conversations share end with the system prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvcache.engine.chat import chat_tokens, render
from kvcache.sampling.tokenizer import CheckpointText, GgufText

__all__ = ["partings"]

_ANSWER, _QUESTION = {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}
_SYSTEM = ("system", "developer")


def partings(
    text: CheckpointText | GgufText | None, messages: Any, prompt: Sequence[int], tools: Any = None,
    template: Any = None,
) -> tuple[int, ...]:
    """After how many tokens of a prompt the next turn of its conversation, and other ones, are expected to differ.

    Args:
        messages, tools, template: those that the prompt was written of.
        prompt: its token ids.

    Returns:
        The places, ascending; none where the template does not take such a conversation.
    """
    write, encode = partial(render, text, tools=tools, template=template), partial(chat_tokens, text)
    try:
        given = list(messages)
        heads = [each for each in given[:2] if each["role"] in _SYSTEM]
        others = [[*given, _ANSWER, _QUESTION], [*heads, _QUESTION] if heads or tools else given]
        rendered = write(given)
        alike = [_common(rendered, write(other)) for other in others if other is not given]
        places = {_tokens_of(encode, rendered, end, prompt) for end in alike}
    except (ValueError, TypeError, KeyError):  # of a template that wants other roles
        return ()
    return tuple(sorted(places - {0}))


def _tokens_of(encode: Callable[[str], list[int]], rendered: str, end: int, prompt: Sequence[int]) -> int:
    """How many tokens of a prompt are those of the first `end` characters of its text."""
    rest = encode(rendered[end:]) if 2 * end > len(rendered) else []
    if end == len(rendered) or (rest and list(prompt[-len(rest) :]) == rest):
        return len(prompt) - len(rest)
    return _common(list(prompt), encode(rendered[:end]))


def _common(a: Iterable[Any], b: Iterable[Any]) -> int:
    """How many first elements are alike."""
    first, second = np.array(list(a)), np.array(list(b))
    most = min(len(first), len(second))
    differ = first[:most] != second[:most]
    return int(differ.argmax()) if differ.any() else most
