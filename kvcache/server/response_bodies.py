"""Bodies of `/v1/responses`, OpenAI's newer interface. Nothing is kept between two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvcache.engine import SamplingParams
from kvcache.engine.documents import LINK
from kvcache.grammar import Grammar
from kvcache.server.asked import Asked
from kvcache.server.constraints import form_of
from kvcache.server.contents import Contents, as_list, left_out
from kvcache.server.conversations import MAX_MESSAGES, ToolChoice, conversation_of, effort, tool_choice_of, verbosity
from kvcache.server.fields import CHATS, FLAG, FROM_1, IGNORED, PLAIN, TEXT, Field
from kvcache.server.message_bodies import Said, skipped
from kvcache.server.refusals import BodyError
from kvcache.support.arguments import as_instance, short

__all__ = ["RESPONSES", "asked_of_response", "flattened", "tools_of_body"]

_OUTPUTS = ("function_call_output", "custom_tool_call_output")


class _Served(NamedTuple):
    """A kind of calls that a service, or a client for it, has answered.

    Attributes:
        name: of the tool; "": the item has one.
        given: the key of what was asked.
        found: the keys of the answer within the call; others have an item of their own.
    """

    name: str
    given: str
    found: tuple[str, ...] = ()


# Calls of tools that are none of ours are read with their answers, where these have texts, and left out otherwise.
_SERVED = {
    "apply_patch_call": _Served("apply_patch", "operation"),
    "code_interpreter_call": _Served("code_interpreter", "code", ("outputs",)),
    "computer_call": _Served("computer", "action"),
    "file_search_call": _Served("file_search", "queries", ("results",)),
    "local_shell_call": _Served("local_shell", "action"),
    "mcp_call": _Served("", "arguments", ("output", "error")),
    "shell_call": _Served("shell", "action"),
    "tool_search_call": _Served("tool_search", "arguments"),
    "web_search_call": _Served("web_search", "action", ("results",)),
}
_ANSWERS = ("_call_output", "tool_search_output")  # end the kinds of their answers
_CALL = "_call"  # ends the kinds of calls


class _Item(NamedTuple):
    """A kind of items that are neither messages nor calls.

    Attributes:
        words: the keys of the user's words; an item without words is left out.
        needed: whether it has a placeholder then.
    """

    words: tuple[str, ...] = ()
    needed: bool = False


_ITEMS = {
    "additional_tools": _Item(), "compaction_trigger": _Item(), "mcp_approval_request": _Item(),
    "mcp_approval_response": _Item(("reason",)), "mcp_list_tools": _Item(), "item_reference": _Item(needed=True),
    **dict.fromkeys(
        ("compaction", "compaction_summary", "context_compaction"), _Item(("content", "summary"), needed=True)
    ),
}
_LOADING = ("additional_tools", "tool_search_output")  # items with tools that may be called from then on


def asked_of_response(given: dict[str, Any], defaults: SamplingParams) -> Asked:
    """Read the fields of a body, `checked` by `RESPONSES`; `defaults` and errors are as of `asked_of_completion`."""
    contents = Contents("input")
    system = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
    messages = [*system, *_messages(given["input"], contents)]
    tools = [*_tools(tools_of_body(given))]
    choice = _choice(given.get("tool_choice", "auto")) if tools else ToolChoice()
    text, template = as_instance(given.get("text", {}), dict, "text"), dict[str, Any]()
    if (asked := as_instance(given.get("reasoning", {}), dict, "reasoning").get("effort")) is not None:
        template |= effort(asked, "reasoning_effort")
    if (asked := text.get("verbosity")) is not None:
        template |= verbosity(asked, "verbosity")
    template |= given.get("chat_template_kwargs", {})
    parallel = given.get("parallel_tool_calls", True)
    conversation = conversation_of(contents, messages, tools, template, choice, parallel)
    conversation = conversation._replace(link=given.get("segment_link", LINK))
    sampling = {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING}
    params = replace(defaults, **sampling, grammar=_format(text.get("format")))
    return Asked(
        given["model"], [conversation], params, "input", stream=given.get("stream", False),
        salt=given.get("cache_salt"), warnings=tuple(contents.warnings),
        keep=given.get("prompt_cache_options") or given.get("prompt_cache_retention"),
    )


def _messages(items: Any, contents: Contents) -> Iterator[dict[str, Any]]:
    """Messages of the items; thoughts, texts and calls of an assistant that follow each other become one."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if len(as_list(items, "input")) > MAX_MESSAGES:
        raise ValueError(f"input: expected at most {MAX_MESSAGES} items, got {len(items)}")
    answers = _answers(items, contents)
    answered = set[str]()  # calls of others' tools
    said = Said()  # by the assistant
    for item in items:
        kind = _kind_of(item)
        if said and _begins_another(kind, item, said):
            yield said.message()
            said = Said()
        if kind == "reasoning":
            thoughts = contents.joined(item.get("content") or item.get("summary") or "")
            said.thoughts += [thoughts] if thoughts else []
        elif (call := _call(kind, item)) is not None:
            said.calls.append(call)
        elif kind in _SERVED and (answer := _answer_of(kind, item, answers, contents)):
            said.calls.append(_served_call(_SERVED[kind], item))
            yield said.message()
            yield {"role": "tool", "tool_call_id": _id_of(item), "content": answer}
            said = Said()
            answered.add(str(_id_of(item)))
        elif kind in _OUTPUTS:
            output = _content(item.get("output") or "", contents)
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        elif kind == "message" and item.get("role") == "assistant":
            said.texts.append(contents.joined(item.get("content")))
        elif kind == "message":
            yield {"role": item.get("role"), "content": _content(item.get("content"), contents)}
        elif kind.endswith(_ANSWERS) and str(item.get("call_id")) in answered:
            continue
        elif words := _words(kind, item, contents):
            yield {"role": "user", "content": words}
    if said:
        yield said.message()


def _kind_of(item: Any) -> str:
    return as_instance(as_instance(item, dict, "input").get("type") or "message", str, "input")


def _begins_another(kind: str, item: dict[str, Any], said: Said) -> bool:
    """Whether an item is no part of what the assistant has said before it: until calls have results, all of it is."""
    if kind == "message" and item.get("role") == "assistant":
        return bool(said.texts) and not said.calls
    if kind == "reasoning":
        return not said.calls
    known = _ITEMS.get(kind, _Item())
    return kind in ("message", *_OUTPUTS) or known.needed or bool(known.words)


def _content(content: Any, contents: Contents) -> Any:
    """The text of a message, or its parts, if some are segments; what is no plain text has lines of its own."""
    if isinstance(content, str):
        return content
    parts = [contents.part(part) for part in as_list(content, "input")]
    return parts if any("segment" in part for part in parts) else "".join(part["text"] for part in parts)


def _call(kind: str, item: dict[str, Any]) -> dict[str, Any] | None:
    """A call of a function or a custom tool, as chat completions have it; None: the item is another."""
    if kind == "function_call":  # the name first, as in chat completions: some templates write a call as it is
        function = {"name": _flat(item), "arguments": item.get("arguments")}
        tool: dict[str, Any] = {"type": "function", "function": function}
    elif kind == "custom_tool_call":
        tool = {"type": "custom", "custom": {"name": _flat(item), "input": item.get("input")}}
    else:
        return None
    return {"id": item.get("call_id"), **tool}


def _id_of(item: dict[str, Any]) -> Any:
    return item.get("call_id") or item.get("id")


def _answers(items: list[Any], contents: Contents) -> dict[str, str]:
    """The texts of the answers that are items of their own, by the ids of their calls."""
    found = {}
    for item in items:
        if (kind := _kind_of(item)).endswith(_ANSWERS) and kind not in _OUTPUTS:
            found[str(item.get("call_id"))] = contents.found([item.get("output"), item.get("tools")])
    return found


def _answer_of(kind: str, item: dict[str, Any], answers: dict[str, str], contents: Contents) -> str:
    """The text of the answer to a call of another's tool; empty: there is none."""
    own = contents.found([item.get(key) for key in _SERVED[kind].found])
    return own or answers.get(str(_id_of(item)), "")


def _served_call(served: _Served, item: dict[str, Any]) -> dict[str, Any]:
    given = item.get(served.given)
    if not isinstance(given, str) or served.given != "arguments":
        given = json.dumps(given if isinstance(given, dict) else {served.given: given}, ensure_ascii=False)
    function = {"name": served.name or _flat(item), "arguments": given}
    return {"id": _id_of(item), "type": "function", "function": function}


def _words(kind: str, item: dict[str, Any], contents: Contents) -> str:
    """The user's words in an item that is neither a message nor a call; empty: it has none, and is left out."""
    if kind not in _ITEMS and not kind.endswith((_CALL, *_ANSWERS)):
        message = f"input: expected messages, calls and their results, got {short(kind)}"
        raise BodyError(message, "unsupported_parameter")
    known = _ITEMS.get(kind, _Item())
    words = contents.found([item.get(key) for key in known.words])
    if not words and known.needed:
        return contents.placeholder(item)
    if not words:
        left_out(kind[:100])
    return words


def _flat(named: dict[str, Any]) -> Any:
    """The name of a tool for the network, which has that of its namespace before it."""
    name, space = named.get("name"), named.get("namespace")
    return f"{space}__{name}" if isinstance(space, str) and space else name


def _flat_tools(tools: Any) -> Iterator[dict[str, Any]]:
    """The tools of a body, and those within its namespaces, each of which knows that; each once."""
    known = set[str]()
    for tool in as_instance(tools, list, "tools"):
        found = [as_instance(tool, dict, "tools")]
        if tool.get("type") == "namespace":
            space = {"namespace": as_instance(tool.get("name"), str, "tools")}
            found = [as_instance(each, dict, "tools") | space for each in as_instance(tool.get("tools"), list, "tools")]
        for each in found:
            if (written := json.dumps(each, sort_keys=True)) not in known:
                known.add(written)
                yield each


def tools_of_body(given: Mapping[str, Any]) -> list[Any]:
    """The tools of a body, and behind them those that items of its input have loaded."""
    tools, items = [*as_instance(given.get("tools") or [], list, "tools")], given.get("input")
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and item.get("type") in _LOADING:
            tools += as_instance(item.get("tools") or [], list, "input")
    return tools


def flattened(tools: Any) -> dict[str, dict[str, str]]:
    """The name and the namespace of tools that have one, by their names for the network."""
    found = [tool for tool in _flat_tools(tools or []) if "namespace" in tool]
    return {_flat(tool): {"name": tool.get("name", ""), "namespace": tool["namespace"]} for tool in found}


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    for tool in _flat_tools(tools):
        kind, flat = tool.get("type"), {"name": _flat(tool)}
        names = ("description", "parameters", "strict")
        if kind == "function":
            yield {"type": kind, kind: flat | {name: tool[name] for name in names if tool.get(name) is not None}}
        elif kind == "custom":
            form = as_instance(tool.get("format") or {"type": "text"}, dict, "tools.format")
            grammar = {name: form.get(name) for name in ("syntax", "definition")}
            custom = flat | {"description": tool.get("description"), "format": form | {"grammar": grammar}}
            yield {"type": kind, kind: custom}
        else:
            skipped(str(kind)[:100])


def _choice(choice: Any) -> ToolChoice:
    """Which calls there may be; tools have their names beside their types."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = {"type": "allowed_tools", "allowed_tools": choice}
    return tool_choice_of(choice, "tool_choice", lambda tool, name: _flat(tool))


def _format(form: Any) -> Grammar | None:
    """The form of an answer."""
    if form is None:
        return None
    return form_of(as_instance(form, dict, "text").get("type"), form.get("schema"), form.get("strict"))


_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
_SAME = ("cache_salt", "chat_template_kwargs", "prompt_cache_options", "prompt_cache_retention", "segment_link")
RESPONSES = {
    **dict.fromkeys(("input", "tools", "tool_choice", "reasoning", "text", "temperature", "top_p"), PLAIN),
    "model": TEXT, "instructions": TEXT, "max_output_tokens": FROM_1, "stream": FLAG, "parallel_tool_calls": FLAG,
    **{name: CHATS[name] for name in _SAME},
    **dict.fromkeys(
        (
            "client_metadata", "include", "max_tool_calls", "metadata", "prompt_cache_key",
            "safety_identifier", "service_tier", "store", "stream_options", "truncation",
            "user",
        ),
        IGNORED,
    ),
    "background": Field(neutral=(False,)), "top_logprobs": Field(neutral=(0,)),
    **dict.fromkeys(("conversation", "previous_response_id", "prompt"), Field()),
}
