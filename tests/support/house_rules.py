"""The house rules that a parser can check: each finds, by file, what breaks it.

`tests/promises/exceptions.json` lists what broke them when they came. A test fails where a file has more than its list,
and where its list has more than the file: lists only shrink.

    python tests/support/house_rules.py     takes off the lists what is mended, adds nothing, and prints what is new
"""

import ast
import json
import re
from collections import Counter, defaultdict
from functools import cache

from places import PROJECT

HOUSE = PROJECT / "kvcache"
LISTS = PROJECT / "tests" / "promises" / "exceptions.json"
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}  # of named tuples
READS_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter"}
UPSIDE_DOWN = re.compile(r"(Of|As of|Those|That|What|Whose)\b")


def sources(*kinds, rooms=("kvcache",)):
    """The files of the given kinds, with their names from the project on."""
    for room in rooms:
        for path in sorted((PROJECT / room).rglob("*")):
            if path.suffix[1:] in kinds and path.is_file():
                yield path.relative_to(PROJECT).as_posix(), path.read_text(encoding="utf-8")


def collected(find, *kinds, **rooms):
    """The findings of `find(text)` in each file that has some."""
    found = {name: sorted(find(text)) for name, text in sources(*kinds, **rooms)}
    return {name: findings for name, findings in found.items() if findings}


def class_bodies(tree):
    """Each class with each assignment in its body."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            lines = [line for line in node.body if isinstance(line, (ast.Assign, ast.AnnAssign))]
            yield from ((node, line) for line in lines if line.value)


def assigned_methods():
    """Names of a class that are assigned from another module: the class is not whole."""

    def find(text):
        tree = ast.parse(text)
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
        foreign = {alias.asname or alias.name.split(".")[0] for node in nodes for alias in node.names}
        plain = ((owner, line) for owner, line in class_bodies(tree) if isinstance(line, ast.Assign))
        for owner, line in plain:  # an annotated one has a type: a field of a dataclass
            for value in line.value.elts if isinstance(line.value, ast.Tuple) else [line.value]:
                root = value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in foreign:
                    yield f"{owner.name}: {ast.unparse(value)}"

    return collected(find, "py")


def properties_by_lambda():
    """Names of a class that are made by a call with a lambda."""

    def find(text):
        for owner, line in class_bodies(ast.parse(text)):
            calls = [node for node in ast.walk(line.value) if isinstance(node, ast.Call)]
            if any(isinstance(argument, ast.Lambda) for call in calls for argument in call.args):
                target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                if not ast.unparse(line.value).startswith("field("):  # of a dataclass
                    yield f"{owner.name}.{ast.unparse(target)}"

    return collected(find, "py")


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC and name != "_"


def names_made(tree):
    """The names that a file defines or gives to its objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(node):
    """Whether a node is `self`, `cls` or `super()`."""
    return ast.unparse(node) in ("self", "cls", "super()")


def private_names():
    """Private names of objects that another file makes."""

    def find(text):
        tree = ast.parse(text)
        own = set(names_made(tree))
        for node in ast.walk(tree):
            used = []
            if isinstance(node, ast.Attribute) and not is_own(node.value):
                used = [node.attr]
            elif isinstance(node, ast.ImportFrom):
                used = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in READS_BY_NAME:
                used = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from {name for name in used if is_private(name)} - own

    def find_compiled(text):
        text = re.sub(r'(?s)""".*?"""|#[^\n]*|"[^"\n]*"', "", text)
        used = re.findall(r"\b(?!self\b|cls\b)\w+\.(_[a-z]\w*)", text)
        own = re.findall(r"(?:def|cdef|cpdef) [^(\n]*?(_\w+)\(|self\.(_\w+) =", text)
        yield from set(used) - {name for pair in own for name in pair}

    def once(findings):
        return {name: sorted(set(found)) for name, found in findings.items()}

    return once(collected(find, "py")) | once(collected(find_compiled, "pyx", "pxd"))


def docstrings_upside_down():
    """Docstrings that begin with another word than their verb or noun."""

    def find(text):
        if '"""' in text:
            for line in re.findall(r'"""([^\n"]+)', text):
                if UPSIDE_DOWN.match(line):
                    yield line[:60]

    return collected(find, "py", "pyx", "pxd", rooms=("kvcache", "tests", "bench"))


def module_of(name):
    return name.rsplit(".", 1)[0].replace("/", ".").removesuffix(".__init__")


def imported(name, text, known):
    """The modules of `known` that a file imports: at its top, in a function, for types."""
    if name.endswith(".py"):
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        found = [(node.module, [alias.name for alias in node.names]) for node in nodes]
    else:
        lines = re.findall(r"(?m)^ *from ([\w.]+) c?import (.*)$", text)
        found = [(module, re.findall(r"\w+", names)) for module, names in lines]
    for module, names in found:
        if module and module.split(".")[0] == "kvcache":
            yield from [f"{module}.{each}" for each in names if f"{module}.{each}" in known] or [module]


@cache
def imports():
    """`{module: the modules that it imports}`, types included."""
    files = list(sources("py", "pyx", "pxd", "pyi"))
    known = {module_of(name) for name, _ in files}
    uses = defaultdict(set)
    for name, text in files:
        uses[module_of(name)] |= set(imported(name, text, known)) - {module_of(name)}
    return dict(uses)


def circles():
    """Modules on a circle of imports, with those of the same circle that they import."""
    uses = {module: others for module, others in imports().items() if module != "kvcache"}  # which nothing imports

    def reached(module):
        seen, new = set(), {module}
        while new:
            new = {other for each in new for other in uses.get(each, ())} - seen
            seen |= new
        return seen

    ahead = {module: reached(module) for module in uses}
    found = {module: sorted(other for other in uses[module] if module in ahead.get(other, ())) for module in uses}
    return {module: others for module, others in sorted(found.items()) if others}


def names_that_stand_twice():
    """File names and class names that stand more than once in kvcache/, and file names that are gerunds."""
    modules = {module_of(name) for name, _ in sources("py", "pyx") if "__" not in name}  # names of Python
    stems = Counter(module.split(".")[-1] for module in modules)
    classes = Counter()
    for _, text in sources("py", "pyx"):
        found = re.findall(r"(?m)^(?:cdef )?class (\w+)", text)
        classes.update(each for each in found if not each.startswith("_"))
    return {
        "files": sorted(stem for stem, count in stems.items() if count > 1),
        "classes": sorted(name for name, count in classes.items() if count > 1),
        "gerunds": sorted(stem for stem in stems if stem.endswith("ing")),
    }


RULES = [assigned_methods, properties_by_lambda, private_names, docstrings_upside_down, circles, names_that_stand_twice]


def counted(findings):
    return Counter((name, each) for name, some in findings.items() for each in some)


def exceptions():
    """The lists, by the name of the rule."""
    return json.loads(LISTS.read_text(encoding="utf-8"))


def shrink():
    """Take off the lists what is mended; print what is new."""
    lists = {}
    for rule in RULES:
        found, listed = counted(rule()), counted(exceptions()[rule.__name__])
        for name, each in sorted((found - listed).elements()):
            print(f"new, {rule.__name__}: {name}: {each}")
        left = defaultdict(list)
        for name, each in sorted((found & listed).elements()):
            left[name].append(each)
        lists[rule.__name__] = dict(left)
    LISTS.write_text(json.dumps(lists, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    shrink()
