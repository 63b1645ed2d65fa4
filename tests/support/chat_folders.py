"""Checkpoint folders with a chat template: the demo model with another `tokenizer_config.json`."""

from __future__ import annotations

import json

from kvcache.demo import DIRECTORY

# Roles and contents, each message ended by the model's end token.
PLAIN = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Answers lose everything before their last space once another message follows, as where thoughts are left out.
REWRITING = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['role'] == 'assistant' %}{{ message['content'].split(' ')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ eos_token }}\n{% endfor %}assistant:"
)


def chat_folder(path, template=PLAIN, generation=None, **tokenizer_config):
    """A folder with the demo's network and tokenizer; None leaves a file or key out."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).symlink_to(DIRECTORY / name)
    config = json.loads((DIRECTORY / "tokenizer_config.json").read_text()) | tokenizer_config
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path
