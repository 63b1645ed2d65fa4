"""Damaged saved caches: texts that need a damaged page are lost, and no lookup returns wrong rows."""

import os

import pytest
from hostile.fuzz_snapshot import fuzz
from oracles.snapshot import parse, texts
from pace import FAST
from saved_caches import SIZE, assert_true, blocks, entries, get, prompts, put

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_damaged_page_costs_what_needs_it_and_nothing_else(tmp_path, kind, caplog):
    path = tmp_path / "cache"
    saved, texts_ = kind(), prompts(7)
    for name, tokens in texts_:
        put(saved, name, tokens)
    saved.save(path)
    good = path.read_bytes()
    parsed = parse(good)
    lost_somewhere = 0
    page_bytes = parsed["arenas"][0]["page_bytes"]
    first = len(good) - page_bytes * len(parsed["arenas"][0]["pages"])
    count = len(parsed["arenas"][0]["pages"])
    for page in range(0, count, max(1, count // 10)):
        bad = bytearray(good)
        bad[first + page * page_bytes + page % page_bytes] ^= 1 << page % 8
        path.write_bytes(bad)
        # From the file: the longest prefix of each text whose slots all lie in other pages.
        size = parsed["arenas"][0]["page_tokens"]
        want = {}
        for name, tokens, slots, _, _ in texts(parsed):
            length = next((i for i, slot in enumerate(slots) if slot // size == page), len(slots))
            for end in range(1, length + 1):
                want.setdefault((name, tuple(tokens[:end])))
        loaded = kind()
        assert loaded.load(path) == len(saved)
        caplog.clear()
        for name, tokens in texts_:
            found = get(loaded, name, tokens)
            assert_true(found, name, tokens)
            whole = tokens if kind is entries else tokens[: len(tokens) // SIZE * SIZE]
            longest = max((n for n in range(len(whole) + 1) if n and (name, tuple(whole[:n])) in want), default=0)
            assert found[0] == (longest if kind is entries else longest // SIZE * SIZE)
            lost_somewhere += found[0] < len(whole)
            loaded.check()
        assert caplog.text.count("is damaged") == 1
        assert f"page {page} is damaged" in caplog.text
        loaded.save(tmp_path / "again")
        assert all(None not in arena["pages"] for arena in parse((tmp_path / "again").read_bytes())["arenas"])
        for name, tokens in texts_:  # lost texts can be stored again
            put(loaded, name, tokens)
            assert get(loaded, name, tokens)[0] == get(saved, name, tokens)[0]
        loaded.check()
    assert lost_somewhere


@pytest.mark.parametrize("kind", [entries, blocks])
def test_a_file_that_shrinks_after_it_was_loaded(tmp_path, kind):
    """With a memory mapping this would be a bus error."""
    path = tmp_path / "cache"
    saved = kind()
    put(saved, "x", [5] * 400)
    saved.save(path)
    size = path.stat().st_size
    for cut in (size - 1, size // 2, 5000, 0):
        saved.save(path)
        loaded = kind()
        loaded.load(path)
        os.truncate(path, cut)
        found = get(loaded, "x", [5] * 400)
        assert found[0] < 400
        assert_true(found, "x", [5] * 400)
        loaded.check()


def test_whole_matches_stay_whole_matches(tmp_path):
    """If only whole entries match, a damaged one is forgotten as a whole."""
    path = tmp_path / "cache"
    saved = entries(partial_matches=False)
    put(saved, "x", [5] * 100)
    put(saved, "x", [5] * 50)
    saved.save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # slots 64.. of [5] * 100
    path.write_bytes(data)
    loaded = entries(partial_matches=False)
    assert loaded.load(path) == 2
    assert get(loaded, "x", [5] * 200)[0] == 50
    assert len(loaded) == 1
    loaded.check()


def test_load_reads_no_page(tmp_path):
    """A file whose pages are all zeros loads; its lookups find nothing."""
    path = tmp_path / "cache"
    saved = blocks()
    put(saved, "x", [5] * 40)
    saved.save(path)
    with open(path, "r+b") as file:
        parsed = parse(path.read_bytes())
        first = path.stat().st_size - 10 * parsed["arenas"][0]["page_bytes"]
        file.seek(first)
        file.write(bytes(path.stat().st_size - first))
    loaded = blocks()
    assert loaded.load(path) == 10
    assert get(loaded, "x", [5] * 40)[0] == 0
    assert len(loaded) == 0
    loaded.check()


def test_a_thousand_mutations(tmp_path):
    """`python -m hostile.fuzz_snapshot` runs any number of mutations."""
    outcomes = fuzz(200 if FAST else 1000, 1, tmp_path)
    seen = {(kind, outcome) for kind, _, outcome in outcomes}
    damage = {("damage", outcome) for outcome in ("refused", "a part is lost", "all is found")}
    assert seen == damage | {("forgery", "refused"), ("forgery", "loaded")}
