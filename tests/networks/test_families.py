"""The guide's table of networks names what is read, and nothing else."""

import re

import pytest
from places import PROJECT

from kvcache.gguf.architectures import ARCHITECTURES
from kvcache.networks.families import FAMILIES
from kvcache.networks.towers import TOWERS

pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


def test_the_table_of_the_guide():
    guide = (PROJECT / "kvcache" / "guides" / "checkpoints.md").read_text()
    table = guide.partition("## Networks")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    classes = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    letters = [name for row in rows for name in re.findall(r"`([^`]+)`", row[3])]
    assert set(classes) == {*FAMILIES, *TOWERS}
    assert set(letters) == set(ARCHITECTURES)
