"""Conversations with segments: documents before the first words of the user, which each turn reads again."""

import json

import pytest
from chat_folders import PLAIN, chat_folder
from letter_texts import answers, text_side
from places import GOLDEN
from serving import run
from state_networks import StateNetwork
from tool_talks import TOOLS, at

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine, SamplingParams, Segment
from kvcache.engine import Transformer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.one_build

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=6)
TALK = [{"role": "system", "content": "import os\nimport sys\n" * 3}, {"role": "user", "content": "def walk(path):"}]
FIRST = "class Reader:\n    def read(self):\n        return self.data\n"
SECOND = "def load(path):\n    with open(path) as file:\n        return file.read()\n"
DOCUMENTS = [Segment(FIRST, "reader"), SECOND]
CLEAR = {"type": TOOLS, "trigger": at("tool_uses", 1)}
LETTERED = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
            "{{ '<|im_start|>assistant\n' }}")


def marked(*texts):
    return [{"type": "text", "text": each, "segment": True} for each in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("chat") / "plain")


def said(engine, messages, **options):
    answer = engine.chat(messages, GREEDY, **options)
    return "".join(answer), answer


def test_documents_stand_before_the_first_words_of_the_user(folder):
    """As a head, segments and a question of `complete`; parts that are segments are the same."""
    engine = InferenceEngine.from_pretrained(folder)
    head, question = f"system: {TALK[0]['content']}<|endoftext|>\nuser: ", "def walk(path):<|endoftext|>\nassistant:"
    for link in (0, 16):
        want = engine.complete(question, GREEDY, head=head, segments=DOCUMENTS, link=link)
        text, answer = said(engine, TALK, segments=DOCUMENTS, link=link)
        assert (text, answer.tokens, answer.segments) == (want.text, want.tokens, want.segments)
        texts, encode = (head, FIRST, SECOND, question), engine.tokenizer.encode
        sizes = [len(encode(each, add_special_tokens=False)) for each in texts]
        assert answer.prompt_tokens == sum(sizes)
        assert [(each.name, each.tokens) for each in answer.segments] == [("reader", sizes[1]), (None, sizes[2])]
        parts = [*marked(FIRST, SECOND), {"type": "text", "text": TALK[1]["content"]}]
        again, other = said(engine, [TALK[0], {"role": "user", "content": parts}], link=link)
        assert (again, other.tokens) == (text, answer.tokens)
        assert [each.name for each in other.segments] == [None, None]
    plain = engine.chat([TALK[0], TALK[1] | {"content": FIRST + SECOND + TALK[1]["content"]}], GREEDY)
    assert plain.prompt_tokens
    assert plain.segments is None


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_a_conversation_goes_on_and_is_resumed(folder, tmp_path, dtype):
    """Each turn runs what is new, in another process too; saved messages keep their segments."""
    cold = InferenceEngine.from_pretrained(folder, dtype=dtype)
    warm = PrefixCachedEngine(InferenceEngine.from_pretrained(folder, dtype=dtype), max_cache_blocks=400)
    batch = BatchEngine.from_pretrained(folder, dtype=dtype, num_blocks=400)
    parts = [*marked(FIRST, SECOND), {"type": "text", "text": TALK[1]["content"]}]
    messages, before = [TALK[0], {"role": "user", "content": parts}], 0
    for turn in range(3):
        text, answer = said(cold, messages)
        found, hit = said(warm, messages)
        prompt = batch.chat_prompt(messages)
        request = batch.submit(prompt.tokens, GREEDY, prefix=prompt.prefix)
        run(batch)
        assert (found, hit.tokens, request.result()) == (text, answer.tokens, answer.tokens)
        if turn:
            assert [each.cached for each in hit.segments] == [each.tokens for each in hit.segments]
            assert hit.cached_tokens >= before - 16
            assert hit.cached_tokens > sum(each.tokens for each in hit.segments)
        before = hit.prompt_tokens
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"    for {turn}"}]
        messages = json.loads(json.dumps(messages))
    warm.save(tmp_path / "saved")
    resumed = PrefixCachedEngine(InferenceEngine.from_pretrained(folder, dtype=dtype), max_cache_blocks=400)
    resumed.load(tmp_path / "saved")
    text, answer = said(resumed, messages)
    want = cold.chat(messages, GREEDY)
    assert "".join(want) == text
    assert want.tokens == answer.tokens
    assert [each.cached for each in answer.segments] == [each.tokens for each in answer.segments]


@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
def test_any_network_with_a_template(name):
    """A golden network of random weights, and a template that writes turns between special tokens."""
    network = Transformer.from_pretrained(GOLDEN / name)
    cold, warm = InferenceEngine(network), PrefixCachedEngine(InferenceEngine(network), 200)
    cold.requests.text = warm.inner.requests.text = text_side(LETTERED)
    params, documents = answers(network.config.vocab_size), ["the cat sat on a mat.\n", "a dog ran by an owl.\n"]
    messages = [{"role": "system", "content": "answer in short words"}]
    for turn in range(3):
        messages.append({"role": "user", "content": f"ask {turn * 'x'}."})
        for order in (documents, documents[::-1]):
            want, got = (engine.chat(messages, params, segments=order) for engine in (cold, warm))
            assert "".join(want) == "".join(got)
            assert want.tokens == got.tokens
            is_new = turn == 0 and order is documents
            assert [each.cached for each in got.segments] == [0 if is_new else each.tokens for each in got.segments]
        messages.append({"role": "assistant", "content": "abc"})


def test_what_is_no_chat_with_segments_is_refused_by_name(folder, tmp_path):
    engine = InferenceEngine.from_pretrained(folder)
    trimming = InferenceEngine.from_pretrained(
        chat_folder(tmp_path / "trims", PLAIN.replace("message['content'] }}", "message['content'] | trim }}"))
    )
    state = InferenceEngine(StateNetwork("one of each"))
    state.requests.text = text_side(LETTERED)
    apart = [*marked("one\n"), {"type": "text", "text": "-"}, *marked("two\n"), {"type": "text", "text": "x"}]
    image = [*marked("one\n"), {"type": "image"}]
    for call, kind, words in (
        (lambda: engine.chat(TALK, segments="text"), TypeError, "segments: expected a list of segments or texts"),
        (lambda: engine.chat(TALK, segments=[[1, 2]]), TypeError, "segments: expected"),
        (lambda: engine.chat(TALK, segments=[" \n"]), ValueError, "messages: expected a text in each segment"),
        (lambda: engine.chat(TALK[:1], segments=DOCUMENTS), ValueError, "segments: expected a message of the user"),
        (lambda: engine.chat(TALK, segments=DOCUMENTS, edits=[CLEAR]), ValueError, "edits: expected none beside"),
        (lambda: engine.chat([{"role": "user", "content": marked("a")}], segments=["b"]), ValueError,
         "segments: expected none beside parts of messages"),
        (lambda: engine.chat([{"role": "user", "content": apart}]), ValueError, "messages: expected segments that"),
        (lambda: engine.chat([{"role": "user", "content": image}]), ValueError, "messages: expected texts alone"),
        (lambda: engine.chat([{"role": "user", "content": [{"text": "a", "segment": 1}]}]), TypeError, "segment: "),
        (lambda: engine.chat(TALK, segments=DOCUMENTS, link=-1), ValueError, "link"),
        (lambda: trimming.chat(TALK, segments=["\n a\n"]), ValueError, "messages: expected a chat template"),
        (lambda: state.chat(TALK, segments=["a"]), ValueError,
         r"segments: expected None with layers that keep a state, got \['a'\]"),
    ):
        with pytest.raises(kind, match=words):
            call()
    nothing = engine.chat(TALK, GREEDY, segments=[])
    assert (nothing.segments, nothing.prompt_tokens) == (None, engine.chat(TALK, GREEDY).prompt_tokens)
