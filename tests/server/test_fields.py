"""The guide's table of fields is that of the code."""

import re

import pytest
from places import PROJECT

from kvcache.sampling.dialects.dialect_table import DIALECTS
from kvcache.server.fields import CHATS, TEXTS

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


def rows():
    """The names in each row of the guide's table."""
    guide = (PROJECT / "kvcache" / "guides" / "server.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"(?m)^\| fields of chats and completions \|.*\n\|.*\n((?:\|.*\n)+)", guide)
    return [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table.splitlines()]


def test_the_guide_has_every_field():
    names = CHATS.keys() | TEXTS.keys()
    honoured = {name for name in names if any(name in table and table[name].read for table in (CHATS, TEXTS))}
    ignored = {name for name in names - honoured if CHATS[name].neutral is None}
    assert rows() == [honoured, ignored, names - honoured - ignored, set()]


def test_the_guide_has_every_dialect():
    guide = (PROJECT / "kvcache" / "guides" / "server.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"(?m)^\| dialect \|.*\n\|.*\n((?:\|.*\n)+)", guide)
    assert {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])} == {*DIALECTS}
