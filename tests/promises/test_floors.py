"""The map of the packages in CONTRIBUTING.md names them all, and imports only go down in it."""

import re

import pytest
from house_rules import circles, counted, exceptions, imports
from places import PROJECT

HOUSE = PROJECT / "kvcache"
# Files above 700 lines that are about one noun.
LONG_FILES = {"kvcache/paged/cache.py", "tests/golden/make_golden.py"}


def floors():
    """The floor of each package, and of each module outside the packages."""
    text = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (house,) = re.findall(r"(?s)```\nkvcache/\n(.*?)```", text)
    lines = re.findall(r"(?m)^ +(\d+)  ((?:\w+/? )+)", house)
    return {name.strip("/"): int(floor) for floor, names in lines for name in names.split()}


def room_of(module):
    return module.split(".")[1] if "." in module else "__init__"


pytestmark = pytest.mark.one_build


def test_the_map_is_complete():
    assert "```\nkvcache/\n" not in (PROJECT / "README.md").read_text(encoding="utf-8")  # it stands once
    names = {path.stem for path in HOUSE.glob("*.py")} | {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    assert set(floors()) == names


def test_imports_go_down():
    floor_of, up = floors(), []
    for module, others in sorted(imports().items()):
        room = room_of(module)
        for other in others:
            if (below := room_of(other)) != room and floor_of[below] >= floor_of[room]:
                up.append(f"{module} imports {other}, which is not below {room}")
    assert not up, "\n".join(up)


def test_no_circles():
    """Imports for types count; the circles that are left are on a list."""
    assert counted(circles()) == counted(exceptions()["circles"])


def test_folders_have_few_entries():
    for folder in ("kvcache", "tests"):
        shown = [p for p in (PROJECT / folder).iterdir() if p.suffix != ".so" and p.name != "__pycache__"]
        assert len(shown) < 33, folder


def test_long_files_were_looked_at():
    """Above 700 lines a file may have a second noun; those on the list were read and have one."""
    rooms = [PROJECT / name for name in ("kvcache", "ckernels", "tests", "bench")]
    sources = [p for room in rooms for kind in ("py", "pyx", "pxd", "pyi", "c", "h") for p in room.rglob(f"*.{kind}")]
    long = {p.relative_to(PROJECT).as_posix() for p in sources if p.read_text(encoding="utf-8").count("\n") > 700}
    assert long <= LONG_FILES
