"""Prompts are made once: how often a conversation is written and becomes tokens, and the places found in it."""

import json
import os.path
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from chat_folders import chat_folder
from http_servers import MODEL, TALK, Served, answer, post, tiny_file
from state_networks import StateNetwork
from windowed_networks import windowed

import kvcache
from kvcache import BatchEngine
from kvcache.engine.chat import render
from kvcache.engine.segment_spans import SegmentSpan
from kvcache.server.chat_text import ChatText
from kvcache.server.conversations import Conversation
from kvcache.server.limits import Threads
from kvcache.server.retention import CacheMark
from kvcache.server.served_model import ServedModel

pytestmark = pytest.mark.one_build

MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "description": "F", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}
MESSAGES = {
    "model": MODEL, "max_tokens": 1, "tools": [TOOL], "system": [{"type": "text", "text": "Be brief. "} | MARK],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi there"} | MARK]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}} | MARK]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"} | MARK]},
    ],
}
CHAT = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "system", "content": "Be brief."}, *TALK]}
BEGUN = CHAT | {
    "messages": [*CHAT["messages"], {"role": "assistant", "content": "It is"}], "continue_final_message": True,
}


# -- how often ----------------------------------------------------------------------------------------------------


def calls_of(run):
    """The calls of Python in a run: by name those of the library, and all as "all"."""
    found, package = Counter(), os.path.dirname(kvcache.__file__)

    def note(frame, event, _):
        if event == "call":
            found["all"] += 1
            if frame.f_code.co_filename.startswith(package):
                found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    engine = BatchEngine.from_pretrained(tiny_file(tmp_path_factory.mktemp("counted")), num_blocks=400)
    yield ServedModel(engine, MODEL, tool_parser="hermes")
    engine.close(cancel=True)


def made(model):
    """Functions that answer bodies, by what they do, with their renderings and the most calls of Python."""
    threads, strict = Threads(), {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    alone = {name: CHAT[name] for name in ("model", "messages")}
    counted = {name: MESSAGES[name] for name in MESSAGES if name != "max_tokens"}

    def queued(asked):
        model.queued(asked, threads, 60.0).cancel()

    return {
        "a chat": (lambda: queued(model.complete(CHAT, None, chat=True)), 1, 450),
        "one that is begun": (lambda: queued(model.complete(BEGUN, None, chat=True)), 2, 750),
        "one with a grammar": (lambda: model.complete(CHAT | {"tools": [strict]}, None, chat=True), 1, None),
        "a message without marks": (lambda: queued(model.message(without_marks(MESSAGES), None)), 1, 900),
        "a message with four": (lambda: queued(model.message(MESSAGES, None)), 2, 1300),
        "a response": (
            lambda: queued(model.respond({"model": MODEL, "input": "Hi", "max_output_tokens": 1}, None)), 1, 400
        ),
        "a text": (lambda: queued(model.complete({"model": MODEL, "prompt": "Hi"}, None, chat=False)), 0, 300),
        "the number of tokens": (lambda: model.count(counted, None), 1, None),
        "tokens": (lambda: model.tokenize(alone, None), 1, None),
        "tokens for a router": (lambda: model.render(alone, None, chat=True), 1, None),
    }


def without_marks(value):
    if isinstance(value, dict):
        return {key: without_marks(each) for key, each in value.items() if key != "cache_control"}
    return [without_marks(each) for each in value] if isinstance(value, list) else value


def test_a_prompt_is_made_once(model):
    """Whatever is asked: of a GGUF file a chat took 6,553 calls of Python, when each one read its header again."""
    for name, (run, renderings, most) in made(model).items():
        run()
        found = calls_of(run)
        assert found["apply_chat_template"] == renderings, name
        assert found["encoded"] + found["encoded_with_ends"] == 1, name
        assert most is None or 0 < found["all"] <= most, (name, found["all"])


def test_a_network_with_a_state_needs_two_texts_more(model):
    """The text of the next turn, and of another conversation behind the same system prompt."""
    engine = BatchEngine(StateNetwork("one of each"))
    engine._text = model.engine._text
    stateful = ServedModel(engine, MODEL)
    asked = []
    found = calls_of(lambda: asked.append(stateful.complete(CHAT, None, chat=True)))
    assert (found["apply_chat_template"], found["encoded_with_ends"], found["encoded"]) == (3, 1, 0)
    ((tokens, parts, kept, *_),) = asked[0].prompts
    assert kept is None
    assert parts == engine.chat_parts(CHAT["messages"], tokens.tolist())
    assert [engine.tokenizer.decode(tokens[:place]) for place in parts] == [
        "system:Be brief.\nuser:", engine.tokenizer.decode(tokens),
    ]
    found = calls_of(lambda: asked.append(stateful.complete(BEGUN, None, chat=True)))
    assert found["encoded_with_ends"] == 1
    assert asked[1].prompts[0].parts == (parts[0], len(asked[1].prompts[0].tokens))
    engine.close()


def test_a_file_that_is_moved_or_removed_changes_nothing(tmp_path):
    def answers(served):
        client = served.client()
        got = [
            client.chat.completions.create(model=MODEL, messages=CHAT["messages"], max_tokens=2, temperature=0),
            client.completions.create(model=MODEL, prompt="Hi", max_tokens=2, temperature=0),
        ]
        return [(each.choices, each.usage.prompt_tokens) for each in got]

    with Served(tiny_file(tmp_path)) as served:
        moved = served.path.rename(tmp_path / "moved.gguf")
        first = answers(served)
        moved.write_bytes(b"GGUF")
        second = answers(served)
        moved.unlink()
        assert answers(served) == second == first


# -- places -------------------------------------------------------------------------------------------------------


def body_of(line, end="assistant:"):
    return "{% for m in messages %}" + line + "{% endfor %}" + end


TALKS = [
    {"role": "system", "content": "  a system \n"}, {"role": "user", "content": "ab cd"},
    {"role": "assistant", "content": "b"}, {"role": "user", "content": "last"},
]
MARKS = [CacheMark(0, None, 1.0), CacheMark(1, 2, 1.0), CacheMark(1, 5, 1.0), CacheMark(2, None, 1.0),
         CacheMark(3, 2, 1.0), CacheMark(3, 4, 1.0)]
# Templates that write what is in messages, each with the ends of these blocks; the last one is always that of all.
WRITTEN = {
    "as it is": (
        body_of("{{ m.role }}:{{ m.content }};"),
        ["system:  a system \n;user:", ":ab", "user:ab cd;assistant:", "assistant:b;user:", ";user:la"],
    ),
    "trimmed": (
        body_of("{{ m.role }}:{{ m.content | trim }};"),
        ["system:a system;user:", ":ab", "user:ab cd;assistant:", "assistant:b;user:", ";user:la"],
    ),
    "as JSON": (
        body_of("{{ m | tojson }}"),
        [' \\n"}{"role": "user", "content": "', ' "ab', ' cd"}{"role": "assistant", "content": "',
         '"b"}{"role": "user", "content": "', ' "la'],
    ),
    "in capitals": (
        body_of("{{ m.role }}:{{ m.content | upper }};"),
        ["system:  A SYSTEM \n;user:", ":AB", "user:AB CD;assistant:", "assistant:B;user:", ";user:LA"],
    ),
    "twice": (
        body_of("{{ m.content }}|{{ m.content | trim }};"),
        ["  a system \n|a system;", ";ab", "ab cd|ab cd;", ";b|b;", ";la"],
    ),
}
# Templates that would write another text, or none, with something else in messages.
CHANGED = {
    "counted": body_of("{{ m.role }}:{{ m.content }}{{ m.content | length }};"),
    "compared": body_of("{{ m.role }}:{% if m.content == 'b' %}B{% else %}{{ m.content }}{% endif %};"),
    "cut": body_of("{{ m.role }}:{{ m.content[:4] }};"),
    "in another order": body_of("{{ m.role }}:{{ m.content | list | sort | join }};"),
    "refused": body_of("{% if m.content | length > 12 %}{{ raise_exception('long') }}{% endif %}{{ m.content }};"),
}


def text_of(template, marks=MARKS, messages=TALKS, **more):
    """The text of a conversation with its ends, how many were written for it, and a function that writes another."""
    side = SimpleNamespace(template=lambda name: template, special_tokens={})
    count = []

    def write(messages, begins):
        count.append(messages)
        return render(side, messages, add_generation_prompt=begins)

    found = ChatText(Conversation(messages, **more), write, False, marks)
    return found, len(count), lambda messages: render(side, messages)


@pytest.mark.parametrize("name", WRITTEN)
def test_ends_are_found_by_one_text_more(name):
    template, ends = WRITTEN[name]
    found, count, write = text_of(template)
    assert (found.text, count) == (write(TALKS), 2)
    shown = [found.text[:end] for end in found.ends]
    assert shown[-1] == found.text
    for text, wanted in zip(shown, ends, strict=False):
        assert text.endswith(wanted)
        assert found.text.index(wanted) + len(wanted) == len(text)


@pytest.mark.parametrize("name", CHANGED)
def test_a_template_that_sees_a_difference_writes_the_text_without(name):
    """Then a block ends where the text and that of the conversation up to it differ."""
    found, count, write = text_of(CHANGED[name])
    assert (found.text, count) == (write(TALKS), 2 + len(MARKS) - 1)
    for mark, end in zip(MARKS, found.ends, strict=True):
        until = [*TALKS[: mark.message], TALKS[mark.message] | {"content": TALKS[mark.message]["content"]}]
        if mark.characters is not None:
            until[-1]["content"] = until[-1]["content"][: mark.characters]
        assert end == len(os.path.commonprefix([found.text, write(until)]))  # noqa: RUF071  # of texts


def test_what_a_template_leaves_out_ends_where_it_differs():
    """And what it does not take alone is all."""
    found, count, _ = text_of("{{ messages[-1].content }}")
    assert (found.text, count, found.ends) == ("last", 2 + 3, [0, 0, 0, 0, 2, 4])
    found, count, _ = text_of(
        "{% if messages | length < 2 %}{{ raise_exception('one') }}{% endif %}{{ messages[-1].content }}"
    )
    assert (count, found.ends) == (2 + 3, [4, 0, 0, 0, 2, 4])


def test_a_place_is_beside_no_white_space():
    """Where a template trims parts of a text too, and where there is nothing but white space."""
    template = body_of("{% for p in m.content %}{{ p.text | trim }};{% endfor %}")
    parts = [{"type": "text", "text": text} for text in (" a b ", "  ", " c")]
    talk = [{"role": "user", "content": parts}, {"role": "user", "content": parts[:1]}]
    marks = [CacheMark(0, characters, 1.0) for characters in (0, 1, 3, 4, 5, 7, 8)]
    found, count, _ = text_of(template, marks, talk)
    assert (found.text, count) == ("a b;;c;a b;assistant:", 2)
    assert [found.text[:end] for end in found.ends] == ["", "", "a", "a b", "a b", "a b", "a b"]
    blank = [{"role": "user", "content": " \n "}, {"role": "user", "content": "a"}]
    assert text_of(body_of("{{ m.content }}"), [CacheMark(0, 1, 1.0)], blank)[0].ends == [3]


def test_the_end_of_a_message_is_behind_its_calls():
    """The next one may have no text: an end behind calls is then found by the conversation up to it."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "b", "tool_calls": [call]}
    template = body_of("{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>"
                       "{% endfor %};")
    talk = [TALKS[1], answer, {"role": "tool", "content": "3"}, TALKS[3]]
    found, count, _ = text_of(template, [CacheMark(number, None, 1.0) for number in range(3)], talk)
    assert (count, [found.text[:end].rpartition("b<")[2] for end in found.ends]) == (
        2, ["user:ab cd;assistant:", "f>;tool:", "f>;tool:3;user:"],
    )
    talk[2] = answer | {"content": None}
    found, count, _ = text_of(template, [CacheMark(0, None, 1.0), CacheMark(1, None, 1.0)], talk)
    assert (count, [found.text[:end] for end in found.ends]) == (
        3, ["user:ab cd;assistant:", "user:ab cd;assistant:b<f>;assistant:"],
    )
    talk[1] = answer | {"content": None}
    assert text_of(template, [CacheMark(0, None, 1.0)], talk)[0].ends == [len("user:ab cd")]


@pytest.mark.parametrize("said", ["It is", "It is \n", "x", " It", "1"])
@pytest.mark.parametrize("name", [*WRITTEN, *CHANGED])
def test_a_message_that_is_continued_has_its_end_in_the_text_without(name, said):
    """Where a template sees a difference, behind the last place of what was said."""
    template = WRITTEN[name][0] if name in WRITTEN else CHANGED[name]
    talk = [*TALKS[:2], {"role": "assistant", "content": said}]
    more = {"begins": False, "continues": True}
    plain = render(SimpleNamespace(template=lambda name: template, special_tokens={}), talk)
    try:
        found, count, _ = text_of(template, MARKS[:2], talk, **more)
    except ValueError as error:
        assert said not in plain
        assert "messages: expected a chat template that writes the last message, got another" in str(error)
        return
    assert plain.startswith(found.text)
    assert all(end <= len(found.text) for end in found.ends)
    if name in WRITTEN:
        assert count == 2
        written = {"trimmed": said.strip(), "in capitals": said.upper(), "as JSON": said.replace("\n", "\\n"),
                   "twice": said.strip()}.get(name, said)
        assert found.text.endswith(written)
    else:
        assert found.text.rstrip().endswith(said.strip())


def test_marks_in_texts_with_special_tokens(tmp_path):
    """Where those of users are text, and where they are not: a block has the tokens of its text."""
    end = "<|endoftext|>"
    engine = BatchEngine.from_pretrained(chat_folder(tmp_path / "x", body_of("{{ m.content | trim }}" + end, "")))
    texts = (f"éx {end} y <|endof", "text|>", f"日{end} z")
    blocks = [{"type": "text", "text": text, "prompt_cache_breakpoint": {"ttl": "5m"}} for text in texts]
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": blocks}, *TALK]}
    for plain, count in ((True, 2), (False, 5)):
        (prompt,) = ServedModel(engine, MODEL, plain_special_tokens=plain).complete(body, None, chat=True).prompts
        ids = prompt.tokens.tolist()
        assert ids.count(engine.tokenizer.token_to_id(end)) == count
        whole = "".join(texts) + end
        assert decoded(engine, ids) == whole + TALK[0]["content"] + end
        # A token that goes on behind the end of a block is not in the block.
        first = texts[0] if plain else texts[0].removesuffix("<|endof")
        assert [decoded(engine, ids[:stop]) for stop, _ in prompt.kept] == [first, texts[0] + texts[1], whole]
    engine.close()


def decoded(engine, ids):
    return engine.tokenizer.decode(ids, skip_special_tokens=False)


def test_later_system_messages_are_words_of_the_user_in_every_text_of_a_prompt(tmp_path):
    """A template that refuses them is asked once."""
    template = (
        "{% for m in messages %}{% if loop.index0 and m.role == 'system' %}{{ raise_exception('late') }}{% endif %}"
        "{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    talk = [TALKS[1], {"role": "system", "content": "late"}, TALKS[2], TALKS[3]]
    found, count, _ = text_of(template, [CacheMark(1, 2, 1.0), CacheMark(1, None, 1.0)], talk)
    assert (found.text, count) == ("user:ab cd\n\nlate;assistant:b;user:last;", 3)
    assert [found.text[:end] for end in found.ends] == ["user:ab cd\n\nla", "user:ab cd\n\nlate;assistant:"]


# -- segments -----------------------------------------------------------------------------------------------------

DOCUMENTS = ("Ada has the key, and the code 17.\n", "  Bob went to the harbour. <|im|>\n", "The cat is grey.\n")
HEAD, QUESTION = "Read these.\n", "Who has the key?"
SEGMENT = {"cache_control": {"type": "ephemeral", "scope": "segment"}}
KINDS = ("/chat/completions", "/responses", "/messages")


def sent(served, path, body):
    """The status and the answer of a body for one new token, or as many as it says."""
    size = "max_output_tokens" if path == "/responses" else "max_tokens"
    body = {"model": MODEL, size: 6, "temperature": 0} | body
    connection = served.connect(post(json.dumps(body).encode(), f"/v1{path}"))
    status, got = answer(connection)
    return status, json.loads(got)


def said(path, found):
    """The text of an answer."""
    if path == "/messages":
        return "".join(block["text"] for block in found["content"])
    if path == "/responses":
        return "".join(part["text"] for item in found["output"] for part in item["content"])
    return found["choices"][0]["message"]["content"]


def talk(path, documents=DOCUMENTS, mark=None, between=()):
    """A body whose user gives documents, as segments unless a mark says it, and a question."""
    kind = "input_text" if path == "/responses" else "text"
    if mark is None:
        mark = SEGMENT if path == "/messages" else {"segment": True}
    parts = [{"type": kind, "text": text} | mark for text in documents]
    parts[1:1] = [{"type": kind, "text": text} for text in between]
    content = [{"type": kind, "text": HEAD}, *parts, {"type": kind, "text": QUESTION}]
    return {"input" if path == "/responses" else "messages": [{"role": "user", "content": content}]}


@pytest.fixture(scope="module", params=[False, True], ids=["special", "plain"])
def segmented(tmp_path_factory, request):
    path = tiny_file(tmp_path_factory.mktemp("segments"))
    with Served(path, limits={"plain_special_tokens": request.param}, num_blocks=400) as served:
        yield served


def test_segments_are_those_of_the_engine(segmented):
    """Each interface: the tokens of `segments=`, cached for each other in any order; without a mark a text as ever."""
    alone, known, head, tail = segmented.alone, False, f"user:{HEAD}", f"{QUESTION}\nassistant:"
    encode = segmented.engine.tokenizer.encode
    for path in KINDS:
        for order in ((0, 1, 2), (2, 0, 1)):
            documents = [DOCUMENTS[number] for number in order]
            wanted = alone.complete(tail, head=head, segments=documents, max_tokens=6, temperature=0.0)
            status, found = sent(segmented, path, talk(path, documents))
            assert (status, said(path, found)) == (200, wanted.text)
            sizes = [len(encode(text).ids) for text in documents]
            wanted = [{"tokens": size, "cached_tokens": size if known else 0} for size in sizes]
            assert found["usage"]["segments"] == wanted
            usage, size = found["usage"], len(encode(head + "".join(documents) + tail).ids)
            if path == "/messages":
                parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
                assert sum(usage[name] for name in parts) == size
                assert usage["input_tokens"] >= 0
            else:
                assert usage["prompt_tokens" if path == KINDS[0] else "input_tokens"] == size
            known = True
        bare = alone.complete(tail, head=head, segments=documents, link=0, max_tokens=6, temperature=0.0)
        assert said(path, sent(segmented, path, talk(path, documents) | {"segment_link": 0})[1]) == bare.text
        plain = alone.complete(head + "".join(DOCUMENTS) + tail, max_tokens=6, temperature=0.0)
        for mark in ({}, {"cache_control": {"type": "ephemeral"}}, {"segment": False}):
            status, found = sent(segmented, path, talk(path, mark=mark))
            assert (status, said(path, found), "segments" in found["usage"]) == (200, plain.text, False)


def test_segments_with_samples_streams_times_and_tokens(segmented):
    documents, path = DOCUMENTS[:2], KINDS[0]
    more = {"n": 2, "return_token_ids": True, "logprobs": True, "prompt_cache_options": {"ttl": "5m"}}
    _, found = sent(segmented, path, talk(path, documents) | more)
    alone = segmented.alone.complete(
        f"{QUESTION}\nassistant:", head=f"user:{HEAD}", segments=documents, max_tokens=6, temperature=0.0
    )
    assert [each["token_ids"] for each in found["choices"]] == [alone.tokens] * 2
    whole = segmented.engine.tokenizer.encode(f"user:{HEAD}{''.join(documents)}{QUESTION}\nassistant:").ids
    assert found["prompt_token_ids"] == whole
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0} | talk(path, documents) | stream
    events = [*segmented.client().chat.completions.create(**asked)]
    text = "".join(each.choices[0].delta.content or "" for each in events if each.choices)
    assert text == alone.text
    assert [each["cached_tokens"] == each["tokens"] for each in events[-1].usage.segments] == [True, True]
    marked = talk("/messages", documents)
    marked["messages"][0]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    assert sent(segmented, "/messages", marked)[0] == 200
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "data": "one"}} | SEGMENT,
        {"type": "search_result", "source": "S", "title": "U", "content": [{"type": "text", "text": "two"}]} | SEGMENT,
    ]
    blocks.append({"type": "text", "text": QUESTION})
    _, found = sent(segmented, "/messages", {"messages": [{"role": "user", "content": blocks}]})
    wanted = segmented.alone.complete(
        f"{QUESTION}\nassistant:", head="user:", segments=["T\none\n", "U\nS\ntwo\n"], max_tokens=6, temperature=0.0
    )
    assert said("/messages", found) == wanted.text


def test_what_excludes_segments_is_refused_by_its_name(segmented):
    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    timed = {"cache_control": SEGMENT["cache_control"] | {"ttl": "5m"}}
    cited = [{"type": "document", "citations": {"enabled": True}, "source": {"type": "text", "data": "x"}}]
    wrong = [
        *((path, talk(path, between=["and"]), "expected segments that follow each other") for path in KINDS),
        *((path, talk(path, [" \n"]), "expected a text in each segment") for path in KINDS),
        (KINDS[0], talk(KINDS[0], mark={"segment": 1}), "segment: expected"),
        (KINDS[0], talk(KINDS[0]) | edits, "context_management: expected none beside segments"),
        ("/messages", talk("/messages") | edits, "context_management: expected none beside segments"),
        ("/messages", talk("/messages", mark=timed), "cache_control: expected no ttl"),
        ("/messages", talk("/messages") | SEGMENT, "cache_control: expected the scope"),
        ("/messages", talk("/messages") | {"system": [{"type": "text", "text": "x"} | SEGMENT]}, "system: expected"),
        ("/messages", {"messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"} | SEGMENT]}
        ]}, "cache_control: expected the scope"),
        ("/messages", {"messages": [
            *TALK, {"role": "assistant", "content": [{"type": "text", "text": "x", "segment": True}]}, *TALK
        ]}, "messages: expected segments among the parts"),
        ("/messages", {"messages": [{"role": "user", "content": cited}]}, "citations: expected none"),
        (KINDS[0], talk(KINDS[0], [DOCUMENTS[0]] * 257), "expected at most 256 segments"),
        ("/cache/hints", talk(KINDS[0]) | {
            "nvext": {"agent_hints": {"speculative_prefill": True}}
        }, "expected no segments in hints"),
    ]
    for path, body, why in wrong:
        given = {"model": MODEL, **body} if path == "/cache/hints" else body
        status, found = sent(segmented, path, given)
        assert (status, why in found["error"]["message"]) == (400, True), (path, why, found)


def test_segments_stand_in_the_text_as_they_are():
    """Or are refused: where a template trims, counts or orders texts, nothing is guessed."""
    talk = [TALKS[0], {"role": "user", "content": " one two \nthree"}]
    spans = (SegmentSpan(1, 0, 4), SegmentSpan(1, 4, 10), SegmentSpan(1, 10, 15))
    for template in (WRITTEN["as it is"][0], WRITTEN["in capitals"][0]):
        found, count, _ = text_of(template, (), talk, segments=spans)
        cut = [found.text[start:stop].lower() for start, stop in pairwise(found.cuts)]
        assert (cut, count) == ([" one", " two \n", "three"], 2)
    changed = [CHANGED[name] for name in ("counted", "cut", "in another order")]
    for template in (*changed, WRITTEN["trimmed"][0], "{{ messages[0].content }}"):
        with pytest.raises(ValueError, match="messages: expected a chat template that writes segments as they are"):
            text_of(template, (), talk, segments=spans)
    apart = (SegmentSpan(0, 0, 3), SegmentSpan(1, 0, 4))
    with pytest.raises(ValueError, match="messages: expected segments that follow each other"):
        text_of(body_of("{{ m.role }}:{{ m.content }};"), (), talk, segments=apart)


def test_networks_with_windows_have_segments_and_those_with_chunks_none(tmp_path):
    path = tiny_file(tmp_path)
    for name in ("gemma3", "chunks"):
        engine = BatchEngine(windowed(name), num_blocks=64)
        engine._text = BatchEngine.from_pretrained(path, num_blocks=64)._text
        model = ServedModel(engine, MODEL)
        made = model.complete({"model": MODEL, "max_tokens": 1} | talk(KINDS[0]), None, chat=True)
        if name == "chunks":
            with pytest.raises(ValueError, match="segments: expected None with layers that attend within chunks"):
                model.queued(made, Threads(), 9.0)
            continue
        (request,) = model.queued(made, Threads(), 60.0).requests
        assert len(request.completions()[0].segments) == len(made.prompts[0].segments) > 0
