"""Edits of conversations: old results of tools and old thoughts leave the prompt.

The edits are those of `context_management` in Anthropic's interface. Which parts leave is a function of the messages
and of their numbers of tokens alone, so a conversation that is sent again has the same prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvcache.engine.history import THOUGHTS, Messages, with_arguments
from kvcache.support.arguments import as_count, as_instance, short

__all__ = [
    "CLEARED", "Clearing", "Edited", "Edits", "Measure", "ThoughtClearing", "ToolClearing", "ToolUse", "as_edits",
    "clearings", "edited",
]

CLEARED = "[This result was cleared to save room.]"  # stands where a result of a tool stood
_TOOLS, _THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
_THOUGHT_PARTS = ("thinking", "redacted_thinking")
_MODE = "kvcache_mode"  # the field that says how a result is cleared: a name of this library
_FREE = 32  # clearings that are told apart whatever they clear; each token of a text behind masks sees all of them
_MOST_NAMES = 1024  # of tools
_LONG = 4096  # characters: a result with more has more tokens than `CLEARED`, and is not counted


class ToolClearing(NamedTuple):
    """The edit `clear_tool_uses_20250919`.

    Attributes:
        trigger: the most tokens of a prompt, or uses of tools in it, that change nothing; see `counts_uses`.
        counts_uses: whether `trigger` counts uses of tools.
        keep: how many of the last uses stay.
        at_least: the tokens that a clearing removes at least; else it is not done.
        exclude: names of tools whose uses stay.
        inputs: whether arguments of calls leave too; or names of the tools of which they do.
        mask: whether results stay in the text and are not seen any more, see `edit_masks`; None: nothing is said, so
            they do not.
    """

    trigger: int = 100_000
    counts_uses: bool = False
    keep: int = 3
    at_least: int = 0
    exclude: frozenset[str] = frozenset()
    inputs: bool | frozenset[str] = False
    mask: bool | None = None

    def clears_input(self, name: str) -> bool:
        """Whether the arguments of a cleared call of this tool leave too."""
        return self.inputs if isinstance(self.inputs, bool) else name in self.inputs


class ThoughtClearing(NamedTuple):
    """The edit `clear_thinking_20251015`: how many of the last turns with thoughts keep them; None: all."""

    keep: int | None = 1


class Edits(NamedTuple):
    """The edits of a request; None: there is none of that kind."""

    thoughts: ThoughtClearing | None = None
    uses: ToolClearing | None = None

    def by_masks(self) -> Edits:
        """The edits, those by masks that can be and say nothing of it."""
        uses = self.uses
        return self if uses is None or uses.inputs or uses.mask is not None else Edits(
            self.thoughts, uses._replace(mask=True)
        )


class ToolUse(NamedTuple):
    """A use of a tool in a conversation.

    Attributes:
        name: of the tool; "": nothing tells it.
        result: the number of the message that has the result.
        call: the number of the message of the call, and its place among the calls there; None: there is no call.
    """

    name: str
    result: int
    call: tuple[int, int] | None


class Clearing(NamedTuple):
    """The uses that are cleared at once, and after how many messages that was done."""

    point: int
    uses: list[ToolUse]


class Edited(NamedTuple):
    """A conversation after its edits.

    Attributes:
        messages: what stays; a cleared result is `CLEARED`, unless that is no shorter.
        applied: what each edit that changed something has cleared, as the interface says it.
        original_tokens: tokens of the prompt before the edits; None: they changed nothing.
        masked: the uses whose results stay in `messages` and are not seen behind the edits; see `edit_masks`.
    """

    messages: Messages
    applied: tuple[dict[str, Any], ...] = ()
    original_tokens: int | None = None
    masked: tuple[Clearing, ...] = ()

    def with_masked(self, tokens: int, masked: int) -> Edited:
        """Tell of the masks too, once they are found in the prompt: of its `tokens`, `masked` are not seen any more."""
        if not self.masked:
            return self
        found = _told(sum(len(each.uses) for each in self.masked), masked)
        original = tokens if self.original_tokens is None else self.original_tokens
        return self._replace(applied=(*self.applied, found), original_tokens=original)


class Measure(Protocol):
    """Counts tokens for the rules."""

    def prompt(self, messages: Messages) -> int:
        """The tokens of the prompt of a conversation."""

    def before(self, messages: Messages, points: Sequence[int]) -> list[int]:
        """The tokens that the prompts of the first messages had, by their numbers, ascending up to all; 0: unknown."""

    def text(self, text: str) -> int:
        """The tokens of a text alone."""


# -- what is asked for --------------------------------------------------------------------------------------------


def as_edits(value: Any, name: str = "edits") -> Edits | None:
    """Read a list of edits as the interface has them; None: it is empty.

    Raises:
        TypeError, ValueError: no such edits; an edit of unknown type, or twice; thoughts behind uses of tools.
    """
    found: dict[str, Any] = {}
    given = [*value] if isinstance(value, (list, tuple)) else as_instance(value, list, name)
    for number, each in enumerate(given):
        own = f"{name}[{number}]"
        kind = as_instance(each, dict, own).get("type")
        if not isinstance(kind, str) or kind not in _READERS:
            raise ValueError(f"{own}.type: expected {_THINKING} or {_TOOLS}, got {short(kind)}")
        key, fields, read = _READERS[kind]
        if key in found:
            raise ValueError(f"{own}.type: expected each type once, got {kind} again")
        if key == "thoughts" and found:
            raise ValueError(f"{own}.type: expected {_THINKING} before {_TOOLS}, got it behind")
        if unknown := [short(field)[1:-1] for field in each if field != "type" and field not in fields]:
            raise ValueError(f"{own}: expected the fields {', '.join(fields)}, got {unknown[0]}")
        found[key] = read({field: each[field] for field in fields if each.get(field) is not None}, own)
    return Edits(**found) if found else None


def _tools_edit(given: Mapping[str, Any], name: str) -> ToolClearing:
    own: dict[str, Any] = {}
    if "trigger" in given:
        kind, own["trigger"] = _amount(given["trigger"], f"{name}.trigger", ("input_tokens", "tool_uses"))
        own["counts_uses"] = kind == "tool_uses"
    if "keep" in given:
        own["keep"] = _amount(given["keep"], f"{name}.keep", ("tool_uses",))[1]
    if "clear_at_least" in given:
        own["at_least"] = _amount(given["clear_at_least"], f"{name}.clear_at_least", ("input_tokens",))[1]
    if "exclude_tools" in given:
        own["exclude"] = _names(given["exclude_tools"], f"{name}.exclude_tools")
    if (inputs := given.get("clear_tool_inputs")) is not None:
        own["inputs"] = inputs if isinstance(inputs, bool) else _names(inputs, f"{name}.clear_tool_inputs")
    own["mask"] = _is_mask(given, name, ("recompute", "mask")) if _MODE in given else None
    if own["mask"] and own.get("inputs"):
        raise ValueError(f"{name}.clear_tool_inputs: expected false beside {_MODE} mask, got {short(inputs)}")
    return ToolClearing(**own)


def _thinking_edit(given: Mapping[str, Any], name: str) -> ThoughtClearing:
    _is_mask(given, name, ("recompute",))
    keep = given.get("keep", {"type": "thinking_turns", "value": 1})
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return ThoughtClearing(None)
    return ThoughtClearing(_amount(keep, f"{name}.keep", ("thinking_turns",), 1)[1])


# How an edit is read, by its type: its name in `Edits`, its fields, and the function that reads these.
_READERS: dict[str, tuple[str, tuple[str, ...], Callable[[Mapping[str, Any], str], Any]]] = {
    _THINKING: ("thoughts", ("keep", _MODE), _thinking_edit),
    _TOOLS: ("uses", ("trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs", _MODE), _tools_edit),
}


def _is_mask(given: Mapping[str, Any], name: str, modes: Sequence[str]) -> bool:
    """Whether an edit is by masks."""
    if (mode := given.get(_MODE, "recompute")) not in modes:
        raise ValueError(f"{name}.{_MODE}: expected {' or '.join(modes)}, got {short(mode)}")
    return bool(mode == "mask")


def _amount(value: Any, name: str, kinds: Sequence[str], least: int = 0) -> tuple[str, int]:
    """An object of a type and a value."""
    kind = as_instance(value, dict, name).get("type")
    if kind not in kinds:
        raise ValueError(f"{name}.type: expected {' or '.join(kinds)}, got {short(kind)}")
    return str(kind), as_count(value.get("value"), f"{name}.value", least)


def _names(value: Any, name: str) -> frozenset[str]:
    found = [*value] if isinstance(value, (list, tuple, frozenset)) else as_instance(value, list, name)
    if len(found) > _MOST_NAMES:
        raise ValueError(f"{name}: expected at most {_MOST_NAMES} names, got {len(found)}")
    return frozenset(as_instance(each, str, name) for each in found)


# -- what is done -------------------------------------------------------------------------------------------------


def edited(messages: Messages, edits: Edits, measure: Measure) -> Edited:
    """Do the edits of a request, one behind the other, each on what those before it have left.

    Args:
        messages: in the shape of chat completions.
        edits: what is asked for.
        measure: counts tokens.
    """
    found, applied, original = messages, list[dict[str, Any]](), None
    if edits.thoughts is not None:
        kept, turns = _without_thoughts(found, edits.thoughts)
        if turns:
            original, tokens = measure.prompt(found), measure.prompt(kept)
            cleared = {"cleared_thinking_turns": turns, "cleared_input_tokens": max(0, original - tokens)}
            applied.append({"type": _THINKING, **cleared})
            found = kept
    done = [] if edits.uses is None else clearings(found, edits.uses, measure, each=bool(edits.uses.mask))
    if edits.uses is not None and edits.uses.mask:
        return Edited(found, tuple(applied), original, tuple(done))
    if edits.uses is not None and (uses := [use for each in done for use in each.uses]):
        kept, count = _without_uses(found, uses, edits.uses, measure)
        if count:
            before = measure.prompt(found)
            original = before if original is None else original
            applied.append(_told(count, max(0, before - measure.prompt(kept))))
            found = kept
    return Edited(found, tuple(applied), original)


def _told(uses: int, tokens: int) -> dict[str, Any]:
    """The report of an edit of uses of tools."""
    return {"type": _TOOLS, "cleared_tool_uses": uses, "cleared_input_tokens": tokens}


def clearings(messages: Messages, edit: ToolClearing, measure: Measure, *, each: bool = False) -> list[Clearing]:
    """Which uses of tools an edit clears.

    The rule is asked at each request that the messages show: before each message of the assistant, and now. Where the
    prompt of that request exceeds the trigger, all uses but the last `keep` are cleared, unless those that were not
    cleared at an earlier request have fewer than `at_least` tokens.

    Args:
        messages: of the conversation.
        edit: the rule.
        measure: counts tokens.
        each: whether each request that clears something is told apart. Behind the first `_FREE` of them, a request
            clears uses only if they have one token in `_FREE` of its prompt. Without `each`, an edit without `at_least`
            is asked for now alone.
    """
    uses = _tool_uses(messages)
    points = [place for place, message in enumerate(messages) if place and message.get("role") == "assistant"]
    points = [*points, len(messages)] if each or edit.at_least else [len(messages)]
    results = [use.result for use in uses]
    free = [number for number, use in enumerate(uses) if use.name not in edit.exclude]
    steps = []  # requests that can clear something: uses that they have, and how many of the free ones they may clear
    for point in points:
        seen = bisect_left(results, point)
        if able := bisect_left(free, seen - edit.keep):
            steps.append((point, seen, able))
    if not steps:
        return []
    sizes = seen_uses = [seen for _, seen, _ in steps]
    if not edit.counts_uses or (each and len(steps) > _FREE):
        sizes = measure.before(messages, [point for point, _, _ in steps])
    tokens = _UseTokens(messages, edit, measure, [uses[number] for number in free])
    found, count = list[Clearing](), 0
    for (point, _, able), size, seen in zip(steps, sizes, seen_uses, strict=True):
        least = max(edit.at_least, size // _FREE if each and len(found) >= _FREE else 0)
        is_due = able > count and (seen if edit.counts_uses else size) > edit.trigger
        if is_due and (not least or tokens.between(count, able) >= least):
            found.append(Clearing(point, [uses[number] for number in free[count:able]]))
            count = able
    return found


class _UseTokens:
    """Counts the tokens of texts that leave with uses, less those of the texts in their places; each use once."""

    def __init__(self, messages: Messages, edit: ToolClearing, measure: Measure, uses: Sequence[ToolUse]) -> None:
        self._messages, self._edit, self._measure, self._uses = messages, edit, measure, uses
        self._instead = 0 if edit.mask else measure.text(CLEARED)
        self._sums = [0]  # of the first uses, by their number

    def between(self, start: int, stop: int) -> int:
        """The tokens of some of the uses."""
        for use in self._uses[len(self._sums) - 1 : stop]:
            own = max(0, sum(map(self._measure.text, _texts(self._messages[use.result]))) - self._instead)
            if use.call is not None and self._edit.clears_input(use.name):
                message, place = use.call
                given = _function_of(self._messages[message]["tool_calls"][place]).get("arguments")
                own += self._measure.text(str(given or ""))
            self._sums.append(self._sums[-1] + own)
        return self._sums[stop] - self._sums[start]


def _texts(result: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a result."""
    content = result.get("content")
    for part in content if isinstance(content, list) else [{"text": content}]:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def _is_longer(result: Mapping[str, Any], measure: Measure, instead: int) -> bool:
    """Whether a result has more than `instead` tokens, those of the text in its place: others stay as they are."""
    content, texts = result.get("content"), [*_texts(result)]
    if isinstance(content, list) and len(texts) < len(content):  # it has more than texts
        return True
    return sum(map(len, texts)) > _LONG or sum(map(measure.text, texts)) > instead


def _tool_uses(messages: Messages) -> list[ToolUse]:
    """The uses of tools that have a result, in the order of these. A result without an id is that of the next call."""
    found, waiting, places = list[ToolUse](), OrderedDict[int, tuple[str, tuple[int, int]]](), dict[str, deque[int]]()
    for number, message in enumerate(messages):
        if message.get("role") == "tool":
            own = places.get(repr(message.get("tool_call_id")), deque())
            while own and own[0] not in waiting:  # a result without an id has taken it
                own.popleft()
            name, call = waiting.pop(own[0] if own else next(iter(waiting))) if waiting else ("", None)
            found.append(ToolUse(name or str(message.get("name") or ""), number, call))
        elif isinstance(calls := message.get("tool_calls"), list):
            waiting, places = OrderedDict(), {}
            for place, each in enumerate(calls):
                if isinstance(each, dict):
                    waiting[place] = str(_function_of(each).get("name") or ""), (number, place)
                    places.setdefault(repr(each.get("id")), deque()).append(place)
    return found


def _function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _without_uses(
    messages: Messages, uses: Sequence[ToolUse], edit: ToolClearing, measure: Measure
) -> tuple[Messages, int]:
    """The messages with a placeholder for each result of some uses, and perhaps without the arguments of the calls.

    Results that are no longer than it stay. Returns also the number of uses of which something has left.
    """
    found, calls = [*messages], dict[int, list[Any]]()  # the calls of messages, copied once
    instead, count = measure.text(CLEARED), 0
    for use in uses:
        is_longer = _is_longer(found[use.result], measure, instead)
        if is_longer:
            found[use.result] = found[use.result] | {"content": CLEARED}
        count += is_longer or (use.call is not None and edit.clears_input(use.name))
        if use.call is not None and edit.clears_input(use.name):
            number, place = use.call
            if number not in calls:
                calls[number] = [*messages[number]["tool_calls"]]
            own = calls[number]
            own[place] = with_arguments(own[place], lambda given: "{}" if isinstance(given, str) else {})
    for number, own in calls.items():
        found[number] = found[number] | {"tool_calls": own}
    return found, count


# -- thoughts -----------------------------------------------------------------------------------------------------


def _without_thoughts(messages: Messages, edit: ThoughtClearing) -> tuple[Messages, int]:
    """The messages without the thoughts of all but the last turns that have some, and of how many turns they were."""
    turns = [turn for turn in _turns(messages) if any(_has_thoughts(messages[number]) for number in turn)]
    cleared = [] if edit.keep is None else turns[: max(0, len(turns) - edit.keep)]
    found = [*messages]
    for number in (number for turn in cleared for number in turn):
        found[number] = _thoughtless(found[number])
    return found, len(cleared)


def _turns(messages: Messages) -> list[list[int]]:
    """The messages of the assistant, by turns: one ends where the user speaks, but not beside results of its calls."""
    turns: list[list[int]] = [[]]
    after = None  # the role of the message before
    for number, message in enumerate(messages):
        role = message.get("role")
        if role == "assistant":
            turns[-1].append(number)
        elif role == "user" and after != "tool":
            turns.append([])
        after = role
    return turns


def _has_thoughts(message: dict[str, Any]) -> bool:
    return _thoughtless(message) != message


def _thoughtless(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the assistant without thoughts."""
    found = {key: value for key, value in message.items() if key not in THOUGHTS or not value}
    if isinstance(content := message.get("content"), list):
        parts = [part for part in content if not isinstance(part, dict) or part.get("type") not in _THOUGHT_PARTS]
        found["content"] = parts or ""
    return found
