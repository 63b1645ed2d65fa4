"""The release: its workflow, the platforms and versions of its wheels, and what the pages say of them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader

import pytest
from places import PROJECT

yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
pytestmark = pytest.mark.one_build

WORKFLOW = PROJECT / ".github" / "workflows" / "release.yml"
MACHINES = {  # of the workflow, by the platforms whose wheels run there
    "manylinux_2_17_x86_64": ("test", "ubuntu-24.04"),
    "manylinux_2_17_aarch64": ("test", "ubuntu-24.04-arm"),
    "musllinux_1_2_x86_64": ("test-musl", "ubuntu-24.04"),
    "musllinux_1_2_aarch64": ("test-musl", "ubuntu-24.04-arm"),
    "macosx_11_0_arm64": ("test", "macos-15"),
    "win_amd64": ("test-windows", "windows-2025"),
}


def workflow():
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))


def test_actions_are_pinned_by_digest():
    files = sorted(WORKFLOW.parent.glob("*.yml"))
    assert [file.name for file in files] == ["ci.yml", "release.yml"]
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            assert "uses:" not in line or re.search(r"uses: [\w/-]+@[0-9a-f]{40} # \S", line), (file.name, line)


def test_a_push_runs_the_commands_of_the_readme():
    found = yaml.safe_load((WORKFLOW.parent / "ci.yml").read_text(encoding="utf-8"))
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    steps = found["jobs"]["test"]["steps"]
    assert all(step["run"] in readme for step in steps if "run" in step)
    assert {"push", "pull_request", "schedule"} <= set(found[True])
    tested = {machine for job, machine in MACHINES.values() if job != "test-windows"}  # nothing is compiled there
    assert set(found["jobs"]["test"]["strategy"]["matrix"]["machine"]) == tested
    assert [step["run"] for step in found["jobs"]["gates"]["steps"] if "run" in step][-1] == ".ci/run"


@pytest.fixture(scope="module")
def jobs():
    return workflow()["jobs"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The file `.ci/wheels` as a module."""
    loader = SourceFileLoader("wheels", str(PROJECT / ".ci" / "wheels"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("wheels", loader))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setitem(sys.modules, "wheels", module)  # dataclasses look there
        loader.exec_module(module)
    return module


def test_every_command_of_the_workflow_is_there(jobs):
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    files = [path for command in commands for path in re.findall(r"\.ci/[\w-]+", command)]
    assert set(files) == {".ci/wheels", ".ci/test-wheel"}
    assert all(os.access(PROJECT / path, os.X_OK) for path in files)


def test_the_package_links_to_the_pages_of_its_repository(jobs, tmp_path):
    """The workflow says where that is; a build that nobody tells has no links."""
    pytest.importorskip("Cython", reason="setup.py needs it")
    (step,) = [step for step in jobs["build"]["steps"] if step.get("run") == ".ci/wheels dist"]
    assert step["env"] == {"KVCACHE_REPOSITORY": "${{ github.server_url }}/${{ github.repository }}"}
    for repository in ("", "https://example.org/a/b"):
        settings = os.environ | {"KVCACHE_REPOSITORY": repository, "KVCACHE_LEVELS": "scalar"}
        command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", str(tmp_path)]
        subprocess.run(command, cwd=PROJECT, env=settings, check=True, capture_output=True)
        (metadata,) = tmp_path.glob("*.dist-info/METADATA")
        links = dict(re.findall(r"(?m)^Project-URL: (\w+), (\S+)$", metadata.read_text(encoding="utf-8")))
        assert bool(links) == bool(repository)
        shutil.rmtree(metadata.parent)
    assert {"Source", "Documentation", "Changelog", "Issues", "Security"} <= {*links}
    assert links["Source"] == repository
    for link in links.values():
        base, _, path = link.partition("/blob/HEAD/")
        assert base.startswith(repository)
        assert (PROJECT / path).exists(), link


def test_a_tag_of_a_version_starts_it(jobs):
    assert workflow()[True] == {"push": {"tags": ["v*"]}}  # YAML reads the word `on` as true
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1]
    (check,) = [step["run"] for step in jobs["build"]["steps"] if step.get("name") == "The tag is the version"]
    pattern = re.search(r'grep -qxF "(.*)" pyproject', check)[1].replace('\\"', '"')
    assert pattern.replace("${GITHUB_REF_NAME#v}", version) in project.splitlines()


def test_nothing_is_published_before_every_test(jobs):
    publish = jobs["publish"]
    assert {"build", *publish["needs"]} == set(jobs) - {"publish"}
    assert all(jobs[job]["needs"] == "build" for job in publish["needs"])
    assert [job for job in jobs if "permissions" in jobs[job]] == ["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    used = [step["uses"].partition("@")[0] for step in publish["steps"]]
    assert used == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    places = [step["with"] for job in jobs.values() for step in job["steps"] if "artifact" in step.get("uses", "")]
    assert {(place["name"], place["path"]) for place in places} == {("dist", "dist/")}


def test_every_platform_and_version_is_tested(jobs, wheels):
    assert {platform.tag for platform in wheels.PLATFORMS} == set(MACHINES)
    assert all(machine in jobs[job]["strategy"]["matrix"]["machine"] for job, machine in MACHINES.values())
    setup = next(step for step in jobs["build"]["steps"] if "setup-python" in step.get("uses", ""))
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    named = [version for version in wheels.VERSIONS if not version.endswith("t")]  # t: without the GIL
    listed = setup["with"]["python-version"].split()
    assert sorted(listed) == sorted(wheels.VERSIONS)
    assert listed[-1] == named[-1]  # the last one's folder is the first on PATH, and 3.14t's has a python3.14 as well
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == named
    assert '"Programming Language :: Python :: Free Threading :: ' in project
    for job in ("test", "test-musl", "test-windows"):
        assert tuple(jobs[job]["strategy"]["matrix"]["python"]) == wheels.VERSIONS


@pytest.mark.parametrize(
    ("version", "uv", "tested"),
    [
        ("3.13", "exit 1", "of the image"),
        ("3.14t", '[ "$2" != find ] || echo /uv/python3.14t', "/uv/python3.14t"),
        ("3.14t", '[ "$2" != install ]', None),
        ("3.14t", '[ "$2" != find ]', None),
    ],
)
def test_each_version_is_tested_with_musl_by_its_own_python(jobs, tmp_path, version, uv, tested):
    (step,) = [step for step in jobs["test-musl"]["steps"] if "TEST" in step.get("env", {})]
    assert step["run"].endswith('-e VERSION "python:${VERSION%t}-alpine" sh -euc "$TEST"')
    (tmp_path / ".ci").mkdir()
    for name, line in (("pip", "exit 0"), ("uv", uv), (".ci/test-wheel", 'echo "${PYTHON-of the image}"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VERSION": version}
    done = subprocess.run(
        ["sh", "-euc", step["env"]["TEST"]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0, done.stdout.strip()) == (tested is not None, tested or "")


def test_a_python_is_found_behind_another_version_of_its_name(tmp_path):
    """A folder of 3.14t has a python3.14 too, which is 3.14t."""
    for name, status in (("with t", 1), ("without", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "python3.14").write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
        (tmp_path / name / "python3.14").chmod(0o755)
    folders = [tmp_path / "with t", tmp_path / "without", *os.environ["PATH"].split(":")]
    environment = {"PATH": ":".join(map(str, folders)), "HOME": str(tmp_path)}
    found = subprocess.run(
        [PROJECT / ".ci" / "pythons", "3.14"], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"3.14 {tmp_path}/without/python3.14\n"


def test_a_build_is_told_where_it_will_run(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "WORK", tmp_path)
    monkeypatch.setattr(wheels, "run", lambda *command, **options: "/zig")
    monkeypatch.setattr(wheels, "numpy_parts", lambda *platform: (tmp_path, ".cpython-312-any-linux.so"))
    monkeypatch.setattr(wheels, "windows_headers", lambda *python: "/python.lib")
    for platform in wheels.PLATFORMS:
        found = wheels.build_settings("/zig", "python", "3.12", platform)
        machine = found["_PYTHON_HOST_PLATFORM"].split("-")[-1]  # as setup.py reads it
        assert machine in ("x86_64", "aarch64", "arm64", "amd64")
        assert platform.tag.endswith(machine)
        names = {}
        exec((tmp_path / "settings" / f"{platform.tag}-3.12" / "_sysconfigdata_target.py").read_text(), names)
        assert f"-target {platform.target}" in names["build_time_vars"]["CC"]
        assert names["build_time_vars"]["EXT_SUFFIX"] == ".cpython-312-any-linux.so"
        assert names["build_time_vars"]["SOABI"] == "cpython-312-any-linux"


def test_modules_end_as_those_of_numpy_do(wheels, tmp_path, monkeypatch):
    """Python 3.10 looks for the same names with musl as with glibc, later ones do not."""
    monkeypatch.setattr(wheels, "WORK", tmp_path)
    monkeypatch.setattr(wheels, "version_of", lambda *name: "2.2.6")
    downloads = []

    def download(*command):
        folder = command[command.index("-d") + 1]
        downloads.append(folder)
        folder.mkdir()
        with zipfile.ZipFile(folder / "numpy.whl", "w") as archive:
            for name in ("include/any.h", f"_multiarray_umath{ending}", "_multiarray_umath.pyi", f"_simd{ending}"):
                archive.writestr(f"numpy/_core/{name}", "")

    monkeypatch.setattr(wheels, "run", download)
    for version, tag, ending in (
        ("3.10", "musllinux_1_2_x86_64", ".cpython-310-x86_64-linux-gnu.so"),
        ("3.11", "musllinux_1_2_x86_64", ".cpython-311-x86_64-linux-musl.so"),
        ("3.14t", "win_amd64", ".cp314t-win_amd64.pyd"),
    ):
        (platform,) = [platform for platform in wheels.PLATFORMS if platform.tag == tag]
        folder = tmp_path / f"numpy-2.2.6-{tag}-{version}"
        for _ in range(2):  # the second time without a download
            parts = wheels.numpy_parts("python", version, platform)
            assert parts == (folder / "numpy" / "_core" / "include", ending)
        assert {path.name for path in folder.iterdir()} == {"numpy", "ending"}
    assert len(downloads) == 3


def test_an_environment_is_of_what_it_requires(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "WORK", tmp_path)
    monkeypatch.chdir(PROJECT)
    ran = []

    def run(*command, **options):
        ran.append(command)
        if "venv" in command:
            command[-1].mkdir()
        return python

    monkeypatch.setattr(wheels, "run", run)
    for python, more, made in (
        ("3.14.6", ("ziglang",), True),
        ("3.14.6", ("ziglang",), False),
        ("3.14.6", ("ziglang", "twine"), True),
        ("3.14.7", ("ziglang", "twine"), True),
        ("3.14.7", ("ziglang", "twine"), False),
    ):
        ran.clear()
        wheels.environment_of("tools", "python3", *more)
        installed = [command for command in ran if "install" in command]
        assert len(installed) == made, (python, more)
        assert all({"build", *more} < {*command} for command in installed)
        assert {path.name for path in (tmp_path / "tools").iterdir()} == {"ready"}


def test_a_wheel_has_each_file_of_the_sources_once(wheels, tmp_path):
    """A module of a source that is gone, a linker's own file and a module of another Python stay out."""
    package, built = tmp_path / "kvcache", tmp_path / "build" / "any" / "lib.any" / "kvcache"
    for folder in (package / "support", package / "server", package / "demo", built / "support"):
        folder.mkdir(parents=True)
    for name in ("__init__.py", "heap.pyx", "heap.pyi", "py.typed", "server/page.html", "demo/README.md", "guide.md"):
        (package / name).touch()
    for name in ("__init__.py", "gone.py", "heap.cpython-314-x.so", "gone.cpython-314-x.so", "heap.lib"):
        (built / name).touch()
    (built / "support" / "cython_runtime.cpython-314-x.so").touch()
    wheels.remove_leftovers(tmp_path)
    kept = {path.relative_to(built.parent).as_posix() for path in built.rglob("*") if path.is_file()}
    modules = {"kvcache/heap.cpython-314-x.so", "kvcache/support/cython_runtime.cpython-314-x.so"}
    assert kept == {"kvcache/__init__.py"} | modules

    names = kept | {"kvcache/heap.pyi", *wheels.DATA, *(f"kvcache_cpu-1.dist-info/{name}" for name in wheels.ABOUT)}
    file = tmp_path / "kvcache_cpu-1-cp314-cp314-any.whl"
    for less, more, wrong in (
        ((), (), None),
        (("kvcache/heap.pyi",), (), r"without \['kvcache/heap.pyi'\]"),
        (("kvcache/heap.cpython-314-x.so",), (), r"without \['kvcache/heap.pyx'\]"),
        (("kvcache/heap.cpython-314-x.so",), ("kvcache/heap.cpython-314t-x.so",), "modules of one Python"),
        ((), ("kvcache/heap.cpython-314t-x.so",), "each file of the sources once, got"),
        ((), ("kvcache/heap.lib",), r"with \['kvcache/heap.lib'\]"),
    ):
        with zipfile.ZipFile(file, "w") as archive:
            for name in sorted({*names, *more} - {*less}):
                archive.writestr(name, "")
        if wrong is None:
            wheels.check_contents(file, tmp_path)
        else:
            with pytest.raises(SystemExit, match=wrong):
                wheels.check_contents(file, tmp_path)


def test_no_page_says_that_an_index_has_it():
    """Until one has: the pages name a clone, or a folder with a wheel, or say what is missing."""
    pages = [PROJECT / "README.md", *(PROJECT / "kvcache" / "guides").glob("*.md"), *(PROJECT / "deploy").iterdir()]
    for page in pages:
        for line in page.read_text(encoding="utf-8").splitlines():
            if "pip install" in line and "kvcache-cpu" in line:
                assert "--find-links" in line or "no index has it yet" in line, (page, line)


def test_the_first_line_of_code_is_the_one_of_the_index():
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"```sh\n(.*)", readme)[1]
    assert first.startswith("pip install 'kvcache-cpu[demo]' && kvcache ")


def test_the_conda_recipe_asks_for_what_the_wheel_asks_for():
    """`.ci/recipe`, where its package is installed, renders it too."""
    recipe = yaml.safe_load((PROJECT / ".conda" / "recipe.yaml").read_text(encoding="utf-8"))
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    assert recipe["context"]["version"] == re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1]
    assert recipe["build"]["skip"] == "win"
    asked = {word.replace(" ", "") for part in ("host", "run") for word in recipe["requirements"][part]}
    for key in ("requires", "dependencies", "text"):
        for word in re.findall(r'"(.+?)"', re.search(rf"^{key} = \[(.*?)\]", project, re.MULTILINE)[1]):
            assert word.lower() in asked or "win32" in word, word  # it makes no package for Windows


def test_extras_that_are_named_are_there():
    """In commands of pages, docstrings and errors, which name each one but for those of developers."""
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    files = [*PROJECT.glob("*.md"), *(PROJECT / "kvcache").rglob("*.md"), *(PROJECT / "kvcache").rglob("*.py")]
    named = set()
    for file in files:
        commands = re.findall(r"pip install.*", file.read_text(encoding="utf-8"))
        for names in re.findall(r"'(?:\.|kvcache-cpu)\[([\w,]+)\]'", "\n".join(commands)):
            named |= set(names.split(","))
    assert named <= set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    assert named >= {"demo", "text", "serve", "redis", "encryption", "grammar", "cluster", "otel", "hf"}
