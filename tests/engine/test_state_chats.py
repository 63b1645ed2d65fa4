"""Chats over networks with a state: each turn runs the last user message alone, whatever the template rewrites."""

import numpy as np
import pytest
from letter_texts import LETTERS, answers, text_side
from seeded_weights import SEEDED, seeded
from serving import run, settled
from state_networks import StateNetwork

from kvcache import BatchEngine, InferenceEngine, PrefixCachedEngine
from kvcache.engine import Transformer
from kvcache.engine.partings import partings

pytestmark = pytest.mark.one_build

_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
_LOOP = "{% for m in messages %}" + _TURN + "{% endfor %}"
TEMPLATES = {  # as those of these families write, without tools
    "lfm2": "{{ '<|startoftext|>' }}" + _LOOP + "{{ '<|im_start|>assistant\n' }}",
    "qwen3.5": _LOOP + "{{ '<|im_start|>assistant\n<think>\n' }}",
    "qwen3.5, no thoughts": _LOOP + "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}",
    "granite": "{% for m in messages %}{{ '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + "
               "'<|end_of_text|>\n' }}{% endfor %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}",
    "nemotron": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
                "{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
                "{{ '<|im_start|>assistant\n<think>\n' }}",
}
KEEPS_ANSWERS = {"lfm2", "granite"}
SYSTEM = {"role": "system", "content": "answer in short words"}
HYBRIDS = [name for name in SEEDED if name.startswith(("lfm", "nemotron", "qwen3_5", "kimi"))]


def common(a, b):
    most = min(len(a), len(b))
    differ = np.array(a[:most]) != np.array(b[:most])
    return int(differ.argmax()) if differ.any() else most


# All templates over layers of each kind; two of them, in turn, over each network that has some.
CASES = [("one of each", name) for name in TEMPLATES]
CASES += [(each, name) for i, each in enumerate(HYBRIDS) for j, name in enumerate(TEMPLATES) if (i + j) % 5 in (0, 2)]


@pytest.fixture(scope="module")
def network(request):
    if request.param in SEEDED:
        return Transformer.from_pretrained(seeded(request.param))
    return StateNetwork(request.param)


@pytest.mark.parametrize(("network", "name"), CASES, indirect=["network"], scope="module")
def test_five_turns_run_their_last_messages_alone(network, name):
    cold = InferenceEngine(network)
    cached = PrefixCachedEngine(InferenceEngine(network), 60, max_state_bytes="4MiB", strict=True)
    batch = BatchEngine(network, num_blocks=60, max_state_bytes="4MiB")
    side = cold.requests.text = cached.inner.requests.text = batch._text = text_side(TEMPLATES[name])
    params, messages, before = answers(network.config.vocab_size), [SYSTEM], []
    for turn in range(5):
        messages.append({"role": "user", "content": f"ask {LETTERS[turn] * 5}"})
        prompt = batch.apply_chat_template(messages, tokenize=True)
        want = "".join(cold.chat(messages, params))
        answer = cached.chat(messages, params)
        assert "".join(answer) == want
        request = batch.submit(prompt, params, parts_at=batch.chat_parts(messages, prompt))
        run(batch)
        assert request.result() == answer.tokens
        shared = common(prompt, before)
        if before:
            ended = len(before) == shared
            assert ended == (name in KEEPS_ANSWERS)
            for found in (answer.cached_tokens, request.completions()[0].cached_tokens):
                unit = 16 if any(getattr(network.config, "windows", ())) else 1  # which are cached in whole blocks
                assert (shared - 1) // unit * unit <= found <= shared
        else:
            assert answer.cached_tokens == 0
        before = [*prompt, *answer.tokens[:-1]]  # the last one has not run
        messages.append({"role": "assistant", "content": want})
    assert side.tokenizer.decode(answer.tokens) == want
    settled(batch)
    cached.check()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_new_chat_continues_behind_the_system_prompt(name):
    model = StateNetwork("one of each")
    batch = BatchEngine(model)
    batch._text = text_side(TEMPLATES[name])
    params, found = answers(250), []
    for question in ("who is it?", "are you?"):
        messages = [SYSTEM, {"role": "user", "content": question}]
        prompt = batch.apply_chat_template(messages, tokenize=True)
        request = batch.submit(prompt, params, parts_at=batch.chat_parts(messages, prompt))
        run(batch)
        found.append((prompt, request.completions()[0].cached_tokens))
    (first, none), (second, shared) = found
    assert none == 0
    assert shared >= common(first, second) - 1


def test_places_of_templates():
    """The end of what the next turn shares, and of the system prompt, in tokens."""
    chat = [SYSTEM, {"role": "user", "content": "who?"}]
    for name, behind in (("lfm2", 0), ("qwen3.5", 2), ("qwen3.5, no thoughts", 6), ("granite", 0), ("nemotron", 1)):
        side = text_side(TEMPLATES[name])
        batch = BatchEngine(StateNetwork("one of each"))
        batch._text = side
        prompt = batch.apply_chat_template(chat, tokenize=True)
        system, turn = partings(side, chat, prompt)
        assert turn == len(prompt) - behind
        assert side.tokenizer.decode(prompt[:system], skip_special_tokens=False).endswith(
            "user\n" if name != "granite" else "<|end_of_role|>"
        )


def test_a_template_that_wants_other_roles_tells_no_place():
    strict = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}" + _LOOP
    side = text_side(strict)
    assert partings(side, [SYSTEM, {"role": "user", "content": "who?"}], [1, 2, 3]) == ()
    assert partings(side, [{"role": "user", "content": "who?"}], [1, 2, 3], tools=[{}]) == ()


def test_places_outside_of_a_prompt_are_refused():
    batch = BatchEngine(StateNetwork("one of each"))
    for place in (0, 6, 1.5):
        with pytest.raises((ValueError, TypeError), match="parts_at"):
            batch.submit(np.arange(5), parts_at=[place])
