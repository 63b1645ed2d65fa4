/* tiles.c - what the tile instructions of this CPU give and cost, for `python -m bench tiles`.
 *
 * Compares random products of several shapes with C, then prints cycles of each instruction: minimum and median of short windows.
 * A window stands between two probes. A chain of multiplications, each of which waits three cycles for the one before it, is the
 * clock: additions of a constant are folded by some cores, and seem to take no time. Instructions that do nothing show whether the
 * core's other thread is busy, which changes within milliseconds: windows are counted as "alone" or "beside", or left out.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
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

/* What a probe finds: seconds of a cycle, and cycles of 128 instructions that do nothing. */
typedef struct probe {
    double cycle, idle;
} probe;

static probe look(void) {
    enum { CHAIN = 1000, TIMES = 60 };
    uint64_t x = 3;
    double start = now();
    __asm__ __volatile__(".rept 1000\n\timul %0, %0\n\t.endr\n\tlfence" : "+r"(x));
    const double cycle = (now() - start) / (3.0 * CHAIN);
    start = now();
    for (int i = 0; i < TIMES; i++) __asm__ __volatile__(".rept 128\n\tnop\n\t.endr");
    return (probe){cycle, (now() - start) / TIMES / cycle};
}

enum { ALONE, BESIDE, UNSURE, MOST_WINDOWS = 2000 };
static double fewest; /* cycles of the 128 instructions, with the core for us alone */

static int state_of(probe p) { return p.idle < 1.2 * fewest ? ALONE : p.idle > 1.35 * fewest ? BESIDE : UNSURE; }

static int by_size(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

typedef struct windows {
    int count[2];
    double cycles[2][MOST_WINDOWS];
} windows;
static windows found;

static void keep(probe before, probe after, double seconds, double each) {
    const int state = state_of(before);
    if (state == UNSURE || state_of(after) != state || before.cycle > 1.07 * after.cycle || after.cycle > 1.07 * before.cycle) return;
    if (found.count[state] < MOST_WINDOWS)
        found.cycles[state][found.count[state]++] = seconds * 2 / (before.cycle + after.cycle) / each;
}

static void print_windows(const char *what) {
    printf("%-58s", what);
    for (int state = ALONE; state <= BESIDE; state++) {
        double *cycles = found.cycles[state];
        const int count = found.count[state];
        qsort(cycles, (size_t)count, sizeof *cycles, by_size);
        if (count < 5)
            printf("        -        - (%4d)", count);
        else
            printf(" %8.1f %8.1f (%4d)", cycles[0], cycles[count / 2], count);
    }
    printf("\n");
    memset(found.count, 0, sizeof found.count);
}

/* Windows of `count` times what follows, which is `each` instructions. */
#define TIME(what, count, each, ...)                                           \
    do {                                                                       \
        for (int window = 0; window < MOST_WINDOWS; window++) {                \
            const probe before = look();                                       \
            const double start = now();                                        \
            for (int i = 0; i < (count); i++) { __VA_ARGS__; }                 \
            __asm__ __volatile__("lfence" : : : "memory");                     \
            const double took = now() - start;                                 \
            keep(before, look(), took, (double)(count) * (each));              \
        }                                                                      \
        print_windows(what);                                                   \
    } while (0)

/* Other instructions between those of tiles. */
#define EIGHT __asm__ __volatile__(".rept 8\n\tnop\n\t.endr")

static void find_fewest(void) {
    fewest = 1e9;
    for (int i = 0; i < 5000; i++) {
        const probe p = look();
        if (p.idle < fewest && p.idle > 128.0 / 16) fewest = p.idle;
    }
}

/* For windows of others, in a shared library: 0, alone; 1, beside a busy thread; 2, unknown. */
int state_of_the_core(void) {
    if (!fewest) find_fewest();
    return state_of(look());
}

static void print_states(int count) {
    int states[3] = {0};
    for (int i = 0; i < count; i++) states[state_of(look())]++, usleep(50);
    printf("the core for us alone %.0f %%, with another thread %.0f %%\n", 100.0 * states[ALONE] / count,
           100.0 * states[BESIDE] / count);
}

int main(void) {
    static const int sizes[][2] = {{16, 64}, {16, 32}, {16, 16}, {5, 64}, {1, 64}};
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;
    find_fewest();
    printf("clock %.2f GHz; 128 instructions that do nothing take %.0f cycles\n", 1e-9 / look().cycle, fewest);
    print_states(2000);
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
    printf("\n%-58s %24s %24s\n", "cycles: minimum, median (windows)", "alone", "beside a busy thread");
    for (int s = 0; s < 5; s++) {
        char what[80];
        configure(sizes[s][0], sizes[s][1]);
        snprintf(what, sizeof what, "product of %d rows and %d channels", sizes[s][0], sizes[s][1]);
        TIME(what, 200, 4, DOT(ss, 0, 4, 5); DOT(ss, 1, 6, 7); DOT(ss, 2, 4, 5); DOT(ss, 3, 6, 7));
        snprintf(what, sizeof what, "- each needs the one before it");
        TIME(what, 400, 1, DOT(ss, 0, 4, 5));
        snprintf(what, sizeof what, "- with 8 other instructions behind each");
        TIME(what, 200, 4, DOT(ss, 0, 4, 5); EIGHT; DOT(ss, 1, 6, 7); EIGHT; DOT(ss, 2, 4, 5); EIGHT; DOT(ss, 3, 6, 7); EIGHT);
    }
    configure(16, 64);
    TIME("product of 16 rows and 32 channels of bf16", 200, 4, DOT_BF16(0, 4, 5); DOT_BF16(1, 6, 7);
         DOT_BF16(2, 4, 5); DOT_BF16(3, 6, 7));
    TIME("- with 8 other instructions behind each", 200, 4, DOT_BF16(0, 4, 5); EIGHT; DOT_BF16(1, 6, 7); EIGHT;
         DOT_BF16(2, 4, 5); EIGHT; DOT_BF16(3, 6, 7); EIGHT);
    TIME("load of 16 x 64 bytes, first level of the cache", 500, 2, LOAD(4, &a); LOAD(5, &b));
    TIME("- with 8 other instructions behind each", 500, 2, LOAD(4, &a); EIGHT; LOAD(5, &b); EIGHT);
    memset(large, 1, sizeof large);
    TIME("load of 16 x 64 bytes, second level", 1, 1024, for (int j = 0; j < 1024; j++) LOAD(5, &large[j]));
    TIME("store of 16 x 64 bytes", 300, 2, STORE(0, &c); STORE(1, &result));
    TIME("2 x 2 products: 4 loads, 4 products, for each product", 100, 4, LOAD(4, &a); LOAD(5, &b); DOT(ss, 0, 4, 5); LOAD(6, &c);
         DOT(ss, 1, 6, 5); LOAD(7, &result); DOT(ss, 2, 4, 7); DOT(ss, 3, 6, 7));
    TIME("- with 8 other instructions behind each", 100, 4, LOAD(4, &a); EIGHT; LOAD(5, &b); EIGHT; DOT(ss, 0, 4, 5); EIGHT;
         LOAD(6, &c); EIGHT; DOT(ss, 1, 6, 5); EIGHT; LOAD(7, &result); EIGHT; DOT(ss, 2, 4, 7); EIGHT; DOT(ss, 3, 6, 7); EIGHT);
    TIME("zero, product, store, load of a row of it", 200, 1, ZERO(0); DOT(ss, 0, 4, 5); STORE(0, &c);
         __asm__ __volatile__("vmovdqu64 %0, %%zmm0" : : "m"(c) : "xmm0"));
    RELEASE();
    TIME("configure and release", 50, 1, configure(16, 32); RELEASE());
    return bad != 0 || bad_bf16 != 0;
}
