"""The SIMD levels: the machines and flags of each, and the files that it is compiled of.

setup.py takes them from here, and tests/ckernels/run does by `python3 ckernels/levels.py [SYSTEM-]MACHINE
[FLAGS OF SCALAR]`, which prints the level, the source and the flags of each object. kvc_dispatch.c has the same names,
the best first.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from glob import glob
from pathlib import Path
from typing import NamedTuple

__all__ = ["EVEX_FLAGS", "LEVELS", "compiler_of_kernels", "compiles", "defines_of", "flags_of_levels", "sources_of"]

X86, ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512"
NEON = "-march=armv8.2-a+dotprod+fp16", "-mcpu=generic+v8_2a+dotprod+fullfp16"  # the second is zig's name
EVEX_FLAGS = ["-DKVC_EVEX=1", "-DKVC_EMULATED_TILES=1"]  # of all files, where CPUs with AVX-512 run other levels


class Level(NamedTuple):
    """One SIMD level; its name is that of ckernels/simd_<level>.h, of KVCACHE_SIMD and of the kernel table itself.

    Attributes:
        machines: that have it; none: all.
        flags: of its files; of several, the first that the compiler knows.
        evex: its flags where a CPU with AVX-512 is to run it; empty: `flags`.
        needs: the level without which it cannot be. A compiler that knows none of its flags leaves it out.
        parts: the files that it has, kvc_<part>.c; empty: those that each level has.
        system: the one that has it, as sys.platform has its name; empty: all.
    """

    name: str
    machines: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("",)
    evex: str = ""
    needs: str = ""
    parts: str = ""
    system: str = ""


LEVELS = [
    Level("scalar"),
    # The scalar level again, with instructions for fma, if the CPU may have them.
    Level("scalarfma", X86, ("-mfma",), parts="activations attend attend_floats attend_units matmul matmul_packed"
          " network packed_plain packed_k packed_looked_up recurrence shares table"),
    Level("avx2", X86, (AVX2,)),
    Level("avx512", X86, (AVX512,)),
    # Products, attention and a table of their own, the rest of avx2 and avx512; gcc 11, clang 12.
    Level("avxvnni", X86, (f"{AVX2} -mavxvnni",), f"{AVX2} -mavx512f -mavx512vl -mavx512vnni -DKVC_EVEX=1", "avx2",
          "matmul_packed packed_plain packed_k packed_looked_up activations attend attend_units table"),
    Level("amx", X86, (f"{AVX512} -mamx-tile -mamx-int8 -mamx-bf16",), f"{AVX512} -DKVC_EMULATED_TILES=1", "avx512",
          "matmul_tiles matmul_bf16 attend table", "linux"),
    Level("neon", ARM, NEON),
    # Products and a table; gcc 10, clang 11.
    Level("i8mm", ARM, (f"{NEON[0]}+i8mm+bf16", f"{NEON[1]}+i8mm+bf16"), "", "neon",
          "matmul_packed packed_plain packed_k packed_looked_up matmul_bf16 activations table"),
]
# The parts that exist once, which know what levels there are; and those of some levels alone.
ONCE = "dispatch functions layout matmul_parallel matrix merge network_parallel parallel recurrence_parallel"
ONCE += " rows_parallel indexer_parallel sparse_parallel spill threads"
FEW = "matmul_tiles matmul_bf16"


def compiler_of_kernels():
    """The words of the command that compiles the kernels."""
    named = os.environ.get("KVCACHE_KERNELS_CC") or os.environ.get("CC")
    return (named or sysconfig.get_config_var("CC") or "cc").split()


def compiles(flags):
    """Whether the compiler makes an object with these flags."""
    compiler = compiler_of_kernels()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("typedef int nothing;\n")
        command = [*compiler, *flags, "-c", source, "-o", source.with_suffix(".o")]
        return bool(shutil.which(compiler[0])) and not subprocess.run(command, capture_output=True).returncode


def flags_of_levels(machine, evex, scalar, system=sys.platform):
    """The flags of each level that machine, system and compiler have; `scalar`: those of the scalar level."""
    found = {}
    for level in LEVELS:
        if (level.machines and machine not in level.machines) or level.system not in ("", system):
            continue
        choices = [each.split() for each in ((level.evex,) if evex and level.evex else level.flags)]
        known = choices[:1] if len(choices) == 1 and not level.needs else [each for each in choices if compiles(each)]
        if known or not level.needs:
            found[level.name] = (scalar if level.name.startswith("scalar") else []) + (known or choices)[0]
    return found


def sources_of(name, folder="ckernels"):
    """The files of a level, or of "once"."""
    parts = ONCE if name == "once" else next(level.parts for level in LEVELS if level.name == name)
    files = {each: os.path.join(folder, f"kvc_{each}.c") for each in (parts or f"{ONCE} {FEW}").split()}
    return [*files.values()] if parts else sorted({*glob(os.path.join(folder, "kvc_*.c"))} - {*files.values()})


def defines_of(name):
    """The macros that tell a file its level."""
    return [f"-DKVC_LEVEL={name}", f"-DKVC_{name.upper()}=1"]


if __name__ == "__main__":
    system, _, machine = sys.argv[1].rpartition("-")
    found = flags_of_levels(machine, True, sys.argv[2:], system or sys.platform)
    folder = os.path.dirname(os.path.abspath(__file__))
    have = [f"-DKVC_HAVE_{name.upper()}=1" for name in found if name != "scalar"]
    for name, flags in {"once": have, **found}.items():
        for source in sources_of(name, folder):
            print(name, source, *([] if name == "once" else defines_of(name)), *flags)
