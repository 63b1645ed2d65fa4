"""The incremental build: Cython modules, and C kernels once per SIMD level, of what changed.

setup.py has the data. Hashes of contents and settings say what is made again, not times: with each `pip install`
Cython's own files are new ones.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import Cython
import numpy
from Cython.Build import cythonize
from Cython.Build.Dependencies import create_dependency_tree
from setuptools.command.build_ext import build_ext

from ckernels.levels import compiler_of_kernels


def check_machine():
    """Exit with one line where nothing can be built: on Windows, or without a compiler or Python's headers."""
    if sys.platform == "win32":
        runs = "it runs there in the Windows Subsystem for Linux (WSL)"
        sys.exit(f"kvcache: expected Linux or macOS, got Windows; {runs}")
    if {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"} & set(sys.argv):
        compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
        for needed in (compiler, sysconfig.get_path("include") + "/Python.h"):
            if not shutil.which(needed) and not os.path.exists(needed):
                sys.exit(
                    f"kvcache: expected a C compiler and Python's headers, got no {needed}; to install them: "
                    "sudo apt install build-essential python3-dev (Debian, Ubuntu), "
                    "sudo dnf install gcc python3-devel (Fedora), xcode-select --install (macOS)"
                )
    if sys.platform == "darwin":  # not for two machines at once, as some Pythons would
        os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")


def is_for_developers():
    """Whether the build is for the machine that it runs on, and stays in the clone."""
    editable = {"develop", "editable_wheel", "--inplace", "-i"} & set(sys.argv)
    return bool(editable) and "_PYTHON_HOST_PLATFORM" not in os.environ


def best_level(known, flags):
    """The level that this CPU runs best, of those that the compiler knows, as ckernels/kvc_dispatch.c finds it.

    None: what the compiler makes does not run here.
    """
    compiler = compiler_of_kernels()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "probe")
        have = [f"-DKVC_HAVE_{level.upper()}=0" for level in known]
        try:
            subprocess.run([*compiler, *have, *flags, "ckernels/probe_level.c", "-o", program], check=True)
            return subprocess.run([program], check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None


@dataclass(frozen=True)
class Plan:
    """What is compiled, and how."""

    units: list  # of kernels: (source, folder of its object, flags)
    headers: list  # of kernels, which the modules include too
    kernel_flags: list
    kernel_owner: str  # the module that the kernels are linked into
    module_flags: list
    link_flags: list
    directives: dict  # of Cython
    generated: str  # the folder of the C files that Cython makes
    runtime: str  # the module of Cython's own code, which the others import
    coverage: bool  # each line of a generated file names its source


class Made:
    """A file to make, and the hash of its contents' sources and settings; build/made has the hash of the last time."""

    def __init__(self, target, sources, *settings):
        self.target, self.note = Path(target), Path("build/made", str(target).lstrip(os.sep))
        contents = sorted(hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in sources)
        self.key = hashlib.sha256(repr((contents, settings)).encode()).hexdigest()

    def is_current(self):
        return self.target.exists() and self.note.exists() and self.note.read_text() == self.key

    def by(self, make, *arguments):
        """Make it, unless it is current."""
        if not self.is_current():
            self.note.unlink(missing_ok=True)
            make(*arguments)
            self.keep()

    def keep(self):
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.write_text(self.key)


def translate(plan, extensions, processes):
    """Run Cython: set each extension's source to the C file of its `.pyx`."""
    tree, settings = create_dependency_tree(quiet=True), (Cython.__version__, plan.directives, plan.coverage)
    files = [
        Made(f"{plan.generated}/{os.path.splitext(source)[0]}.c", tree.all_dependencies(source), settings)
        for extension in extensions
        for source in extension.sources
        if source.endswith(".pyx")
    ]
    changed = [file for file in files if not file.is_current()]
    for file in files:  # cythonize goes by times
        if file in changed:
            file.target.unlink(missing_ok=True)
        else:
            os.utime(file.target)
    options = {"compiler_directives": plan.directives, "build_dir": plan.generated, "emit_linenums": plan.coverage}
    modules = cythonize(extensions, nthreads=processes, shared_utility_qualified_name=plan.runtime, **options)
    if plan.coverage and changed:
        subprocess.run([".ci/each_line", *(file.target for file in changed)], check=True)
    for file in changed:
        file.keep()
    for extension, module in zip(extensions, modules, strict=True):
        extension.sources = module.sources


class Progress:
    """Lines of how much is compiled, one a second at most. pip shows them with -v."""

    def __init__(self, count):
        self._count, self._done, self._said, self._lock = count, 0, 0.0, Lock()

    def step(self, name):
        with self._lock:
            self._done += 1
            if (now := time.monotonic()) - self._said >= 1 or self._done == self._count:
                self._said = now
                line = f"kvcache: {self._done} of {self._count} compiled, {name}\n"
                os.write(1, line.encode())  # print holds a lock, which a process that Cython forks now would wait for


class build_kernels(build_ext):
    """build_ext, with Cython and with the kernels compiled per SIMD level. A subclass has the `plan`."""

    plan: Plan

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        self.force = True  # Made says what is made again
        if self.editable_mode:  # not a new folder each time, but that of all builds
            tag = f"{self.plat_name}-{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"  # t: without the GIL
            self.build_lib, self.build_temp = f"build/lib.{tag}", f"build/temp.{tag}"

    def build_extensions(self):
        self._compiler = copy(self.compiler)  # of kernels, with the same flags of Python's
        if "KVCACHE_KERNELS_CC" in os.environ:
            of_modules = (os.environ.get("CC") or sysconfig.get_config_var("CC")).split()
            flags = self.compiler.compiler_so[len(of_modules) :]
            self._compiler.set_executables(compiler_so=[*compiler_of_kernels(), *flags])
        self._progress = Progress(len(self.plan.units) + len(self.extensions))
        with ThreadPoolExecutor(self.parallel) as pool:  # kernels need nothing of what Cython makes meanwhile
            kernels = pool.map(lambda unit: self._kernel(*unit), self.plan.units)
            translate(self.plan, self.extensions, self.parallel)
            kernels = list(kernels)
        for extension in self.extensions:
            extension.extra_compile_args += self.plan.module_flags
            extension.extra_link_args += self.plan.link_flags
            extension.extra_objects += kernels if extension.name == self.plan.kernel_owner else []
        self.extensions.sort(key=lambda extension: -os.path.getsize(extension.sources[0]))
        super().build_extensions()

    def _kernel(self, source, folder, special):
        folder = os.path.join(self.build_temp, folder)
        (target,) = self._compiler.object_filenames([source], output_dir=folder)
        flags = [*self.plan.kernel_flags, "-fPIC", *special]
        made = Made(target, [source, *self.plan.headers], self._compiler.compiler_so, flags)
        made.by(lambda: self._compiler.compile([source], folder, extra_postargs=flags))
        self._progress.step(target)
        return target

    def build_extension(self, extension):
        linker = self.compiler.linker_so
        settings = self.compiler.compiler_so, linker, extension.extra_compile_args, extension.extra_link_args
        linked = [*extension.extra_objects, *(word for word in linker if word.endswith((".o", ".lib")))]
        sources = [*extension.sources, *linked, *self.plan.headers]
        made = Made(self.get_ext_fullpath(extension.name), sources, settings, sys.version, numpy.__version__)
        made.by(super().build_extension, extension)
        self._progress.step(extension.name)
