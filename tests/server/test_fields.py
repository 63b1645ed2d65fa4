"""The guide's tables of fields and dialects are those of the code."""

import re

import pytest
from places import PROJECT

from kvcache.sampling.dialects.dialect_table import DIALECTS
from kvcache.server.fields import CHATS, TEXTS
from kvcache.server.message_bodies import MESSAGES
from kvcache.server.response_bodies import RESPONSES

pytestmark = pytest.mark.one_build
GUIDES = PROJECT / "kvcache" / "guides"


def rows(table):
    """The names in each row of a table of the guide."""
    guide = "".join((GUIDES / page).read_text(encoding="utf-8") for page in ("server.md", "agents.md"))
    (found,) = re.findall(rf"(?m)^\| fields of {table} \|.*\n\|.*\n((?:\|.*\n)+)", guide)
    return [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in found.splitlines()]


@pytest.mark.parametrize(
    ("name", "tables"),
    [("chats and completions", (CHATS, TEXTS)), ("messages", (MESSAGES,)), ("responses", (RESPONSES,))],
)
def test_the_guide_has_every_field(name, tables):
    names = {field for table in tables for field in table}
    honoured = {field for field in names if any(field in table and table[field].read for table in tables)}
    ignored = {field for field in names - honoured if tables[0][field].neutral is None}
    assert rows(name) == [honoured, ignored, names - honoured - ignored, set()]


def test_the_guide_has_every_dialect():
    guide = (GUIDES / "agents.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"(?m)^\| dialect \|.*\n\|.*\n((?:\|.*\n)+)", guide)
    assert {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])} == {*DIALECTS}
