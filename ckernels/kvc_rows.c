/* kvc_rows.c - float rows into slots and back, and the check that a format can hold them. */
#include "kvc_simd.h"

#include "kvc_half.h"

#include <math.h>
#include <string.h>

/* count rows of dim values, row_stride floats apart, to consecutive slots. */
static void write_head(kvc_format format, unsigned char *head, int slot, int count, int dim, const float *rows,
                       size_t row_stride) {
    for (int i = 0; i < count; i++, rows += row_stride) {
        const size_t first = (size_t)(slot + i) * (size_t)dim;
        if (format == KVC_F32) {
            memcpy((float *)head + first, rows, (size_t)dim * sizeof(float));
        } else {
            uint16_t *halves = (uint16_t *)head + first;
            for (int d = 0; d < dim; d += KVC_LANES) store_dims_half(halves, d, dim, load_dims(rows, d, dim));
        }
    }
}

static void read_head(kvc_format format, const unsigned char *head, int slot, int count, int dim, float *rows,
                      size_t row_stride) {
    for (int i = 0; i < count; i++, rows += row_stride) {
        const size_t first = (size_t)(slot + i) * (size_t)dim;
        if (format == KVC_F32) {
            memcpy(rows, (const float *)head + first, (size_t)dim * sizeof(float));
        } else {
            const uint16_t *halves = (const uint16_t *)head + first;
            for (int d = 0; d < dim; d += KVC_LANES) store_dims(rows, d, dim, load_dims_half(halves, d, dim));
        }
    }
}

void KVC_FN(write_runs)(const kvc_layout *layout, unsigned char *arena, const kvc_run *runs, int64_t num_runs,
                        const float *keys, const float *values) {
    const int dim = layout->head_dim, heads = layout->num_heads;
    const size_t row_stride = (size_t)heads * (size_t)dim;
    for (int64_t i = 0; i < num_runs; i++) {
        unsigned char *k = arena + (size_t)runs[i].block * layout->block_bytes;
        unsigned char *v = k + (size_t)heads * layout->key_head_bytes;
        const int first = runs[i].first, count = runs[i].stop - first;
        for (size_t h = 0; keys && h < (size_t)heads; h++) {
            write_head(layout->key_format, k + h * layout->key_head_bytes, first, count, dim,
                       keys + h * (size_t)dim, row_stride);
        }
        for (size_t h = 0; values && h < (size_t)heads; h++) {
            write_head(layout->value_format, v + h * layout->value_head_bytes, first, count, dim,
                       values + h * (size_t)dim, row_stride);
        }
        if (keys) keys += (size_t)count * row_stride;
        if (values) values += (size_t)count * row_stride;
    }
}

void KVC_FN(read_runs)(const kvc_layout *layout, const unsigned char *arena, const kvc_run *runs, int64_t num_runs,
                       float *keys, float *values) {
    const int dim = layout->head_dim, heads = layout->num_heads;
    const size_t row_stride = (size_t)heads * (size_t)dim;
    for (int64_t i = 0; i < num_runs; i++) {
        const unsigned char *k = arena + (size_t)runs[i].block * layout->block_bytes;
        const unsigned char *v = k + (size_t)heads * layout->key_head_bytes;
        const int first = runs[i].first, count = runs[i].stop - first;
        for (size_t h = 0; keys && h < (size_t)heads; h++) {
            read_head(layout->key_format, k + h * layout->key_head_bytes, first, count, dim, keys + h * (size_t)dim,
                      row_stride);
        }
        for (size_t h = 0; values && h < (size_t)heads; h++) {
            read_head(layout->value_format, v + h * layout->value_head_bytes, first, count, dim,
                      values + h * (size_t)dim, row_stride);
        }
        if (keys) keys += (size_t)count * row_stride;
        if (values) values += (size_t)count * row_stride;
    }
}

/* f32 holds what is finite. All others keep halves, of the values or of the scale and minimum of a row, whose
 * magnitudes are at most those of the row (also under the rotation, which is scaled by 1/head_dim). */
int64_t KVC_FN(check_representable)(const float *x, int64_t n, kvc_format format) {
    const float limit = format == KVC_F32 ? INFINITY : KVC_HALF_OVERFLOW;
    int64_t i = 0;
    for (; i + KVC_LANES <= n; i += KVC_LANES) {
        const int lane = f32v_first_not_below(f32v_load(x + i), limit);
        if (lane >= 0) return i + lane;
    }
    for (; i < n; i++) {
        if (!(x[i] < limit && x[i] > -limit)) return i;
    }
    return -1;
}
