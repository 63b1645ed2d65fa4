/* kvc_row.h - the ends of rows of any length, and what several steps of a network compute of each value. */
#ifndef KVC_ROW_H
#define KVC_ROW_H

#include <string.h>

#include "kvc_simd.h"

/* The vector at x, of which `left` values exist, at least one; the others are 0. */
INLINE f32v load_some(const float *x, int64_t left) {
    float some[KVC_LANES] = {0};
    if (left >= KVC_LANES) return f32v_load(x);
    memcpy(some, x, (size_t)left * sizeof(float));
    return f32v_load(some);
}
INLINE void store_some(float *x, int64_t left, f32v value) {
    float some[KVC_LANES];
    if (left >= KVC_LANES) {
        f32v_store(x, value);
        return;
    }
    f32v_store(some, value);
    memcpy(x, some, (size_t)left * sizeof(float));
}

/* The same of 16 values. */
INLINE f32x16 f32x16_load_some(const float *x, int64_t left) {
    f32x16 all;
    UNROLL
    for (int v = 0; v < KVC_VECTORS; v++, x += KVC_LANES, left -= KVC_LANES)
        all.v[v] = left > 0 ? load_some(x, left) : f32v_zero();
    return all;
}

/* The first `left` values of a vector, at least one; the others are 0. */
INLINE f32v some_of(f32v value, int64_t left) {
    float all[KVC_LANES];
    f32v_store(all, value);
    return load_some(all, left);
}

/* gate * sigmoid(slope). The relative error is below (4 + max(-slope, 0)) * 2^-23 for an exact slope: the exponent is rounded
 * once. 0 where slope < -87: there it is less than 2^-119 gate. */
INLINE f32v gated(f32v gate, f32v slope) {
    const f32v power = f32v_exp2(f32v_min(f32v_mul(slope, f32v_set1(-1.442695041f)), f32v_set1(126.0f)));
    return f32v_zero_below(f32v_div(gate, f32v_add(f32v_set1(1.0f), power)), slope, f32v_set1(-87.0f));
}

/* ln(1 + e^x): max(x, 0) + log1p(u), u = e^-|x|. log1p(u) = 2 atanh(s), s = u / (2 + u) <= 1/3, by its series to s^17, whose
 * rest is below 2e-10. The relative error is below (6 + max(-x, 0)) * 2^-23; 0 below -87. */
INLINE f32v softplus(f32v x) {
    const f32v u = f32v_exp2(f32v_mul(f32v_abs(x), f32v_set1(-1.442695041f)));
    const f32v s = f32v_div(u, f32v_add(f32v_set1(2.0f), u)), square = f32v_mul(s, s);
    f32v p = f32v_set1(2.0f / 17);
    p = f32v_fma(p, square, f32v_set1(2.0f / 15));
    p = f32v_fma(p, square, f32v_set1(2.0f / 13));
    p = f32v_fma(p, square, f32v_set1(2.0f / 11));
    p = f32v_fma(p, square, f32v_set1(2.0f / 9));
    p = f32v_fma(p, square, f32v_set1(2.0f / 7));
    p = f32v_fma(p, square, f32v_set1(2.0f / 5));
    p = f32v_fma(p, square, f32v_set1(2.0f / 3));
    p = f32v_fma(p, square, f32v_set1(2.0f));
    return f32v_fma(p, s, f32v_max(f32v_zero(), x));
}

#endif
