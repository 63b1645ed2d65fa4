"""The demo: a small model that ships with the library, a workload like that of a server, and its display.

`config.json`, `model.safetensors` and `tokenizer.json` beside this file are an ordinary Hugging Face checkpoint;
`README.md` is its model card.
"""

from pathlib import Path

__all__ = ["DIRECTORY"]

DIRECTORY = Path(__file__).parent
