"""Sphinx: the guides of kvcache/guides, and reference pages made from docstrings. `.ci/run docs` builds them."""

import os
import re

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
    "body_max_width": "none",
}
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_show_copyright = False


def name_files(app, name, source):
    """Turn links to files of the repository, which are no pages, into their names; pictures stay."""
    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./\.\./([^)#]+)[^)]*\)", r"\1 (`\2` of the repository)", source[0])


def setup(app):
    app.connect("source-read", name_files)
