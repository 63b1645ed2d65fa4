"""Sphinx: the guides of kvcache/guides, and reference pages made from docstrings. `.ci/run docs` builds them."""

import importlib
import inspect
import os
import re
from pathlib import Path

from sphinx.ext.autodoc.mock import mock

import kvcache

project = "kvcache"
version = release = kvcache.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "py:obj"  # `name` in docstrings: a link where there is such a name, code where there is none
myst_heading_anchors = 3
_BASES = "object,BaseException,Exception,tuple,int,dict,DynamicCache"  # the pages leave out what comes from these
autodoc_default_options = {
    "members": True, "imported-members": True, "inherited-members": _BASES, "member-order": "bysource",
}
autodoc_mock_imports = ["safetensors", "torch", "transformers"]  # the adapter's pages need neither
os.environ.setdefault("KVCACHE_NUM_THREADS", "1")  # or the adapter would ask the mock for a number of threads
napoleon_numpy_docstring = False
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # `num_heads` is an attribute of several classes: no link
html_theme = "alabaster"
html_theme_options = {
    "description": "The KV-cache engine for LLM inference on CPUs", "fixed_sidebar": True, "page_width": "1240px",
    "body_max_width": "none", "show_relbars": True,  # the next page in the order of reading
}
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_show_copyright = False


# Modules of the reference, what they are for, and names that belong to another page.
MODULES = {
    "kvcache": "what most programs need",
    "kvcache.engine": "networks, policies and the parts of engines",
    "kvcache.policies": "eviction policies of the literature",
    "kvcache.serving": "many requests at once",
    "kvcache.server.app": "an HTTP server",
    "kvcache.tiers": "prefixes beyond this process",
    "kvcache.integrations.transformers": "for models of transformers",
}
_KINDS = ((inspect.isclass, "autoclass"), (callable, "autofunction"), (lambda value: True, "autodata"))


def write_reference(app):
    """Write a page for each public name into `reference/` beside the guides, and one that lists them."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    pages, known = {"index.rst": "Reference\n=========\n"}, set()
    for module, about in MODULES.items():
        with mock(autodoc_mock_imports):
            loaded = importlib.import_module(module)
        names = [name for name in loaded.__all__ if not name.startswith("__") and name not in known]
        known.update(names)
        title = f"{module}: {about}"
        pages["index.rst"] += f"\n{title}\n{'-' * len(title)}\n\n.. toctree::\n   :maxdepth: 1\n\n"
        pages["index.rst"] += "".join(f"   {name}\n" for name in sorted(names, key=str.lower))
        for name in names:
            kind = next(kind for fits, kind in _KINDS if fits(getattr(loaded, name)))
            bases = getattr(getattr(loaded, name), "__bases__", (object,))
            options = "   :show-inheritance:\n" if kind == "autoclass" and bases != (object,) else ""
            pages[f"{name}.rst"] = f"{name}\n{'=' * len(name)}\n\n.. {kind}:: {module}.{name}\n{options}"
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for old in folder.glob("*.rst"):
        if old.name not in pages:
            old.unlink()


def name_files(app, name, source):
    """Turn links to files of the repository, which are no pages, into their names; pictures stay."""
    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./\.\./([^)#]+)[^)]*\)", r"\1 (`\2` of the repository)", source[0])


def setup(app):
    app.connect("builder-inited", write_reference)
    app.connect("source-read", name_files)
