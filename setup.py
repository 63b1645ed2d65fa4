"""Build data: the Cython modules, and the C kernels once per SIMD level of the target machine.

KVCACHE_DEBUG=1     bounds checks and assertions in Cython, -O1 -g in C
KVCACHE_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer in everything that is compiled
KVCACHE_OPENMP=0    serial kernels even where the compiler has OpenMP
"""

import os
import platform
import tempfile
from glob import glob
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("KVCACHE_DEBUG") == "1"
SANITIZE = os.environ.get("KVCACHE_SANITIZE") == "1"
OPENMP = os.environ.get("KVCACHE_OPENMP", "1") == "1"

# One name per level, the same in ckernels/simd_<level>.h, in KVCACHE_SIMD and in the kernel table itself.
LEVELS = {
    "x86_64": {
        "scalar": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": ["-mavx2", "-mfma", "-mf16c"]
        + [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")]
        + ["-mprefer-vector-width=512"],
    },
    "aarch64": {"scalar": [], "neon": ["-march=armv8.2-a+dotprod+fp16"]},
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())

WARN = ["-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden"]
OPTIMISE = ["-O1", "-g", "-UNDEBUG", "-DKVC_DEBUG"] if DEBUG else ["-O3", "-DNDEBUG"]
CHECK = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"] if SANITIZE else []

# Kernels: every kvc_<part>.c is compiled once per level, with the level's flags and its primitives,
# except the parts that exist once.
ONCE = ["ckernels/kvc_dispatch.c", "ckernels/kvc_layout.c", "ckernels/kvc_parallel.c"]
PER_LEVEL = sorted(set(glob("ckernels/kvc_*.c")) - set(ONCE))


class build_kernels(build_ext):
    """build_ext, with the kernels compiled per SIMD level and OpenMP where the compiler has it."""

    def build_extensions(self):
        openmp = ["-fopenmp"] if OPENMP and self._compiles(["-fopenmp"]) else []
        for extension in self.extensions:
            extension.extra_compile_args += WARN + OPTIMISE + CHECK + openmp
            extension.extra_link_args += CHECK + openmp
            if extension.name == "kvcache._kernels":
                extension.extra_objects += self._kernels(openmp)
        super().build_extensions()

    def _kernels(self, openmp):
        common = WARN + OPTIMISE + CHECK + openmp + ["-fPIC"]
        levels = LEVELS.get(MACHINE, {"scalar": []})
        has = [(f"KVC_HAVE_{level.upper()}", "1") for level in levels]
        objects = self.compiler.compile(ONCE, self.build_temp, has, extra_postargs=common)
        for level, flags in levels.items():
            macros = [("KVC_LEVEL", level), (f"KVC_{level.upper()}", "1")]
            folder = os.path.join(self.build_temp, level)
            objects += self.compiler.compile(PER_LEVEL, folder, macros, extra_postargs=common + flags)
        return objects

    def _compiles(self, flags):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
            try:
                self.compiler.compile([str(source)], folder, extra_postargs=flags)
            except Exception:
                return False
            return True


DIRECTIVES = {
    "language_level": "3",
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": not DEBUG,
    "embedsignature": True,
    "embedsignature.format": "python",
}
MODULES = sorted(Path("kvcache").glob("_*.pyx"))
EXTENSIONS = [
    Extension(
        f"kvcache.{path.stem}",
        [str(path)],
        include_dirs=["ckernels", numpy.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
        depends=glob("ckernels/*.h") + glob("ckernels/*.c"),
    )
    for path in MODULES
]
MODULES_C = cythonize(EXTENSIONS, compiler_directives=DIRECTIVES)
setup(ext_modules=MODULES_C, cmdclass={"build_ext": build_kernels})
