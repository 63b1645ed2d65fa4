"""The page of what is read names all of it."""

import re

import pytest
from places import PROJECT

from kvcache.gguf.blocks import FORMATS, TYPES
from kvcache.kernels.matrix import Matrix
from kvcache.networks.families import FAMILIES
from kvcache.networks.gguf_architectures import ARCHITECTURES
from kvcache.networks.quantisation import METHODS
from kvcache.networks.towers import TOWERS
from kvcache.sampling.vocabulary_tokenizer import _PRE

pytestmark = pytest.mark.one_build
PAGE = (PROJECT / "kvcache" / "guides" / "checkpoints.md").read_text(encoding="utf-8")


def test_every_name_is_on_the_page():
    names = [*FAMILIES, *TOWERS, *ARCHITECTURES, *_PRE, *METHODS]
    assert not [name for name in names if f"`{name}`" not in PAGE]


def test_the_table_of_types_is_that_of_the_code():
    """Every type that is read, the format that keeps it, and the bits of both."""
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| nothing", PAGE, re.MULTILINE)
    assert {kind: format for kind, format, *_ in rows} == FORMATS
    sizes = {kind.name: kind for kind in TYPES.values()}
    for kind, format, stored, kept in rows:
        assert float(stored) == sizes[kind].bytes * 8 / sizes[kind].values
        assert float(kept) == Matrix(64, 256, format).nbytes * 8 / (64 * 256)
