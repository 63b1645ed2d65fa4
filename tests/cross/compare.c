/* compare.c - every routine of one SIMD level against scalar, over random layouts and sequences.
 *
 * For machines without Python (a cross compiler and qemu): the Python tests say more where they can run.
 */
#include "kvc.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 20;

static uint32_t random_u32(void) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32);
}
static int between(int low, int high) { return low + (int)(random_u32() % (uint32_t)(high - low + 1)); }
static float gaussian(void) { /* near enough: sum of uniforms */
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += (float)random_u32() * 0x1p-32f;
    return sum;
}
static float *floats(size_t n) {
    float *x = malloc((n + 1) * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = gaussian();
    return x;
}

/* Largest difference, over the largest value. */
static double difference(const float *a, const float *b, size_t n) {
    double most = 0, largest = 1e-30;
    for (size_t i = 0; i < n; i++) {
        most = fmax(most, fabs((double)a[i] - b[i]));
        largest = fmax(largest, fabs((double)a[i]));
        if (isnan(a[i]) || isnan(b[i])) return INFINITY;
    }
    return most / largest;
}

static int failures;

static void expect(int good, const char *what, const kvc_layout *l, double got) {
    if (good) return;
    failures++;
    printf("%s: %g (block %d, heads %d, dim %d, formats %d %d, rotated %d %d)\n", what, got, l->block_size,
           l->num_heads, l->head_dim, l->key_format, l->value_format, l->rotate_keys, l->rotate_values);
}

static void compare(const kvc_kernels *kernels, const kvc_kernels *scalar, kvc_format format, int rotate) {
    kvc_layout l;
    const int dim = rotate ? 8 << between(0, 5) : 8 * between(1, 32);
    if (kvc_layout_init(&l, between(0, 1) ? 16 : between(1, 40), between(1, 3), dim, format, format, rotate,
                        rotate)) {
        expect(0, "layout refused", &l, format);
        return;
    }
    const int tokens = between(1, 400), group = between(1, 5), query_heads = group * l.num_heads;
    const int queries = between(0, 1) ? 1 : between(1, tokens < 40 ? tokens : 40);
    const int blocks = (tokens + l.block_size - 1) / l.block_size;
    const size_t row = (size_t)l.num_heads * (size_t)dim, arena_bytes = (size_t)blocks * l.block_bytes;
    const size_t out_floats = (size_t)queries * (size_t)query_heads * (size_t)dim;
    kvc_run *runs = malloc((size_t)blocks * sizeof *runs);
    for (int b = 0, left = tokens; b < blocks; b++, left -= l.block_size) {
        runs[b] = (kvc_run){blocks - 1 - b, 0, (uint16_t)(left < l.block_size ? left : l.block_size)};
    }
    float *k = floats((size_t)tokens * row), *v = floats((size_t)tokens * row), *read[2][2], *out[2],
          *scores[2];
    float *q = floats(out_floats), *sink_q = floats(out_floats);
    unsigned char *arena[2];
    const kvc_kernels *both[2] = {scalar, kernels};
    kvc_seq seq = {runs, blocks, tokens, between(0, 20), queries};
    for (int i = 0; i < 2; i++) {
        arena[i] = aligned_alloc(64, arena_bytes);
        memset(arena[i], 0, arena_bytes);
        read[i][0] = floats((size_t)tokens * row), read[i][1] = floats((size_t)tokens * row);
        out[i] = floats(out_floats), scores[i] = floats((size_t)tokens);
        both[i]->write_runs(&l, arena[i], runs, blocks, k, v);
        both[i]->read_runs(&l, arena[i], runs, blocks, read[i][0], read[i][1]);
        kvc_attend_args args = {&l, arena[0], &seq,   1,        query_heads, 1.0f / sqrtf((float)dim),
                                q,  sink_q,   out[i], scores[i]};
        void *scratch = malloc(kvc_attend_scratch_bytes(&l, &seq, 1, query_heads, 2));
        kvc_attend(both[i], &args, scratch, 2);
        free(scratch);
    }
    expect(!memcmp(arena[0], arena[1], arena_bytes), "stored bytes differ", &l, 0);
    for (int i = 0; i < 2; i++) {
        const double d = difference(read[0][i], read[1][i], (size_t)tokens * row);
        expect(d <= 1e-6, "read", &l, d);
    }
    const double tolerance = format <= KVC_F16 ? 5e-6 : 0.01;
    const double d_out = difference(out[0], out[1], out_floats),
                 d_scores = difference(scores[0], scores[1], (size_t)tokens);
    expect(d_out <= tolerance, "attend", &l, d_out);
    expect(d_scores <= 2 * tolerance, "scores", &l, d_scores);
    const size_t bad = random_u32() % ((size_t)tokens * row);
    k[bad] = between(0, 1) ? NAN : -INFINITY;
    const int64_t first = kernels->check_representable(k, (int64_t)((size_t)tokens * row), format);
    expect(first == (int64_t)bad, "check_representable", &l, (double)first);
    for (int i = 0; i < 2; i++)
        free(arena[i]), free(read[i][0]), free(read[i][1]), free(out[i]), free(scores[i]);
    free(runs), free(k), free(v), free(q), free(sink_q);
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : kvc_level(0)->name;
    const kvc_kernels *kernels = kvc_find_level(name), *scalar = kvc_find_level("scalar");
    if (!kernels) return printf("this CPU or build has no level %s\n", name), 1;
    int cases = 0;
    for (int format = KVC_F32; format <= KVC_Q2; format++) {
        for (int i = 0; i < 40; i++, cases++)
            compare(kernels, scalar, (kvc_format)format, format >= KVC_Q8 && i % 2);
    }
    printf("%s against %s: %d cases, %d failures\n", kernels->name, scalar->name, cases, failures);
    return failures > 0;
}
