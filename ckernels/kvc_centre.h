/* kvc_centre.h - keys less a constant that all keys of a head share.
 *
 * Softmax cannot tell a constant that is added to all scores, q c. What is stored is k - c, in float32 arithmetic.
 */
#ifndef KVC_CENTRE_H
#define KVC_CENTRE_H

#include "kvc_simd.h"

#define KVC_LEAST_HALF 0x1p-24f

typedef struct kvc_centred {
    float x[KVC_MAX_HEAD_DIM + KVC_LANES];
} kvc_centred;

/* out = x - centre. A row that a half would hold as zeros becomes a constant `least`: all zeros are a slot that was
 * never written. */
INLINE void kvc_subtract(const float *x, const float *centre, int dim, float least, kvc_centred *centred) {
    float *out = centred->x;
    int below = 1;
    for (int d = 0; d < dim; d += KVC_LANES) {
        const f32v away = f32v_sub(load_dims(x, d, dim), load_dims(centre, d, dim));
        f32v_store(out + d, away);
        below &= f32v_first_not_below(away, least) < 0;
    }
    if (below) {
        for (int d = 0; d < dim; d += KVC_LANES) f32v_store(out + d, f32v_set1(least));
    }
}

#endif
