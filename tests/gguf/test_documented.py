"""The page of what is read names all of it."""

import re

import pytest
from places import PROJECT

from kvcache.gguf.blocks import LOADABLE
from kvcache.gguf.config import ARCHITECTURES
from kvcache.networks.families import FAMILIES
from kvcache.networks.quantisation import METHODS
from kvcache.networks.towers import TOWERS
from kvcache.sampling.vocabulary_tokenizer import _PRE

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]
PAGE = (PROJECT / "kvcache" / "guides" / "checkpoints.md").read_text(encoding="utf-8")


def test_every_name_is_on_the_page():
    names = [*FAMILIES, *TOWERS, *ARCHITECTURES, *_PRE, *METHODS]
    assert not [name for name in names if f"`{name}`" not in PAGE]
    assert not [kind for kind in LOADABLE if not re.search(rf"\b{kind}\b", PAGE)]
