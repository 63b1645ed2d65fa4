/* twin.h - the contents of a world of blocks, row by row as the scalar level reads them, and attention over them in
 * float64.
 *
 * THE ERROR OF A LEVEL, derived from the arithmetic of the kernels, not measured. For one row q, with |.| the L2 norm
 * and `half` half of the range that the codes of a stored row span (its scale times top / 2; 0 for f32 and f16):
 *
 *   score    scale * (2^-19 |q| |k|  +  0.5 step_q dim half_k)    step_q = max |q| / 1791, the coarser of the digits
 *   weight   w -> w e^(+-2 score error)
 *   output   weight error of the largest |v|  +  rounding 1e-5 |v|  +  0.5 / 1791 * 128 * 2 sum(w half_v)   per channel
 *
 *   capped score     the same, as the slope of the tangent is at most 1, and 2^-20 |score|
 *   lse      score error  +  rounding 1e-5 and 2^-20 |lse|
 *
 * where the 128 tokens of a chunk share a step, and the rotation H has norm sqrt(dim). These are worst cases: they hold
 * for any data, but not for a wrong lane, scale or token. The bounds for Gaussian data are tighter, see case.c.
 */
#ifndef TWIN_H
#define TWIN_H

#include "kvc_quant.h"

#include <math.h>
#include <stdlib.h>

enum { LARGEST = 40 }; /* magnitudes below 2^40 give scores within float32: finite inputs give finite outputs */

typedef struct world {
    kvc_layout layout;
    uint64_t options; /* of attention: what is drawn from it takes no bytes of the input */
    int apart; /* 1: K and V have different head_dims */
    int lse;  /* attention returns the logarithms of its sums too */
    int many; /* 1: enough tokens that kvc_parallel.c splits a context and uses threads: at least 2^14 products */
    int num_blocks, most_floats; /* most_floats: approximate limit on the floats of K */
    size_t arena_bytes, row[2]; /* row: floats of a token, of K and of V: heads * dim */
    unsigned char *arena;
    float *rows[2];       /* K and V, [block][slot][head][dim of the side] */
    unsigned char *plain; /* [block][slot]: Gaussian, both sides */
} world;

static inline size_t slot_of(const world *w, int block, int slot) {
    return (size_t)block * (size_t)w->layout.block_size + (size_t)slot;
}

/* Scale of a stored quantised row, from its place in kvc_quant.h; 0 for f32 and f16. */
static inline float stored_scale(const world *w, kvc_side side, int block, int slot, int head) {
    if (w->layout.latent) side = KVC_KEYS;
    const kvc_rows rows = kvc_rows_of(&w->layout, side);
    if (!rows.quantised) return 0.0f;
    const unsigned char *at = w->arena + (size_t)block * w->layout.block_bytes;
    if (side == KVC_VALUES) at += (size_t)w->layout.num_heads * w->layout.key_head_bytes;
    at += (size_t)head * (side == KVC_KEYS ? w->layout.key_head_bytes : w->layout.value_head_bytes);
    if (rows.tiled)
        at += (size_t)(slot / KVC_TILE) * kvc_tile_bytes(rows) + 2 * (size_t)(slot % KVC_TILE);
    else
        at += (size_t)slot * kvc_row_bytes(rows);
    uint16_t half;
    memcpy(&half, at, 2);
    return kvc_float_of_half(half);
}

/* Whether attention over this slot must be finite: its values are below 2^LARGEST and its scales not negative. */
static inline int slot_is_ordinary(const world *w, int block, int slot) {
    for (int side = KVC_KEYS; side <= KVC_VALUES; side++) {
        const float *x = w->rows[side] + slot_of(w, block, slot) * w->row[side];
        for (size_t i = 0; i < w->row[side]; i++) {
            if (!(fabsf(x[i]) < ldexpf(1.0f, LARGEST))) return 0;
        }
        for (int head = 0; head < w->layout.num_heads; head++) {
            if (!(stored_scale(w, (kvc_side)side, block, slot, head) >= 0.0f)) return 0;
        }
    }
    return 1;
}

static inline double norm_of(const float *x, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum);
}

/* Tokens of a context: the first ones in one world, whose keys lack a centre (NULL: none), as latent rows do whole, the
 * last `near` in another. */
typedef struct context {
    const world *far, *close;
    const size_t *slots; /* of each token */
    int64_t seen, near;
    const float *centre;
} context;

/* One row: the query at q over the tokens of a context, of one KV head. */
typedef struct row_answer {
    double out[KVC_MAX_HEAD_DIM], error; /* error: the bound on the L2 error of the row */
    double score_error;                  /* of any score, in natural logarithms */
    double lse, lse_error;               /* ln sum exp(score) */
    int plain;
} row_answer;

/* weights: [seen], filled. cap: 0 for none. sink: -INFINITY for none. */
static inline row_answer attend_row(const context *c, int head, double scale, const float *q, const float *sink_q,
                                    int64_t sinks, double cap, double sink, double *weights) {
    const kvc_layout *l = &c->far->layout;
    const int dim = l->head_dim, v_dim = l->value_head_dim;
    const int64_t seen = c->seen, far = seen - c->near;
    const size_t *slots = c->slots;
    row_answer answer = {.plain = !c->centre};
    double largest = sink, sum = 0, most = 0, k_norm = 0, k_half = 0, v_norm = 0, v_half = 0, v_most_half = 0;
    for (int64_t t = 0; t < seen; t++) {
        const world *w = t < far ? c->far : c->close;
        const float *k = w->rows[KVC_KEYS] + slots[t] * w->row[KVC_KEYS] + (size_t)(head * dim);
        const float *x = sink_q && t < sinks ? sink_q : q, *centre = t < far ? c->centre : NULL;
        double product = 0;
        for (int d = 0; d < dim; d++) product += ((double)k[d] + (centre ? (double)centre[d] : 0)) * x[d];
        weights[t] = cap > 0 ? cap * tanh(product * scale / cap) : product * scale;
        if (cap > 0) most = fmax(most, fabs(weights[t]));
        largest = fmax(largest, weights[t]);
        k_norm = fmax(k_norm, norm_of(k, dim) + (centre ? norm_of(centre, dim) : 0));
        answer.plain &= w->plain[slots[t]];
    }
    for (int64_t t = 0; t < seen; t++) sum += weights[t] = exp(weights[t] - largest);
    if (sink > -INFINITY) sum += exp(sink - largest);
    answer.lse = sum > 0 ? largest + log(sum) : -INFINITY;
    for (int64_t t = 0; t < seen; t++) {
        const world *w = t < far ? c->far : c->close;
        const float *v = w->rows[KVC_VALUES] + slots[t] * w->row[KVC_VALUES] + (size_t)(head * v_dim);
        const size_t size = (size_t)w->layout.block_size;
        const int block = (int)(slots[t] / size), slot = (int)(slots[t] % size);
        const float *centre = t < far && l->latent ? c->centre : NULL;
        weights[t] /= sum;
        for (int d = 0; d < v_dim; d++) answer.out[d] += weights[t] * ((double)v[d] + (centre ? (double)centre[d] : 0));
        v_norm = fmax(v_norm, norm_of(v, v_dim) + (centre ? norm_of(centre, v_dim) : 0));
        const kvc_rows k_rows = kvc_rows_of(&w->layout, KVC_KEYS), v_rows = kvc_rows_of(&w->layout, KVC_VALUES);
        const float k_scale = stored_scale(w, KVC_KEYS, block, slot, head);
        const double half =
            stored_scale(w, KVC_VALUES, block, slot, head) * ((1 << v_rows.bits % 16) - 1) / 2;
        k_half = fmax(k_half, k_scale * ((1 << k_rows.bits % 16) - 1) / 2);
        v_half += weights[t] * half, v_most_half = fmax(v_most_half, half);
    }
    double q_norm = norm_of(q, dim), q_most = 0;
    if (sink_q) q_norm = fmax(q_norm, norm_of(sink_q, dim));
    q_most = l->rotate_keys ? q_norm * sqrt(dim) : q_norm;
    answer.score_error = fabs(scale) * (0x1p-19 * q_norm * k_norm + 0.5 / 1791 * q_most * dim * k_half);
    answer.score_error += 0x1p-20 * most; /* of the tangent */
    answer.lse_error = answer.score_error + 1e-5 + (seen ? 0x1p-20 * fabs(answer.lse) : 0);
    const double rotation = l->rotate_values ? sqrt(v_dim) : 1.0, channels = sqrt(v_dim);
    answer.error = fmin(expm1(2 * answer.score_error), 2.0) * v_norm;
    answer.error += 1e-5 * channels * (v_norm + rotation * v_most_half);
    answer.error += rotation * channels * (0.5 / 1791 * 128 * 2) *
                    fmin(v_half * exp(fmin(2 * answer.score_error, 700.0)), v_most_half);
    return answer;
}

/* ---- The error of a row that is stored. */

/* x H / part, the stored form of a row that is rotated in parts, by the definition of the matrix. */
static inline void rotate_row(const float *x, int dim, int part, double *y) {
    for (int i = 0; i < dim; i++) {
        const float *of = x + i / part * part;
        y[i] = 0;
        for (int j = 0; j < part; j++) y[i] += (__builtin_popcount((unsigned)(i % part & j)) % 2 ? -1.0 : 1.0) * of[j];
        y[i] /= part;
    }
}

static inline double spacing(double x) { return fmax(ldexp(1.0, ilogb(fmax(fabs(x), 0x1p-30)) - 10), 0x1p-24); }

/* The bound of kvc_quant.c on the root mean square error of a row; f16 is off by at most half a spacing. */
static inline double allowed_error(const kvc_rows rows, const float *x) {
    double y[KVC_MAX_HEAD_DIM], lowest = INFINITY, highest = -INFINITY;
    if (rows.format == KVC_F32) return 0;
    for (int d = 0; d < rows.dim; d++) y[d] = x[d];
    if (rows.rotated) rotate_row(x, rows.dim, rows.rotated, y);
    for (int d = 0; d < rows.dim; d++) lowest = fmin(lowest, y[d]), highest = fmax(highest, y[d]);
    const double largest = fmax(fabs(lowest), fabs(highest));
    if (!rows.quantised) return spacing(largest) / 2;
    const double range = highest - lowest + spacing(lowest) / 2;
    const double scale = range / ((1 << rows.bits) - 1) * (1 + 0x1p-10) + 0x1p-24;
    const double stored = fmax(scale / 2, spacing(lowest) / 2) + scale / 64 + 0x1p-21 * largest;
    return stored * (rows.rotated ? sqrt(rows.rotated) : 1);
}

#endif
