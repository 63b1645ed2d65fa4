"""Turns of a conversation as a chat template takes them: what it refuses is written in another way.

Templates are written for conversations that went well. An answer may also be empty, end within a thought or a call,
have words beside thoughts and calls, or several calls; and clients say more before a call has its result, and send
parts for texts. A template tells what it takes: it writes a small conversation of each kind once. Where it refuses one,
or leaves out a part of it, the messages of that kind, and no others, have another form in every conversation: the next
turn shares the prompt.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from kvcache.support.json_text import begun_object

__all__ = ["THOUGHTS", "TOOLS", "Messages", "Rewriting", "are_texts", "rewritings", "with_arguments"]

Messages = list[dict[str, Any]]
Rewriting = Callable[[Messages], Messages]

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the keys of an assistant's thoughts
_ID = 9  # characters of an id of a call, which Mistral's templates want


class _Kind(NamedTuple):
    """A kind of turns that some templates refuse.

    Attributes:
        probes: conversations that have it.
        ways: other forms of its messages, the best first.
        shown: what a template that takes it writes.
    """

    probes: tuple[Messages, ...]
    ways: tuple[Rewriting, ...]
    shown: str = ""


def rewritings(words: Rewriting, write: Callable[[Messages], str]) -> list[Rewriting]:
    """The rewritings that a template needs, in the order in which they are to be done.

    Args:
        words: what is done with each conversation before.
        write: writes a conversation as the template does, with `TOOLS`. ValueError: it refuses that.
    """

    def takes(kind: _Kind, ways: Sequence[Rewriting]) -> bool:
        """Whether the template takes the conversations of a kind after these rewritings."""
        for probe in kind.probes:
            for way in (words, *ways):
                probe = way(probe)
            try:
                if kind.shown not in write(probe):
                    return False
            except ValueError:
                return False
        return True

    found: list[Rewriting] = []
    for kind in reversed(_KINDS):  # a later one is done on what an earlier one has made
        if not takes(kind, found):
            ways = ([way, *found] for way in kind.ways)
            found = next((way for way in ways if takes(kind, way)), found)
    return found


# -- ways ---------------------------------------------------------------------------------------------------------


def _text_for_parts(role: str) -> Rewriting:
    """The texts of parts are one, in messages of this role."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        parts = message.get("content")
        if message.get("role") != role or not isinstance(parts, list) or not are_texts(parts):
            return message
        return message | {"content": "".join(part["text"] for part in parts)}

    return lambda messages: [changed(each) for each in messages]


def are_texts(parts: Sequence[Any]) -> bool:
    """Whether all parts of a content are texts."""
    return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)


def _system_of_user(messages: Messages) -> Messages:
    """Put what the system says at the beginning before the first words of the user."""
    if not messages or messages[0].get("role") != "system":
        return messages
    system, *rest = messages[0] | {"role": "user"}, *messages[1:]
    if rest and rest[0].get("role") == "user":
        return [_joined([system, rest[0]]), *rest[1:]]
    return [system, *rest]


def _single_calls(messages: Messages) -> Messages:
    """A turn for each call, with its result behind it; the first has the words and the thoughts."""
    found: Messages = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        if len(calls := _calls(message)) < 2:
            found.append(message)
            continue
        end = place
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        bare = {"role": "assistant", "content": ""}
        for number, own in enumerate(_results_of(calls, messages[place:end])):
            found += [(bare if number else message) | {"tool_calls": [calls[number]]}, *own]
        place = end
    return found


def _results_of(calls: Sequence[Any], results: Messages) -> list[Messages]:
    """The results of each call: by its id, or by their places where they have none of these."""
    found: list[Messages] = [[] for _ in calls]
    places: dict[str, list[int]] = {}
    for number in reversed(range(len(calls))):
        places.setdefault(str(_id_of(calls[number])), []).append(number)
    for place, result in enumerate(results):
        if own := places.get(str(result.get("tool_call_id"))):  # several calls may have one id
            found[own.pop() if len(own) > 1 else own[0]].append(result)
        else:
            found[min(place, len(calls) - 1)].append(result)
    return found


def _with_results(messages: Messages) -> Messages:
    """An empty result behind calls that have none before the next message of another role."""
    found: Messages = []
    for message, following in pairwise([*messages, {"role": "tool"}]):
        found.append(message)
        if (calls := _calls(message)) and following.get("role") != "tool":
            found += [{"role": "tool", "tool_call_id": _id_of(call), "content": ""} for call in calls]
    return found


def _with_answers(messages: Messages) -> Messages:
    """An empty answer between a result and what the user says next."""
    found: Messages = []
    for message in messages:
        if found and (found[-1].get("role"), message.get("role")) == ("tool", "user"):
            found.append({"role": "assistant", "content": ""})
        found.append(message)
    return found


def _one_by(role: str) -> Rewriting:
    """Messages of this role that follow each other are one; behind calls another one begins."""

    def joined(messages: Messages) -> Messages:
        groups: list[Messages] = []
        for message in messages:
            last = groups[-1][-1] if groups else {}
            is_same = last.get("role") == message.get("role") == role and not _calls(last)
            if is_same and _has_text(last) and _has_text(message):
                groups[-1].append(message)
            else:
                groups.append([message])
        return [group[0] if len(group) == 1 else _joined(group) for group in groups]

    return joined


def _has_text(message: dict[str, Any]) -> bool:
    return message.get("content") is None or isinstance(message["content"], (str, list))


def _joined(group: Messages) -> dict[str, Any]:
    """One message of several; texts are put together by an empty line."""
    contents: list[Any] = []
    for kind, found in groupby((each["content"] for each in group if each.get("content")), type):
        same = [*found]
        contents += ["\n\n".join(same)] if kind is str else same
    if not all(isinstance(each, str) for each in contents):
        parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents)
        contents = [[part for each in parts for part in each]]
    thoughts = {
        key: "\n\n".join(str(each[key]) for each in group if each.get(key))
        for key in THOUGHTS if any(key in each for each in group)
    }
    merged = {key: value for each in group for key, value in each.items()}
    return merged | thoughts | {"content": contents[0] if contents else ""}


def _short_ids(messages: Messages) -> Messages:
    """Ids of calls with as many letters and digits as such a template wants; those that have them stay."""
    found: Messages = []
    for message in messages:
        if calls := _calls(message):
            message = message | {"tool_calls": [call | {"id": _short_id(_id_of(call))} for call in calls]}
        elif message.get("role") == "tool":
            message = message | {"tool_call_id": _short_id(message.get("tool_call_id"))}
        found.append(message)
    return found


def _short_id(id: Any) -> str:
    if isinstance(id, str) and len(id) == _ID and id.isascii() and id.isalnum():
        return id
    digest = hashlib.blake2b(str(id).encode("utf-8", "replace"), digest_size=_ID).digest()
    return base64.b32encode(digest).decode()[:_ID].lower()


def _each(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Rewriting:
    """The rewriting that changes each message of the assistant alone."""
    return lambda messages: [change(each) if each.get("role") == "assistant" else each for each in messages]


def _thought_words(message: dict[str, Any]) -> dict[str, Any]:
    """Words beside thoughts and calls are the end of the thoughts."""
    keys, words = [key for key in THOUGHTS if message.get(key)], message.get("content")
    if not keys or not isinstance(words, str) or not words or not _calls(message):
        return message
    return message | {key: f"{message[key]}\n\n{words}" for key in keys} | {"content": ""}


def _text_for_none(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": ""} if message.get("content", "") is None else message


def _parts_for_nothing(message: dict[str, Any]) -> dict[str, Any]:
    """An answer without words has parts: its thoughts and an empty text."""
    if not _is_empty(message):
        return message
    thoughts = [{"type": "thinking", "thinking": message[key]} for key in THOUGHTS if message.get(key)][:1]
    return message | {"content": [*thoughts, {"type": "text", "text": ""}]}


def _text_for_nothing(message: dict[str, Any]) -> dict[str, Any]:
    """An answer without words has an empty text as its only part."""
    return message | {"content": [{"type": "text", "text": ""}]} if _is_empty(message) else message


def _space_for_nothing(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": " "} if _is_empty(message) else message


def _is_empty(message: dict[str, Any]) -> bool:
    return not message.get("content") and not _calls(message)


def _objects(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls are objects, whatever the network has written."""
    calls = _calls(message)
    return message | {"tool_calls": [with_arguments(call, _object_of) for call in calls]} if calls else message


def _object_of(arguments: Any) -> Any:
    if isinstance(arguments, dict):
        return arguments
    begun = begun_object(arguments) if isinstance(arguments, str) else None
    if begun is not None:
        return begun
    return {} if arguments in (None, "", "null") else {"arguments": arguments}


def with_arguments(call: Any, read: Callable[[Any], Any]) -> Any:
    """A call whose arguments are what `read` makes of them."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    function = function | {"arguments": read(function["arguments"])}
    return call | {"function": function} if "function" in call else function


def _calls(message: dict[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _id_of(call: dict[str, Any]) -> Any:
    return call.get("id")


# -- kinds --------------------------------------------------------------------------------------------------------

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find", "description": "Finds.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}},
        },
    }
]  # of the probes
_WORD, _OWN = "zqxj", '{"at": "x"}'
_USER, _ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}


def _said(
    content: str | None, thoughts: str = "", ids: Sequence[str] = (), arguments: str = _OWN, place: int = 0
) -> dict[str, Any]:
    """A message of the assistant with calls of these ids; that at a place has arguments of its own."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        message |= dict.fromkeys(THOUGHTS, thoughts)
    if ids:
        given = [arguments if number == place else _OWN for number in range(len(ids))]
        functions = [{"name": "find", "arguments": each} for each in given]
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": each} for id, each in zip(ids, functions, strict=True)
        ]
    return message


def _results(*ids: str) -> Iterator[dict[str, Any]]:
    return ({"role": "tool", "tool_call_id": id, "name": "find", "content": "Here"} for id in ids)


_A, _B = "abcdefgh1", "abcdefgh2"
_LINES = "zq\nxj"  # a list that a template writes as Python does has no end of a line
_PARTS = [{"type": "text", "text": each} for each in ("So ", _LINES)]
_KINDS = (
    # parts of others than users: Gemma 4 writes Python's list of them, Devstral the first one alone
    _Kind(([{"role": "system", "content": _PARTS}, _USER],), (_text_for_parts("system"),), _LINES),
    _Kind(([_USER, _ANSWER | {"content": _PARTS}, _USER],), (_text_for_parts("assistant"),), _LINES),
    _Kind(
        ([_USER, _said("", "", [_A]), next(_results(_A)) | {"content": _PARTS}],), (_text_for_parts("tool"),), _LINES
    ),
    # several calls: Llama 3, and gpt-oss and GigaChat 3, whose templates write the first one alone
    _Kind(
        ([_USER, _said("", "", [_A, _B], f'{{"at": "{_WORD}"}}', 1), *_results(_A, _B)],), (_single_calls,), _WORD
    ),
    # words of the system: Gemma 1 and 2
    _Kind(([{"role": "system", "content": "Be"}, _USER],), (_system_of_user,)),
    # calls without a result: Mistral
    _Kind(([_USER, _said("", "", [_A]), _USER],), (_with_results,)),
    # a word of the user behind a result: Mistral
    _Kind(([_USER, _said("", "", [_A]), *_results(_A), _USER],), (_with_answers,)),
    # two answers, two questions: Gemma, Mistral
    _Kind(([_USER, _ANSWER, _ANSWER, _USER],), (_one_by("assistant"),)),
    _Kind(([_USER, _USER],), (_one_by("user"),)),
    # ids of other servers: Mistral
    _Kind(([_USER, _said("", "", ["call_1234567890"]), *_results("call_1234567890")],), (_short_ids,)),
    # words beside thoughts and calls: gpt-oss
    _Kind(([_USER, _said("Well", "Hm", [_A]), *_results(_A)],), (_each(_thought_words),)),
    # arguments that are no object: templates that go through their members
    _Kind(([_USER, _said("", "", [_A], _WORD), *_results(_A)],), (_each(_objects),), _WORD),
    # none for a content: Apertus, Ministral 3
    _Kind(
        ([_USER, _said(None), _USER], [_USER, _said(None, "", [_A]), *_results(_A)], [_USER, _said(None, "Hm"), _USER]),
        (_each(_text_for_none),),
    ),
    # nothing but thoughts, and nothing at all: Ministral 3
    _Kind(
        ([_USER, _said("", "Hm"), _USER], [_USER, _said(""), _USER]),
        (_each(_parts_for_nothing), _each(_text_for_nothing), _each(_space_for_nothing)),
    ),
)
