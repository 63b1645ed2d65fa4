"""Thoughts, content and calls of each family; the same however the text is cut."""

import json
import time
from itertools import pairwise

import pytest
from dialect_answers import ANSWERS, MARKS, SCHEMAS, mark_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from kvcache.sampling.dialects.call_span import CallSpan
from kvcache.sampling.dialects.call_texts import json_calls, pythonic_calls
from kvcache.sampling.dialects.dialect_table import DIALECTS, dialect_of
from kvcache.sampling.dialects.json_scan import JsonScan
from kvcache.sampling.dialects.marks import MarkSearch
from kvcache.sampling.dialects.spoken_answer import MarkTokens, SpokenAnswer
from kvcache.sampling.dialects.transcript import Transcript

pytestmark = pytest.mark.one_build


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each byte, and one for each mark."""
    return mark_tokenizer()


@pytest.fixture(scope="module")
def spelling_tokenizer():
    """A token for each byte, and one for each part of marks that is a special token of its own."""
    parts = (
        "｜DSML｜", "<|open|>", "<|sep|>", "<|close|>", "]<]minimax[>[", "<tool_call>", "<|message_sep|>",
        "<|role_sep|>",
    )
    return mark_tokenizer(parts, ())


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
    "<function=f><parameter=s>" + "<parameter=" * 5_000 + "\n</parameter>", "call:f{s:x," + " " * 30_000 + ":" * 30_000,
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
        ("sep = '<tool_sep{}>'.format(KIND)", "hy3"), ("NAME<tool_sep:opensource>", "hy3"),
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
        ("'<|python_start|>' + content + '<|python_end|>'", "llama4"), ("<|header_start|>", "llama4"),
    ],
)
def test_the_template_tells_the_dialect(template, name):
    assert dialect_of(template) == DIALECTS[name]._replace(thoughts=dialect_of(template).thoughts)
    assert dialect_of(template + "</think>", name).thoughts is not None or name in ("harmony", "functiongemma")
    assert dialect_of("other", name).calls == DIALECTS[name].calls


def test_an_unknown_dialect():
    with pytest.raises(ValueError, match=r"tool_parser: expected one of harmony, .*, got klingon"):
        dialect_of("", "klingon")
