"""Build data: the Cython modules, and the C kernels once per SIMD level of the target machine.

KVCACHE_DEBUG=1     bounds checks and assertions in Cython, -Og -g in C
KVCACHE_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer in everything that is compiled
KVCACHE_COVERAGE=1  lines of Cython and C counted, for .ci/coverage
"""

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import Cython
import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

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

# -g1: the line numbers of a report. -Og: half of the compile time of -O1, with the same checks; kernels run too slowly.
# -fno-wrapv: Python's -fwrapv hides overflows, and gcc takes three times as long over kernels with checks.
CHECK = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-Og"] if SANITIZE else []

# gcov counts the kernels and, by the lines that Cython says its C is of, the modules, at -O0 where no line is merged
# into another. Threads may lose counts; none goes back to zero.
COUNT = ["--coverage", "-O0"] if COVERAGE else []
KERNELS = ["-O1", "-fno-wrapv"] if SANITIZE or COVERAGE else []

# Kernels: every kvc_<part>.c is compiled once per level, with the level's flags and its primitives,
# except the parts that exist once, which know what levels there are.
ONCE = [f"ckernels/kvc_{part}.c" for part in ("dispatch", "layout", "matmul_parallel", "matrix", "parallel", "threads")]
UNITS = [(source, "once", [f"-DKVC_HAVE_{level.upper()}=1" for level in LEVELS]) for source in ONCE]
for level, flags in LEVELS.items():
    defines = [f"-DKVC_LEVEL={level}", f"-DKVC_{level.upper()}=1"]
    UNITS += [(source, level, defines + flags) for source in sorted(set(glob("ckernels/kvc_*.c")) - set(ONCE))]

# What is older than a dependency is built again; this file is as old as the last change of settings.
SETTINGS = Path("build/settings.txt")
settings = repr([FLAGS, CHECK, COUNT, KERNELS, *map(os.environ.get, ("CC", "CFLAGS")), Cython.__version__])
if not SETTINGS.exists() or SETTINGS.read_text() != settings:
    SETTINGS.parent.mkdir(exist_ok=True)
    SETTINGS.write_text(settings)
DEPENDS = ["setup.py", str(SETTINGS), *sorted(glob("ckernels/*"))]


class build_kernels(build_ext):
    """build_ext, with the kernels compiled per SIMD level."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if self.editable_mode:  # not a new folder each time: a second `pip install -e .` builds only what changed
            self.build_lib, self.build_temp = "build/inplace", "build/temp"

    def build_extensions(self):
        flags, links = FLAGS + CHECK, [*CHECK, "-pthread"]
        with ThreadPoolExecutor(self.parallel) as pool:
            kernels = list(pool.map(lambda unit: self._kernel(flags + COUNT + KERNELS, *unit), UNITS))
        for extension in self.extensions:
            extension.extra_compile_args += flags + COUNT
            extension.extra_link_args += links + COUNT
            extension.extra_objects += kernels if extension.name == "kvcache.core.kernels" else []
        super().build_extensions()

    def _kernel(self, common, source, folder, special):
        folder = os.path.join(self.build_temp, folder)
        (target,) = self.compiler.object_filenames([source], output_dir=folder)
        if self.force or newer_group([source, *(d for d in DEPENDS if not d.endswith(".c"))], target):
            self.compiler.compile([source], folder, extra_postargs=[*common, "-fPIC", *special])
        return target


DIRECTIVES = {"language_level": "3", "wraparound": False, "embedsignature": True, "embedsignature.format": "python"}
DIRECTIVES |= {"boundscheck": DEBUG, "initializedcheck": DEBUG, "cdivision": not DEBUG}
GENERATED = f"build/cython-{Cython.__version__}{'-debug' * DEBUG}{'-coverage' * COVERAGE}"
COMMON = {"include_dirs": ["ckernels", numpy.get_include()], "depends": DEPENDS}
COMMON["define_macros"] = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
# The last one is Cython's own code, memoryviews above all: the others import it instead of having a copy each.
SOURCES = [*sorted(glob("kvcache/**/*.pyx", recursive=True)), "kvcache/core/cython_runtime.c"]
EXTENSIONS = [Extension(os.path.splitext(path)[0].replace(os.sep, "."), [path], **COMMON) for path in SOURCES]
OPTIONS = {"compiler_directives": DIRECTIVES, "build_dir": GENERATED, "emit_linenums": COVERAGE}
MODULES = cythonize(EXTENSIONS, shared_utility_qualified_name=EXTENSIONS[-1].name, **OPTIONS)
if COVERAGE:
    subprocess.run([".ci/each_line", *(module.sources[0] for module in MODULES)], check=True)
setup(ext_modules=MODULES, cmdclass={"build_ext": build_kernels})
