"""A scripted network for agents: a tiny checkpoint, and a script of answers for conversations of several turns.

The user's message of turn N has the words `TURN-NN`. What the network says next follows from the conversation alone:
the last turn that is named, and how many answers it has since then. Requests without tools, of titles say, get a text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np
import seeded_weights

from kvcache.demo import DIRECTORY

MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL = 2  # of the marks; the others are added tokens that are not special, as in Qwen3's files
HEAD = "<|im_start|>assistant\n"

# In the words of Qwen3: results follow as messages of the user.
TEMPLATE = (
    "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c or [] %}{{ p.text }}{% endfor %}{% endif %}"
    "{% endmacro %}"
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>"
    'Call by <tool_call>\n{"name": .., "arguments": ..}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ text(m.content) }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ text(m.content) }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ text(m.content) }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + HEAD + "{% endif %}"
)


def agent_folder(path, positions=1 << 17):
    """A checkpoint folder: a Llama of one layer with the demo's vocabulary and the marks, and room for long prompts."""
    path.mkdir(parents=True, exist_ok=True)
    content = json.loads((DIRECTORY / "tokenizer.json").read_text())
    first = max(content["model"]["vocab"].values()) + 1
    first = max(first, *(token["id"] + 1 for token in content["added_tokens"]))
    content["added_tokens"] += [
        dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        | {"id": first + number, "content": mark, "special": number < SPECIAL}
        for number, mark in enumerate(MARKS)
    ]
    (path / "tokenizer.json").write_text(json.dumps(content))
    size = (first + len(MARKS) + 15) // 16 * 16
    config = {
        "model_type": "llama", "vocab_size": size, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": first + 1,
        "bos_token_id": None,
    }
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": MARKS[1], "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    shapes = {"model.embed_tokens.weight": (size, 32), "model.norm.weight": (32,)}
    layer = "model.layers.0."
    shapes |= {f"{layer}self_attn.{name}_proj.weight": (32, 32) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (32, 32) for name in ("gate", "up", "down")}
    shapes |= {f"{layer}{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
    spec = {"seed": "agents", "dtype": "F32", "exact": [], "tensors": {n: (s, 0.1, 0.0) for n, s in shapes.items()}}
    seeded_weights.write(path / "model.safetensors", seeded_weights.tensors_of(spec))
    return path


@dataclass(frozen=True)
class Call:
    """A call of the shell: what it runs, and how the network writes it.

    Attributes:
        command: of the shell; None: a function that nobody offers.
        keep: the number of characters of the call that are written before the answer ends; None: all.
    """

    command: str | None
    keep: int | None = None


@dataclass(frozen=True)
class Turn:
    """The answers of the network in one turn: texts and calls; the last answer is a text.

    Attributes:
        answers: each a list of texts and calls in their order.
    """

    answers: tuple[tuple[str | Call, ...], ...]

    @property
    def said(self):
        """The last words, which the user must see."""
        return self.answers[-1][-1]

    @property
    def is_cut(self):
        """Whether a call of the turn ends too early."""
        return any(isinstance(part, Call) and part.keep is not None for answer in self.answers for part in answer)


def _turn(*answers):
    return Turn(tuple(each if isinstance(each, tuple) else (each,) for each in answers))


THOUGHT = "<think>\nHm: <b> and é.\n</think>\n\n"
TURNS = (
    _turn("Good day, one."),
    _turn((THOUGHT, "A thought before it, two.")),
    _turn((Call("echo three"),), "The tool has run, three."),
    _turn((THOUGHT, "I look.", Call("echo four")), "With a thought and words, four."),
    _turn((Call("echo five"), Call("echo FIVE")), "Two at once, five."),
    _turn(("I cut it.", Call("echo six", keep=45)), "A call that was cut, six."),
    _turn((Call(None),), "A function that is not there, seven."),
    _turn((Call("echo '</tool_call>' \"<think>\""),), "Marks within a text, eight."),
    _turn(("<think>\nI call before it ends.", Call("echo nine")), "A call within a thought, nine."),
    _turn((Call("echo ten"),), (Call("echo TEN"),), (THOUGHT, "Two, one after the other, ten.")),
    _turn((Call("printf 'a\\nb\\tü'"),), "With signs that JSON escapes, eleven."),
    _turn((THOUGHT, "The end, twelve.")),
)


class AgentScript:
    """A logits processor that lets a network say the script.

    Args:
        tokenizer: of the checkpoint.
        function: the name of the shell among the agent's tools.
        arguments: makes the arguments of a call from its command.
        turns: the script.
    """

    def __init__(self, tokenizer, function="shell", arguments=lambda command: {"command": command}, turns=TURNS):
        self._tokenizer, self._function, self._arguments, self._turns = tokenizer, function, arguments, turns
        self._start, self._end = (tokenizer.token_to_id(mark) for mark in MARKS[:SPECIAL])
        self._head = tokenizer.encode(HEAD).ids
        self._said = {}

    def written(self, part):
        """A part of an answer in the words of the network."""
        if isinstance(part, str):
            return part
        name = "nowhere" if part.command is None else self._function
        arguments = self._arguments("echo nowhere" if part.command is None else part.command)
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"\n<tool_call>\n{call}\n</tool_call>"[: part.keep]

    def answer(self, prompt):
        """The answer of the network behind a prompt."""
        names = list(re.finditer(r"TURN-(\d+)", prompt))
        if "<tools>" not in prompt or not names:
            return "A title."
        turn = self._turns[int(names[-1][1]) - 1]
        answers = prompt[names[-1].end() :].count(HEAD) - 1
        return "".join(map(self.written, turn.answers[min(answers, len(turn.answers) - 1)]))

    def __call__(self, text, logits):
        ids = np.asarray(text)
        starts = np.flatnonzero(ids == self._start)
        at = int(starts[-1]) + len(self._head)  # the script writes no such mark
        key = hash(ids[:at].tobytes())
        if key not in self._said:
            prompt = self._tokenizer.decode(ids[:at].tolist(), skip_special_tokens=False)
            self._said[key] = [*self._tokenizer.encode(self.answer(prompt)).ids, self._end]
        said = self._said[key]
        logits[:] = -100.0
        logits[said[min(len(ids) - at, len(said) - 1)]] = 100.0
