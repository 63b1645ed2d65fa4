/* tiles.c - what the tile instructions of this CPU give and cost, for `python -m bench tiles`.
 *
 * Compares random products of several shapes with C, then prints cycles of each instruction, by a clock that a chain of additions
 * measures: one a cycle.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CONFIGURE(p) __asm__ __volatile__("ldtilecfg %0" : : "m"(*(p)) : "memory")
#define RELEASE() __asm__ __volatile__("tilerelease" : : : "memory")
#define ZERO(t) __asm__ __volatile__("tilezero %%tmm" #t : : : "memory")
#define LOAD(t, p) __asm__ __volatile__("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"(64L) : "memory")
#define STORE(t, p) __asm__ __volatile__("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"(64L) : "memory")
#define DOT(kind, c, a, b) __asm__ __volatile__("tdpb" #kind "d %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")
#define DOT_BF16(c, a, b) __asm__ __volatile__("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

typedef struct shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} shapes;

typedef struct tile {
    _Alignas(64) uint8_t at[16][64];
} tile;

static tile a, b, c, result, large[1024]; /* 1 MiB: in the second level of the cache */
static uint64_t seed = 1;

static uint8_t random_byte(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint8_t)(seed >> 56);
}

static void configure(int rows, int channels) {
    shapes s = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        const int is_codes = t == 5 || t == 7, is_numbers = t == 4 || t == 6;
        s.rows[t] = (uint8_t)(is_codes ? channels / 4 : rows);
        s.bytes[t] = (uint16_t)(is_numbers ? channels : 64);
    }
    CONFIGURE(&s);
}

static int differing(int rows, int channels, int is_signed) {
    int count = 0;
    for (size_t i = 0; i < sizeof a; i++) {
        a.at[i / 64][i % 64] = random_byte(), b.at[i / 64][i % 64] = random_byte(), c.at[i / 64][i % 64] = random_byte();
    }
    LOAD(0, &c);
    LOAD(4, &a);
    LOAD(5, &b);
    if (is_signed)
        DOT(ss, 0, 4, 5);
    else
        DOT(su, 0, 4, 5);
    STORE(0, &result);
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < 16; j++) {
            uint32_t sum, found;
            memcpy(&sum, &c.at[i][4 * j], 4);
            memcpy(&found, &result.at[i][4 * j], 4);
            for (int k = 0; k < channels; k++) {
                const uint8_t code = b.at[k / 4][4 * j + k % 4];
                sum += (uint32_t)((int8_t)a.at[i][k] * (is_signed ? (int8_t)code : code));
            }
            count += sum != found;
        }
    }
    return count;
}

static float of_bf16(const uint8_t *word) {
    const uint8_t bytes[] = {0, 0, word[0], word[1]};
    float x;
    memcpy(&x, bytes, sizeof x);
    return x;
}

/* The product of bf16 in the order of ckernels/kvc_matrix.h, for magnitudes from 2^-8 to 2^8: product and sum in double, rounded once. */
static int differing_in_bf16(int rows, int channels) {
    int count = 0;
    for (size_t i = 0; i < sizeof a; i += 2) {
        uint8_t *const words[] = {&a.at[i / 64][i % 64], &b.at[i / 64][i % 64]};
        for (int w = 0; w < 2; w++) {
            const unsigned bits = (119u + random_byte() % 16) << 7 | (random_byte() & 127) | (random_byte() & 128u) << 8;
            words[w][0] = (uint8_t)bits, words[w][1] = (uint8_t)(bits >> 8);
        }
    }
    memset(&c, 0, sizeof c);
    LOAD(0, &c);
    LOAD(4, &a);
    LOAD(5, &b);
    DOT_BF16(0, 4, 5);
    DOT_BF16(0, 4, 5);
    STORE(0, &result);
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < 16; j++) {
            float half[2] = {0}, sum = 0, found;
            memcpy(&found, &result.at[i][4 * j], 4);
            for (int k = 0; k < channels / 2; k++) {
                const double x = of_bf16(&a.at[i][2 * k]), w = of_bf16(&b.at[k / 2][4 * j + 2 * (k % 2)]);
                half[k % 2] = (float)(half[k % 2] + x * w);
            }
            for (int times = 0; times < 2; times++) sum += half[0] + half[1];
            count += memcmp(&sum, &found, 4) != 0;
        }
    }
    return count;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double cycles_per_second(void) {
    double best = 0;
    for (int round = 0; round < 5; round++) {
        const double start = now();
        uint64_t x = 0;
        for (int i = 0; i < 2000000; i++)
            __asm__ __volatile__("add $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0" : "+r"(x));
        const double rate = 1e7 / (now() - start);
        if (rate > best) best = rate;
    }
    return best;
}

#define TIME(what, count, each, ...)                                                    \
    do {                                                                                \
        double best = 1;                                                                \
        for (int round = 0; round < 5; round++) {                                       \
            const double start = now();                                                 \
            for (int i = 0; i < (count); i++) { __VA_ARGS__; }                          \
            const double took = now() - start;                                          \
            if (took < best) best = took;                                               \
        }                                                                               \
        printf("%-52s %7.1f cycles\n", what, best * clock / ((double)(count) * (each))); \
    } while (0)

int main(void) {
    static const int sizes[][2] = {{16, 64}, {16, 32}, {16, 16}, {5, 64}, {1, 64}};
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;
    const double clock = cycles_per_second();
    printf("clock %.2f GHz\n", clock / 1e9);
    int bad = 0;
    for (int s = 0; s < 5; s++) {
        configure(sizes[s][0], sizes[s][1]);
        for (int i = 0; i < 10000; i++) bad += differing(sizes[s][0], sizes[s][1], i % 2);
    }
    printf("50000 random products: %d sums differ from C\n", bad);
    int bad_bf16 = 0;
    for (int s = 0; s < 5; s++) {
        configure(sizes[s][0], sizes[s][1]);
        for (int i = 0; i < 5000; i++) bad_bf16 += differing_in_bf16(sizes[s][0], sizes[s][1]);
    }
    printf("25000 random products of bf16: %d sums differ from C\n", bad_bf16);
    for (int s = 0; s < 5; s++) {
        char what[80];
        configure(sizes[s][0], sizes[s][1]);
        snprintf(what, sizeof what, "product of %d rows and %d channels, throughput", sizes[s][0], sizes[s][1]);
        TIME(what, 100000, 4, DOT(ss, 0, 4, 5); DOT(ss, 1, 6, 7); DOT(ss, 2, 4, 5); DOT(ss, 3, 6, 7));
        snprintf(what, sizeof what, "product of %d rows and %d channels, latency", sizes[s][0], sizes[s][1]);
        TIME(what, 100000, 1, DOT(ss, 0, 4, 5));
    }
    configure(16, 64);
    TIME("product of 16 rows and 32 channels of bf16, throughput", 100000, 4, DOT_BF16(0, 4, 5); DOT_BF16(1, 6, 7);
         DOT_BF16(2, 4, 5); DOT_BF16(3, 6, 7));
    TIME("load of 16 x 64 bytes, first level of the cache", 100000, 2, LOAD(4, &a); LOAD(5, &b));
    memset(large, 1, sizeof large);
    TIME("load of 16 x 64 bytes, second level", 100, 1024, for (int j = 0; j < 1024; j++) LOAD(5, &large[j]));
    TIME("store of 16 x 64 bytes", 100000, 2, STORE(0, &c); STORE(1, &result));
    TIME("zero, product, store, load of a row of it", 100000, 1, ZERO(0); DOT(ss, 0, 4, 5); STORE(0, &c);
         __asm__ __volatile__("vmovdqu64 %0, %%zmm0" : : "m"(c) : "xmm0"));
    RELEASE();
    TIME("configure and release", 10000, 1, configure(16, 32); RELEASE());
    return bad != 0 || bad_bf16 != 0;
}
