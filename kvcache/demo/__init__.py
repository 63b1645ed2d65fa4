"""The demo: a small model, a workload like that of a server, and its display.

In a clone and in the sdist `config.json`, `model.safetensors` and `tokenizer.json` beside this file are an ordinary
Hugging Face checkpoint; `README.md` is its model card. The wheels of an index leave it to the package `kvcache_demo`,
which one wheel brings to all platforms.
"""

from importlib.util import find_spec
from pathlib import Path

__all__ = ["DIRECTORY"]

DIRECTORY: Path  # of the checkpoint


def __getattr__(name: str) -> Path:
    """The folder of the checkpoint, found when it is first asked for.

    Where no model is installed it raises an ImportError that names the extra, for `hasattr` too. Python replaces an
    AttributeError, in `from kvcache.demo import DIRECTORY`, by an error of its own, which would not name it. `dir` has
    the name once the folder is known, so that inspection does not ask for it.
    """
    if name != "DIRECTORY":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    spec = find_spec("kvcache_demo")
    for folder in (Path(__file__).parent, *map(Path, (spec and spec.submodule_search_locations) or ())):
        if (folder / "model.safetensors").is_file():
            return globals().setdefault(name, folder)  # type: ignore[no-any-return]
    raise ImportError("the demo needs its model: pip install 'kvcache-cpu[demo]'")
