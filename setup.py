"""Build data: the Cython modules, and the C kernels once per SIMD level of the target machine.

KVCACHE_LEVELS=all  kernels for all CPUs of this architecture; or levels by name: "avx2,avx512". Without it, builds of
                    developers (`pip install -e .`) have scalar and what this CPU runs best, all others every level
KVCACHE_DEBUG=1     bounds checks and assertions in Cython, -Og -g in C
KVCACHE_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer in everything that is compiled
KVCACHE_EVEX=1      for tests, what CPUs with AVX-512 run of other levels: avxvnni as AVX-512 encodes its instructions,
                    amx with emulated tiles; the others do so too
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
from ckernels.build import Plan, best_level, build_kernels, check_machine, compiles, is_for_developers

check_machine()
DEBUG, SANITIZE, COVERAGE, EVEX = (
    os.environ.get(f"KVCACHE_{name}") == "1" for name in ("DEBUG", "SANITIZE", "COVERAGE", "EVEX")
)
EVEX = EVEX or DEBUG or SANITIZE or COVERAGE

# One name per level, the same in ckernels/simd_<level>.h, in KVCACHE_SIMD and in the kernel table itself.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")] + ["-mprefer-vector-width=512"]
AVXVNNI = ["-mavx512f", "-mavx512vl", "-mavx512vnni", "-DKVC_EVEX=1"] if EVEX else ["-mavxvnni"]
AMX = ["-DKVC_EMULATED_TILES=1"] if EVEX else ["-mamx-tile", "-mamx-int8", "-mamx-bf16"]
EVEX_FLAGS = ["-DKVC_EVEX=1", "-DKVC_EMULATED_TILES=1"]
# The scalar level without what takes -O3 most of its time, and again with instructions for fma, if the CPU may have them.
SCALAR = [] if DEBUG or SANITIZE or COVERAGE else ["-O1", "-ftree-vectorize"]
LEVELS = {"scalar": SCALAR}
# The machine that runs what is built: another one than this where Python's variable for cross builds is set.
MACHINE = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).split("-")[-1]
if MACHINE == "x86_64":
    LEVELS |= {"scalarfma": [*SCALAR, "-mfma"], "avx2": AVX2, "avx512": AVX2 + AVX512}
    if compiles(AVXVNNI):  # gcc 11, clang 12
        LEVELS["avxvnni"] = AVX2 + AVXVNNI
    if sys.platform == "linux" and compiles(AMX):  # gcc 11, clang 11
        LEVELS["amx"] = AVX2 + AVX512 + AMX
if MACHINE in ("aarch64", "arm64"):
    NEON = "-march=armv8.2-a+dotprod+fp16"
    if not compiles([NEON]):  # as zig names the same
        NEON = "-mcpu=generic+v8_2a+dotprod+fullfp16"
    LEVELS["neon"] = [NEON]
    if compiles([NEON + "+i8mm+bf16"]):  # gcc 10, clang 11
        LEVELS["i8mm"] = [NEON + "+i8mm+bf16"]

# Levels without which another one cannot be.
NEEDS = {"amx": "avx512", "avxvnni": "avx2", "i8mm": "neon"}
KNOWN = [level for level in LEVELS if level != "scalar"]
NAMED = {*LEVELS} - {"scalarfma"}
asked = {level.strip() for level in os.environ.get("KVCACHE_LEVELS", "").split(",")} - {""}
best = best_level(KNOWN, EVEX_FLAGS * EVEX) if is_for_developers() and not asked else None
if "all" in asked or not (asked or best):
    BUILT = [*LEVELS]
else:
    chosen = asked or {best}
    if unknown := chosen - NAMED:
        sys.exit(f"KVCACHE_LEVELS: expected all, or some of {', '.join(sorted(NAMED))}, got {', '.join(sorted(unknown))}")
    always = {"scalar", "scalarfma"}
    BUILT = [level for level in LEVELS if level in {*always, *chosen, *(NEEDS.get(each) for each in chosen)}]

# -g0: Python's -g takes a quarter of the compile time.
# No a * b + c in one rounding where the source has two: clang's default, at the mercy of what it inlines where.
FLAGS = ["-std=c11", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden"]
FLAGS += ["-Og", "-g", "-UNDEBUG", "-DKVC_DEBUG"] if DEBUG else ["-O3", "-g0", "-DNDEBUG"]

# The modules have no loops that -O3 makes faster, and -O1 takes half of its time.
MODULES = [] if DEBUG else ["-O1"]

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
# except the parts that exist once, which know what levels there are, and those of some levels alone.
PARTS = "dispatch functions layout matmul_parallel matrix network_parallel parallel recurrence_parallel rows_parallel"
PARTS += " sparse_parallel threads"
ONCE = [f"ckernels/kvc_{part}.c" for part in PARTS.split()]
# amx and avxvnni have products, attention and a table of their own, the rest of avx512 and avx2; i8mm products alone. The scalar
# level has files with fma twice.
OWN = {
    "scalarfma": "activations attend attend_floats attend_units matmul matmul_packed network packed_plain packed_k"
    " packed_looked_up recurrence shares table",
    "amx": "matmul_tiles matmul_bf16 attend table",
    "avxvnni": "matmul_packed packed_plain packed_k packed_looked_up activations attend attend_units table",
    "i8mm": "matmul_packed packed_plain packed_k packed_looked_up matmul_bf16 activations table",
}
FEW = {level: [f"ckernels/kvc_{part}.c" for part in parts.split()] for level, parts in OWN.items()}
EACH = sorted({*glob("ckernels/kvc_*.c")} - {*ONCE, "ckernels/kvc_matmul_tiles.c", "ckernels/kvc_matmul_bf16.c"})
HAVE = [f"-DKVC_HAVE_{level.upper()}={int(level in BUILT)}" for level in KNOWN] + EVEX_FLAGS * EVEX
UNITS = [(source, "once", HAVE) for source in ONCE]
for level in BUILT:
    defines = [f"-DKVC_LEVEL={level}", f"-DKVC_{level.upper()}=1"]
    checks = []
    if SANITIZE and not level.startswith("scalar"):  # one level checks pointer arithmetic, which takes half as long again to compile
        checks = ["-fno-sanitize=null,object-size,pointer-overflow"]
    for source in FEW.get(level, EACH):
        # Python's -fwrapv makes dot products of floats a fifth slower: each pass over the keys computes addresses.
        own = ["-fno-wrapv"] if source.endswith("kvc_attend_floats.c") else []
        UNITS.append((source, level, defines + LEVELS[level] + checks + own))
UNITS.sort(key=lambda unit: -os.path.getsize(unit[0]))  # no CPU waits long for the last one

DIRECTIVES = {"language_level": "3", "wraparound": False, "embedsignature": True, "embedsignature.format": "python"}
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
        module_flags=FLAGS + MODULES + CHECK + COUNT,
        link_flags=[*CHECK, "-pthread", *COUNT],
        directives=DIRECTIVES,
        generated=f"build/cython-{Cython.__version__}{'-debug' * DEBUG}{'-coverage' * COVERAGE}",
        runtime="kvcache.support.cython_runtime",
        coverage=COVERAGE,
    )


if __name__ == "__main__":  # processes that run Cython may import this file
    setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": build_modules})
