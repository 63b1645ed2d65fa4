"""Conversations: what templates write, token for token; answers as text, stopped, closed and cached."""

import json
import sys
from enum import Enum, IntEnum

import numpy as np
import pytest
from chat_folders import PLAIN, REWRITING, chat_folder
from gguf_files import ARRAY, STRING, U32, convert
from places import GOLDEN

from kvcache import (
    BatchEngine,
    CheckpointError,
    InferenceEngine,
    InvalidOperationError,
    PrefixCachedEngine,
    SamplingParams,
)
from kvcache.engine.chat import render
from kvcache.sampling.tokenizer import CheckpointText

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.one_build

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=40)
TALK = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def walk(path):"}]
SHARED = [{"role": "system", "content": "import os\n\n\ndef walk(path):\n" * 9}, TALK[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("chat") / "plain")


@pytest.fixture(scope="module")
def engine(folder):
    return InferenceEngine.from_pretrained(folder)


def written(tmp_path, template, messages=TALK, tools=None, add_generation_prompt=True, **config):
    """The text that a template writes."""
    folder = chat_folder(tmp_path / "x", template, **config)
    return render(CheckpointText(folder), messages, tools, add_generation_prompt)


# -- the template -----------------------------------------------------------------------------------------------


def test_the_text_of_a_conversation(engine):
    end = "<|endoftext|>\n"
    text = f"system: import os{end}user: def walk(path):{end}"
    assert engine.apply_chat_template(TALK) == text + "assistant:"
    assert engine.apply_chat_template(TALK, add_generation_prompt=False) == text
    ids = engine.apply_chat_template(TALK, tokenize=True)
    assert ids == engine.tokenizer.encode(text + "assistant:", add_special_tokens=False).ids
    assert ids.count(0) == 2


def test_a_token_that_the_template_names_comes_once(tmp_path):
    """The tokenizer begins each text with the same token; a conversation has the one of the template alone."""
    folder = chat_folder(tmp_path / "x", "{{ bos_token }}" + PLAIN)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    begin = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": begin},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    engine = InferenceEngine.from_pretrained(folder)
    assert engine.tokenizer.encode("x").ids[0] == 0
    ids = engine.apply_chat_template(TALK, tokenize=True)
    assert (ids[0], ids[1] == 0, ids.count(0)) == (0, False, 3)


def test_a_gguf_file_has_its_template_and_tokens(tmp_path):
    characters = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:-2], "hi", "<s>"]
    path = convert(
        GOLDEN / "llama",
        tmp_path / "x.gguf",
        tokenizer__ggml__model=(STRING, "gpt2"),
        tokenizer__ggml__tokens=(ARRAY, characters, STRING),
        tokenizer__ggml__token_type=(ARRAY, [1] * 255 + [3], 5),
        tokenizer__ggml__merges=(ARRAY, ["h i"], STRING),
        tokenizer__ggml__bos_token_id=(U32, 255),
        tokenizer__chat_template=(STRING, "{{ bos_token }}{{ messages[0]['content'] }}!"),
    )
    engine = InferenceEngine.from_pretrained(path)
    ids = engine.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)
    assert (len(ids), ids[0]) == (3, 255)
    assert isinstance("".join(engine.chat([{"role": "user", "content": "hi"}], GREEDY)), str)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
        ("{{ messages[0] | tojson(indent=1, ensure_ascii=True) }}", '{\n "role": "user",\n "content": "<\\u00e9>"\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}",
         "013"),
        ("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}", "<é>"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ dict(a=1) | tojson }}{{ dict([('b', 2)]).b }}", '{"a": 1}2'),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}", "<|endoftext|>|<|endoftext|>|False"),
        ("{{ 'content' in messages[0] }}{{ 'tool_calls' in messages[0] }}", "TrueFalse"),
    ],
)
def test_what_templates_use(tmp_path, template, text):
    message = {"role": "user", "content": "<é>", "tool_calls": None}
    assert written(tmp_path, template, [message]) == text


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
BARE = {key: value for key, value in CALL.items() if key != "content"}  # as clients send what has none
PARTS = {"role": "user", "content": [{"type": "text", "text": " a"}, {"type": "text", "text": "b "}]}


@pytest.mark.parametrize(
    ("template", "message", "text"),
    [
        ("{{ m.content + '.' }}", CALL, "."),
        ("{{ m['content'].strip() }}{{ m.tool_calls | length }}", CALL, "1"),
        ("{{ m['content'].strip() }}{{ m.tool_calls | length }}", BARE, "1"),
        ("{% if m['content'] is none %}calls{% else %}{{ m['content'] }}{% endif %}", BARE, "calls"),
        ("{% if m['content'] is none %}calls{% else %}{{ m['content'] }}{% endif %}", CALL, "calls"),
        ("{% if m.content is not none %}{{ m.content }}{% endif %}", CALL, ""),
        ("{{ m.content + '.' }}", PARTS, " ab ."),
        ("{% if m.content is string %}{{ m.content }}{% else %}lost{% endif %}", PARTS, " ab "),
        ("{% for line in m.content.split('b') %}{{ line }}|{% endfor %}", PARTS, " a| |"),
        ("{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text | trim }}"
         "{% endfor %}{% endif %}", PARTS, "ab"),
        ("{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part.text }},{% endfor %}", PARTS,
         " a,b ,"),
    ],
)
def test_contents_of_none_and_of_parts(tmp_path, template, message, text):
    """A template gets none, or a list, only where it knows them; transformers then writes the same."""
    assert written(tmp_path, "{% for m in messages %}" + template + "{% endfor %}", [message]) == text


@pytest.mark.parametrize("cached", [False, True])
def test_variables_of_the_template(folder, tmp_path, cached):
    """Every engine hands them on; what the engine gives itself stays its own."""
    switch = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ level or '' }}"
    folder = chat_folder(tmp_path / "x", switch)
    engine = InferenceEngine.from_pretrained(folder)
    plain = engine.apply_chat_template(TALK)
    chosen = {"enable_thinking": False, "level": "high"}
    tokens = engine.apply_chat_template(TALK, tokenize=True, template=chosen)
    assert engine.apply_chat_template(TALK, template=chosen) == plain + "<no>high"
    assert BatchEngine.from_pretrained(folder).apply_chat_template(TALK, tokenize=True, template=chosen) == tokens
    talking = PrefixCachedEngine(engine, 200) if cached else engine
    assert talking.apply_chat_template(TALK, tokenize=True, template=chosen) == tokens
    answer = talking.chat(TALK, GREEDY, template=chosen)
    assert answer.prompt_tokens == len(tokens)
    assert "".join(answer) == engine.complete(tokens, GREEDY).text
    for wrong, error in (
        ({"messages": []}, ValueError), ({"bos_token": "x"}, ValueError), ({"chat_template": "x"}, ValueError),
        ({"a b": 1}, ValueError), ({"_x": 1}, ValueError), ({1: 1}, ValueError), ({"x": object()}, TypeError),
        ([1], TypeError),
    ):
        with pytest.raises(error, match="template: expected"):
            talking.apply_chat_template(TALK, template=wrong)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ c.arguments | tojson }}", '{"a": 1}'),
        ("{% for name, value in c.arguments | items %}{{ name }}={{ value }}{% endfor %}", "a=1"),
        ("{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}", '{"a":1}'),
        ("{{ 'x' + c['arguments'] + 'y' }}", 'x{"a":1}y'),
        ("{{ 'x' + c['arguments'] | tojson + 'y' }}", 'x{"a": 1}y'),
        ("{% if c.old %}{{ 'x' + c.arguments }}{% else %}{{ 'x' + c.arguments | tojson }}{% endif %}", 'x{"a": 1}'),
        ("{% if c['arguments'] is mapping %}{% for name, value in c['arguments'] | dictsort %}{{ name }}:{{ value }}"
         "{% endfor %}{% elif c['arguments'] is string %}{{ c['arguments'] }}{% endif %}", "a:1"),
    ],
)
def test_arguments_of_calls_are_objects_or_texts(tmp_path, template, text):
    """As the template takes them; interfaces have texts. What is no object of JSON stays a text."""
    template = (
        "{% for m in messages %}{% for t in m.tool_calls %}{% set c = t.function %}" + template +
        "{% endfor %}{% endfor %}"
    )

    def call(arguments):
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    assert written(tmp_path, template, [call('{"a":1}')]) == text
    engine = InferenceEngine.from_pretrained(tmp_path / "x")
    if "+" not in template:
        assert engine.apply_chat_template([call({"a": 1})]).replace(" ", "") == text.replace(" ", "")
    if template.endswith("c.arguments | tojson }}{% endfor %}{% endfor %}"):
        for odd in ("[1]", "{", "[" * 100_000):
            assert json.loads(engine.apply_chat_template([call(odd)])) == odd


def test_templates_of_kimi_count_calls(tmp_path):
    """The ids of a client would be what the network goes on with; results have those of their calls."""
    template = (
        "{# <|tool_calls_section_begin|> #}{% for m in messages %}{% for t in m.tool_calls %}{{ t.id }} {% endfor %}"
        "{{ m.tool_call_id }};{% endfor %}"
    )

    def call(id, name):
        return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    talk = [
        {"role": "assistant", "tool_calls": [call("call_a", "f"), call("call_b", "g")]},
        {"role": "tool", "tool_call_id": "call_b", "content": ""}, {"role": "tool", "tool_call_id": "x", "content": ""},
        {"role": "assistant", "tool_calls": [call("call_a", "f")]}, {"role": "tool", "tool_call_id": "call_a"},
    ]
    wanted = "functions.f:0 functions.g:1 ;functions.g:1;x;functions.f:2 ;functions.f:2;"
    assert written(tmp_path, template, talk) == wanted
    (tmp_path / "y").mkdir()
    assert written(tmp_path / "y", template.replace("section", ""), talk).startswith("call_a call_b ;call_b;")


def test_values_of_subclasses_are_plain(tmp_path):
    class Role(str, Enum):
        USER = "user"

    class Number(IntEnum):
        TWO = 2

    message = {"role": Role.USER, "seconds": np.float64(0.5), "content": "", Role.USER: Number.TWO}
    template = "{{ messages[0]['role'] }} {{ messages | tojson }}"
    assert written(tmp_path, template, [message]) == 'user [{"role": "user", "seconds": 0.5, "content": "", "user": 2}]'


def test_templates_of_several_places_and_names(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ tools | length }}"}]
    tool = {"type": "function", "function": {"name": "f"}}
    assert written(tmp_path / "list", named) == "d"
    assert written(tmp_path / "tools", named, tools=[tool, tool]) == "t2"
    assert written(tmp_path / "one", "d{{ tools | length }}", tools=[tool]) == "d1"
    folder = chat_folder(tmp_path / "files", "of the configuration")
    (folder / "chat_template.jinja").write_text("of the file é", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    text = CheckpointText(folder)
    assert (render(text, TALK), render(text, TALK, [tool])) == ("of the file é", "of tools")
    assert text.chat_template == "of the file é"
    special = chat_folder(tmp_path / "special", "{{ bos_token }}{{ eos_token is defined }}", eos_token=None,
                          bos_token={"content": "<|endoftext|>", "special": True})
    assert render(CheckpointText(special), TALK) == "<|endoftext|>False"


@pytest.mark.parametrize(
    ("messages", "error", "says"),
    [
        ([], ValueError, "messages: expected at least one"),
        ("hello", TypeError, "messages: expected a list of dicts"),
        (["hello"], TypeError, "messages: expected a list of dicts"),
        ([{"content": "x"}], ValueError, 'messages: expected a "role"'),
        ([{"role": 1, "content": "x"}], ValueError, 'messages: expected a "role"'),
        ([{"role": "user", "content": object()}], TypeError, "messages: expected texts"),
        ([{"role": "user", "content": b"x"}], TypeError, "messages: expected texts"),
        ([{"role": "wizard", "content": "x"}], ValueError, "messages: expected ones .* no wizards"),
        ([{"role": "user", "content": {"x": 1}}], TypeError, r"messages: expected a \"content\" of .*, got {'x': 1}"),
        ([{"role": "tool", "content": 5}], TypeError, 'messages: expected a "content" of text or parts, got 5'),
        ([{"role": "user", "contents": "x"}], ValueError, 'messages: expected a "content" beside the role user, got'),
        ([{"role": "tool", "content": {"x": 1}}], ValueError, "messages: expected ones .* error of it"),
        ([{"role": "user", "content": ["x"]}], ValueError, r"messages: expected parts of type text, got \['x'\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], ValueError, "messages: expected parts of type text"),
    ],
)
def test_messages_that_are_refused(tmp_path, messages, error, says):
    template = (
        "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
        "{{ 'x' + m.content }}{% endfor %}"
    )
    with pytest.raises(error, match=says):
        written(tmp_path, template, messages)
    deep = content = []
    for _ in range(200):
        content.append([])
        content = content[0]
    with pytest.raises(ValueError, match="messages: expected at most 100 levels"):
        written(tmp_path / "deep", template, [{"role": "user", "content": deep}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ dict.__call__.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(a=1) }}",
        "{{ ''.format.__self__.__class__ }}{{ '{0.__class__.__mro__}'.format('') }}{{ x.y }}",
        "{% include 'other' %}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_reaches_plain_data_alone(tmp_path, template):
    with pytest.raises(ValueError, match="messages: expected ones that the chat template takes"):
        written(tmp_path, template)


REFUSED_BY_PYTHON = {  # jinja2 takes them, Python's compiler does not
    "a break outside a loop": "{% break %}",
    "a continue outside a loop": "{% for a in b %}{% call f() %}{% continue %}{% endcall %}{% endfor %}",
    "an argument twice": "{{ f(a=1, a=2) }}",
    "a parameter twice": "{% macro f(a, a) %}{% endmacro %}",
    "nested loops": "{% for a in b %}" * 25 + "{% endfor %}" * 25,
    "nested conditions": "{% if a %}" * 120 + "{% endif %}" * 120,
    "nested parentheses": "{{ " + "not " * 201 + "a }}",
    "a name of Python's own": "{{ f(__debug__=1) }}",
}


@pytest.mark.parametrize("template", REFUSED_BY_PYTHON.values(), ids=REFUSED_BY_PYTHON)
def test_a_template_that_python_does_not_compile(tmp_path, template):
    with pytest.raises(CheckpointError, match="chat_template: expected a Jinja template, got an error"):
        written(tmp_path, template)


def test_thoughts_come_under_the_key_that_the_template_reads(tmp_path):
    """Interfaces send `reasoning_content` or `reasoning`; templates read one of these, or `thinking`."""
    answer = {"role": "assistant", "content": "yes"}
    reads = {
        "thinking": "{{ messages[0].thinking }}",
        "reasoning_content": "{% if 'reasoning_content' in messages[0] %}{{ messages[0].reasoning_content }}{%endif%}",
        "reasoning": '{{ messages[0]["reasoning"] }}',
    }
    for number, (read, template) in enumerate(reads.items()):
        for sent in reads:
            assert written(tmp_path / f"{number}{sent}", template, [answer | {sent: "hm"}]) == "hm"
        own = [answer | {"reasoning": "no", "thinking": "no", "reasoning_content": "no"} | {read: "own"}]
        assert written(tmp_path / f"{number}own", template, own) == "own"
    whole = "{{ messages[0] | tojson }}{% set enable_thinking = thinking is defined %}"
    answer["reasoning"] = "hm"
    assert json.loads(written(tmp_path / "whole", whole, [answer])) == answer


def test_a_template_is_not_searched_for_each_message(tmp_path):
    """The searches of a template of 16 KB took 430 ms of a conversation with 200 calls."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.reasoning_content }}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": "{}"}
    turn = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "reasoning": "y",
            "tool_calls": [{"type": "function", "function": function}]}
    text, searches = CheckpointText(chat_folder(tmp_path / "x", template)), []

    def note(_, event, called):
        if event == "c_call" and called.__name__ == "search":
            searches.append(called)

    sys.setprofile(note)
    try:
        assert render(text, [turn] * 200) == "{}yx" * 200
    finally:
        sys.setprofile(None)
    assert 0 < len(searches) < 40


@pytest.mark.parametrize("template", ["{% for %}", "{{ x", "{% endif %}", "{% fly %}", "{% generation %}"])
def test_a_damaged_template(tmp_path, template):
    with pytest.raises(CheckpointError, match="chat_template: expected a Jinja template, got an error"):
        written(tmp_path, template)


def test_templates_and_tokens_of_another_kind(tmp_path):
    for place, config in (("a", {"chat_template": 7}), ("b", {"chat_template": [{"name": "default", "template": 1}]})):
        with pytest.raises(CheckpointError, match="chat_template: expected a string"):
            written(tmp_path / place, None, **config)
    with pytest.raises(CheckpointError, match="bos_token: expected a string"):
        written(tmp_path / "c", "x", bos_token=[1])
    folder = chat_folder(tmp_path / "d")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="expected UTF-8"):
        render(CheckpointText(folder), TALK)


def test_an_engine_without_a_template_or_tokenizer(tmp_path):
    bare = InferenceEngine.from_pretrained(GOLDEN / "llama")
    for engine in (bare, InferenceEngine(bare.model), PrefixCachedEngine(bare, 4)):
        for call in (engine.chat, engine.apply_chat_template):
            with pytest.raises(ValueError, match="messages: expected an engine whose checkpoint has a chat template"):
                call(TALK)
    folder = chat_folder(tmp_path / "x")
    (folder / "tokenizer.json").unlink()
    engine = InferenceEngine.from_pretrained(folder)
    assert engine.apply_chat_template(TALK).endswith("assistant:")
    with pytest.raises(ValueError, match="messages: expected an engine with a tokenizer"):
        engine.chat(TALK)


def test_the_texts_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tool = {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}}}
    template = (
        "{{- bos_token }}{%- if tools %}\n  {{- tools | tojson(indent=2) }}\n{% endif %}"
        "{% set ns = namespace(last=-1) %}{% for m in messages %}\n  {%- if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}\n<{{ m['role'] }}>{{ m['content'] | trim }}{{ eos_token }}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.last }}{% if add_generation_prompt %}<a>{% endif %}"
    )
    folder = chat_folder(tmp_path / "x", template)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), InferenceEngine.from_pretrained(folder)
    for messages in (TALK, [*TALK, {"role": "assistant", "content": " a\n", "tool_calls": None}]):
        for tools in (None, [tool]):
            for more in (True, False):
                options = {"tools": tools, "add_generation_prompt": more}
                text = theirs.apply_chat_template(messages, tokenize=False, **options)
                assert ours.apply_chat_template(messages, **options) == text
                ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
                assert ours.apply_chat_template(messages, tokenize=True, **options) == ids


# -- the answer -------------------------------------------------------------------------------------------------


def test_the_pieces_are_the_text_of_complete(engine):
    prompt = engine.apply_chat_template(TALK, tokenize=True)
    whole = engine.complete(prompt, GREEDY)
    answer = engine.chat(TALK, GREEDY)
    assert (answer.tokens, answer.cached_tokens, answer.finish_reason) == ([], 0, None)
    pieces = list(answer)
    assert len(pieces) > 5
    assert all(pieces)
    assert "".join(pieces) == whole.text
    assert (answer.tokens, answer.prompt_tokens) == (whole.tokens, len(prompt))
    assert answer.finish_reason == whole.finish_reason
    assert repr(answer).startswith(f"Answer({len(whole.tokens)} tokens")
    assert list(answer) == []


def test_characters_of_several_tokens_come_whole(engine):
    """Tokens of single bytes: no piece ends within a character."""
    text = "é日😀"
    letters = "".join(part for part, _ in tokenizers.pre_tokenizers.ByteLevel(False).pre_tokenize_str(text))
    table = [engine.tokenizer.token_to_id(letter) for letter in letters]
    position = len(engine.apply_chat_template(TALK, tokenize=True))

    def spell(tokens, logits):
        logits[:] = -1e9
        logits[table[len(tokens) - position] if len(tokens) - position < len(table) else 0] = 0.0

    pieces = list(engine.chat(TALK, SamplingParams(temperature=0.0, max_tokens=20, logits_processor=spell)))
    assert pieces == ["é", "日", "😀"]
    cut = list(engine.chat(TALK, SamplingParams(temperature=0.0, max_tokens=4, logits_processor=spell)))
    assert cut == ["é", "\ufffd"]


def test_no_part_of_a_stop_string_is_shown(engine):
    whole = "".join(engine.chat(TALK, GREEDY))
    for length in (2, 5, 9):
        stop = whole[12 : 12 + length]
        answer = engine.chat(TALK, SamplingParams(0.0, repetition_penalty=1.1, max_tokens=40, stop=[stop, "never"]))
        shown = ""
        for piece in answer:
            shown += piece
            assert whole.startswith(shown)
        assert shown == whole[: whole.index(stop)]
        assert answer.finish_reason == "stop"


@pytest.mark.parametrize("cached", [False, True])
def test_a_closed_answer_frees_the_engine_and_keeps_what_it_computed(folder, cached):
    inner = InferenceEngine.from_pretrained(folder)
    engine = PrefixCachedEngine(inner, 64) if cached else inner
    answer = engine.chat(SHARED, GREEDY)
    first = next(answer)
    with pytest.raises(InvalidOperationError):
        next(engine.chat(SHARED, GREEDY))
    answer.close()
    answer.close()
    assert answer.finish_reason is None
    assert list(answer) == []
    again = engine.chat(SHARED, GREEDY)
    assert next(again) == first
    assert (again.cached_tokens > again.prompt_tokens // 2) == cached
    del again  # a dropped one too
    engine.generate([1, 2, 3], GREEDY)
    engine.check()


def test_the_progress_of_a_prompt(folder):
    """After each piece, cached tokens counted; what it raises ends the answer, and the next one is as ever."""
    engine = PrefixCachedEngine(InferenceEngine.from_pretrained(folder, prefill_chunk=32), 64)
    messages, seen = [{"role": "user", "content": "import os " * 40}], []
    params = SamplingParams(temperature=0.0, max_tokens=3)

    def stop(done, total):
        seen.append((done, total))
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(engine.chat(messages, params, progress=stop))
    total = seen[0][1]
    assert seen == [(32, total), (64, total)]
    seen.clear()
    answer = engine.chat(messages, params, progress=lambda *done: seen.append(done))
    assert "".join(answer) == "".join(InferenceEngine.from_pretrained(folder).chat(messages, params))
    assert [done for done, _ in seen] == [*range(32 * (1 + answer.cached_tokens // 32), total, 32), total]
    engine.check()


def test_an_answer_that_never_began_holds_nothing(engine):
    engine.chat(TALK, GREEDY)
    engine.chat(TALK, GREEDY).close()
    assert engine.generate([1, 2, 3], GREEDY) is not None


def test_a_conversation_keeps_its_prefix(folder):
    engine = PrefixCachedEngine(InferenceEngine.from_pretrained(folder), 200, strict=True)
    cold = InferenceEngine.from_pretrained(folder)
    messages, before = list(SHARED), 0
    for turn in range(4):
        answer = engine.chat(messages, GREEDY, namespace="a")
        text = "".join(answer)
        assert text == "".join(cold.chat(messages, GREEDY))
        assert answer.cached_tokens >= before - 16  # the tail of a block may run again
        before = answer.prompt_tokens
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"def f{turn}(x):"}]
    other = engine.chat(messages, GREEDY, namespace="b")
    next(other)
    assert other.cached_tokens == 0
    other.close()
    engine.check()


def test_a_template_that_rewrites_history_gives_the_text_of_a_cold_run(tmp_path):
    folder = chat_folder(tmp_path / "x", REWRITING)
    engine = PrefixCachedEngine(InferenceEngine.from_pretrained(folder), 200, strict=True)
    cold = InferenceEngine.from_pretrained(folder)
    messages = list(SHARED)
    for turn in range(3):
        answer = engine.chat(messages, GREEDY)
        text = "".join(answer)
        assert text == "".join(cold.chat(messages, GREEDY))
        assert (answer.cached_tokens > 0) == (turn > 0)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"def f{turn}(x):"}]
    engine.check()


def test_arguments_are_checked_before_anything_runs(engine):
    before = engine.prefill_token_count
    for call in (
        lambda: engine.chat([]),
        lambda: engine.chat(TALK, params=3),
        lambda: engine.chat(TALK, tools=3),
        lambda: engine.chat([{"role": "user", "content": "x y " * 2000}]),
        lambda: engine.chat([{"role": "user", "content": "\ud800"}]),
    ):
        with pytest.raises((TypeError, ValueError), match="expected"):
            call()
    assert engine.prefill_token_count == before
