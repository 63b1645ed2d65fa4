/* kvc_lanes.h - quantises KVC_LANES rows at a time, one per lane, to minimum, scale and codes (kvc_quant.c).
 *
 *   rows            | a0 a1 a2 ... | b0 b1 b2 ... | ...
 *   lanes           | a0 b0 c0 ... | a1 b1 c1 ... | ...          KVC_LANES floats at each dimension
 *
 * All arithmetic is between vectors, in the order of a single row: a row has the same bits at every level and beside
 * any other rows. The steps of a rotation go from distance dim / 2 down to 1. Steps of distance KVC_LANES and more are
 * done on rows, the others on lanes: in both cases they are between vectors.
 */
#ifndef KVC_LANES_H
#define KVC_LANES_H

#include "kvc_centre.h"
#include "kvc_feedback.h"
#include "kvc_fit.h"
#include "kvc_hadamard.h"

/* Up to 16 quantised rows. */
typedef struct kvc_coded {
    unsigned char
        codes[KVC_MAX_HEAD_DIM * KVC_TILE]; /* [dim][row] */
    uint16_t scales[KVC_TILE], minima[KVC_TILE];
} kvc_coded;

/* The place of vector j of row i before the transposition, that of dimension j * KVC_LANES + i after it. */
INLINE float *kvc_block(float *lanes, int j, int i) { return lanes + (j * KVC_LANES + i) * KVC_LANES; }

/* Places part of row i, divided by its channels, after those steps of its rotation that are between its vectors; dim is
 * constant where sizes have code of their own. */
INLINE void kvc_rotate_row(const float *x, int dim, int i, float *lanes) {
    f32v v[KVC_MAX_HEAD_DIM / KVC_LANES + 1];
    const int n = dim < KVC_LANES ? 1 : dim / KVC_LANES;
    const f32v inverse = f32v_set1(1.0f / (float)dim);
    UNROLL
    for (int j = 0; j < n; j++) v[j] = f32v_mul(load_dims(x, j * KVC_LANES, dim), inverse);
    UNROLL
    for (int step = n / 2; step > 0; step /= 2) kvc_butterflies(v, n, step);
    UNROLL
    for (int j = 0; j < n; j++) f32v_store(kvc_block(lanes, j, i), v[j]);
}

INLINE void kvc_place_row(kvc_rows rows, kvc_source source, int i, float *lanes) {
    kvc_centred centred;
    centred.x[0] = 0.0f; /* gcc warns otherwise */
    const float *x = source.x;
    if (source.known && source.known->centre) {
        kvc_subtract(x, source.known->centre, rows.dim, KVC_LEAST_HALF, &centred);
        x = centred.x;
    }
    if (!rows.rotated) {
        for (int d = 0; d < rows.dim; d += KVC_LANES)
            f32v_store(kvc_block(lanes, d / KVC_LANES, i), load_dims(x, d, rows.dim));
        return;
    }
    for (int d = 0; d < rows.dim; d += rows.rotated, lanes += (ptrdiff_t)rows.rotated * KVC_LANES) {
        switch (KVC_OWN_SIZES ? rows.rotated : 0) {
        case 0: kvc_rotate_row(x + d, rows.rotated, i, lanes); break;
        case 8: kvc_rotate_row(x + d, 8, i, lanes); break;
        case 16: kvc_rotate_row(x + d, 16, i, lanes); break;
        case 32: kvc_rotate_row(x + d, 32, i, lanes); break;
        case 64: kvc_rotate_row(x + d, 64, i, lanes); break;
        case 128: kvc_rotate_row(x + d, 128, i, lanes); break;
        case 256: kvc_rotate_row(x + d, 256, i, lanes); break;
        default: kvc_rotate_row(x + d, 512, i, lanes); break;
        }
    }
}

/* Prefetches the cache line of x[at], which may be behind the end of all rows: nothing is read. */
INLINE void kvc_prefetch(const float *x, ptrdiff_t at) {
    if (at % 16 == 0) __builtin_prefetch((const void *)((uintptr_t)x + (uintptr_t)at * sizeof(float)), 0, 3);
}

typedef struct kvc_range { /* one per lane */
    f32v lowest, highest, first;
    f32v spread; /* 0 if all values of the row are equal before the rotation */
} kvc_range;

/* Places KVC_LANES rows into lanes. The rotation of a constant row, in one part, is (value, 0, 0, ...). No other row has such a
 * rotation: the difference of two different values is not 0, and of two numbers that are not both 0, the sum or the
 * difference is not 0. */
INLINE kvc_range kvc_into_lanes(kvc_rows rows, const kvc_source *x, ptrdiff_t ahead, float *lanes) {
    for (int i = 0; i < KVC_LANES; i++) kvc_place_row(rows, x[i], i, lanes);
    f32v first = f32v_zero(), low = f32v_set1(0x1p127f), high = f32v_sub(f32v_zero(), low);
    for (int d = 0; d < rows.dim; d += KVC_LANES) {
        f32v v[KVC_LANES];
        const int here = rows.dim - d < KVC_LANES ? rows.dim - d : KVC_LANES;
        UNROLL
        for (int i = 0; i < KVC_LANES; i++) v[i] = f32v_load(lanes + (d + i) * KVC_LANES);
        f32v_transpose(v);
        if (rows.rotated) {
            UNROLL
            for (int step = KVC_LANES / 2; step > 0; step /= 2) kvc_butterflies(v, KVC_LANES, step);
        }
        for (int i = 0; i < KVC_LANES; i++) kvc_prefetch(x[i].x, ahead + d);
        if (d == 0) first = v[0];
        UNROLL
        for (int i = 0; i < KVC_LANES; i++) {
            f32v_store(lanes + (d + i) * KVC_LANES, v[i]);
            if (d + i == 0 || i >= here) continue;
            low = f32v_min(low, v[i]), high = f32v_max(high, v[i]);
        }
    }
    const f32v lowest =
        f32v_add(f32v_min(low, first), f32v_zero()); /* -0 becomes 0: the minimum of both depends on the order */
    const f32v highest = f32v_max(high, first), away = f32v_max(high, f32v_sub(f32v_zero(), low));
    return (kvc_range){lowest, highest, first, rows.rotated ? away : f32v_sub(highest, lowest)};
}

/* Codes a constant row. Rotated it is (value, 0, 0, ...): the value gets the code 2^k, so that the scale |value| / 2^k
 * is exact. k is the largest whose scale is not denormal, which keeps the scale near those of other rows. */
static void kvc_code_constant(kvc_rows rows, float value, int row, kvc_coded *out) {
    const uint16_t half = kvc_half_of_float(value);
    const float kept = kvc_float_of_half(half), magnitude = kept < 0.0f ? -kept : kept;
    int code = rows.rotated ? 1 << (rows.bits - 1) : 0;
    while (code > 1 && magnitude / (float)code < 0x1p-14f) code /= 2;
    out->scales[row] = code ? kvc_half_of_float(magnitude / (float)code) : 0;
    out->minima[row] = code && kept >= 0.0f ? 0 : half;
    for (int d = 0; d < rows.dim; d++)
        out->codes[d * KVC_TILE + row] = (unsigned char)(kept < 0.0f ? code : 0);
    out->codes[row] = (unsigned char)(kept < 0.0f ? 0 : code);
}

/* The scale of the range, a half; minimum is one too. */
INLINE f32v kvc_scale_of(f32v minimum, f32v highest, int top) {
    const f32v range = f32v_max(f32v_sub(highest, minimum), f32v_zero());
    uint16_t next[KVC_LANES];
    f32v_store_half(next, f32v_div(range, f32v_set1((float)top)));
    const f32v scale = f32v_load_half(next), reach = f32v_mul(scale, f32v_set1((float)top + 0.5f));
    for (int i = 0; i < KVC_LANES; i++) next[i]++;
    return f32v_pick(reach, range, f32v_load_half(next),
                     scale); /* the next half, if the rounded scale does not cover the range */
}

/* Codes of the values in lanes under a minimum and a scale. */
INLINE void kvc_encode(const float *lanes, int dim, f32v minimum, f32v scale, int top, unsigned char *codes) {
    const f32v tiny = f32v_set1(KVC_TINY), zero = f32v_zero();
    const f32v divisor = f32v_pick(scale, tiny, f32v_set1(1.0f), scale);
    const f32v limit = f32v_pick(scale, tiny, zero, f32v_set1((float)top));
    for (int d = 0; d < dim; d++) {
        const f32v steps = f32v_div(f32v_sub(f32v_load(lanes + d * KVC_LANES), minimum), divisor);
        f32v_store_bytes(codes + d * KVC_TILE, f32v_min(f32v_max(steps, zero), limit));
    }
}

/* Codes KVC_LANES rows, of which the first `count` are valid, as rows `at`, `at` + 1, .. of out. */
static void kvc_code_lanes(kvc_rows rows, const kvc_source *x, ptrdiff_t ahead, int count, int at,
                           kvc_coded *out) {
    const int top = (1 << rows.bits) - 1;
    float lanes[(KVC_MAX_HEAD_DIM + KVC_LANES) * KVC_LANES], first[KVC_LANES], spread[KVC_LANES];
    const kvc_range range = kvc_into_lanes(rows, x, ahead, lanes);
    f32v minimum = kvc_rounded_to_half(range.lowest), scale = kvc_scale_of(minimum, range.highest, top);
    if (kvc_format_of(rows.format)->fitted)
        kvc_fit(lanes, rows.dim, rows.bits, range.lowest, range.highest, &minimum, &scale);
    kvc_widen(rows.bits, x, count, &minimum, &scale);
    f32v_store_half(out->minima + at, minimum);
    f32v_store_half(out->scales + at, scale);
    const float *factor = kvc_common_factor(x, count);
    if (factor && count > KVC_LANES / 4) {
        kvc_encode_steered(lanes, rows.dim, minimum, scale, top, factor, out->codes + at);
    } else {
        kvc_encode(lanes, rows.dim, minimum, scale, top, out->codes + at);
        for (int i = 0; i < count; i++) {
            if (kvc_factor_of(x[i]))
                kvc_encode_row(lanes + i, rows.dim, kvc_float_of_half(out->minima[at + i]),
                               kvc_float_of_half(out->scales[at + i]), top, kvc_factor_of(x[i]), out->codes + at + i);
        }
    }
    f32v_store(first, range.first);
    f32v_store(spread, range.spread);
    for (int i = 0; i < count; i++) {
        if (spread[i] == 0.0f) kvc_code_constant(rows, first[i], at + i, out);
    }
}

/* Codes up to 16 rows, rotated if rows.rotated. The rows of the next call are `ahead` floats further on. */
static void kvc_code_rows(kvc_rows rows, const kvc_source *x, ptrdiff_t ahead, int count, kvc_coded *out) {
    for (int at = 0; at < count; at += KVC_LANES) {
        kvc_source here[KVC_LANES];
        for (int i = 0; i < KVC_LANES; i++) here[i] = x[at + i < count ? at + i : at];
        kvc_code_lanes(rows, here, ahead, count - at < KVC_LANES ? count - at : KVC_LANES, at, out);
    }
}

#endif
