/* ceilings.c - the ceilings of this machine: reading scattered blocks, writing half of the bytes read, FMA,
 * products of bytes.
 *
 * Compiled by bench/support/ceilings.py for the machine at hand. Nothing here does useful work; every function returns
 * something that depends on all of it, so that none of it is left out.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

enum { LINE = 64, LANES = 8, CHAINS = 16 };

#if defined(__AVX512F__)
enum { WIDTH = 64 };
#else
enum { WIDTH = 32 };
#endif

typedef uint64_t words __attribute__((vector_size(WIDTH)));

static inline words load(const char *p) {
    words w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* Reads one block, LANES lines at a time; `ahead` is the block to prefetch beside it. */
static uint64_t read_block(const char *block, int64_t bytes, const char *ahead) {
    words acc[LANES] = {{0}};
    for (int64_t at = 0; at + LANES * WIDTH <= bytes; at += LANES * WIDTH) {
        if (ahead)
            for (int i = 0; i < LANES * WIDTH; i += LINE) __builtin_prefetch(ahead + at + i, 0, 3);
        for (int i = 0; i < LANES; i++) acc[i] ^= load(block + at + i * WIDTH);
    }
    uint64_t sum = 0;
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < WIDTH / 8; j++) sum ^= acc[i][j];
    return sum;
}

/* Reads `count` blocks of `bytes` at `offsets`, in pieces of `piece` bytes; prefetches `distance` pieces ahead. */
uint64_t ceiling_read(const char *base, const int64_t *offsets, int64_t count, int64_t bytes, int64_t piece,
                      int64_t distance, int threads) {
    uint64_t sum = 0;
    const int64_t pieces = bytes / piece, total = count * pieces;
#pragma omp parallel for schedule(static) reduction(^ : sum) num_threads(threads)
    for (int64_t i = 0; i < total; i++) {
        const int64_t next = i + distance < total ? i + distance : i;
        const char *ahead = base + offsets[next / pieces] + next % pieces * piece;
        sum ^= read_block(base + offsets[i / pieces] + i % pieces * piece, piece, distance ? ahead : 0);
    }
    (void)threads;
    return sum;
}

/* Reads `bytes` and writes half as many, as storing float32 as float16 does. */
uint64_t ceiling_narrow(const char *from, char *to, int64_t bytes) {
    for (int64_t at = 0; at + 2 * WIDTH <= bytes; at += 2 * WIDTH) {
        const words w = load(from + at) ^ load(from + at + WIDTH);
        memcpy(to + at / 2, &w, sizeof w);
    }
    return (uint64_t)to[0];
}

/* `rounds` times `chains` independent fused multiply-adds of a register of `width` bytes, which has 12 chains beside x and y where
 * there are 16 registers. */
#define MULTIPLY(width, chains)                                                                   \
    typedef float floats##width __attribute__((vector_size(width)));                              \
    static float multiply##width(int64_t rounds, float seed) {                                    \
        floats##width acc[chains], x, y;                                                          \
        for (int j = 0; j < width / 4; j++) x[j] = 0.999f + seed * 1e-9f, y[j] = 1e-3f;           \
        for (int i = 0; i < chains; i++) acc[i] = x * (float)i;                                   \
        for (int64_t r = 0; r < rounds; r++)                                                      \
            _Pragma("GCC unroll 16") for (int i = 0; i < chains; i++) acc[i] = acc[i] * x + y;    \
        float sum = 0;                                                                            \
        for (int i = 0; i < chains; i++)                                                          \
            for (int j = 0; j < width / 4; j++) sum += acc[i][j];                                 \
        return sum;                                                                               \
    }
MULTIPLY(32, 12)
#if defined(__AVX512F__)
MULTIPLY(64, 16)
#else
#define multiply64 multiply32
#endif

/* That on each thread; half: with registers of 32 bytes where there are wider ones. */
float ceiling_fma(int64_t rounds, int threads, int half) {
    float sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum) num_threads(threads)
    for (int t = 0; t < threads; t++) sum += half ? multiply32(rounds, (float)t) : multiply64(rounds, (float)t);
    return sum;
}

int64_t ceiling_fma_flop(int64_t rounds, int threads, int half) {
    return rounds * threads * (half || WIDTH == 32 ? 12 * 8 : 16 * 16) * 2;
}

/* Dot products of 4 bytes per 32-bit lane: the instruction that this machine has for them. */
#if defined(__AVX512VNNI__)
typedef __m512i sums;
#define KEPT "+v"
#define DOT(acc, x) _mm512_dpbusd_epi32(acc, x, x)
#elif defined(__AVX2__)
typedef __m256i sums;
#define KEPT "+x"
#define DOT(acc, x) \
    _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(x, x), _mm256_set1_epi16(1)))
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int32x4_t sums;
#define KEPT "+w"
#define DOT(acc, x) vdotq_s32(acc, vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(x))
#else
typedef int32_t sums;
#define KEPT "+r"
#define DOT(acc, x) ((acc) + (x) * 4)
#endif

static int64_t multiply_bytes(int64_t rounds, int seed) {
    sums acc[CHAINS], x;
    memset(&x, 1 + (seed & 1), sizeof x);
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) acc[i] = x;
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) acc[i] = DOT(acc[i], x);
        __asm__ volatile("" : KEPT(x)); /* x may be another one in each round */
    }
    int64_t sum = 0;
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) {
        int32_t lanes[sizeof(sums) / 4];
        const sums one = acc[i];
        memcpy(lanes, &one, sizeof lanes);
        for (unsigned j = 0; j < sizeof(sums) / 4; j++) sum += lanes[j];
    }
    return sum;
}

/* `rounds` times CHAINS independent products of a whole register of bytes, on each thread. */
int64_t ceiling_dot(int64_t rounds, int threads) {
    int64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum) num_threads(threads)
    for (int t = 0; t < threads; t++) sum += multiply_bytes(rounds, t);
    return sum;
}

int64_t ceiling_dot_ops(int64_t rounds, int threads) { return rounds * threads * CHAINS * (int64_t)sizeof(sums) * 2; }
