/* layers.h - norms, gated activations and rotary embeddings at every level, compared with double (kvc_network.c).
 *
 * Inputs below 2^40 give results within the errors that kvc_network.c states; other inputs give any, inside their
 * memory. A row alone has the same bits. Rotated channels have the same bits at every level.
 */
#ifndef LAYERS_H
#define LAYERS_H

#include "runs.h"

typedef struct layer {
    int64_t n, heads, dim, stride;
    memory x, weight, cos, sin; /* x (n, heads, dim), rows `stride` apart; of swiglu (n, 2 * dim) */
    float eps;
    int at_end;
} layer;

static int is_ordinary(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (!(fabsf(x[i]) < ldexpf(1.0f, LARGEST))) return 0;
    }
    return 1;
}

static void expect_near_double(const kvc_kernels *kernels, const char *what, float got, double expected,
                               double allowed) {
    if (fabs(expected) < 0x1p127 && !(fabs(got - expected) <= allowed))
        fail("%s: %s gives %g, not %g, may err %g", kernels->name, what, got, expected, allowed);
}

static int same_bits(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (memcmp(a + i, b + i, sizeof *a) && !(isnan(a[i]) && isnan(b[i]))) return 0;
    }
    return 1;
}

enum { RMS_NORM, SWIGLU, ROTATE, NUM_LAYERS };
static const char *const layer_names[] = {"rms_norm", "swiglu", "rotate"};

/* Rows [first, first + n). */
static memory run_layer(const kvc_kernels *k, int which, const layer *l, int64_t first, int64_t n) {
    memory out = take((size_t)(n * l->heads * l->dim) * sizeof(float), 4, l->at_end);
    const float *x = (const float *)l->x.at + first * l->stride;
    const int64_t angles = first * (l->dim / 2);
    if (which == RMS_NORM)
        k->rms_norm(n, l->heads, l->dim, x, l->stride, l->weight.at, l->eps, out.at);
    else if (which == SWIGLU)
        k->swiglu(n, l->dim, x, out.at);
    else
        k->rotate(n, l->heads, l->dim, x, l->stride, (float *)l->cos.at + angles, (float *)l->sin.at + angles, out.at);
    return out;
}

/* One head: the mean of squares over vectors of so many lanes, then a root, a division and two products. */
static void expect_norm(const kvc_kernels *k, const layer *l, const float *x, const float *weight, const float *out) {
    const char *name = k->name;
    const double lanes = !strcmp(name, "avx512") ? 16 : !strcmp(name, "avx2") ? 8 : !strcmp(name, "neon") ? 4 : 1;
    double squares = 0;
    if (!is_ordinary(x, l->dim) || !is_ordinary(weight, l->dim)) return;
    for (int64_t d = 0; d < l->dim; d++) squares += (double)x[d] * x[d];
    const double scale = 1 / sqrt(squares / (double)l->dim + l->eps);
    for (int64_t d = 0; d < l->dim; d++) {
        const double expected = x[d] * scale * weight[d];
        expect_near_double(k, "rms_norm", out[d], expected,
                           ((double)l->dim / lanes + 8) * 0x1p-24 * fabs(expected) + 0x1p-149 * (1 + fabs(weight[d])));
    }
}

static void expect_gated(const kvc_kernels *k, const layer *l, const float *x, const float *out) {
    for (int64_t d = 0; d < l->dim; d++) {
        const double gate = x[d], up = x[l->dim + d];
        if (!isfinite(gate) || !isfinite(up)) continue;
        const double expected = gate < -87 ? 0 : gate / (1 + exp(-gate)) * up;
        const double error = (4 + fmax(-gate, 0)) * 0x1p-23;
        expect_near_double(k, "swiglu", out[d], expected, error * fabs(expected) + 0x1p-149 * (1 + fabs(up)));
    }
}

/* The same three roundings: compiled like the kernels, without contraction. */
static void expect_rotated(const kvc_kernels *k, const layer *l, const float *x, const float *cos, const float *sin,
                           const float *out) {
    const int64_t half = l->dim / 2;
    for (int64_t d = 0; d < half; d++) {
        const float a = x[d], b = x[half + d], c = cos[d], s = sin[d];
        const float turned[] = {a * c - b * s, b * c + a * s};
        const double exact = (double)a * c - (double)b * s, size = fabs((double)a * c) + fabs((double)b * s);
        if (!same_bits(&out[d], &turned[0], 1) || !same_bits(&out[half + d], &turned[1], 1))
            fail("%s: rotate gives %a, %a, not %a, %a", k->name, out[d], out[half + d], turned[0], turned[1]);
        if (size < 0x1p127) expect_near_double(k, "rotate", out[d], exact, 0x1p-23 * size + 0x1p-148);
    }
}

static void step_layer(source *s) {
    const int which = draw(s, NUM_LAYERS), usual = draw(s, 4) > 0;
    layer l = {.n = draw_between(s, 1, 6), .heads = which == SWIGLU ? 1 : draw_between(s, 1, 4), .at_end = draw(s, 2)};
    l.dim = DRAW_OF(s, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 128, 0, 0);
    if (!l.dim) l.dim = draw_between(s, 1, 600);
    if (which == ROTATE) l.dim += l.dim % 2;
    l.eps = ldexpf(1.0f, -draw_between(s, 3, 40));
    const int64_t row = which == SWIGLU ? 2 * l.dim : l.heads * l.dim;
    l.stride = which == SWIGLU ? row : row + draw(s, 9);
    const size_t angles = (size_t)(l.n * (l.dim / 2));
    const size_t sizes[] = {(size_t)((l.n - 1) * l.stride + row), (size_t)row, angles, angles};
    memory *const parts[] = {&l.x, &l.weight, &l.cos, &l.sin};
    say("%s of %d x %d x %d", layer_names[which], (int)l.n, (int)l.heads, (int)l.dim);
    for (int i = 0; i < 4; i++) {
        *parts[i] = take(sizes[i] * sizeof(float), 4, l.at_end);
        draw_floats(s, usual ? i ? GAUSSIAN : WIDE : draw(s, NUM_KINDS), parts[i]->at, sizes[i]);
    }
    const int64_t alone = draw(s, (int)l.n), floats = l.heads * l.dim;
    for (int level = 0; level < num_levels(); level++) {
        const kvc_kernels *k = level_at(level);
        memory out = run_layer(k, which, &l, 0, l.n), again = run_layer(k, which, &l, alone, 1);
        if (!same_bits((float *)out.at + alone * floats, again.at, floats))
            fail("%s: row %d has other bits alone", k->name, (int)alone);
        for (int64_t i = 0; i < l.n * l.heads; i++) {
            const int64_t at = i / l.heads, head = i % l.heads * l.dim;
            const float *x = (const float *)l.x.at + at * l.stride + head, *y = (const float *)out.at + i * l.dim;
            if (which == RMS_NORM)
                expect_norm(k, &l, x, (const float *)l.weight.at + head, y);
            else if (which == SWIGLU)
                expect_gated(k, &l, x, y);
            else
                expect_rotated(k, &l, x, (const float *)l.cos.at + at * (l.dim / 2),
                               (const float *)l.sin.at + at * (l.dim / 2), y);
        }
        give_back(&out), give_back(&again);
    }
    for (int i = 0; i < 4; i++) give_back(parts[i]);
}

#endif
