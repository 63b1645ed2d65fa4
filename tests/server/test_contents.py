"""Parts, blocks and items that clients send: texts are read, and what is no text is named where it was."""

import base64
import json
import logging

import pytest
from http_servers import MODEL, Served, answer, post, tiny_file

from kvcache import SamplingParams
from kvcache.server import contents as contents_room
from kvcache.server.contents import PARTS, Contents
from kvcache.server.fingerprints import Fingerprints
from kvcache.server.message_bodies import asked_of_message
from kvcache.server.response_bodies import asked_of_response, flattened, tools_of_body

pytestmark = pytest.mark.one_build


def file_of(text, kind="text/plain"):
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def source(kind, **more):
    return {"type": "document", "source": {"type": kind, **more}}


IMAGE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
# A part, its text, and whether it was not read.
READ = [
    ({"type": "text", "text": "a"}, "a", False), ({"type": "refusal", "refusal": "no"}, "no", False),
    ({"type": "input_text", "text": "a"}, "a", False), ({"type": "output_text", "text": "a"}, "a", False),
    (source("text", data="a\nb"), "a\nb", False), (source("content", content="a"), "a", False),
    ({"title": "T", "context": "C", **source("content", content=[{"type": "text", "text": "a"}])}, "T\nC\na", False),
    ({"type": "search_result", "source": "S", "title": "T", "content": [{"type": "text", "text": "a"}]}, "T\nS\na",
     False),
    ({"type": "tool_reference", "tool_name": "Fetch"}, "Fetch", False),
    ({"type": "compaction", "content": "so far"}, "so far", False),
    ({"type": "input_file", "filename": "a.txt", "file_data": file_of("hé")}, "hé", False),
    ({"type": "file", "file": {"filename": "a.json", "file_data": file_of("{}", "application/json")}}, "{}", False),
    (source("base64", media_type="text/plain", data=base64.b64encode(b"a").decode()), "a", False),
    (source("base64", media_type="application/pdf", data="AA=="), "[base64 application/pdf: ", True),
    ({"type": "input_file", "filename": "a.bin", "file_data": file_of("x", "x/y")}, "[input_file a.bin: ", True),
    ({"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,%"}, "[input_file a.txt: ", True),
    (source("file", file_id="f_1"), "[file f_1: ", True), (source("url", url="http://x"), "[url: ", True),
    ({"type": "image", "source": IMAGE}, "[image: ", True),
    ({"type": "compaction", "content": None}, "[compaction: ", True),
    ({"type": "input_image", "image_url": "data:image/png;base64,AA=="}, "[input_image: ", True),
    ({"type": "image_url", "image_url": {"url": "x"}}, "[image_url: ", True),
    ({"type": "input_audio", "input_audio": {}}, "[input_audio: ", True),
    ({"type": "container_upload", "file_id": "f_1"}, "[container_upload f_1: ", True),
]


def test_parts_by_their_kinds():
    for part, text, is_unread in READ:
        contents = Contents("messages")
        found = contents.text(part)
        assert found.startswith(text) if is_unread else found == text
        assert len(contents.warnings) == is_unread, part
        if is_unread:
            assert contents.warnings[0].startswith(f"messages: {found[1:].partition(':')[0]} was not read")
    wrongs = ({"type": "hologram"}, {"type": None}, {}, {"type": []}, 3, {"type": "text"}, {"type": "text", "text": 1})
    for wrong in wrongs:
        with pytest.raises((TypeError, ValueError), match="messages: expected"):
            Contents("messages").text(wrong)
    many = Contents("messages")
    for number in range(100):
        many.text({"type": "file", "filename": f"{number}" * 200})
    assert len(many.warnings) == 16
    assert max(map(len, many.warnings)) < 250
    assert {part["type"] for part, _, _ in READ} <= {*PARTS}


def asked_of(**given):
    """Read a body: one of `/v1/responses` where it has an input."""
    read = asked_of_response if "input" in given else asked_of_message
    return read({"model": MODEL, **given}, SamplingParams())


def conversation(**given):
    messages = asked_of(**given).conversation.messages
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def of_messages(*content, role="assistant"):
    """The messages of a message with these blocks, without ids."""
    talk = [{"role": role, "content": [*content]}]
    return shown(conversation(messages=talk))


def of_items(*items):
    return shown(conversation(input=[*items]))


def shown(messages):
    """Messages as roles, contents and calls."""
    found = []
    for message in messages:
        content = message.get("content", "")
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
        found.append((message["role"], text, *calls))
    return found


def test_calls_of_services_in_messages(caplog):
    """A call with a text for an answer is a call with a result; others are left out with their results."""
    contents_room.left_out.cache_clear()
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    page = {"type": "web_search_result", "title": "T", "url": "U", "encrypted_content": "x"}
    words = {"type": "text", "text": "w"}

    def result(content, kind="web_search"):
        return {"type": f"{kind}_tool_result", "tool_use_id": "s", "content": content}

    called = ("assistant", "w", ("web_search", {"query": "q"}))
    with caplog.at_level(logging.WARNING, "kvcache"):
        assert of_messages(words, use, result([page]), words) == [called, ("tool", "T\nU"), ("assistant", "w")]
        error = {"type": "web_search_tool_result_error", "error_code": "too_many"}
        assert of_messages(words, use, result(error)) == [called, ("tool", "too_many")]
        references = [{"type": "tool_reference", "tool_name": "f"}]
        names = {"type": "tool_search_tool_search_result", "tool_references": references}
        assert of_messages(words, use, result(names, "tool_search"))[1:] == [("tool", "f")]
        ran = {"type": "code_execution_result", "stdout": "1", "stderr": "", "content": [], "return_code": 0}
        assert of_messages(words, use, result(ran, "code_execution"))[1:] == [("tool", "1")]
        mcp = use | {"type": "mcp_tool_use", "server_name": "m"}
        assert of_messages(words, mcp, result([words], "mcp")) == [called, ("tool", "w")]
        assert caplog.records == []
        assert of_messages(words, use, result([]), words) == of_messages(words, use, words) == [("assistant", "ww")]
        assert of_messages(use, result([])) == [("assistant", "")]
        assert of_messages(result([page])) == [("assistant", "")]
    kinds = ("server_tool_use", "web_search_tool_result")
    assert [record.getMessage() for record in caplog.records] == [
        f"items of type {kind!r} are left out: they have no text" for kind in kinds
    ]
    reference = {"type": "tool_reference", "tool_name": "Fetch"}
    found = of_messages({"type": "tool_result", "tool_use_id": "t", "content": [reference, words]}, words, role="user")
    assert found == [("tool", "Fetch\nw"), ("user", "w")]


def test_items_of_responses(caplog):
    contents_room.left_out.cache_clear()
    user = {"role": "user", "content": "u"}
    mcp = {"type": "mcp_call", "id": "m", "server_label": "x", "name": "f", "arguments": '{"a": 1}', "output": "r"}
    shell = {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}}
    ran = {"type": "local_shell_call_output", "call_id": "l", "output": "files"}
    search = {"type": "tool_search_call", "call_id": "t", "arguments": {"query": "q"}}
    tool = {"type": "function", "name": "late", "parameters": {"type": "object"}}
    tools = {"type": "tool_search_output", "call_id": "t", "tools": [tool]}
    interpreter = {"type": "code_interpreter_call", "id": "c", "code": "1", "outputs": [{"type": "logs", "logs": "1"}]}
    with caplog.at_level(logging.WARNING, "kvcache"):
        assert of_items(user, mcp, user) == [
            ("user", "u"), ("assistant", "", ("f", {"a": 1})), ("tool", "r"), ("user", "u")
        ]
        assert of_items(shell, ran) == [("assistant", "", ("local_shell", {"command": ["ls"]})), ("tool", "files")]
        assert of_items(search, tools) == [("assistant", "", ("tool_search", {"query": "q"})), ("tool", "late")]
        assert of_items(interpreter) == [("assistant", "", ("code_interpreter", {"code": "1"})), ("tool", "1")]
        assert of_items({"type": "mcp_approval_response", "reason": "no", "approve": False}) == [("user", "no")]
        assert of_items({"type": "compaction", "summary": [{"type": "summary_text", "text": "s"}]}) == [("user", "s")]
        assert caplog.records == []
        kinds = ["mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "additional_tools"]
        kinds += ["web_search_call", "image_generation_call", "unheard_call", "unheard_call_output"]
        kinds += ["tool_search_output", "mcp_call"]
        for kind in kinds:
            assert of_items(user, {"type": kind}, user) == [("user", "u")] * 2
        assert of_items(user, shell, user) == [("user", "u")] * 2
    assert [record.args[0] for record in caplog.records] == [repr(kind) for kind in (*kinds, "local_shell_call")]
    for kind in ("item_reference", "compaction", "context_compaction"):
        found = asked_of(input=[user, {"type": kind, "id": "i_1", "encrypted_content": "x"}])
        shown_as = f"[{kind} i_1: not shown, only text can be read]"
        assert found.conversation.messages[1] == {"role": "user", "content": shown_as}
        assert found.warnings == (f"input: {kind} i_1 was not read, since this server reads texts alone",)
    given = {"model": MODEL, "input": [search, tools, tools, {"type": "additional_tools", "tools": [
        {"type": "namespace", "name": "n", "tools": [tool]}]}], "tools": [tool | {"name": "early"}]}
    names = [each["function"]["name"] for each in asked_of(**given).conversation.tools]
    assert names == ["early", "late", "n__late"]
    assert flattened(tools_of_body(given)) == {"n__late": {"name": "late", "namespace": "n"}}


def test_words_behind_a_call_belong_to_its_turn():
    """The result follows the call; what the assistant said between them is in the message of the call."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    said = {"role": "assistant", "content": "w"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert of_items(said, call, said, thought, output, said) == [
        ("assistant", "ww", ("f", {})), ("tool", "r"), ("assistant", "w")
    ]
    assert of_items(said, said) == [("assistant", "w")] * 2


def test_the_line_that_bills_is_left_out():
    """It differs from request to request; the instructions behind it count."""
    line = "x-anthropic-billing-header: cc_version=1; cch={};"

    def system(value):
        return shown(conversation(messages=[], system=value))

    for text, kept in ((line, []), (f"{line}\nBe kind.\nNow.", [("system", "Be kind.\nNow.")])):
        assert system(text) == system([{"type": "text", "text": text}]) == kept
        both = [("system", "\n\n".join([*(text for _, text in kept), "s"]))]
        assert system([{"type": "text", "text": text}, {"type": "text", "text": "s"}]) == both
    prints = Fingerprints()
    bodies = [
        {"model": MODEL, "messages": [], "system": f"{line.format(number)}\nBe kind.",
         "diagnostics": {"previous_message_id": "0"}}
        for number in range(2)
    ]
    prints.note(bodies[0], None, "0", 9)
    assert prints.note(bodies[1], None, "1", 9).kind == ""
    bodies[1]["system"] += " Or not."
    assert prints.note(bodies[1], None, "2", 9).kind == "system_changed"


def test_an_answer_warns_of_what_was_not_read(tmp_path):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    with Served(tiny_file(tmp_path, template)) as served:

        def ask(path, **body):
            status, data = answer(served.connect(post(json.dumps({"model": MODEL, **body}).encode(), path)))
            assert status == 200
            events = [line[len("data: ") :] for line in data.decode().splitlines() if line.startswith("data: {")]
            return [json.loads(event) for event in events] or json.loads(data)

        images = ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "image"}, {"type": "input_image"})
        bodies = [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [images[0]]}], "max_tokens": 2}),
            ("/v1/messages", {"messages": [{"role": "user", "content": [images[1]]}], "max_tokens": 2}),
            ("/v1/responses", {"input": [{"role": "user", "content": [images[2]]}], "max_output_tokens": 16}),
        ]
        for (path, body), image in zip(bodies, images, strict=True):
            field = "input" if "input" in body else "messages"
            warned = [f"{field}: {image['type']} was not read, since this server reads texts alone"]
            assert ask(path, **body)["warnings"] == warned
            first = ask(path, **body, stream=True)[0]
            assert first.get("message", first.get("response", first))["warnings"] == warned
            assert "warnings" not in ask(path, **{**body, field: [{"role": "user", "content": "x"}]})
        text = "user:\n[image_url: not shown, only text can be read]\n;"
        size = len(served.engine.tokenizer.encode(text).ids)
        assert ask(bodies[0][0], **bodies[0][1])["usage"]["prompt_tokens"] == size


def test_calls_have_the_order_of_chat_completions():
    """Templates that write a call as it is have one text for all interfaces."""
    items = [
        {"type": "function_call", "arguments": "{}", "call_id": "a", "name": "f"},
        {"type": "custom_tool_call", "input": "x", "call_id": "b", "name": "g"},
    ]
    (said,) = asked_of(input=items).conversation.messages
    assert [[*call["function"].items()] for call in said["tool_calls"]] == [
        [("name", "f"), ("arguments", "{}")], [("name", "g"), ("arguments", '{"input": "x"}')],
    ]


def test_a_kind_of_a_client_is_one_line_of_the_log(caplog):
    contents_room.left_out.cache_clear()
    with caplog.at_level(logging.WARNING, "kvcache"):
        asked_of(input=[{"type": "a\nERROR it burns \x1b[2J_call"}])
        asked_of(messages=[], tools=[{"type": "b\nERROR it burns"}])
    assert len(caplog.messages) == 2
    assert all(message.isprintable() for message in caplog.messages)
