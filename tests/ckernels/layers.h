/* layers.h - norms, gated activations and rotary embeddings at every level (kvc_network.c); weights of tokens (kvc_shares.c); and
 * sums of NH, compared with integers (kvc_digest.c).
 *
 * All levels give the bits of the scalar one, whose results are within the errors that kvc_network.c states for inputs below
 * 2^40. A row alone has the same bits.
 */
#ifndef LAYERS_H
#define LAYERS_H

#include "runs.h"

typedef struct layer {
    int64_t n, heads, dim, stride, turned; /* `turned` channels of a head have an angle */
    memory x, weight, cos, sin; /* x (n, heads, dim), rows `stride` apart; of swiglu (n, 2 * dim) */
    float eps, limit; /* `limit` of the clamped gate, and the cap */
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

enum { RMS_NORM, SWIGLU, ROTATE, GEGLU, CLAMPED, SOFTCAP, LAYER_NORM, GELU, XIELU, GATE, SILU_GATE, PLUS_GATE, THIN, NUM_LAYERS };
static const char *const layer_names[] = {"rms_norm", "swiglu",     "rotate", "geglu", "clamped_swiglu", "softcap",
                                          "layer_norm", "gelu", "xielu",  "gate",  "silu_gate", "softplus_gate", "thin"};

/* Rows of x have a gate before or behind the values. */
static int is_gate(int which) {
    return which == SWIGLU || which == GEGLU || which == CLAMPED || (which >= GATE && which <= PLUS_GATE);
}

/* Rows [first, first + n). */
static memory run_layer(const kvc_kernels *k, int which, const layer *l, int64_t first, int64_t n) {
    memory out = take((size_t)(n * l->heads * l->dim) * sizeof(float), 4, l->at_end);
    const float *x = (const float *)l->x.at + first * l->stride;
    const int64_t angles = first * (l->turned / 2);
    if (which == RMS_NORM)
        k->rms_norm(n, l->heads, l->dim, x, l->stride, l->weight.at, l->eps, out.at);
    else if (which == SWIGLU)
        k->swiglu(n, l->dim, x, out.at);
    else if (which == GEGLU)
        k->geglu(n, l->dim, x, out.at);
    else if (which == CLAMPED)
        k->clamped_swiglu(n, l->dim, x, 1.702f, l->limit, out.at);
    else if (which == LAYER_NORM)
        k->layer_norm(n, l->dim, x, l->stride, l->weight.at, l->weight.at, l->eps, out.at);
    else if (which == GELU)
        k->gelu(n, l->dim, x, out.at);
    else if (which == XIELU)
        k->xielu(n, l->dim, x, 0.75f, 1.25f, 0.5f, -l->eps, out.at);
    else if (which == SOFTCAP)
        k->softcap(n * l->dim, x, l->limit, out.at);
    else if (which == THIN) { /* in place, between rows that stay */
        memory rows = take((size_t)((n - 1) * l->stride + l->dim) * sizeof(float), 4, l->at_end);
        memcpy(rows.at, x, (size_t)((n - 1) * l->stride + l->dim) * sizeof(float));
        k->thin(n, l->dim, rows.at, l->stride, l->limit - 2);
        for (int64_t i = 0; i < n; i++) {
            const float *row = (const float *)rows.at + i * l->stride;
            memcpy((float *)out.at + i * l->dim, row, (size_t)l->dim * sizeof(float));
            if (i < n - 1 && !same_bits(row + l->dim, x + i * l->stride + l->dim, l->stride - l->dim))
                fail("%s: thin changes what is between rows", k->name);
        }
        give_back(&rows);
    }
    else if (which >= GATE && which <= PLUS_GATE)
        k->gate(n, l->dim, x + l->dim, l->stride, x, l->stride, which - GATE, out.at); /* as kinds are numbered */
    else
        k->rotate(n, l->heads, l->dim, l->turned, x, l->stride, (float *)l->cos.at + angles, (float *)l->sin.at + angles,
                  out.at);
    return out;
}

/* One head: the mean of squares in 16 sums, then a root, a division and two products. */
static void expect_norm(const kvc_kernels *k, const layer *l, const float *x, const float *weight, const float *out) {
    double squares = 0;
    if (!is_ordinary(x, l->dim) || !is_ordinary(weight, l->dim)) return;
    for (int64_t d = 0; d < l->dim; d++) squares += (double)x[d] * x[d];
    const double scale = 1 / sqrt(squares / (double)l->dim + l->eps);
    for (int64_t d = 0; d < l->dim; d++) {
        const double expected = x[d] * scale * weight[d];
        expect_near_double(k, "rms_norm", out[d], expected,
                           ((double)l->dim / 16 + 8) * 0x1p-24 * fabs(expected) + 0x1p-149 * (1 + fabs(weight[d])));
    }
}

/* The mean, the mean of squares of what is left, a root, a division, a product and a sum: beside the largest |x|. */
static void expect_layer_norm(const kvc_kernels *k, const layer *l, const float *x, const float *out) {
    const float *weight = l->weight.at;
    double mean = 0, squares = 0, largest = 0;
    if (!is_ordinary(x, l->dim) || !is_ordinary(weight, l->dim)) return;
    for (int64_t d = 0; d < l->dim; d++) mean += x[d] / (double)l->dim, largest = fmax(largest, fabs((double)x[d]));
    for (int64_t d = 0; d < l->dim; d++) squares += (x[d] - mean) * (x[d] - mean);
    const double scale = 1 / sqrt(squares / (double)l->dim + l->eps), error = ((double)l->dim + 8) * 0x1p-24;
    const double lost = error * largest * scale; /* of a normed number, if small */
    if (lost > 0x1p-4) return;
    for (int64_t d = 0; d < l->dim; d++) {
        const double normed = (x[d] - mean) * scale, w = weight[d];
        expect_near_double(k, "layer_norm", out[d], normed * w + w,
                           (4 * lost + error) * (1 + fabs(normed)) * fabs(w) + 0x1p-149 * (1 + fabs(w)));
    }
}

/* The mean and the deviation of a row, a product, a sum and a difference: beside the largest |x|. */
static void expect_thin(const kvc_kernels *k, const layer *l, const float *x, const float *out) {
    double mean = 0, squares = 0, largest = 0;
    if (!is_ordinary(x, l->dim)) return;
    for (int64_t d = 0; d < l->dim; d++) mean += x[d] / (double)l->dim, largest = fmax(largest, fabs((double)x[d]));
    for (int64_t d = 0; d < l->dim; d++) squares += (x[d] - mean) * (x[d] - mean);
    const double bound = mean + sqrt(squares / (double)l->dim) * (l->limit - 2);
    const double error = ((double)l->dim + 8) * 0x1p-24 * largest * (2 + 4 * fabs(l->limit - 2));
    for (int64_t d = 0; d < l->dim; d++)
        expect_near_double(k, "thin", out[d], fmax(x[d] - bound, 0), error + 0x1p-60);
}

static void expect_xielu(const kvc_kernels *k, const layer *l, const float *x, const float *out) {
    for (int64_t d = 0; d < l->dim; d++) {
        const double v = x[d], m = fmin(v, -(double)l->eps);
        if (!isfinite(v)) continue;
        const double parts[] = {0.75 * v * v, 0.5 * v, 1.25 * (expm1(m) - m), 1.25 * (m - v)};
        const double expected = v > 0 ? parts[0] + parts[1] : parts[1] + parts[2] + parts[3];
        const double size = v > 0 ? parts[0] + parts[1] : fabs(parts[1]) + fabs(parts[2]) + fabs(parts[3]);
        expect_near_double(k, "xielu", out[d], expected, 0x1p-20 * size + 0x1p-140);
    }
}

/* gate * sigmoid(slope) * up, where the slope is the gate, a cubic of it, or a multiple of it held to the limit. */
static void expect_gated(const kvc_kernels *k, const layer *l, int which, const float *x, const float *out) {
    for (int64_t d = 0; d < l->dim; d++) {
        double gate = x[d], up = which == GELU ? 1 : x[l->dim + d], slope = gate;
        if (!isfinite(gate) || !isfinite(up)) continue;
        if (which == CLAMPED) {
            gate = fmin(gate, l->limit), up = (float)(fmax(fmin(up, l->limit), -l->limit) + 1);
            slope = 1.702f * gate;
        }
        if (which == GEGLU || which == GELU) slope = 1.5957691216f * gate * (1 + 0.044715f * gate * gate);
        if (fabs(slope + 87) < 1e-4) continue; /* either side of where it becomes 0 */
        if (which == GATE) gate = 1;
        const double curve = which == PLUS_GATE ? fmax(slope, 0) + log1p(exp(-fabs(slope))) : gate / (1 + exp(-slope));
        const double expected = slope < -87 ? 0 : curve * up;
        const double error = (which == PLUS_GATE ? 7 + 3 * fmax(-slope, 0) : 5 + 3 * fmax(-slope, 0)) * 0x1p-23;
        const double least = which == PLUS_GATE && slope < -87 ? 0x1p-125 * fabs(up) : 0; /* exp2 ends at 2^-127, not at 0 */
        expect_near_double(k, layer_names[which], out[d], expected,
                           error * fabs(expected) + 0x1p-149 * (1 + fabs(up) + fabs(gate)) + least);
    }
}

static void expect_capped(const kvc_kernels *k, const layer *l, const float *x, const float *out) {
    for (int64_t d = 0; d < l->dim; d++) {
        if (!isfinite(x[d])) continue;
        const double expected = l->limit * tanh((double)x[d] / l->limit);
        expect_near_double(k, "softcap", out[d], expected, 0x1p-20 * fabs(expected) + 0x1p-149 * (1 + l->limit));
    }
}

/* The same three roundings: compiled like the kernels, without contraction. */
static void expect_rotated(const kvc_kernels *k, const layer *l, const float *x, const float *cos, const float *sin,
                           const float *out) {
    const int64_t half = l->turned / 2;
    if (!same_bits(out + l->turned, x + l->turned, l->dim - l->turned)) fail("%s: rotate moves other channels", k->name);
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
    layer l = {.n = draw_between(s, 1, 6), .at_end = draw(s, 2)};
    const int alone_in_row = is_gate(which) || which == SOFTCAP || which == GELU || which == XIELU;
    l.heads = alone_in_row || which == LAYER_NORM || which == THIN ? 1 : draw_between(s, 1, 4);
    l.dim = DRAW_OF(s, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 128, 0, 0);
    if (!l.dim) l.dim = draw_between(s, 1, 600);
    l.turned = which == ROTATE && draw(s, 2) ? 2 * draw_between(s, 0, (int)(l.dim / 2)) : l.dim / 2 * 2;
    l.limit = ldexpf(1.0f, draw_between(s, -2, 6));
    l.eps = ldexpf(1.0f, -draw_between(s, 3, 40));
    const int64_t row = is_gate(which) ? 2 * l.dim : l.heads * l.dim;
    l.stride = alone_in_row ? row : row + draw(s, 9);
    const size_t angles = (size_t)(l.n * (l.turned / 2));
    const size_t sizes[] = {(size_t)((l.n - 1) * l.stride + row), (size_t)row, angles, angles};
    memory *const parts[] = {&l.x, &l.weight, &l.cos, &l.sin};
    say("%s of %d x %d x %d", layer_names[which], (int)l.n, (int)l.heads, (int)l.dim);
    for (int i = 0; i < 4; i++) {
        *parts[i] = take(sizes[i] * sizeof(float), 4, l.at_end);
        draw_floats(s, usual ? i ? GAUSSIAN : WIDE : draw(s, NUM_KINDS), parts[i]->at, sizes[i]);
    }
    const int64_t alone = draw(s, (int)l.n), floats = l.heads * l.dim;
    memory want = run_layer(scalar_level(), which, &l, 0, l.n);
    for (int level = 0; level < num_levels(); level++) {
        const kvc_kernels *k = level_at(level);
        memory out = run_layer(k, which, &l, 0, l.n), again = run_layer(k, which, &l, alone, 1);
        if (!same_bits((float *)out.at + alone * floats, again.at, floats))
            fail("%s: row %d has other bits alone", k->name, (int)alone);
        expect_bits(layer_names[which], k, out.at, want.at, l.n * floats);
        for (int64_t i = 0; k == scalar_level() && i < l.n * l.heads; i++) {
            const int64_t at = i / l.heads, head = i % l.heads * l.dim;
            const float *x = (const float *)l.x.at + at * l.stride + head, *y = (const float *)out.at + i * l.dim;
            if (which == RMS_NORM)
                expect_norm(k, &l, x, (const float *)l.weight.at + head, y);
            else if (which == LAYER_NORM)
                expect_layer_norm(k, &l, x, y);
            else if (which == XIELU)
                expect_xielu(k, &l, x, y);
            else if (which == THIN)
                expect_thin(k, &l, x, y);
            else if (is_gate(which) || which == GELU)
                expect_gated(k, &l, which, x, y);
            else if (which == SOFTCAP)
                expect_capped(k, &l, x, y);
            else
                expect_rotated(k, &l, x, (const float *)l.cos.at + at * (l.turned / 2),
                               (const float *)l.sin.at + at * (l.turned / 2), y);
        }
        give_back(&out), give_back(&again);
    }
    give_back(&want);
    for (int i = 0; i < 4; i++) give_back(parts[i]);
}

/* Sums of rows with shares of their own, out of place and in place; scalar compared with the same operations. */
static void step_mix(source *s) {
    const int64_t n = draw_between(s, 1, 5), outs = draw_between(s, 1, 6), ins = draw_between(s, 1, 6);
    const int64_t dim = draw(s, 2) ? DRAW_OF(s, 1, 7, 8, 15, 16, 17, 33, 64) : draw_between(s, 1, 300);
    const int at_end = draw(s, 2), kind = draw(s, NUM_KINDS), same = ins == outs && draw(s, 2);
    const size_t sizes[] = {(size_t)(n * outs * dim), (size_t)(n * outs * ins), (size_t)(n * ins * dim)};
    memory parts[3], want = take(sizes[0] * sizeof(float), 4, at_end);
    say("mix of %d x %d x %d x %d", (int)n, (int)outs, (int)ins, (int)dim);
    for (int i = 0; i < 3; i++) {
        parts[i] = take(sizes[i] * sizeof(float), 4, at_end);
        draw_floats(s, kind, parts[i].at, sizes[i]);
    }
    const float *base = parts[0].at, *shares = parts[1].at, *x = same ? base : (const float *)parts[2].at;
    float *expected = want.at;
    for (int64_t i = 0; i < n * outs; i++) {
        for (int64_t d = 0; d < dim; d++) {
            float sum = base[i * dim + d];
            for (int64_t j = 0; j < ins; j++) sum = fmaf(shares[i * ins + j], x[(i / outs * ins + j) * dim + d], sum);
            expected[i * dim + d] = sum;
        }
    }
    const int64_t alone = draw(s, (int)n);
    for (int level = 0; level < num_levels(); level++) {
        const kvc_kernels *k = level_at(level);
        memory out = take(sizes[0] * sizeof(float), 4, at_end), one = take(sizes[0] / (size_t)n * sizeof(float), 4, at_end);
        k->mix(n, outs, ins, dim, shares, x, base, out.at);
        expect_bits("mix", k, out.at, want.at, n * outs * dim);
        k->mix(1, outs, ins, dim, shares + alone * outs * ins, x + alone * ins * dim, base + alone * outs * dim, one.at);
        expect_bits("mix of a row", k, one.at, expected + alone * outs * dim, outs * dim);
        if (!same) {
            memcpy(out.at, base, sizes[0] * sizeof(float));
            k->mix(n, outs, ins, dim, shares, x, out.at, out.at);
            expect_bits("mix in place", k, out.at, want.at, n * outs * dim);
        }
        give_back(&out), give_back(&one);
    }
    for (int i = 0; i < 3; i++) give_back(&parts[i]);
    give_back(&want);
}

/* Weights of tokens, and their sum without them. Those of ordinary logits are near double. */
static void step_shares(source *s) {
    const int64_t n = draw(s, 3) ? draw_between(s, 1, 70) : draw_between(s, 1, 3000);
    const int kind = draw(s, 3) ? draw(s, 2) : draw(s, NUM_KINDS), at_end = draw(s, 2);
    const float factor = ldexpf(1.4426950409f, DRAW_OF(s, 0, 0, 1, 3, -3, 20, -126)), spread = (float)DRAW_OF(s, 1, 10, 40);
    memory x = take((size_t)n * sizeof(float), 4, at_end), want = take((size_t)n * sizeof(uint64_t), 8, at_end);
    float *logits = x.at, most = -INFINITY;
    say("weights of %d tokens", (int)n);
    draw_floats(s, kind, logits, (size_t)n);
    for (int64_t i = 0; i < n; i++) logits[i] *= spread, most = logits[i] > most ? logits[i] : most;
    if (!isfinite(most)) most = 0.0f;
    const uint64_t total = scalar_level()->shares(n, logits, most, factor, want.at);
    for (int level = 0; level < num_levels(); level++) {
        const kvc_kernels *k = level_at(level);
        memory out = take((size_t)n * sizeof(uint64_t), 8, at_end);
        if (k->shares(n, logits, most, factor, out.at) != total || k->shares(n, logits, most, factor, NULL) != total)
            fail("%s: the sum of weights is not %llu", k->name, (unsigned long long)total);
        for (int64_t i = 0; i < n; i++) {
            if (((uint64_t *)out.at)[i] != ((uint64_t *)want.at)[i]) fail("%s: weight %d of %g", k->name, (int)i, logits[i]);
        }
        give_back(&out);
    }
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t weight = ((uint64_t *)want.at)[i];
        const double power = (double)(logits[i] - most) * factor, exact = exp2(power + 40);
        sum += weight;
        if (isfinite(power) && power <= 0 && !(fabs((double)weight - exact) <= (1 - power) * 0x1p-21 * exact + 0.51))
            fail("weight %d of %g is %g, not %g", (int)i, logits[i], (double)weight, exact);
    }
    if (sum != total) fail("the sum of weights is not theirs");
    give_back(&x), give_back(&want);
}

/* Bytes at any address, and every word of the key, within their memory. */
static void step_digest(source *s) {
    const int n = draw(s, 4) ? DRAW_OF(s, 0, 1, 63, 64, 65, 1023, 1024, 1025, 2048) : draw_between(s, 0, 3000);
    const int at_end = draw(s, 2), chunks = (n + 1023) / 1024;
    memory data = take((size_t)n, 1, at_end), key = take(262 * sizeof(uint32_t), 4, 1);
    uint64_t state = (uint64_t)draw(s, 65536);
    for (int i = 0; i < n; i++) ((unsigned char *)data.at)[i] = (unsigned char)splitmix(&state);
    for (int i = 0; i < 262; i++) ((uint32_t *)key.at)[i] = (uint32_t)splitmix(&state);
    for (int level = 0; level < num_levels(); level++) {
        memory out = take((size_t)chunks * 4 * sizeof(uint64_t), 8, 1);
        level_at(level)->digest(n, data.at, key.at, out.at);
        for (int i = 0; i < 4 * chunks; i++) {
            const uint32_t *k = (const uint32_t *)key.at + i % 4 * 2;
            uint64_t sum = 0;
            const int first = i / 4 * 1024, left = n - first < 1024 ? n - first : 1024, bytes = (left + 63) / 64 * 64;
            for (int at = 0; at < bytes; at += 8) {
                uint32_t word[2] = {k[at / 4], k[at / 4 + 1]};
                for (int b = 0; b < 8 && at + b < left; b++)
                    word[b / 4] += (uint32_t)((unsigned char *)data.at)[first + at + b] << 8 * (b % 4);
                sum += (uint64_t)word[0] * word[1];
            }
            if (((uint64_t *)out.at)[i] != sum) fail("%s: sum %d of %d bytes differs", level_at(level)->name, i, n);
        }
        give_back(&out);
    }
    give_back(&data), give_back(&key);
}

#endif
