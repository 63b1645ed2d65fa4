/* kvc_feedback.h - quantises keys so that rounding errors cancel in the scores.
 *
 * A score is q k, so what counts is not the squared error e e of a stored key but its mean over queries, e H e with
 * H = E[q q]. The channels of a row are coded one after another. The error of each is pushed onto the later channels,
 * where the queries weigh it as they weighed the error itself:
 *
 *   code_d = round((x_d - minimum) / scale)         error_d = x_d - (minimum + scale * code_d)
 *   x_j   -= error_d * factor[d][j]                 for all j > d, in the order of d
 *
 * With the upper triangular U of  H^-1 = U' U,  factor[d][j] = U[d][j] / U[d][d]  makes the error of each channel as
 * good as the codes before it allow. Source: Frantar et al., "GPTQ" (arXiv 2210.17323), sections 3.2 and 3.3, which
 * rounds weights in this way. Minimum and scale are those of the row before any push; at 3 and 2 bits the step is wider,
 * since pushed values leave the range of the row more often. What is stored, and how it is read, does not change.
 *
 * All levels store the same bytes: the arithmetic is plain float32 in the order above, never fused. A row of many of
 * one head has a lane (kvc_encode_steered); a row alone has its channels side by side (kvc_encode_row).
 */
#ifndef KVC_FEEDBACK_H
#define KVC_FEEDBACK_H

#include "kvc_quant.h"
#include "kvc_simd.h"

/* A row to be coded. */
typedef struct kvc_source {
    const float *x;
    const kvc_head_keys *known; /* NULL for values */
} kvc_source;

/* The step of a row with feedback over that of a row without, indexed by bits: the least KL divergence of a real model
 * (python -m bench quality --model). */
static const float kvc_step_times[] = {0, 0, 1.2f, 1.15f, 1, 1, 1, 0, 1};

static inline const float *kvc_factor_of(kvc_source row) { return row.known ? row.known->factor : NULL; }

/* The factor of all rows, or NULL if some have none or another. */
static inline const float *kvc_common_factor(const kvc_source *x, int count) {
    for (int i = 1; i < count; i++) {
        if (kvc_factor_of(x[i]) != kvc_factor_of(x[0])) return NULL;
    }
    return kvc_factor_of(x[0]);
}

/* Widens the steps of rows with a factor around the middle of their range; the results are halves. */
INLINE void kvc_widen(int bits, const kvc_source *x, int count, f32v *minimum, f32v *scale) {
    float times[KVC_LANES];
    uint16_t halves[KVC_LANES];
    int any = 0;
    for (int i = 0; i < KVC_LANES; i++) {
        const int wider = i < count && kvc_factor_of(x[i]) && kvc_step_times[bits] > 1.0f;
        times[i] = wider ? kvc_step_times[bits] : 1.0f, any |= wider;
    }
    if (!any) return;
    const f32v by = f32v_load(times), most = f32v_set1(65504.0f), half_top = f32v_set1(0.5f * (float)((1 << bits) - 1));
    const f32v out = f32v_mul(f32v_mul(*scale, half_top), f32v_sub(by, f32v_set1(1.0f)));
    const f32v low = f32v_min(f32v_max(f32v_sub(*minimum, out), f32v_sub(f32v_zero(), most)), most);
    f32v_store_half(halves, low);
    *minimum = f32v_load_half(halves);
    f32v_store_half(halves, f32v_min(f32v_mul(*scale, by), most));
    *scale = f32v_load_half(halves);
}

enum { KVC_CHANNELS = 8 }; /* coded one after another, after the pushes of all before them; every head_dim is a multiple */

/* Codes KVC_LANES rows of one head, one per lane, with feedback; lanes are overwritten. */
static void kvc_encode_steered(float *lanes, int dim, f32v minimum, f32v scale, int top, const float *factor,
                               unsigned char *codes) {
    const f32v tiny = f32v_set1(0x1p-126f), zero = f32v_zero(), one = f32v_set1(1.0f);
    const f32v inverse = f32v_div(one, f32v_pick(scale, tiny, one, scale));
    const f32v limit = f32v_pick(scale, tiny, zero, f32v_set1((float)top));
    for (int first = 0; first < dim; first += KVC_CHANNELS) {
        f32v x[KVC_CHANNELS];
        UNROLL
        for (int j = 0; j < KVC_CHANNELS; j++) x[j] = f32v_load(lanes + (first + j) * KVC_LANES);
        const float *push = factor + first;
        for (int d = 0; d < first; d++, push += dim) {
            const f32v error = f32v_load(lanes + d * KVC_LANES);
            UNROLL
            for (int j = 0; j < KVC_CHANNELS; j++) x[j] = f32v_sub(x[j], f32v_mul(error, f32v_set1(push[j])));
        }
        UNROLL
        for (int d = 0; d < KVC_CHANNELS; d++, push += dim) {
            const f32v steps = f32v_mul(f32v_sub(x[d], minimum), inverse);
            const f32v code = f32v_round(f32v_min(f32v_max(steps, zero), limit));
            const f32v error = f32v_sub(x[d], f32v_add(minimum, f32v_mul(scale, code)));
            f32v_store_bytes(codes + (first + d) * KVC_TILE, code);
            f32v_store(lanes + (first + d) * KVC_LANES, error);
            UNROLL
            for (int j = 0; j < KVC_CHANNELS; j++) {
                if (j > d) x[j] = f32v_sub(x[j], f32v_mul(error, f32v_set1(push[j])));
            }
        }
    }
}

/* Codes one row with feedback, value d at lanes[d * KVC_LANES]. */
static void kvc_encode_row(const float *lanes, int dim, float minimum, float scale, int top, const float *factor,
                           unsigned char *codes) {
    float x[KVC_MAX_HEAD_DIM];
    const int blank = scale < 0x1p-126f;
    const float inverse = 1.0f / (blank ? 1.0f : scale), limit = blank ? 0.0f : (float)top;
    for (int d = 0; d < dim; d++) x[d] = lanes[d * KVC_LANES];
    for (int d = 0; d < dim; d++, factor += dim) {
        const float steps = (x[d] - minimum) * inverse, above = steps > 0.0f ? steps : 0.0f;
        const float code = ((above < limit ? above : limit) + 0x1.8p23f) - 0x1.8p23f;
        const f32v error = f32v_set1(x[d] - (minimum + scale * code));
        codes[d * KVC_TILE] = (unsigned char)(int)code;
        for (int j = (d + 1) / KVC_LANES * KVC_LANES; j < dim; j += KVC_LANES) /* values before d + 1 are not read again */
            store_dims(x, j, dim, f32v_sub(load_dims(x, j, dim), f32v_mul(error, load_dims(factor, j, dim))));
    }
}

#endif
