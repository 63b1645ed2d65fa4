/* kvc_hadamard.h - unscaled fast Walsh-Hadamard transforms: of one row, and the steps for rows in lanes. */
#ifndef KVC_HADAMARD_H
#define KVC_HADAMARD_H

#include "kvc_simd.h"

/* One step of the transform between n vectors. */
INLINE void kvc_butterflies(f32v *v, int n, int step) {
    UNROLL
    for (int i = 0; i < n; i++) {
        if (i & step) continue;
        const f32v a = v[i], b = v[i + step];
        v[i] = f32v_add(a, b), v[i + step] = f32v_sub(a, b);
    }
}

/* Steps of distance 4, 2 and 1 (and 8, if a vector has 16 lanes), within a vector or 8 neighbours. */
#if KVC_LANES >= 8
enum { KVC_SHORT_STEPS = KVC_LANES };
INLINE f32v kvc_short_steps(f32v x) {
    x = f32v_butterfly1(f32v_butterfly2(f32v_butterfly4(x)));
    return KVC_LANES > 8 ? f32v_butterfly8(x) : x;
}
#else
enum { KVC_SHORT_STEPS = 8 };
#endif

static inline void kvc_eight_steps(float *e) {
    float a[8], b[8];
    for (int j = 0; j < 4; j++) a[j] = e[j] + e[j + 4], a[j + 4] = e[j] - e[j + 4];
    for (int j = 0; j < 2; j++) {
        b[j] = a[j] + a[j + 2], b[j + 2] = a[j] - a[j + 2];
        b[j + 4] = a[j + 4] + a[j + 6], b[j + 6] = a[j + 4] - a[j + 6];
    }
    for (int j = 0; j < 8; j += 2) e[j] = b[j] + b[j + 1], e[j + 1] = b[j] - b[j + 1];
}

/* Transforms a row in place; dim is a constant power of two, at least 16. */
INLINE void kvc_transform(float *x, int dim) {
    f32v v[KVC_MAX_HEAD_DIM / KVC_LANES];
    const int n = dim / KVC_LANES;
#if KVC_LANES < 8
    for (int i = 0; i < dim; i += 8) kvc_eight_steps(x + i);
#endif
    UNROLL
    for (int i = 0; i < n; i++) {
        v[i] = f32v_load(x + i * KVC_LANES);
#if KVC_LANES >= 8
        v[i] = kvc_short_steps(v[i]);
#endif
    }
    for (int step = KVC_SHORT_STEPS / KVC_LANES; step < n; step *= 2) kvc_butterflies(v, n, step);
    UNROLL
    for (int i = 0; i < n; i++) f32v_store(x + i * KVC_LANES, v[i]);
}

#endif
