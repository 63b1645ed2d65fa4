"""Thoughts, content and calls of each family; the same however the text is cut."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.call_texts import json_calls, pythonic_calls
from kvcache.sampling.dialects.dialect_table import DIALECTS, dialect_of
from kvcache.sampling.dialects.json_scan import JsonScan
from kvcache.sampling.dialects.marks import MarkSearch
from kvcache.sampling.dialects.spoken_answer import MarkTokens, SpokenAnswer
from kvcache.sampling.dialects.transcript import Transcript

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]

MARKS = sorted({mark for dialect in DIALECTS.values() for mark in dialect.marks} | {"<think>", "</think>"})
# These are no special tokens in the vocabularies of their families.
PLAIN = {
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<response>", "</response>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<function=", "</function>", "<TOOLCALL>", "</TOOLCALL>", "<tool_calls>",
    "</tool_calls>", '<function name="', '<invoke name="', "</invoke>",
}
TYPES = {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": ["object", "string"]}, "l": {"type": "array"}}
SCHEMAS = {"f": {"properties": TYPES}}


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each byte, and one for each mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS if mark not in PLAIN])
    made.add_tokens([AddedToken(mark, special=False) for mark in MARKS if mark in PLAIN])
    return made


@pytest.fixture(scope="module")
def spelling_tokenizer():
    """A token for each byte, and one for each part of marks that is a special token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    parts = [
        "｜DSML｜", "<|open|>", "<|sep|>", "<|close|>", "]<]minimax[>[", "<tool_call>", "<|message_sep|>",
        "<|role_sep|>",
    ]
    made.add_special_tokens([AddedToken(part, special=True) for part in parts])
    return made


def read(tokenizer, name, text, cuts=(), prompt="", **options):
    """The thoughts, the content and the calls of an answer; its tokens come in pieces that begin at `cuts`."""
    answer = answer_of(tokenizer, name, prompt, **options)
    tokens = tokenizer.encode(text).ids
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    pieces = []
    for start, stop in pairwise(edges):
        pieces += answer.extend(tokens[start:stop], ended=False)
    pieces += answer.extend([], ended=True)
    return collected(pieces)


def answer_of(tokenizer, name, prompt="", **options):
    dialect = dialect_of("<think></think>", name)
    options = {"calls": True, "schemas": SCHEMAS, **options}
    return SpokenAnswer(MarkTokens(tokenizer, dialect), tokenizer.encode(prompt).ids, **options)


def collected(pieces):
    texts, calls = {"reasoning": "", "content": ""}, []
    for channel, text in pieces:
        if channel == "call":
            calls.append([text, ""])
        elif channel == "arguments":
            calls[-1][1] += text
        else:
            texts[channel] += text
    return texts["reasoning"], texts["content"], [(name, value_of(text)) for name, text in calls]


def value_of(text):
    """The value of a text in JSON; the text, where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


ANSWERS = [
    ("hermes", 'Hi \n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", "Hi", [("f", {"a": 1})])),
    ("hermes", '<think>\nhm <b>\n</think>\n\nSo.\n', ("hm <b>", "So.\n", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
     ("", "", [("f", {}), ("g", {})])),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"é": "</b>"}}]</tool_call>.',
     ("", ".", [("f", {}), ("g", {"é": "</b>"})])),
    ("hermes", 'a <tool_call>{"name": "f"', ("", 'a <tool_call>{"name": "f"', [])),
    ("hermes", 'a <tool_call>{"name": "f", "arguments": [1]}</tool_call> b ',
     ("", 'a <tool_call>{"name": "f", "arguments": [1]}</tool_call> b ', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
     ("", "NaN}}", [("f", '{"a": ')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", "", [("f", '{"a": 1')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>b', ("", "b", [("f", {"a": 1})])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}; {"name": "g", "id": [1], "arguments": {}}</tool_call>',
     ("", "", [("f", {"a": 1}), ("g", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}} x</tool_call>', ("", "} x", [("f", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}, {"name": 3}</tool_call>',
     ("", '{"name": 3}', [("f", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"é": "\\ud83d\\udc08\\n"}, "x": [{}]}</tool_call>',
     ("", "", [("f", {"é": "🐈\n"})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
     ("", '"}}', [("f", '{"a": "\\ud83d')])),
    ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
     ("", "", [("f", {"a": 1})])),
    ("hermes", "the tag <think> is </think> text", ("", "the tag <think> is </think> text", [])),
    ("hermes", "a < b <tool", ("", "a < b <tool", [])),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=s>\n1\n\n</parameter>\n"
     "<parameter=o>\n{\"x\": 1}\n</parameter>\n<parameter=other>\ntrue\n</parameter>\n</function>\n</tool_call>",
     ("", "", [("f", {"a": 7, "s": "1\n", "o": {"x": 1}, "other": "true"})])),
    ("qwen3_coder", "<tool_call><function=f></function><function=g><parameter=x>y</parameter></function>",
     ("", "", [("f", {}), ("g", {"x": "y"})])),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>1</parameter> x <parameter=s>2</function></tool_call>",
     ("", "x <parameter=s>2</function>", [("f", '{"s": "1"')])),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>",
     ("", "<tool_call><function=f><parameter=a>1</function></tool_call>", [])),
    ("glm", "\n<think>hm</think>\nI look.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n"
     "<arg_key>s</arg_key>\n<arg_value>1\n</arg_value>\n</tool_call>",
     ("hm", "I look.", [("f", {"a": 7, "s": "1\n"})])),
    ("glm", "<tool_call>f<arg_key>o</arg_key><arg_value>{\"x\": 1}</arg_value><arg_key>t</arg_key><arg_value>[true]"
     "</arg_value><arg_key>u</arg_key><arg_value>NaN</arg_value></tool_call><tool_call>g</tool_call>",
     ("", "", [("f", {"o": {"x": 1}, "t": [True], "u": "NaN"}), ("g", {})])),
    ("glm", '<tool_call>f<arg_key>l</arg_key><arg_value>["</arg_value>", "</ar"]</arg_value></tool_call>',
     ("", "", [("f", {"l": ["</arg_value>", "</ar"]})])),
    ("qwen3_coder", '<tool_call><function=f><parameter=l>["\\"</parameter>x</parameter></function></tool_call>',
     ("", '<tool_call><function=f><parameter=l>["\\"</parameter>x</parameter></function></tool_call>', [])),
    ("glm", "<tool_call>f\n</tool_call>\n<tool_call>g</tool_call>.", ("", ".", [("f", {}), ("g", {})])),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", ("", "", [("f", '{"a": 1')])),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>", ("", "x", [("f", '{"a": 1')])),
    ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>",
     ("", "<tool_call>f<arg_key>a</arg_key></tool_call>", [])),
    ("glm", "<tool_call>f g</tool_call>", ("", "<tool_call>f g</tool_call>", [])),
    ("glm", '<tool_call>{"name": "f"}</tool_call> <tool_call>f',
     ("", '<tool_call>{"name": "f"}</tool_call> <tool_call>f', [])),
    ("minimax", '<think>\nhm\n</think>\n\nHi\n<minimax:tool_call>\n<invoke name="f">\n'
     '<parameter name="a">7</parameter>\n<parameter name="s">\n1</parameter>\n'
     '<parameter name="u">null</parameter>\n<parameter name="l">["</parameter>"]</parameter>\n</invoke>\n'
     '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
     ("hm", "Hi", [("f", {"a": 7, "s": "\n1", "u": None, "l": ["</parameter>"]}), ("g", {})])),
    ("minimax", '<minimax:tool_call><invoke name="f"><parameter>',
     ("", '<minimax:tool_call><invoke name="f"><parameter>', [])),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\n"
     "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     ("", "", [("f", {"a": 1}), ("g", {})])),
    ("deepseek", "hm</think>Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
     "{\"a\":\n1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n``<｜tool▁calls▁end｜>",
     ("", "hm</think>Hi``", [("f", {"a": 1}), ("g", {})])),
    ("deepseek", "<think>hm<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": <｜tool▁calls▁end｜>x",
     ("hm", "x", [("f", '{"a": ')])),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>.",
     ("", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>.", [])),
    ("kimi", "<think>so</think>Now<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
     '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|> functions.g-1:12 '
     "<|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>",
     ("so", "Now", [("f", {"a": 1}), ("g-1", {})])),
    ("kimi", '<think>so<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>',
     ("so", "", [("f", {})])),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", {"a": 1})])),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "x"}}; {"name": "g"}',
     ("", "", [("f", {"a": "x"}), ("g", {})])),
    ("llama3", ' [f(a=1, s="x"), g(l=[true, None], d={"k": -1.5})]',
     ("", "", [("f", {"a": 1, "s": "x"}), ("g", {"l": [True, None], "d": {"k": -1.5}})])),
    ("llama3", '{"answer": 42}', ("", '{"answer": 42}', [])),
    ("llama3", "[1, 2]", ("", "[1, 2]", [])),
    ("llama3", '{"name": "f", "para', ("", '{"name": "f", "para', [])),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     ("", "", [("f", {"a": 1}), ("g", {})])),
    ("mistral", '[THINK]so[/THINK]Now[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{"b": [2]}',
     ("so", "Now", [("f", {"a": 1}), ("g", {"b": [2]})])),
    ("mistral", "Now[TOOL_CALLS]f[ARGS]{", ("", "Now", [("f", "{")])),
    ("mistral", "Now[TOOL_CALLS]f[ARGS]", ("", "Now[TOOL_CALLS]f[ARGS]", [])),
    ("mistral", "[TOOL_CALLS]f g[ARGS]{}", ("", "[TOOL_CALLS]f g[ARGS]{}", [])),
    ("harmony", "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hi\n",
     ("Think.", "Hi\n", [])),
    ("harmony", "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
     "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
     ("A", "Look:", [("f", {"a": 1})])),
    ("harmony", "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}", ("", "", [("g", {})])),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{\"a\": ", ("", "", [("f", '{"a": ')])),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>"{}"<|call|>', ("", "", [("f", {})])),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>x<|call|>", ("", "x", [])),
    ("harmony", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
     ("", "a\n\nb", [])),
    ("gemma4", '<|channel>thought\nhm\n<channel|>Hi<|tool_call>call:f{a:-4,s:<|"|>x{y:"<|"|>,o:{k:[1.5,true,null]}}'
     "<tool_call|><|tool_call>call:g{}<tool_call|>",
     ("hm", "Hi", [("f", {"a": -4, "s": 'x{y:"', "o": {"k": [1.5, True, None]}}), ("g", {})])),
    ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", ("", "<|tool_call>call:f{a:}<tool_call|>", [])),
    ("gemma4", "<|tool_call>call:f{a:1,b:}<tool_call|>", ("", "b:}", [("f", '{"a": 1')])),
    ("gemma4", '<|tool_call>call:f{s:[<|"|>a,b}<|"|>,{x:1}],t:<|"|><|"|>}x<tool_call|>',
     ("", "x", [("f", {"s": ["a,b}", {"x": 1}], "t": ""})])),
    ("functiongemma", "<start_function_call>call:f{s:<escape>a, b<escape>}<end_function_call>",
     ("", "", [("f", {"s": "a, b"})])),
    ("lfm2", '<|tool_call_start|>[f(a=1), g(s="x")]<|tool_call_end|>Done.',
     ("", "Done.", [("f", {"a": 1}), ("g", {"s": "x"})])),
    ("lfm2", "<|tool_call_start|>[f(s='a \"b\nc\", \\'d\\n', a=1)]<|tool_call_end|>",
     ("", "", [("f", {"s": 'a "b\nc", \'d\n', "a": 1})])),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", ("", "<|tool_call_start|>[f(1)]<|tool_call_end|>", [])),
    ("granite", '<think>a</think><response>b</response><|tool_call|>[{"name": "f", "arguments": {}}]',
     ("a", "b", [("f", {})])),
    ("ernie", '<think>\na\n</think>\n\n<response>\nHi <b>\n</response>\n\n'
     '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
     ("a", "Hi <b>", [("f", {})])),
    ("ernie", "a\n</response>\n", ("", "a", [])),
    ("seed_oss", "<seed:think>hm</seed:think>Hi\n<seed:tool_call>\n<function=f>\n<parameter=a>7</parameter>\n"
     "<parameter=s>\n1</parameter>\n</function>\n</seed:tool_call>", ("hm", "Hi", [("f", {"a": 7, "s": "\n1"})])),
    ("seed_oss", "<seed:tool_call><function=f><parameter=l>[{'k': True, 'n': None}]</parameter></function>"
     "</seed:tool_call>", ("", "", [("f", {"l": [{"k": True, "n": None}]})])),
    ("seed_oss", "<seed:tool_call><function=f><parameter=l>[{1, 2}]</parameter></function></seed:tool_call>",
     ("", "", [("f", {"l": "[{1, 2}]"})])),
    ("nemotron", '<think>hm</think><TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
     "</TOOLCALL>", ("hm", "", [("f", {"a": 1}), ("g", {})])),
    ("cohere", '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", '
     '"parameters": {"a": 1}},\n    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
     ("hm", "", [("f", {"a": 1}), ("g", {})])),
    ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", ("hm", "Hi", [])),
    ("apertus", 'Hi<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>',
     ("", "Hi", [("f", {"a": 1}), ("g", {})])),
    ("apertus", '<|inner_prefix|>hm<|inner_suffix|><|tools_prefix|>[{"f": 1}]<|tools_suffix|>',
     ("hm", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', [])),
    ("apriel", 'Hi\n<tool_calls>[{"name": "f", "arguments": {"a": 1}, "id": "x"}]</tool_calls>',
     ("", "Hi", [("f", {"a": 1})])),
    ("functionary", '<function=f>{"a": 1}</function><function=g>{}</function>', ("", "", [("f", {"a": 1}), ("g", {})])),
    ("functionary", "<function=f>\n<parameter=a>1</parameter></function>",
     ("", "<function=f>\n<parameter=a>1</parameter></function>", [])),
    ("deepseek_v3_2", 'hm</think>Hi\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter '
     'name="s" string="true">1\n</｜DSML｜parameter>\n<｜DSML｜parameter name="l" string="false">'
     '["</｜DSML｜parameter>"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
     ("", "hm</think>Hi", [("f", {"s": "1\n", "l": ["</｜DSML｜parameter>"]}), ("g", {})])),
    ("deepseek_v3_2", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1',
     ("", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1', [])),
    ("deepseek_v4", '<think>hm</think>Hi<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="u" '
     'string="false">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
     ("hm", "Hi", [("f", {"u": None})])),
    ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="u" string="false">x'
     "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>", ("", "", [("f", {"u": "x"})])),
    ("kimi_k3", "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
     '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a&quot;b" type="string"<|sep|>1'
     '<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>1.5<|close|>argument<|sep|><|close|>call'
     '<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
     ("hm", "Hi", [("f", {'a"b': "1", "n": 1.5}), ("g", {})])),
    ("kimi_k3", '<|open|>think<|sep|>hm<|open|>tools<|sep|><|open|>call tool="g" index="1"<|sep|><|close|>call<|sep|>'
     "<|close|>tools<|sep|>", ("hm", "", [("g", {})])),
    ("kimi_k3", "<|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>", ("", "Hi", [])),
    ("minimax_m3", '<mm:think>hm</mm:think>Hi]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>7'
     "]<]minimax[>[</a>]<]minimax[>[<s>1]<]minimax[>[<b>]<]minimax[>[</s>]<]minimax[>[<l>]<]minimax[>[<item>x"
     "]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<l>true]<]minimax[>[</l>]<]minimax[>[</item>"
     "]<]minimax[>[</l>]<]minimax[>[</invoke>\n"
     ']<]minimax[>[<invoke name="g">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
     ("hm", "Hi", [("f", {"a": 7, "s": "1]<]minimax[>[<b>", "l": ["x", {"l": True}]}), ("g", {})])),
    ("minimax_m3", "</mm:think>Hi", ("", "Hi", [])),
    ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<l>]<]minimax[>[</l>'
     "]<]minimax[>[<u>]<]minimax[>[<x>1]<]minimax[>[</x>y]<]minimax[>[</u>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
     ("", "]<]minimax[>[<x>1]<]minimax[>[</x>y]<]minimax[>[</u>]<]minimax[>[</invoke>", [("f", '{"l": []')])),
    ("solar_open", '<|think|>hm<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>call_1<|tool_call:name|>f'
     '<|tool_call:args|>{"a": 1}<|tool_call:end|><|tool_call:begin|>x<|tool_call:name|>g<|tool_call:args|>{}'
     "<|tool_call:end|><|calls|>", ("hm", "", [("f", {"a": 1}), ("g", {})])),
    ("solar_open", "<|think|>hm<|end|><|begin|>assistant<|content|>Hi<|end|>", ("hm", "Hi", [])),
    ("minicpm5", '<think>hm</think>Hi\n<function name="f"><param name="a">7</param><param name="s">'
     '<![CDATA[a</param>\n<b]]></param></function><function name="g"></function>',
     ("hm", "Hi", [("f", {"a": 7, "s": "a</param>\n<b"}), ("g", {})])),
    ("minicpm5", '<function name="f"><param name="s"><![CDATA[a</param></function>',
     ("", '<function name="f"><param name="s"><![CDATA[a</param></function>', [])),
    ("gigachat3", 'Hi<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}',
     ("", "Hi", [("f", {"a": 1})])),
    ("gigachat3", "Hi, a function call", ("", "Hi, a function call", [])),
    ("gigachat3_1", 'Hi<|function_call|>{"name": "f", "arguments": {"a": 1}}', ("", "Hi", [("f", {"a": 1})])),
    ("none", '<think>a</think><tool_call>{"name": "f"}</tool_call>',
     ("a", '<tool_call>{"name": "f"}</tool_call>', [])),
    # A call that a thought has not ended before: one of a function that there is.
    ("hermes", '<think>hm\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n</think>\n\nx',
     ("hm", "x", [("f", {"a": 1})])),
    ("hermes", '<think>a <tool_call> tag, b <tool_call>{"name": "g", "arguments": {}}</tool_call> c</think>d',
     ('a <tool_call> tag, b <tool_call>{"name": "g", "arguments": {}}</tool_call> c', "d", [])),
    ("hermes", '<think>a <tool_call>{"name": "f"</think>d', ('a <tool_call>{"name": "f"', "d", [])),
    ("hermes", '<think>a <tool_call>{"name": "f"', ('a <tool_call>{"name": "f"', "", [])),
    ("hermes", '<think>a<tool_call>{"name": "f", "arguments": {"s": "</think>"}}</think>d',
     ("a", "d", [("f", {"s": "</think>"})])),
    ("qwen3_coder", "<think>a\n<tool_call>\n<function=f>\n<parameter=s>\n</think>\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
     ("a", "", [("f", {"s": "</think>"}), ("f", {})])),
    ("qwen3_coder", "<think>a <tool_call><function=g></function></tool_call> b</think>c",
     ("a <tool_call><function=g></function></tool_call> b", "c", [])),
    ("glm", "<think>a <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
     ("a", "", [("f", {"a": 1})])),
    ("glm", "<think>a <tool_call> format of b</think>c", ("a <tool_call> format of b", "c", [])),
    ("minimax", '<think>a<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call></think>b',
     ("a", "b", [("f", {})])),
    ("kimi", "<think>a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
     "<|tool_call_end|><|tool_calls_section_end|></think>b", ("a", "b", [("f", {})])),
    ("llama3", '<think>a</think>\n\n{"name": "f", "parameters": {"a": 1}}', ("a", "", [("f", {"a": 1})])),
    ("llama3", "<think>a</think>[f(a=1)]", ("a", "", [("f", {"a": 1})])),
    ("llama3", "<think>a</think>[1]", ("a", "[1]", [])),
    # Calls whose first mark, or another tag, is left out.
    ("qwen3_coder", "Hi\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
     "<function=f>\n</function>\n</tool_call>", ("", "Hi", [("f", {"a": 7}), ("f", {})])),
    ("qwen3_coder", "<think>a<function=f><parameter=a>7</parameter></tool_call>", ("a", "", [("f", {"a": 7})])),
    ("qwen3_coder", "the tag <function=g> and </function>.", ("", "the tag <function=g> and </function>.", [])),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=a>\n7\n</parameter>\n</tool_call>",
     ("", "", [("f", {"s": "x", "a": 7})])),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=b>\n7\n</parameter>\n</tool_call>",
     ("", "", [("f", {"s": "x\n<parameter=b>\n7"})])),
    ("seed_oss", "<function=f><parameter=s>x</parameter></function></seed:tool_call>.", ("", ".", [("f", {"s": "x"})])),
    ("minimax", '<invoke name="f"><parameter name="a">1</parameter></invoke>', ("", "", [("f", {"a": 1})])),
    ("llama3", '<function=f>{"a": 1}</function>', ("", "", [("f", {"a": 1})])),
    ("deepseek_v3_2", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1'
     "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", ("", "", [("f", {"a": 1})])),
    # Marks within strings and arguments, and strings that have no end.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a </tool_call> b\n<tool_call>\t\\n"}}</tool_call>',
     ("", "", [("f", {"s": "a </tool_call> b\n<tool_call>\t\n"})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
     ("", "", [("f", '{"s": "a'), ("f", {})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a</tool_call>\n', ("", "", [("f", '{"s": "a')])),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>a</tool_call>\n<tool_call></function></parameter></function>"
     "</tool_call>", ("", "<tool_call><function=f><parameter=s>a</tool_call>\n<tool_call></function></parameter>"
     "</function></tool_call>", [])),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n</tool_call> </function> <function=f>\n</parameter>\n"
     "</function>\n</tool_call>", ("", "", [("f", {"s": "</tool_call> </function> <function=f>"})])),
    ("glm", "<tool_call>f<arg_key>s</arg_key><arg_value>a <tool_call> </tool_call> b</arg_value></tool_call>",
     ("", "", [("f", {"s": "a <tool_call> </tool_call> b"})])),
    ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<u>{"]<]minimax[>[</u>": 1}'
     "]<]minimax[>[</u>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
     ("", "", [("f", {"u": {"]<]minimax[>[</u>": 1}})])),
    # Other words for values and names.
    ("gemma4", '<|tool_call>call:f{s:Paris, at 9:30, or "so",a:+3,o:{x:b c,y:"d\\n}"},l:[e f,1]}<tool_call|>',
     ("", "", [("f", {"s": 'Paris, at 9:30, or "so"', "a": 3, "o": {"x": "b c", "y": "d\n}"}, "l": ["e f", 1]})])),
    ("gemma4", '<|tool_call>call:f{"s":5,a:1e999,n:1e999,t:"a, b:c",u:True}<tool_call|>',
     ("", "", [("f", {"s": "5", "a": "1e999", "n": "1e999", "t": "a, b:c", "u": True})])),
    ("gemma4", "<|tool_call>call:f{s:a<b,a:1}<tool_call|>", ("", "", [("f", {"s": "a<b", "a": 1})])),
    ("gemma4", '<|tool_call>call:f{s:"a}<tool_call|>', ("", '<|tool_call>call:f{s:"a}<tool_call|>', [])),
    ("lfm2", "<|tool_call_start|>[get-weather(from='Rome', in=True)]<|tool_call_end|>",
     ("", "", [("get-weather", {"from": "Rome", "in": True})])),
    ("llama3", '[f(s="x", class=1e999)]', ("", "", [("f", {"s": "x", "class": "1e999"})])),
    ("kimi", "<|tool_call_begin|>functions_f_1<|tool_call_argument_begin|>{}<|tool_call_end|>", ("", "", [("f", {})])),
    ("kimi", "<|tool_call_begin|>functionsf1<|tool_call_argument_begin|>{}<|tool_call_end|>", ("", "", [("f", {})])),
    ("kimi", "<|tool_call_begin|>g_1<|tool_call_argument_begin|>{}<|tool_call_end|>", ("", "", [("g_1", {})])),
    ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>', ("", "", [("f", {"a": "1e999"})])),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1e999</arg_value></tool_call>",
     ("", "", [("f", {"a": "1e999"})])),
]


@pytest.mark.parametrize(("name", "text", "want"), ANSWERS, ids=[f"{name} {i}" for i, (name, *_) in enumerate(ANSWERS)])
def test_answers_of_the_families(tokenizer, name, text, want):
    assert read(tokenizer, name, text) == want
    for size in (1, 2, 3):
        assert read(tokenizer, name, text, range(0, 400, size)[: len(tokenizer.encode(text).ids)]) == want


SPELLED = ("deepseek_v3_2", "deepseek_v4", "kimi_k3", "minimax_m3", "gigachat3")


@pytest.mark.parametrize(("name", "text", "want"), [each for each in ANSWERS if each[0] in SPELLED])
def test_marks_of_several_tokens(spelling_tokenizer, name, text, want):
    assert read(spelling_tokenizer, name, text) == want
    assert read(spelling_tokenizer, name, text, range(400)) == want


def test_tokens_of_marks_without_a_meaning(spelling_tokenizer):
    ids = [id for character in "<|open|>tools<|sep|>" for id in spelling_tokenizer.encode(character).ids]
    answer = answer_of(spelling_tokenizer, "kimi_k3")
    assert collected(answer.extend(ids, ended=True)) == ("", "<|open|>tools<|sep|>", [])
    assert read(spelling_tokenizer, "kimi_k3", "a<|sep|>b<|open|>") == ("", "ab", [])
    assert read(spelling_tokenizer, "gigachat3", "a<|message_sep|>\n\nfunction") == ("", "a\n\nfunction", [])


BITS = st.sampled_from([
    *MARKS, "\n", " ", "x", "é🐈", "{", "}", "[", "]", '{"name": "f", "arguments": {"a": 1}}', "<function=f>",
    "</function>", "<parameter=a>\n1\n</parameter>", "call:f{a:1}", "[f(a=1)]", "f", "analysis", "final",
    "thought\n", " to=functions.f", "<", "<tool_", '"', ";", "[ARGS", "assistant",
    "<|channel|>commentary to=functions.f<|message|>{}", '{"name": "f", "arguments": ', '{"a": "', "\\ud83d", "1e", ",",
    "call:f{", 's:<|"|>', "<parameter=s>", "</parameter>",
    "<arg_key>a</arg_key>\n<arg_value>", "functions.f:0", "f<｜tool▁sep｜>{", "function<｜tool▁sep｜>",
    '[{"f": ', "f>{", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="false">',
    "</｜DSML｜parameter>", '<|open|>call tool="f" index="1"<|sep|>', "<|open|>", "<|close|>call<|sep|>",
    '<|open|>argument key="a" type="number"<|sep|>', "<|close|>argument<|sep|>", "```json\n", "```",
    ']<]minimax[>[<invoke name="f">', "]<]minimax[>[<a>", "]<]minimax[>[</a>", "]<]minimax[>[", "<item>", "</item>",
    '<function name="f">', '<function name="f"><param name="s"><![CDATA[', "]]>", "</param>", "<|role_sep|>",
    '<invoke name="f">', '<parameter name="l">["', "</invoke>", "[f-g(from='x", "')]", "s:Paris, F", ",a:", 's:"x',
    "<function=f>\n<parameter=s>\nx\n", "functions_f_1", '{"name": "f", "arguments": {"s": "x\n', '"}}', "+3",
])


@given(name=st.sampled_from(sorted(DIALECTS)), bits=st.lists(BITS, max_size=12),
       cuts=st.lists(st.integers(0, 500), max_size=8),
       prompt=st.sampled_from(["", "a<think>\n", "🐈"]), calls=st.booleans(), parallel=st.booleans(),
       stop=st.lists(st.sampled_from(["xf", "\n\n", "é", "}}"]), max_size=2), spells=st.booleans())
def test_any_cut_of_any_text_reads_the_same(
    tokenizer, spelling_tokenizer, name, bits, cuts, prompt, calls, parallel, stop, spells
):
    tokenizer = spelling_tokenizer if spells else tokenizer
    options = {"prompt": prompt, "calls": calls, "parallel": parallel, "stop": stop}
    whole = read(tokenizer, name, "".join(bits), **options)
    assert read(tokenizer, name, "".join(bits), cuts, **options) == whole
    assert read(tokenizer, name, "".join(bits), range(0, 500), **options) == whole
    assert len(whole[2]) < 2 or parallel
    assert calls or not whole[2]


@given(text=st.text("<tol_ca>k/\n é"), cuts=st.lists(st.integers(0, 50), max_size=6))
def test_marks_are_found_in_any_pieces(text, cuts):
    marks = ["<tool>", "</tool>", "<ok>"]
    search, found = MarkSearch(marks), []
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, stop in pairwise(edges):
        found += search.add(text[start:stop])
    found += search.end()
    assert "".join(part for part, _ in found) == text
    assert [part for part, is_mark in found if is_mark] == MarkSearch(marks)._pattern.findall(text)


LONG = json.dumps({"s": 'é "quoted" \n' * 20, "n": [1.5e3, {"x": None}, True], "o": {}}, ensure_ascii=False)
PIECEWISE = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": ', LONG, "}\n</tool_call>"),
    ("llama3", '{"name": "f", "parameters": ', LONG, "}"), ("mistral", "[TOOL_CALLS]f[ARGS]", LONG, ""),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ', LONG, "}]"),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": ', LONG, "}]"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", LONG, "\n```<｜tool▁call▁end｜>"),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", LONG, "<|tool_call_end|>"),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", LONG, "<|call|>"),
]


@pytest.mark.parametrize(("name", "before", "arguments", "behind"), PIECEWISE)
def test_arguments_come_as_they_are_written(tokenizer, name, before, arguments, behind):
    """Each token gives what it adds to the arguments; nothing of them waits."""
    answer = answer_of(tokenizer, name)
    pieces = answer.extend(tokenizer.encode(before).ids, ended=False)
    for count, token in enumerate(tokenizer.encode(arguments).ids, 1):
        pieces += answer.extend([token], ended=False)
        text = "".join(piece.text for piece in pieces if piece.channel == "arguments")
        assert len(text.encode()) >= count - 3, "but for bytes of a character"
    pieces += answer.extend(tokenizer.encode(behind).ids, ended=True)
    assert "".join(piece.text for piece in pieces if piece.channel == "arguments") == arguments
    assert answer.has_calls


@pytest.mark.parametrize(
    ("name", "text", "ends"),
    [
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=s>x</parameter></function>",
         ["</parameter>", "</parameter>", "</function>"]),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
         ["</arg_value>", "</tool_call>"]),
        ("gemma4", '<|tool_call>call:f{a:1,s:<|"|>x, y<|"|>}<tool_call|>', [",", "}"]),
    ],
)
def test_values_come_one_by_one(tokenizer, name, text, ends):
    answer, at = answer_of(tokenizer, name), []
    tokens = tokenizer.encode(text).ids
    for place, token in enumerate(tokens):
        if any(piece.channel == "arguments" for piece in answer.extend([token], ended=False)):
            at.append(tokenizer.decode(tokens[: place + 1], skip_special_tokens=False))
    assert [whole.endswith(end) for whole, end in zip(at, ends, strict=True)] == [True] * len(ends)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=12,
    ),
    is_ascii=st.booleans(), place=st.integers(0, 500), other=st.sampled_from(["", *'{}[]",:\\0.e-+tNu \n\x00']),
    cuts=st.lists(st.integers(0, 500), max_size=4),
)
def test_a_scan_knows_json(value, is_ascii, place, other, cuts):
    """A character of a value is replaced: what is JSON still, and what is not, `json` knows."""
    text = json.dumps(value, ensure_ascii=is_ascii)
    place %= len(text)
    text = text[:place] + other + text[place + 1 :] if other else text
    try:
        wanted = json.loads(text, parse_constant=lambda _: json.loads("x"))
        json.dumps(wanted, ensure_ascii=False).encode()
    except (ValueError, UnicodeEncodeError):
        wanted = None
    else:
        wanted = (wanted,)
    scan, at = JsonScan(), 0
    for stop in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        at = scan.add(text[:stop], at)
    scan.add(text + "\n", at)  # behind a number something tells that it has ended
    rest = text[at:].strip(" \t\r\n")
    assert (scan.is_whole and not rest) == (wanted is not None), (text, at, scan.need)
    if scan.is_broken:
        assert not scan.is_whole


def test_a_scan_has_bounds():
    for text, is_broken in (("[" * 200, False), ("[" * 201, True), ("1" * 400, False), ("1" * 401, True)):
        scan = JsonScan()
        scan.add(text)
        assert scan.is_broken == is_broken


HOSTILE = [
    "a" * 60_000, " " * 60_000, "{}" * 20_000, '{"name": "f", "arguments": {' + '"a": 1,' * 8_000,
    "<function=f>" + "<parameter=a>" * 5_000, "<function=f><parameter=s>" + "\n</param" * 7_000,
    "<function=f>" + "<parameter=a>1</parameter>" * 2_500, "call:f{" + "a" * 60_000, 'call:f{a:<|"|>' + "x<" * 30_000,
    '<function=f><parameter=l>["' + "</parameter>" * 5_000,
    "call:f{a:" + "9" * 5000 + "}", "call:f" + "{a:" * 30_000, "<function=f>" * 3_000, " " * 60_000 + "<function=f>",
    "call:f{" + "a:1," * 10_000, "call:f{a:[" + "1," * 30_000, "f" * 30_000 + "[CALL_ID]" * 3_000, "[" * 60_000,
    '{"name": "f", "arguments": {"a": "' + "\\u0041" * 10_000, "f[ARGS]{" + '"a": -0.5e+3, ' * 4_000,
    "call:f{s:" + "x," * 30_000, "call:f{s:x," + "b b:" * 15_000, 'call:f{s:x"' + '"' * 60_000,
    'call:f{s:"' + "\\" * 60_000, "call:f{s:" + "<" * 60_000,
    "<function=f><parameter=s>" + "\n<parameter=b>" * 4_000 + "</parameter>",
    '{"name": "f", "arguments": {"s": "' + "\n" * 60_000, "[f(" + "a=1," * 15_000, "[f(s='" + "\\'" * 30_000,
    "[f(s=" + "''" * 30_000 + ")]", "[" + "f(), " * 12_000, "f" * 60_000 + "(", "1" * 60_000 + "a[ARGS]{}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm", "gemma4", "mistral", "llama3"])
def test_streams_of_calls_take_linear_time(name, text):
    """The text of a network that writes anything comes in small pieces."""
    dialect = DIALECTS[name]
    transcript = Transcript(True)
    began = time.process_time()
    stream = dialect.reader_of_calls(CallSpan(transcript, dialect.read, SCHEMAS, dialect.calls[0]))
    for start in range(0, len(text), 100):
        stream.add(text[start : start + 100])
    stream.end("")
    transcript.end()
    assert time.process_time() - began < 1.0, "quadratic time takes minutes"
    assert transcript.take()


@pytest.mark.parametrize("text", ["~<a>" * 5000, "~<a>" * 3000 + "~</a>" * 3000, "x~</b>" * 5000])
def test_tags_within_tags_take_linear_time(text):
    transcript, text = Transcript(True), text.replace("~", "]<]minimax[>[")
    began = time.process_time()
    stream = DIALECTS["minimax_m3"].reader_of_calls(CallSpan(transcript, None, SCHEMAS, ""))
    for piece in (']<]minimax[>[<invoke name="f">', *(text[at : at + 100] for at in range(0, len(text), 100)), "."):
        stream.add(piece)
    stream.end("")
    assert time.process_time() - began < 1.0, "quadratic time takes minutes"
    assert transcript.take()


def test_text_without_marks_stays_as_it_is(tokenizer):
    for name in set(DIALECTS) - {"harmony"}:
        for text in ("", "  a \n b\n\n", "{ x", "🐈 [no", "\n"):
            assert read(tokenizer, name, text) == ("", text, [])
    assert read(tokenizer, "harmony", "  plain") == ("", "  plain", [])


def test_a_prompt_that_opens_thoughts(tokenizer):
    answer = answer_of(tokenizer, "hermes", "user: x\n<think>\n")
    assert collected(answer.extend(tokenizer.encode("ab").ids, ended=False)) == ("ab", "", [])
    assert answer.reasoning_tokens == 2
    rest = answer.extend(tokenizer.encode("\n</think>\nc").ids, ended=True)
    assert (collected(rest), answer.reasoning_tokens) == (("", "c", []), 4)
    assert read(tokenizer, "hermes", "c", prompt="<think>\n\n</think>\n\n") == ("", "c", [])


def test_what_comes_is_given_at_once(tokenizer):
    """But for what may begin a mark, and for white space that a mark may follow."""
    answer = answer_of(tokenizer, "hermes")
    tokens = tokenizer.encode("a < b").ids
    given = ["".join(piece.text for piece in answer.extend([token], ended=False)) for token in tokens]
    assert given == ["a", "", "", " <", " b"]


def test_marks_in_prose_hold_no_text_back(tokenizer):
    """Where a mark may be text, what follows it is given as soon as it is no call."""
    for name, prompt, text in (
        ("hermes", "<think>", "the <tool_call> tag"), ("qwen3_coder", "<think>", "the <tool_call> tag"),
        ("qwen3_coder", "", "the <function=g> tag"), ("glm", "<think>", "the <tool_call> tag is"),
        ("llama3", "", "the <function=g> tag" + " is" * 100),
    ):
        answer = answer_of(tokenizer, name, prompt)
        pieces = answer.extend(tokenizer.encode(text + " x").ids, ended=False)
        assert "".join(piece.text for piece in pieces) == text + " x", name
        assert answer.reasoning_tokens == (len(tokenizer.encode(text + " x").ids) if prompt else 0)


def test_calls_that_are_not_allowed_are_text(tokenizer):
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(tokenizer, "hermes", text, calls=False) == ("", text, [])
    assert read(tokenizer, "hermes", text, names=frozenset("g")) == ("", text, [])
    assert read(tokenizer, "hermes", text * 2, parallel=False) == ("", "", [("f", {})])
    assert read(tokenizer, "llama3", '<|python_tag|>{"name": "f"}', calls=False) == ("", '{"name": "f"}', [])
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert read(tokenizer, "glm", text, names=frozenset("g")) == ("", text, [])
    assert read(tokenizer, "glm", text * 2, parallel=False) == ("", "", [("f", {"a": 1})])


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("hermes", "<think>ab STOP c</think>\n\nd STOP e", ("ab STOP c", "d ", [])),
        ("hermes", "a <tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"STOP\"}}</tool_call> b STOP c",
         ("", "ab ", [("f", {"s": "STOP"})])),
        ("hermes", "<tool_call>{}STOP</tool_call>", ("", "<tool_call>{}", [])),
        ("hermes", "ST<tool_call>{\"name\": \"f\"}</tool_call>OP", ("", "STOP", [("f", {})])),
        ("hermes", "a\n\n \n<tool_call>{\"name\": \"f\"}</tool_call>", ("", "a", [])),
        ("hermes", "<think>a</think>\n\n \nb\n\nc", ("a", "b", [])), ("hermes", "a ST", ("", "a ST", [])),
        ("llama3", "{STOP", ("", "{", [])), ("llama3", '{"name": "f"} STOP', ("", "", [("f", {})])),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nSTOP\n</parameter>\n</function>\n</tool_call>STOP",
         ("", "", [("f", {"s": "STOP"})])),
        ("harmony", "<|channel|>analysis<|message|>STOP<|end|><|start|>assistant<|channel|>final<|message|>a STOP",
         ("STOP", "a ", [])),
        ("kimi_k3", "<|open|>response<|sep|>a STOP b<|close|>response<|sep|>", ("", "a ", [])),
    ],
)
def test_stop_strings_count_in_content_alone(tokenizer, name, text, want):
    for cuts in ((), range(400)):
        assert read(tokenizer, name, text, cuts, stop=["STOP", "\n\n"]) == want


def test_the_stop_string_that_ended_an_answer(tokenizer):
    for stop, want in ((["b", "abc", "ab"], "ab"), (["c", "bc"], "bc"), (["x"], "")):
        answer = answer_of(tokenizer, "none", stop=stop)
        answer.extend(tokenizer.encode("-abc-").ids, ended=True)
        assert answer.stop_string == want
        assert answer.stopped == bool(want)


def test_special_tokens_spelled_by_others_are_text(tokenizer):
    ids = [id for character in "[TOOL_CALLS]f{}" for id in tokenizer.encode(character).ids]
    answer = answer_of(tokenizer, "mistral")
    assert collected(answer.extend(ids, ended=True)) == ("", "[TOOL_CALLS]f{}", [])


@pytest.mark.parametrize("read_calls", [json_calls, pythonic_calls])
@pytest.mark.parametrize(
    "text",
    ["", "[" * 100_000, "{" * 100_000, "call:f" + "{a:" * 100_000, "[f(a=" + "(" * 50_000, "<function=f>" * 3,
     "call:f{a:" + "9" * 5000 + "}", "[f(a=" + "9" * 5000 + ")]", "[f(**x)]", "[f(a=1+2j)]", "[f(a=1, a=2)]",
     "[f(a=1) g()]",
     r'{"name": "f", "arguments": {"a": "\ud800"}}', r'{"name": "\udfff", "arguments": {}}', r'[f(a="\ud800")]',
     '{"name": 1, "arguments": {}}', '{"name": "", "arguments": {}}', " " * 100_000 + "<function=f>" + " " * 100_000],
)
def test_no_text_breaks_a_reader(read_calls, text):
    assert read_calls(text) is None


@pytest.mark.parametrize("read_calls", [json_calls, pythonic_calls])
@pytest.mark.parametrize(
    "text",
    ["a" * 30_000 + " " * 30_000, " " * 60_000, "{}" * 20_000, "{};" * 20_000, "<function=f>" + "<parameter=a>" * 5_000,
     "<function=f><parameter=a>" + "\n" * 60_000, "call:f{" + "a" * 60_000, "a[CALL_ID]" + " " * 60_000, "}" * 60_000,
     "call:f{a:" + '<|"|>x<|"|>,a:' * 4_000,
     "call:f{a:[" + "1," * 30_000 + "1]}", "f" * 30_000 + "[CALL_ID]" * 3_000, "} ;" * 20_000],
)
def test_readers_take_linear_time(read_calls, text):
    """A network can be made to write any of these, and they are read on the event loop."""
    began = time.process_time()
    assert read_calls(text) is None
    assert time.process_time() - began < 1.0, "quadratic time takes minutes"


def test_long_calls_in_python():
    text = "line 'quoted'\n" * 5_000
    assert pythonic_calls(f"[f(s={text!r})]") == [("f", json.dumps({"s": text}))]


def test_several_objects_with_semicolons():
    one = '{"name": "f", "parameters": {"a": 1}}'
    assert len(json_calls(f" {one} ;\n{one};")) == 2
    assert len(json_calls(";".join([one] * 256))) == 256
    for odd in (";".join([one] * 257), f"{one} {one}", f"{one};;{one}", f"[{one}];{one}", f";{one}", f"{one};x", ""):
        assert json_calls(odd) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|start|>{{ x }}<|channel|>commentary to=functions.{{ n }} <|constrain|>json", "harmony"),
        ("<|tool_call>call:", "gemma4"), ("<start_function_call>call:", "functiongemma"), ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call_start|>", "lfm2"), ("'List of tools: ['", "lfm2"),
        ("<tool_call>\n<function=x>", "qwen3_coder"), ("<|tool_call|>", "granite"),
        ("'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi"),
        ("begin = '<minimax:tool_call>'\n<invoke name=", "minimax"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>", "glm"),
        ('<response>x</response>\n<tool_call>{"name"', "ernie"),
        ("'<|start|>assistant to=' + 'functions.' + name + '<|channel|>commentary '", "harmony"),
        ("'\\n\\n<' + dsml_token + 'function_calls>\\n'", "deepseek_v3_2"), ("<｜DSML｜tool_calls>", "deepseek_v4"),
        ("'<' + dsml_token + 'tool_calls>'", "deepseek_v4"), ("<|close|>message<|sep|><|end_of_msg|>", "kimi_k3"),
        ("ns = ']<]minimax[>['\n<tool_call>\n<response>", "minimax_m3"),
        ("begin = '<seed:tool_call>'\n<function=x>", "seed_oss"), ("'<TOOLCALL>['", "nemotron"),
        ("<|START_ACTION|>[", "cohere"), ("token = '<|tools_prefix|>'", "apertus"),
        ("<|tool_call:begin|><tool-call-id>", "solar_open"), ('<function name="function-name"><param', "minicpm5"),
        ('function_call="<|function_call|>"', "gigachat3_1"), ("{'role': 'function call', 'content': x}", "gigachat3"),
        ("within <tool_call></tool_call> XML tags\n<tool_calls>[", "apriel"),
        ("start_tag => `<function`\n<function=example>", "functionary"),
        ('<tool_call>{"name"', "hermes"), ("<|python_tag|>", "llama3"), ("plain", "none"),
    ],
)
def test_the_template_tells_the_dialect(template, name):
    assert dialect_of(template) == DIALECTS[name]._replace(thoughts=dialect_of(template).thoughts)
    assert dialect_of(template + "</think>", name).thoughts is not None or name in ("harmony", "functiongemma")
    assert dialect_of("other", name).calls == DIALECTS[name].calls


def test_an_unknown_dialect():
    with pytest.raises(ValueError, match=r"tool_parser: expected one of harmony, .*, got klingon"):
        dialect_of("", "klingon")
