/* kvc_rows.c - writes float rows to slots and reads them, makes float rows of others, checks that a format can hold them. */
#include "kvc_centre.h"
#include "kvc_kernels.h"

#include <math.h>
#include <string.h>

/* Writes the rows of count tokens, each of all heads, to consecutive slots, token by token in their memory order. Head
 * by head, every row would be read from another page, and the processor does not prefetch across pages. */
static void write_floats(kvc_rows rows, unsigned char *block, size_t head_bytes, int num_heads, int slot,
                         int count, kvc_float_rows of, const kvc_head_keys *known) {
    const int dim = rows.dim;
    kvc_centred centred;
    const size_t row_bytes = kvc_row_bytes(rows);
    for (int i = slot; i < slot + count; i++, of.data += of.stride) {
        const float *x = of.data;
        for (int h = 0; h < num_heads; h++, x += dim) {
            unsigned char *row = block + (size_t)h * head_bytes + (size_t)i * row_bytes;
            const float *from = x;
            if (known && known[h].centre) {
                const float least = rows.format == KVC_F32 ? 0x1p-126f : KVC_LEAST_HALF;
                kvc_subtract(x, known[h].centre, dim, least, &centred);
                from = centred.x;
            }
            if (rows.format == KVC_F32) {
                memcpy(row, from, (size_t)dim * sizeof(float));
            } else {
                for (int d = 0; d < dim; d += KVC_LANES)
                    store_row(rows.format, row, d, dim, load_dims(from, d, dim));
            }
        }
    }
}

/* Adds the centre to rows that were written. The scale and minimum of a quantised row that was not are both 0, as all
 * values of a float one are; kvc_subtract keeps a written row from that. */
static void add_centre(kvc_rows rows, const unsigned char *head, int slot, int count, const float *centre, float *x,
                       size_t row_stride) {
    for (int i = slot; i < slot + count; i++, x += row_stride) {
        uint16_t header[2] = {0, 0};
        if (rows.tiled) {
            const uint16_t *scales = (const uint16_t *)(head + (size_t)(i / KVC_TILE) * kvc_tile_bytes(rows));
            header[0] = scales[i % KVC_TILE], header[1] = scales[KVC_TILE + i % KVC_TILE];
        } else if (rows.quantised) {
            memcpy(header, head + (size_t)i * kvc_row_bytes(rows), sizeof header);
        }
        int written = header[0] | header[1];
        for (int d = 0; d < rows.dim && !rows.quantised; d++) written |= x[d] != 0.0f;
        for (int d = 0; d < rows.dim && written; d += KVC_LANES)
            store_dims(x, d, rows.dim, f32v_add(load_dims(x, d, rows.dim), load_dims(centre, d, rows.dim)));
    }
}

static void read_head(kvc_rows rows, const unsigned char *head, int slot, int count, float *x,
                      size_t row_stride) {
    const int dim = rows.dim;
    if (rows.quantised) {
        KVC_UNFUSED(dequantise_head)(rows, head, slot, count, x, row_stride);
        for (int i = 0; rows.rotated && i < count; i++) KVC_UNFUSED(hadamard)(x + (size_t)i * row_stride, dim, rows.rotated);
        return;
    }
    const unsigned char *row = head + (size_t)slot * kvc_row_bytes(rows);
    for (int i = 0; i < count; i++, x += row_stride, row += kvc_row_bytes(rows)) {
        if (rows.format == KVC_F32) {
            memcpy(x, row, (size_t)dim * sizeof(float));
        } else {
            for (int d = 0; d < dim; d += KVC_LANES)
                store_dims(x, d, dim, load_row(rows.format, row, d, dim));
        }
    }
}

/* V of latent rows, a few tokens at a time; a centre is of whole rows. */
static void read_values(kvc_rows keys, int dim, const unsigned char *head, int slot, int count, const float *centre,
                        float *x, size_t row_stride) {
    float rows[KVC_TILE * (KVC_MAX_HEAD_DIM + KVC_LANES)];
    for (int n; count > 0; count -= n, slot += n) {
        n = KVC_TILE - slot % KVC_TILE < count ? KVC_TILE - slot % KVC_TILE : count;
        read_head(keys, head, slot, n, rows, (size_t)keys.dim);
        if (centre) add_centre(keys, head, slot, n, centre, rows, (size_t)keys.dim);
        for (int i = 0; i < n; i++, x += row_stride) memcpy(x, rows + i * keys.dim, (size_t)dim * sizeof(float));
    }
}

void KVC_UNFUSED(write_runs)(const kvc_layout *layout, unsigned char *arena, const kvc_run *runs, int64_t num_runs,
                        kvc_float_rows keys, kvc_float_rows values, const kvc_head_keys *known) {
    const kvc_rows k_rows = kvc_rows_of(layout, KVC_KEYS), v_rows = kvc_rows_of(layout, KVC_VALUES);
    const kvc_float_rows none = {NULL, 0};
    if (layout->latent) values = none;
    kvc_float_rows k = k_rows.quantised ? none : keys, v = v_rows.quantised ? none : values;
    KVC_UNFUSED(quantise_runs)(layout, arena, runs, num_runs, k.data ? none : keys, v.data ? none : values, known);
    for (int64_t i = 0; (k.data || v.data) && i < num_runs; i++) {
        unsigned char *block = arena + (size_t)runs[i].block * layout->block_bytes;
        const int first = runs[i].first, count = runs[i].stop - first, num_heads = layout->num_heads;
        if (k.data) {
            write_floats(k_rows, block, layout->key_head_bytes, num_heads, first, count, k, known);
            k.data += count * k.stride;
        }
        if (v.data) {
            write_floats(v_rows, block + kvc_values_at(layout), layout->value_head_bytes, num_heads,
                         first, count, v, NULL);
            v.data += count * v.stride;
        }
    }
}

/* One row of a tensor. The loops over words and doubles are for the compiler to vectorise. */
static void gather_row(const kvc_tensor *tensor, const unsigned char *from, int dim, float *to) {
    const uint16_t *words = (const uint16_t *)from;
    switch (tensor->element) {
    case KVC_ELEMENT_F32: memcpy(to, from, (size_t)dim * sizeof(float)); break;
    case KVC_ELEMENT_F16:
        for (int d = 0; d < dim; d += KVC_LANES) store_dims(to, d, dim, load_dims_half(words, d, dim));
        break;
    case KVC_ELEMENT_BF16:
        for (int d = 0; d < dim; d++) to[d] = kvc_float_of_bits((uint32_t)words[d] << 16);
        break;
    case KVC_ELEMENT_F64:
        for (int d = 0; d < dim; d++) to[d] = (float)((const double *)from)[d];
        break;
    }
}

void KVC_UNFUSED(gather_rows)(const kvc_tensor *tensor, int64_t first, int64_t count, int heads, int dim, float *rows) {
    for (int64_t i = first; i < first + count; i++) {
        const unsigned char *token = tensor->data + i * tensor->token_stride;
        for (int h = 0; h < heads; h++, rows += dim) gather_row(tensor, token + h * tensor->head_stride, dim, rows);
    }
}

void KVC_UNFUSED(read_runs)(const kvc_layout *layout, const unsigned char *arena, const kvc_run *runs, int64_t num_runs,
                       float *keys, float *values, size_t token_stride, size_t head_stride,
                       const kvc_head_keys *known) {
    const kvc_rows k_rows = kvc_rows_of(layout, KVC_KEYS), v_rows = kvc_rows_of(layout, KVC_VALUES);
    const size_t heads = (size_t)layout->num_heads;
    for (int64_t i = 0; i < num_runs; i++) {
        const unsigned char *k = arena + (size_t)runs[i].block * layout->block_bytes;
        const unsigned char *v = k + kvc_values_at(layout);
        const int first = runs[i].first, count = runs[i].stop - first;
        for (size_t h = 0; h < heads; h++) {
            const float *centre = known ? known[h].centre : NULL;
            if (keys) {
                const unsigned char *head = k + h * layout->key_head_bytes;
                read_head(k_rows, head, first, count, keys + h * head_stride, token_stride);
                if (centre) add_centre(k_rows, head, first, count, centre, keys + h * head_stride, token_stride);
            }
            if (values && layout->latent)
                read_values(k_rows, v_rows.dim, k, first, count, centre, values, token_stride);
            else if (values)
                read_head(v_rows, v + h * layout->value_head_bytes, first, count, values + h * head_stride,
                          token_stride);
        }
        if (keys) keys += (size_t)count * token_stride;
        if (values) values += (size_t)count * token_stride;
    }
}

int64_t KVC_UNFUSED(check_representable)(const float *x, int64_t n, kvc_format format) {
    const float limit = kvc_format_of(format)->overflow;
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
