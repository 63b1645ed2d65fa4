"""Build data: the Cython modules, and the C kernels once per SIMD level of the target machine.

KVCACHE_LEVELS=all  kernels for all CPUs of this architecture; or levels by name: "avx2,avx512". Without it, builds of
                    developers (`pip install -e .`) have scalar and what this CPU runs best, all others every level
KVCACHE_DEBUG=1     bounds checks and assertions in Cython, -Og -g in C
KVCACHE_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer in everything that is compiled; "thread" in place of
                    1: ThreadSanitizer
KVCACHE_EVEX=1      for tests, what CPUs with AVX-512 run of other levels: avxvnni as AVX-512 encodes its instructions,
                    amx with emulated tiles; the others do so too
KVCACHE_KERNELS_CC  the compiler of the kernels, where it is not that of the modules, CC
KVCACHE_REPOSITORY  the address of the repository, for the links of the package; release.yml gives its own
KVCACHE_COVERAGE=1  lines of Cython and C counted, for .ci/coverage
"""

import os
import platform
import sys
from glob import glob

import Cython
import numpy
from setuptools import Extension, setup

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated build does not have it there
from ckernels.build import Plan, best_level, build_kernels, check_machine, is_for_developers
from ckernels.levels import EVEX_FLAGS, LEVELS, compiles, defines_of, flags_of_levels, sources_of
from ckernels.sbom import wheel_with_sbom

check_machine()
DEBUG, SANITIZE, COVERAGE, EVEX = (
    os.environ.get(f"KVCACHE_{name}") == "1" for name in ("DEBUG", "SANITIZE", "COVERAGE", "EVEX")
)
THREADS = os.environ.get("KVCACHE_SANITIZE") == "thread"
EVEX = EVEX or DEBUG or SANITIZE or COVERAGE

# The scalar level without what takes -O3 most of its time, and without half of what gcc's -O2 takes over the fits of
# formats: it looks for a store behind each load, 1,000 places back.
PATIENCE = "--param=sccvn-max-alias-queries-per-access=50"
SCALAR = [] if DEBUG or SANITIZE or COVERAGE else ["-O2", *([PATIENCE] if compiles(["-Werror", PATIENCE]) else [])]
# The machine that runs what is built: another one than this where Python's variable for cross builds is set.
MACHINE = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).split("-")[-1]
SYSTEM = os.environ.get("_PYTHON_HOST_PLATFORM", sys.platform).split("-")[0]
LEVEL_FLAGS = flags_of_levels(MACHINE, EVEX, SCALAR, SYSTEM)
NEEDS = {level.name: level.needs for level in LEVELS}
KNOWN = [level for level in LEVEL_FLAGS if level != "scalar"]
NAMED = {*LEVEL_FLAGS} - {"scalarfma"}
asked = {level.strip() for level in os.environ.get("KVCACHE_LEVELS", "").split(",")} - {""}
best = best_level(KNOWN, EVEX_FLAGS * EVEX) if is_for_developers() and not asked else None
if "all" in asked or not (asked or best):
    BUILT = [*LEVEL_FLAGS]
else:
    chosen = asked or {best}
    if unknown := chosen - NAMED:
        expected = f"all, or some of {', '.join(sorted(NAMED))}"
        sys.exit(f"KVCACHE_LEVELS: expected {expected}, got {', '.join(sorted(unknown))}")
    always = {"scalar", "scalarfma"}
    BUILT = [level for level in LEVEL_FLAGS if level in {*always, *chosen, *(NEEDS[each] for each in chosen)}]

# -g0: Python's -g takes a quarter of the compile time.
# No a * b + c in one rounding where the source has two: clang's default, at the mercy of what it inlines where.
FLAGS = ["-std=c11", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden"]
FLAGS += ["-Og", "-g", "-UNDEBUG", "-DKVC_DEBUG"] if DEBUG else ["-O3", "-g0", "-DNDEBUG"]

# The modules have no loops that -O3 makes faster, and -O1 takes half its time. What is inlined is instrumented again.
MODULES = ["-fno-inline"] if SANITIZE else [] if DEBUG else ["-O1"]

# -g1: the line numbers of a report. -Og: half of the compile time of -O1, with the same checks; kernels run too slowly.
CHECK = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-Og"] if SANITIZE else []
CHECK += ["-fsanitize=thread", "-g1", "-O1"] if THREADS else []

# The checks of pointers take half as long again: one level of the kernels has them. ASan reports a wrong pointer that
# is used.
UNCHECKED_POINTERS = ["-fno-sanitize=null,object-size,pointer-overflow"]

# gcov counts the kernels and, by the lines that Cython says its C is of, the modules, at -O0 where no line is merged
# into another. Threads may lose counts; none goes back to zero.
COUNT = ["--coverage", "-O0"] if COVERAGE else []
# Python's -fwrapv makes products of float keys a fifth slower: addresses are computed again in each pass over them.
# It also hides overflows, and gcc takes three times as long over kernels with checks.
KERNELS = ["-fno-wrapv", *(["-O1"] if SANITIZE or COVERAGE else [])]
if SANITIZE:  # `tests/ckernels/run fuzz` takes them from here
    KERNELS += ["-fsanitize=float-cast-overflow", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    # In functions of many accesses calls check them: over code in place gcc takes half as long again.
    CALLS = "--param=asan-instrumentation-with-call-threshold=300"
    KERNELS += [CALLS] if compiles(["-Werror", CALLS]) else []  # gcc's name

# Kernels: kvc_<part>.c is compiled once per level, with its flags and primitives; levels.py has the exceptions.
HAVE = [f"-DKVC_HAVE_{level.upper()}={int(level in BUILT)}" for level in KNOWN] + EVEX_FLAGS * EVEX
UNITS = [(source, "once", HAVE) for source in sources_of("once")]
TWICE = {*sources_of("scalarfma")} if "scalarfma" in BUILT else set()
for level in BUILT:
    for source in sources_of(level):
        checks = []
        if SANITIZE and level == "scalar" and source in TWICE:  # CPUs with fma run scalarfma in its place
            checks = ["-fno-sanitize=all", "-O0"]
        elif SANITIZE:  # gcc takes a third of the time over the scalar levels at -Og, which only few tests run
            checks = ["-Og"] if level.startswith("scalar") else UNCHECKED_POINTERS
        UNITS.append((source, level, defines_of(level) + LEVEL_FLAGS[level] + checks))
UNITS.sort(key=lambda unit: -os.path.getsize(unit[0]))  # no CPU waits long for the last one

# Links that an index shows beside the package: none where nobody says where the repository is.
REPOSITORY = os.environ.get("KVCACHE_REPOSITORY", "")
PAGES = {
    "Source": "", "Documentation": "/blob/HEAD/kvcache/guides/index.md", "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Benchmarks": "/blob/HEAD/bench/README.md", "Issues": "/issues", "Security": "/security/policy",
}
URLS = {name: REPOSITORY + path for name, path in PAGES.items()} if REPOSITORY else {}

DIRECTIVES = {"language_level": "3", "wraparound": False, "embedsignature": True, "embedsignature.format": "python"}
DIRECTIVES |= {"freethreading_compatible": True}  # see "Without the GIL" in CONTRIBUTING.md
DIRECTIVES |= {"boundscheck": DEBUG, "initializedcheck": DEBUG, "cdivision": not DEBUG}
# The last one is Cython's own code, memoryviews above all: the others import it instead of having a copy each.
SOURCES = [*sorted(glob("kvcache/**/*.pyx", recursive=True)), "kvcache/support/cython_runtime.c"]
COMMON = {"include_dirs": ["ckernels", numpy.get_include()]}
COMMON["define_macros"] = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
EXTENSIONS = [Extension(os.path.splitext(path)[0].replace(os.sep, "."), [path], **COMMON) for path in SOURCES]


class build_modules(build_kernels):
    plan = Plan(
        units=UNITS,
        headers=sorted(glob("ckernels/*.h")),
        kernel_flags=FLAGS + CHECK + COUNT + KERNELS,
        kernel_owner="kvcache.kernels.kernels",
        module_flags=FLAGS + MODULES + CHECK + UNCHECKED_POINTERS * SANITIZE + COUNT,
        link_flags=[*CHECK, "-pthread", *COUNT],
        directives=DIRECTIVES,
        generated=f"build/cython-{Cython.__version__}{'-debug' * DEBUG}{'-coverage' * COVERAGE}",
        runtime="kvcache.support.cython_runtime",
        coverage=COVERAGE,
    )


if __name__ == "__main__":  # processes that run Cython may import this file
    commands = {"build_ext": build_modules, "bdist_wheel": wheel_with_sbom}
    setup(ext_modules=EXTENSIONS, cmdclass=commands, project_urls=URLS)
