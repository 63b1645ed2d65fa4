"""The dialects by name, and the choice of one by the marks in a chat template."""

from __future__ import annotations

from kvcache.sampling.dialects.argument_call import ArgumentCall
from kvcache.sampling.dialects.call_texts import json_calls, pythonic_calls
from kvcache.sampling.dialects.dialect import Dialect, LoneCall
from kvcache.sampling.dialects.harmony_reader import HARMONY_MARKS, HarmonyReader
from kvcache.sampling.dialects.member_calls import MemberCalls
from kvcache.sampling.dialects.name_style import (
    DEEPSEEK_NAMES,
    FUNCTIONARY_NAMES,
    KIMI_NAMES,
    MISTRAL_NAMES,
    SOLAR_NAMES,
)
from kvcache.sampling.dialects.named_calls import NamedCalls
from kvcache.sampling.dialects.object_calls import ObjectCalls
from kvcache.sampling.dialects.object_style import (
    APERTUS_OBJECTS,
    BARE_OBJECTS,
    COHERE_OBJECTS,
    LISTED_OBJECTS,
    LLAMA_OBJECTS,
)
from kvcache.sampling.dialects.tag_calls import TagCalls
from kvcache.sampling.dialects.tag_style import (
    DSML_TAGS,
    GLM_TAGS,
    HY_TAGS,
    KIMI_TAGS,
    MINICPM_TAGS,
    MINIMAX_M3_TAGS,
    MINIMAX_TAGS,
    NESTED_WORD,
    QWEN_TAGS,
    SEED_TAGS,
)
from kvcache.sampling.dialects.tagged_reader import TaggedReader

__all__ = ["DIALECTS", "dialect_of"]

_THOUGHTS = ("<think>", "</think>")
_RESPONSE = ("<response>", "</response>")
_TAG = ("<tool_call>", "</tool_call>")
_FUNCTION = ("<function=", "</function>")

DIALECTS = {
    "harmony": Dialect(HarmonyReader, stream=ArgumentCall, more=HARMONY_MARKS),  # gpt-oss
    "gemma4": Dialect(
        TaggedReader, ("<|tool_call>", "<tool_call|>"), MemberCalls, None, ("<|channel>", "<channel|>"),
        titled=True, more=('<|"|>',),
    ),
    "functiongemma": Dialect(
        TaggedReader, ("<start_function_call>", "<end_function_call>"), MemberCalls, more=("<escape>",)
    ),
    "mistral": Dialect(
        TaggedReader, ("[TOOL_CALLS]", ""), NamedCalls, json_calls, ("[THINK]", "[/THINK]"),
        style=MISTRAL_NAMES, more=("[ARGS]", "[CALL_ID]"),
    ),
    "lfm2": Dialect(
        TaggedReader, ("<|tool_call_start|>", "<|tool_call_end|>"), ObjectCalls, pythonic_calls, _THOUGHTS
    ),
    "qwen3_coder": Dialect(
        TaggedReader, _TAG, TagCalls, None, _THOUGHTS, style=QWEN_TAGS,
        lone=LoneCall(_FUNCTION, TagCalls, QWEN_TAGS.without_first()),
    ),  # and Qwen3.5
    "glm": Dialect(
        TaggedReader, _TAG, TagCalls, None, _THOUGHTS, style=GLM_TAGS, more=(*GLM_TAGS.key, *GLM_TAGS.value),
        spaced=True,
    ),  # 4.5 to 4.7
    "hy3": Dialect(
        TaggedReader, ("<tool_call:opensource>", "</tool_call:opensource>"), TagCalls, None,
        ("<think:opensource>", "</think:opensource>"), style=HY_TAGS,
        section=("<tool_calls:opensource>", "</tool_calls:opensource>"),
        more=(HY_TAGS.function[1], *HY_TAGS.key, *HY_TAGS.value),
    ),
    "minimax": Dialect(
        TaggedReader, ("<minimax:tool_call>", "</minimax:tool_call>"), TagCalls, None, _THOUGHTS, style=MINIMAX_TAGS,
        lone=LoneCall(('<invoke name="', "</invoke>"), TagCalls, MINIMAX_TAGS.without_first()),
    ),  # M2
    "minimax_m3": Dialect(
        TaggedReader, (f"{NESTED_WORD}<tool_call>", f"{NESTED_WORD}</tool_call>"), TagCalls, None,
        ("<mm:think>", "</mm:think>"), style=MINIMAX_M3_TAGS, silent=("</mm:think>",),
    ),
    "deepseek": Dialect(
        TaggedReader, ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), NamedCalls, None, _THOUGHTS,
        style=DEEPSEEK_NAMES, more=("<｜tool▁sep｜>",), section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),  # V3, V3.1 and R1
    "kimi": Dialect(
        TaggedReader, ("<|tool_call_begin|>", "<|tool_call_end|>"), NamedCalls, None, _THOUGHTS, style=KIMI_NAMES,
        more=("<|tool_call_argument_begin|>",), section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),  # K2 and K2.5
    "deepseek_v3_2": Dialect(
        TaggedReader, ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), TagCalls, None, _THOUGHTS,
        style=DSML_TAGS,
    ),
    "deepseek_v4": Dialect(
        TaggedReader, ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"), TagCalls, None, _THOUGHTS, style=DSML_TAGS
    ),
    "kimi_k3": Dialect(
        TaggedReader, ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"), TagCalls, None,
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"), style=KIMI_TAGS, framed=2,
        silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "granite": Dialect(
        TaggedReader, ("<|tool_call|>", ""), ObjectCalls, json_calls, _THOUGHTS, silent=_RESPONSE, style=LISTED_OBJECTS
    ),
    "seed_oss": Dialect(
        TaggedReader, ("<seed:tool_call>", "</seed:tool_call>"), TagCalls, None, ("<seed:think>", "</seed:think>"),
        style=SEED_TAGS, lone=LoneCall(_FUNCTION, TagCalls, SEED_TAGS.without_first()),
    ),
    "nemotron": Dialect(
        TaggedReader, ("<TOOLCALL>", "</TOOLCALL>"), ObjectCalls, json_calls, _THOUGHTS, style=LISTED_OBJECTS
    ),  # Nano 2
    "cohere": Dialect(
        TaggedReader, ("<|START_ACTION|>", "<|END_ACTION|>"), ObjectCalls, json_calls,
        ("<|START_THINKING|>", "<|END_THINKING|>"), style=COHERE_OBJECTS,
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),  # Command R7B and A
    "apertus": Dialect(
        TaggedReader, ("<|tools_prefix|>", "<|tools_suffix|>"), ObjectCalls, None,
        ("<|inner_prefix|>", "<|inner_suffix|>"), style=APERTUS_OBJECTS,
    ),
    "apriel": Dialect(
        TaggedReader, ("<tool_calls>", "</tool_calls>"), ObjectCalls, json_calls, _THOUGHTS, style=LISTED_OBJECTS
    ),
    "solar_open": Dialect(
        TaggedReader, ("<|tool_call:begin|>", "<|tool_call:end|>"), NamedCalls, None, ("<|think|>", "<|end|>"),
        style=SOLAR_NAMES, more=("<|tool_call:name|>", "<|tool_call:args|>"), framed=1,
        section=("<|tool_calls|>", "<|calls|>"), silent=("<|begin|>assistant", "<|content|>", "<|flush|>"),
    ),
    "minicpm5": Dialect(
        TaggedReader, ('<function name="', "</function>"), TagCalls, None, _THOUGHTS, style=MINICPM_TAGS
    ),
    "gigachat3": Dialect(
        TaggedReader, ("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""), ObjectCalls, json_calls,
        style=BARE_OBJECTS,
    ),
    "gigachat3_1": Dialect(
        TaggedReader, ("<|function_call|>", ""), ObjectCalls, json_calls, style=BARE_OBJECTS,
        silent=("<|message_sep|>",),
    ),
    "functionary": Dialect(
        TaggedReader, _FUNCTION, NamedCalls, None, _THOUGHTS, style=FUNCTIONARY_NAMES
    ),  # 3.1
    "hermes": Dialect(TaggedReader, _TAG, ObjectCalls, json_calls, _THOUGHTS),  # and Qwen2.5, Qwen3, SmolLM3, Granite 4
    "ernie": Dialect(TaggedReader, _TAG, ObjectCalls, json_calls, _THOUGHTS, silent=_RESPONSE),  # 4.5 that thinks
    "llama3": Dialect(
        TaggedReader, ("<|python_tag|>", ""), ObjectCalls, pythonic_calls, _THOUGHTS, leads=True, style=LLAMA_OBJECTS,
        lone=LoneCall(_FUNCTION, NamedCalls, FUNCTIONARY_NAMES),
    ),
    "llama4": Dialect(
        TaggedReader, ("<|python_start|>", "<|python_end|>"), ObjectCalls, pythonic_calls, _THOUGHTS, leads=True,
        style=LLAMA_OBJECTS,
    ),
    "none": Dialect(TaggedReader),
}
# The marks of a template that tell its dialect, in the order in which they are looked for.
_SIGNS = {
    "｜DSML｜function_calls>": "deepseek_v3_2", "dsml_token + 'function_calls>": "deepseek_v3_2",
    "｜DSML｜tool_calls>": "deepseek_v4", "dsml_token + 'tool_calls>": "deepseek_v4", "<|end_of_msg|>": "kimi_k3",
    NESTED_WORD: "minimax_m3", "<|constrain|>": "harmony", "to=functions.": "harmony",
    "<|channel|>commentary": "harmony", "<|tool_call>": "gemma4", "<start_function_call>": "functiongemma",
    "[TOOL_CALLS]": "mistral", "<|tool_call_start|>": "lfm2", "<seed:tool_call>": "seed_oss", "<TOOLCALL>": "nemotron",
    "<|START_ACTION|>": "cohere", "<|tools_prefix|>": "apertus", "<tool_calls>[": "apriel",
    "`<function`": "functionary", "<|tool_call:begin|>": "solar_open", "<|function_call|>": "gigachat3_1",
    "'role': 'function call'": "gigachat3", '<function name="': "minicpm5",
    "<｜tool▁call▁begin｜>": "deepseek", "<|tool_calls_section_begin|>": "kimi",
    "<minimax:tool_call>": "minimax", "<|tool_list_start|>": "lfm2", "<function=": "qwen3_coder", "<arg_key>": "glm",
    "<tool_sep{}>": "hy3", "<tool_sep:opensource>": "hy3",
    "<|tool_call|>": "granite", "List of tools: [": "lfm2", "<response>": "ernie", "<tool_call>": "hermes",
    "<|python_start|>": "llama4", "<|header_start|>": "llama4", "<|python_tag|>": "llama3",
    '"parameters": dictionary of argument': "llama3",
}


def dialect_of(template: str, name: str | None = None) -> Dialect:
    """The dialect of a chat template.

    Args:
        template: in Jinja.
        name: a name of `DIALECTS`, which counts more than the template's marks; "none": calls are text.

    Raises:
        ValueError: no such name.
    """
    if name is None:
        name = next((dialect for sign, dialect in _SIGNS.items() if sign in template), "none")
    if name not in DIALECTS:
        raise ValueError(f"tool_parser: expected one of {', '.join(DIALECTS)}, got {name}")
    found = DIALECTS[name]
    if found.thoughts in (None, _THOUGHTS) and found.reader is TaggedReader:
        found = found._replace(thoughts=_THOUGHTS if _THOUGHTS[1] in template else None)
    return found
