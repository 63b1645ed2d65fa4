/* kvc_dispatch.c - the levels that this CPU can run, and which of them this build has. Queries CPU and system, and keeps no state.
 *
 * KVC_HAVE_<LEVEL> is 1 for a level of this build, 0 for one that was left out, and not defined for one that the machine or the
 * compiler does not know. */
#if defined(__linux__)
#define _GNU_SOURCE /* syscall */
#endif
#include "kvc.h"

#include <string.h>

extern const kvc_kernels kvc_kernels_scalar, kvc_kernels_scalarfma, kvc_kernels_avx2, kvc_kernels_avxvnni, kvc_kernels_avx512, kvc_kernels_amx,
    kvc_kernels_neon, kvc_kernels_i8mm;

#if defined(KVC_HAVE_SCALARFMA) || defined(KVC_HAVE_AVX2) || defined(KVC_HAVE_AVX512)
#include <cpuid.h>

enum { /* leaf 1, ecx */ FMA = 1 << 12, OSXSAVE = 1 << 27, AVX = 1 << 28, F16C = 1 << 29 };
enum { /* leaf 7, ebx */ AVX2 = 1 << 5, AVX512F = 1 << 16, AVX512DQ = 1 << 17, AVX512BW = 1 << 30 };
#define AVX512VL (1u << 31)
enum { /* leaf 7, ecx */ AVX512VNNI = 1 << 11 };
enum { /* leaf 7, edx */ AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };
enum { /* leaf 7, subleaf 1, eax */ AVXVNNI = 1 << 4, AVX512BF16 = 1 << 5 };
enum { /* xcr0: state that the system saves on a switch */ XMM = 1 << 1, YMM = 1 << 2, OPMASK_ZMM = 7 << 5, TILES = 3 << 17 };

static unsigned saved_state(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return low;
}

static int has_all(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

static int cpu_runs(unsigned wanted) { /* of leaf 1, ecx, with AVX */
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && has_all(ecx, wanted | OSXSAVE | AVX) && has_all(saved_state(), XMM | YMM);
}

static int cpu_runs_scalarfma(void) { return cpu_runs(FMA); }

static int cpu_runs_avx2(void) {
    unsigned eax, ebx, ecx, edx;
    return cpu_runs(FMA | F16C) && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && has_all(ebx, AVX2);
}

#if defined(KVC_HAVE_AVX512)
static int cpu_runs_avx512(void) {
    unsigned eax, ebx, ecx, edx;
    if (!cpu_runs_avx2() || !has_all(saved_state(), XMM | YMM | OPMASK_ZMM)) return 0;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 0;
    return has_all(ebx, AVX512F | AVX512DQ | AVX512BW | AVX512VL) && has_all(ecx, AVX512VNNI);
}

#if defined(KVC_HAVE_AMX)
#if defined(KVC_EMULATED_TILES) /* a build for tests */
static int cpu_runs_amx(void) { return cpu_runs_avx512(); }

#if KVC_HAVE_AMX
#include <signal.h>

/* Refuses as the system does, in the one thread that it looks at: see below. */
static int are_tiles_permitted(void) {
    enum { LEAST_BYTES = 8192 }; /* of the registers */
    stack_t own;
    return sigaltstack(NULL, &own) == 0 && (own.ss_flags & SS_DISABLE || own.ss_size >= LEAST_BYTES);
}
#endif
#else
static int cpu_runs_amx(void) {
    unsigned eax, ebx, ecx, edx;
    if (!cpu_runs_avx512() || !has_all(saved_state(), TILES)) return 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && has_all(edx, AMX_BF16 | AMX_TILE | AMX_INT8);
}

#if KVC_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_TILEDATA = 18 };

/* Asks for all threads of the process and its children. Where they have it already, the system says so at once. It refuses where
 * a thread has no room for the registers on its alternative stack of signals, and old systems do not know the call. */
static int are_tiles_permitted(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILEDATA) == 0; }
#endif
#endif
#endif

#if defined(KVC_HAVE_AVXVNNI)
static int cpu_runs_avxvnni(void) {
#if defined(KVC_EVEX) /* a build for tests: the same instructions as AVX-512 encodes them */
    return cpu_runs_avx512();
#else
    unsigned eax, ebx, ecx, edx;
    return cpu_runs_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && has_all(eax, AVXVNNI);
#endif
}
#endif

/* Whether products of pairs are faster than those of floats: on AMD's CPUs they have twice the rate, on Intel's half of it
 * (measured on family 6, model 207). */
static int cpu_has_fast_bf16_pairs(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx == signature_INTEL_ebx) return 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && has_all(eax, AVX512BF16);
}
#endif
#endif

#if defined(KVC_HAVE_NEON)
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

static int cpu_runs_neon(void) { /* the level is compiled for armv8.2 with dot products and half arithmetic */
    const unsigned long wanted = HWCAP_ASIMD | HWCAP_ASIMDDP | HWCAP_ASIMDHP | HWCAP_FPHP;
    return (getauxval(AT_HWCAP) & wanted) == wanted;
}
#else
static int cpu_runs_neon(void) { return 1; } /* every 64-bit Apple machine */
#endif

#if defined(KVC_HAVE_I8MM)
#if defined(__linux__)
static int cpu_runs_i8mm(void) {
    const unsigned long wanted = 1 << 13 | 1 << 14; /* HWCAP2_I8MM, HWCAP2_BF16: every CPU that has one has the other too */
    return cpu_runs_neon() && (getauxval(AT_HWCAP2) & wanted) == wanted;
}
#else
#include <sys/sysctl.h>

static int cpu_has(const char *feature) {
    int has = 0;
    size_t size = sizeof has;
    return !sysctlbyname(feature, &has, &size, NULL, 0) && has;
}
static int cpu_runs_i8mm(void) { return cpu_has("hw.optional.arm.FEAT_I8MM") && cpu_has("hw.optional.arm.FEAT_BF16"); }
#endif
#endif
#endif

static int cpu_runs_scalar(void) { return 1; }

/* The levels that the machine knows, best first. The first of two that have one name is that level. */
static const struct known_level {
    const char *name;
    int (*cpu_runs)(void);
    const kvc_kernels *kernels; /* NULL: left out of this build */
} known_levels[] = {
#define NAMED(name, level, have) {name, cpu_runs_##level, have ? &kvc_kernels_##level : NULL}
#define KNOWN(level, have) NAMED(#level, level, have)
#if defined(KVC_HAVE_AMX) && !defined(KVC_EMULATED_TILES)
    KNOWN(amx, KVC_HAVE_AMX),
#endif
#if defined(KVC_HAVE_AVX512)
    KNOWN(avx512, KVC_HAVE_AVX512),
#endif
#if defined(KVC_HAVE_AMX) && defined(KVC_EMULATED_TILES) /* which are slower */
    KNOWN(amx, KVC_HAVE_AMX),
#endif
#if defined(KVC_HAVE_AVXVNNI)
    KNOWN(avxvnni, KVC_HAVE_AVXVNNI),
#endif
#if defined(KVC_HAVE_AVX2)
    KNOWN(avx2, KVC_HAVE_AVX2),
#endif
#if defined(KVC_HAVE_I8MM)
    KNOWN(i8mm, KVC_HAVE_I8MM),
#endif
#if defined(KVC_HAVE_NEON)
    KNOWN(neon, KVC_HAVE_NEON),
#endif
#if defined(KVC_HAVE_SCALARFMA)
    NAMED("scalar", scalarfma, KVC_HAVE_SCALARFMA),
#endif
    KNOWN(scalar, 1),
};
enum { NUM_KNOWN = sizeof known_levels / sizeof *known_levels };
_Static_assert((int)NUM_KNOWN <= (int)KVC_MOST_LEVELS, "callers have room for all levels");

const char *kvc_best_level(void) {
    int i = 0;
    while (!known_levels[i].cpu_runs()) i++;
    return known_levels[i].name;
}

/* Lists the levels of this build and CPU, best first, and returns their number. */
static int find_levels(const kvc_kernels *levels[NUM_KNOWN]) {
    int count = 0;
    for (int i = 0; i < NUM_KNOWN; i++) {
        const struct known_level *known = &known_levels[i];
        if (!known->kernels || !known->cpu_runs()) continue;
        if (!count || strcmp(levels[count - 1]->name, known->name)) levels[count++] = known->kernels;
    }
    return count;
}

kvc_bf16_rows kvc_bf16_rows_of(const kvc_kernels *kernels) {
    if (kernels->multiply_bf16 && !kernels->tiles) return KVC_BF16_QUADS;
    if (kernels->multiply_bf16 && kvc_permitted(kernels) == kernels) return KVC_BF16_TILES;
#if defined(KVC_HAVE_AVX512)
    if (strcmp(kernels->base, "avx512") == 0 && cpu_has_fast_bf16_pairs()) return KVC_BF16_PAIRS;
#endif
    return KVC_BF16_ROUNDED;
}

int kvc_num_levels(void) {
    const kvc_kernels *levels[NUM_KNOWN];
    return find_levels(levels);
}

const kvc_kernels *kvc_level(int index) {
    const kvc_kernels *levels[NUM_KNOWN];
    return index >= 0 && index < find_levels(levels) ? levels[index] : NULL;
}

const kvc_kernels *kvc_find_level(const char *name) {
    const kvc_kernels *levels[NUM_KNOWN];
    const int count = find_levels(levels);
    for (int i = 0; i < count; i++) {
        if (strcmp(levels[i]->name, name) == 0) return levels[i];
    }
    return NULL;
}

const kvc_kernels *kvc_permitted(const kvc_kernels *kernels) {
#if KVC_HAVE_AMX
    if (kernels->tiles && !are_tiles_permitted()) return &kvc_kernels_avx512;
#endif
    return kernels;
}
