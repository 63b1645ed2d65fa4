/* kvc_summaries.c - the summaries of the keys of a page (kvc_sparse.h), by which sparse attention ranks pages.
 *
 *   a row, of one head   | head_dim bytes: code of the variance << 5 | code of the mean |   and two exponents
 *
 * A code m of a mean stands for (m - 15.5) * scale, a code v of a variance for v * the other scale. The scales are the largest
 * magnitude of the row / 15.5, and the largest variance / 7, rounded up to powers of two. A page with a key that is not finite
 * has scales of 0.
 */
#include <float.h>
#include <math.h>

#include "kvc_half.h"
#include "kvc_kernels.h"
#include "kvc_sparse.h"

/* The keys of one head of a page, without rotation, `stride` floats apart. */
static void read_page(kvc_rows rows, const unsigned char *head, int slot, float *x, int stride) {
    if (rows.quantised) {
        KVC_UNFUSED(dequantise_head)(rows, head, slot, KVC_PAGE, x, (size_t)stride);
        for (int t = 0; rows.rotated && t < KVC_PAGE; t++) KVC_UNFUSED(hadamard)(x + t * stride, rows.dim, rows.rotated);
        return;
    }
    const unsigned char *row = head + (size_t)slot * kvc_row_bytes(rows);
    for (int t = 0; t < KVC_PAGE; t++, row += kvc_row_bytes(rows)) {
        for (int d = 0; d < rows.dim; d += KVC_LANES) store_dims(x + t * stride, d, rows.dim, load_row(rows.format, row, d, rows.dim));
    }
}

/* The exponent of the scale of codes up to `top` that reach `largest`, as floats have it; 0 where it is not finite. */
static int exponent_of(float largest, float top) {
    if (!(largest <= FLT_MAX)) return 0;
    return (int)((kvc_float_bits(largest / top) + 0x7fffff) >> 23);
}

static float inverse_of(int exponent) { return exponent ? 1.0f / kvc_float_of_bits((uint32_t)exponent << 23) : 0.0f; }

static void summarise_head(int dim, const float *x, int stride, unsigned char *codes, uint16_t *scales) {
    float means[KVC_MAX_HEAD_DIM + KVC_LANES], variances[KVC_MAX_HEAD_DIM + KVC_LANES];
    const f32v share = f32v_set1(1.0f / KVC_PAGE); /* before the sum, which stays finite so */
    float largest = 0.0f, widest = 0.0f;
    int finite = 1;
    for (int d = 0; d < dim; d += KVC_LANES) {
        f32v mean_v = f32v_zero(), variance_v = f32v_zero();
        for (int t = 0; t < KVC_PAGE; t++) {
            const f32v x_v = f32v_load(x + t * stride + d);
            finite &= f32v_first_not_below(x_v, INFINITY) < 0;
            mean_v = f32v_add(mean_v, f32v_mul(x_v, share));
        }
        for (int t = 0; t < KVC_PAGE; t++) {
            const f32v away = f32v_sub(f32v_load(x + t * stride + d), mean_v);
            variance_v = f32v_add(variance_v, f32v_mul(f32v_mul(away, away), share));
        }
        f32v_store(means + d, mean_v);
        f32v_store(variances + d, variance_v);
        const float here = f32v_max_of(f32v_abs(mean_v)), wide = f32v_max_of(variance_v);
        largest = here > largest ? here : largest, widest = wide > widest ? wide : widest;
    }
    const int mean_scale = finite ? exponent_of(largest, 15.5f) : 0, variance_scale = finite ? exponent_of(widest, 7.0f) : 0;
    const float inverse = inverse_of(mean_scale), narrower = inverse_of(variance_scale);
    *scales = (uint16_t)(variance_scale << 8 | mean_scale);
    if (!finite) memset(codes, 0, (size_t)dim);
    for (int d = 0; finite && d < dim; d++) {
        const int mean = (int)(means[d] * inverse + 16.0f); /* half up: 15.5 + 0.5 */
        const int variance = narrower > 0.0f ? (int)(variances[d] * narrower + 0.5f) : 0;
        codes[d] = (unsigned char)((variance < 7 ? variance : 7) << 5 | (mean < 31 ? mean : 31));
    }
}

void KVC_UNFUSED(summarise_page)(const kvc_layout *layout, const unsigned char *arena, int32_t block, int page, const kvc_summaries *summaries) {
    float x[KVC_PAGE * (KVC_MAX_HEAD_DIM + KVC_LANES)];
    const kvc_rows rows = kvc_rows_of(layout, KVC_KEYS);
    const int stride = (rows.dim + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    const unsigned char *keys = arena + (size_t)block * layout->block_bytes;
    size_t at = ((size_t)block * (size_t)(layout->block_size / KVC_PAGE) + (size_t)page) * (size_t)layout->num_heads;
    for (int i = 0; i < KVC_PAGE * stride; i++) x[i] = 0.0f;
    for (int h = 0; h < layout->num_heads; h++, at++, keys += layout->key_head_bytes) {
        read_page(rows, keys, page * KVC_PAGE, x, stride);
        summarise_head(rows.dim, x, stride, summaries->codes + at * (size_t)rows.dim, summaries->scales + at);
    }
}
