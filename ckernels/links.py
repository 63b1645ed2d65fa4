"""The links of the package: those that an index shows beside it, and those of its README, which an index shows too.

Nobody but the workflow of releases knows where the repository is. Without KVCACHE_REPOSITORY there are none of the
first, and the README stays as it is.
"""

import os
import re
from pathlib import Path

__all__ = ["PAGES", "package_links"]

PAGES = {
    "Source": "", "Documentation": "/blob/HEAD/kvcache/guides/index.md", "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Benchmarks": "/blob/HEAD/bench/README.md", "Issues": "/issues", "Security": "/security/policy",
}
_INSIDE = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")  # a link or a picture of the repository


def package_links():
    """The arguments of `setup` that have links."""
    repository = os.environ.get("KVCACHE_REPOSITORY", "")
    text = Path("README.md").read_text(encoding="utf-8")

    def outside(link):
        kind, name, path = link.groups()
        return f"{kind}{name}({repository}/{'raw' if kind else 'blob'}/HEAD/{path})"

    return {
        "project_urls": {name: repository + path for name, path in PAGES.items()} if repository else {},
        "long_description": _INSIDE.sub(outside, text) if repository else text,
        "long_description_content_type": "text/markdown",
    }
