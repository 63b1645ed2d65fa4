#!/bin/sh
# Compiles the kernels for aarch64, once per level as setup.py does, and compares neon with scalar under qemu.
# Needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user). On aarch64 itself:
#   CC=gcc RUN= tests/cross/run_neon.sh
set -eu
cd "$(dirname "$0")/../.."
CC=${CC-aarch64-linux-gnu-gcc} RUN=${RUN-qemu-aarch64 -L /usr/aarch64-linux-gnu}
FLAGS="-std=c11 -O3 -Wall -Wextra -Werror -fvisibility=hidden -Ickernels"
NEON="-march=armv8.2-a+dotprod+fp16"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

once="dispatch layout parallel"
for source in ckernels/kvc_*.c; do
    part=$(basename "$source" .c)
    case " $once " in
    *" ${part#kvc_} "*) $CC $FLAGS -DKVC_HAVE_NEON -c "$source" -o "$build/$part.o" ;;
    *)
        $CC $FLAGS -DKVC_LEVEL=scalar -DKVC_SCALAR -c "$source" -o "$build/$part.scalar.o"
        $CC $FLAGS -DKVC_LEVEL=neon -DKVC_NEON $NEON -c "$source" -o "$build/$part.neon.o"
        ;;
    esac
done
$CC $FLAGS tests/cross/compare.c "$build"/*.o -lm -o "$build/compare"
$RUN "$build/compare" neon
