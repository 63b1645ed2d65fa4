/* kvc_bounds.c - the bounds of the keys of a page (kvc_sparse.h), by which sparse attention ranks pages.
 *
 *   a row, of one head   | head_dim bytes: code of the smallest << 4 | code of the largest |   and one scale in bf16
 *
 * A code c stands for (c - 7.5) * scale, and the scale is the largest magnitude of the row / 7.5, rounded up to bf16. A page
 * with a key that is not finite has scale 0.
 *
 * That is the bound of Quest (Tang et al., 2024, section 3.3): no key of the page has a larger product with a query than the
 * sum over the channels of q * largest, or q * smallest where q < 0 - but for the rounding here, by half a scale at most.
 */
#include <float.h>
#include <math.h>

#include "kvc_half.h"
#include "kvc_kernels.h"
#include "kvc_sparse.h"

/* The keys of one head of a page, without rotation, `stride` floats apart. */
static void read_page(kvc_rows rows, const unsigned char *head, int slot, float *x, int stride) {
    if (rows.quantised) {
        KVC_FN(dequantise_head)(rows, head, slot, KVC_PAGE, x, (size_t)stride);
        for (int t = 0; rows.rotated && t < KVC_PAGE; t++) KVC_FN(hadamard)(x + t * stride, rows.dim, rows.rotated);
        return;
    }
    const unsigned char *row = head + (size_t)slot * kvc_row_bytes(rows);
    for (int t = 0; t < KVC_PAGE; t++, row += kvc_row_bytes(rows)) {
        for (int d = 0; d < rows.dim; d += KVC_LANES) store_dims(x + t * stride, d, rows.dim, load_row(rows.format, row, d, rows.dim));
    }
}

/* The scale of bounds up to `largest`; 0 of none, and where it is not finite. */
static uint16_t scale_of(float largest) {
    if (!(largest <= FLT_MAX)) return 0;
    return (uint16_t)((kvc_float_bits(largest / 7.5f) + 0xffff) >> 16);
}

static void bound_head(int dim, const float *x, int stride, unsigned char *codes, uint16_t *scale) {
    float least[KVC_MAX_HEAD_DIM + KVC_LANES], most[KVC_MAX_HEAD_DIM + KVC_LANES];
    float largest = 0.0f;
    int finite = 1;
    for (int d = 0; d < dim; d += KVC_LANES) {
        f32v least_v = f32v_load(x + d), most_v = least_v;
        finite &= f32v_first_not_below(least_v, INFINITY) < 0;
        for (int t = 1; t < KVC_PAGE; t++) {
            const f32v x_v = f32v_load(x + t * stride + d);
            finite &= f32v_first_not_below(x_v, INFINITY) < 0;
            least_v = f32v_min(least_v, x_v);
            most_v = f32v_max(most_v, x_v);
        }
        f32v_store(least + d, least_v);
        f32v_store(most + d, most_v);
        const float here = f32v_max_of(f32v_max(f32v_abs(least_v), f32v_abs(most_v)));
        largest = here > largest ? here : largest;
    }
    *scale = finite ? scale_of(largest) : 0;
    const float step = kvc_float_of_bits((uint32_t)*scale << 16), inverse = step >= FLT_MIN ? 1.0f / step : 0.0f;
    if (!finite) memset(codes, 0, (size_t)dim);
    for (int d = 0; finite && d < dim; d++) {
        const int low = (int)(least[d] * inverse + 8.0f), high = (int)(most[d] * inverse + 8.0f); /* half up: 7.5 + 0.5 */
        codes[d] = (unsigned char)((low < 15 ? low : 15) << 4 | (high < 15 ? high : 15));
    }
}

void KVC_FN(bound_page)(const kvc_layout *layout, const unsigned char *arena, int32_t block, int page, const kvc_bounds *bounds) {
    float x[KVC_PAGE * (KVC_MAX_HEAD_DIM + KVC_LANES)];
    const kvc_rows rows = kvc_rows_of(layout, KVC_KEYS);
    const int stride = (rows.dim + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    const unsigned char *keys = arena + (size_t)block * layout->block_bytes;
    size_t at = ((size_t)block * (size_t)(layout->block_size / KVC_PAGE) + (size_t)page) * (size_t)layout->num_heads;
    for (int i = 0; i < KVC_PAGE * stride; i++) x[i] = 0.0f;
    for (int h = 0; h < layout->num_heads; h++, at++, keys += layout->key_head_bytes) {
        read_page(rows, keys, page * KVC_PAGE, x, stride);
        bound_head(rows.dim, x, stride, bounds->codes + at * (size_t)rows.dim, bounds->scales + at);
    }
}
