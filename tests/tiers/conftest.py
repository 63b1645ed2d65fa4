"""Fetches are always worth it, however busy the machine is; tests of that decision set the share themselves."""

import math

import pytest

from kvcache.tiers import lookups


@pytest.fixture(autouse=True)
def fetches_pay(monkeypatch):
    monkeypatch.setattr(lookups, "_SHARE", math.inf)
