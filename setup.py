"""Build data: the Cython modules, and the C kernels once per SIMD level of the target machine.

KVCACHE_DEBUG=1     bounds checks and assertions in Cython, -Og -g in C
KVCACHE_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer in everything that is compiled
KVCACHE_COVERAGE=1  lines of Cython and C counted, for .ci/coverage
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import Cython
import numpy
from Cython.Build import cythonize
from Cython.Build.Dependencies import create_dependency_tree
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if sys.platform == "win32":
    sys.exit("kvcache: expected Linux or macOS, got Windows; it runs there in the Windows Subsystem for Linux (WSL)")
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

DEBUG, SANITIZE, COVERAGE = (os.environ.get(f"KVCACHE_{name}") == "1" for name in ("DEBUG", "SANITIZE", "COVERAGE"))

# One name per level, the same in ckernels/simd_<level>.h, in KVCACHE_SIMD and in the kernel table itself.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")] + ["-mprefer-vector-width=512"]
NEON = ["-march=armv8.2-a+dotprod+fp16"]
LEVELS = {"x86_64": {"avx2": AVX2, "avx512": AVX2 + AVX512}, "aarch64": {"neon": NEON}, "arm64": {"neon": NEON}}
LEVELS = {"scalar": [], **LEVELS.get(platform.machine(), {})}

# -g0: Python's -g takes a quarter of the compile time.
# No a * b + c in one rounding where the source has two: clang's default, at the mercy of what it inlines where.
FLAGS = ["-std=c11", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden"]
FLAGS += ["-Og", "-g", "-UNDEBUG", "-DKVC_DEBUG"] if DEBUG else ["-O3", "-g0", "-DNDEBUG"]

# The modules have no loops that -O3 makes faster, and -O2 takes three quarters of its time.
MODULES = [] if DEBUG else ["-O2"]

# -g1: the line numbers of a report. -Og: half of the compile time of -O1, with the same checks; kernels run too slowly.
# -fno-wrapv: Python's -fwrapv hides overflows, and gcc takes three times as long over kernels with checks.
CHECK = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-Og"] if SANITIZE else []

# gcov counts the kernels and, by the lines that Cython says its C is of, the modules, at -O0 where no line is merged
# into another. Threads may lose counts; none goes back to zero.
COUNT = ["--coverage", "-O0"] if COVERAGE else []
KERNELS = ["-O1", "-fno-wrapv"] if SANITIZE or COVERAGE else []
if SANITIZE:  # `tests/ckernels/run fuzz` takes them from here
    KERNELS += ["-fsanitize=float-cast-overflow", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]

# Kernels: every kvc_<part>.c is compiled once per level, with the level's flags and its primitives,
# except the parts that exist once, which know what levels there are.
HEADERS = sorted(glob("ckernels/*.h"))
PARTS = (
    "dispatch", "layout", "matmul_parallel", "matrix", "network_parallel", "parallel", "rows_parallel",
    "threads",
)  # fmt: skip
ONCE = [f"ckernels/kvc_{part}.c" for part in PARTS]
UNITS = [(source, "once", [f"-DKVC_HAVE_{level.upper()}=1" for level in LEVELS]) for source in ONCE]
for level, flags in LEVELS.items():
    defines = [f"-DKVC_LEVEL={level}", f"-DKVC_{level.upper()}=1"]
    checks = []
    if SANITIZE:  # -O2 compiles kernels with vectors for four times as long; one level checks pointer arithmetic
        checks = ["-O2"] if level == "scalar" else ["-fno-sanitize=null,object-size,pointer-overflow"]
    UNITS += [(source, level, defines + flags + checks) for source in sorted(set(glob("ckernels/kvc_*.c")) - set(ONCE))]
UNITS.sort(key=lambda unit: -os.path.getsize(unit[0]))  # no CPU waits long for the last one

DIRECTIVES = {"language_level": "3", "wraparound": False, "embedsignature": True, "embedsignature.format": "python"}
DIRECTIVES |= {"boundscheck": DEBUG, "initializedcheck": DEBUG, "cdivision": not DEBUG}
GENERATED = f"build/cython-{Cython.__version__}{'-debug' * DEBUG}{'-coverage' * COVERAGE}"
# The last one is Cython's own code, memoryviews above all: the others import it instead of having a copy each.
SOURCES = [*sorted(glob("kvcache/**/*.pyx", recursive=True)), "kvcache/core/cython_runtime.c"]
COMMON = {"include_dirs": ["ckernels", numpy.get_include()]}
COMMON["define_macros"] = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
EXTENSIONS = [Extension(os.path.splitext(path)[0].replace(os.sep, "."), [path], **COMMON) for path in SOURCES]


class Made:
    """A file to make, and the hash of its contents' sources and settings; build/made has the hash of the last time.

    Hashes, not times: with each `pip install` Cython's own files are new ones.
    """

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


def translate(extensions, processes):
    """Cython: set each extension's source to the C file of its `.pyx`."""
    tree, settings = create_dependency_tree(quiet=True), (Cython.__version__, DIRECTIVES, COVERAGE)
    files = [
        Made(f"{GENERATED}/{os.path.splitext(source)[0]}.c", tree.all_dependencies(source), settings)
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
    options = {"compiler_directives": DIRECTIVES, "build_dir": GENERATED, "emit_linenums": COVERAGE}
    modules = cythonize(
        extensions, nthreads=processes, shared_utility_qualified_name="kvcache.core.cython_runtime", **options
    )
    if COVERAGE and changed:
        subprocess.run([".ci/each_line", *(file.target for file in changed)], check=True)
    for file in changed:
        file.keep()
    for extension, module in zip(extensions, modules, strict=True):
        extension.sources = module.sources


class build_kernels(build_ext):
    """build_ext, with Cython and with the kernels compiled per SIMD level, of what changed."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        self.force = True  # Made says what is made again
        if self.editable_mode:  # not a new folder each time, but that of all builds
            tag = f"{self.plat_name}-{sys.implementation.cache_tag}"
            self.build_lib, self.build_temp = f"build/lib.{tag}", f"build/temp.{tag}"

    def build_extensions(self):
        translate(self.extensions, self.parallel)
        with ThreadPoolExecutor(self.parallel) as pool:
            kernels = list(pool.map(lambda unit: self._kernel(FLAGS + CHECK + COUNT + KERNELS, *unit), UNITS))
        for extension in self.extensions:
            extension.extra_compile_args += FLAGS + MODULES + CHECK + COUNT
            extension.extra_link_args += [*CHECK, "-pthread", *COUNT]
            extension.extra_objects += kernels if extension.name == "kvcache.core.kernels" else []
        self.extensions.sort(key=lambda extension: -os.path.getsize(extension.sources[0]))
        super().build_extensions()

    def _kernel(self, common, source, folder, special):
        folder = os.path.join(self.build_temp, folder)
        (target,) = self.compiler.object_filenames([source], output_dir=folder)
        flags = [*common, "-fPIC", *special]
        made = Made(target, [source, *HEADERS], self.compiler.compiler_so, flags)
        made.by(lambda: self.compiler.compile([source], folder, extra_postargs=flags))
        return target

    def build_extension(self, extension):
        settings = self.compiler.compiler_so, extension.extra_compile_args, extension.extra_link_args
        sources = [*extension.sources, *extension.extra_objects, *HEADERS]
        made = Made(self.get_ext_fullpath(extension.name), sources, settings, sys.version, numpy.__version__)
        made.by(super().build_extension, extension)


if __name__ == "__main__":  # processes that run Cython may import this file
    setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": build_kernels})
