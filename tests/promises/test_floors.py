"""The map of the packages: README and CONTRIBUTING show the same map, and imports only go down in it."""

import ast
import re

import pytest
from places import PROJECT

HOUSE = PROJECT / "kvcache"
SOURCES = sorted(path for kind in ("py", "pyx", "pxd") for path in HOUSE.rglob(f"*.{kind}"))


def map_of(document):
    """The block of text that begins with `kvcache/`."""
    return re.search(r"```\nkvcache/\n(.*?)```", (PROJECT / document).read_text(encoding="utf-8"), re.DOTALL)[1]


def floors():
    """The floor of each package, and of each module outside the packages."""
    lines = re.findall(r"(?m)^  (\d)  ((?:\w+/? )+)", map_of("README.md"))
    return {name.strip("/"): int(floor) for floor, names in lines for name in names.split()}


def module_of(path):
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module):
    return module.split(".")[1] if "." in module else "__init__"


def imported(path):
    """The modules of the library that a file imports, at its top or in a function."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tree = ast.parse(text)
        for node in [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]:
            node.body = []
        found = [(n.module, [a.name for a in n.names]) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    else:
        lines = re.findall(r"(?m)^ *from ([\w.]+) c?import (.*)$", text)
        found = [(module, re.findall(r"\w+", names)) for module, names in lines]
    known = {module_of(path) for path in SOURCES}
    for module, names in found:
        if module and module.split(".")[0] == "kvcache":
            inner = [f"{module}.{name}" for name in names if f"{module}.{name}" in known]
            yield from inner or [module]


pytestmark = [pytest.mark.no_level, pytest.mark.one_build]


def test_one_map():
    assert map_of("README.md") == map_of("CONTRIBUTING.md")
    names = {path.stem for path in HOUSE.glob("*.py")} | {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    assert set(floors()) == names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_go_down(path):
    floor_of, room = floors(), room_of(module_of(path))
    for module in imported(path):
        below = room_of(module)
        assert below == room or floor_of[below] < floor_of[room], f"{module} is not below {room}"


def test_no_circles():
    uses = {}
    for path in SOURCES:
        uses.setdefault(module_of(path), set()).update(set(imported(path)) - {module_of(path), "kvcache"})
    while leaves := {module for module, others in uses.items() if not others & set(uses)}:
        for module in leaves:
            del uses[module]
    assert not uses


def test_folders_have_few_entries():
    for folder in ("kvcache", "tests"):
        shown = [p for p in (PROJECT / folder).iterdir() if p.suffix != ".so" and p.name != "__pycache__"]
        assert len(shown) < 25, folder


# The lines of files that hold a whole class, where it needs more than 420.
WHOLE = {"cache.py": 760, "tables.pyx": 530, "sequences.pyx": 490, "run_lists.pyx": 470, "attention.h": 500}


def test_no_file_is_long():
    rooms = [PROJECT / name for name in ("kvcache", "ckernels", "tests", "bench")]
    sources = [p for room in rooms for kind in ("py", "pyx", "pxd", "pyi", "c", "h") for p in room.rglob(f"*.{kind}")]
    lines = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in sources}
    assert not {p.name: n for p, n in lines.items() if n > WHOLE.get(p.name, 420)}
