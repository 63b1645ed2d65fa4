/* kvc_quant.c - quantises float rows to codes, and back.
 *
 *   minimum = f16(lowest)      scale = f16((highest - minimum) / top), or the next half if that is too small
 *   code    = round((x - minimum) / scale), half to even, within 0 .. top = 2^bits - 1
 *
 * In fitted formats (kvc_formats.h), minimum and scale are those of kvc_fit.h if they give the row a smaller squared
 * error.
 *
 * All levels store the same bytes, and the bytes of a row do not depend on other rows: the arithmetic is exact, or
 * plain float32 in one order and never fused. Writing takes up to 80 KiB of stack: 16 rows as floats, whole numbers and
 * codes.
 *
 * Error of a stored row (with rotation: of the rotated row), where ulp16 is the spacing of halves:
 *
 *   |read - x| <= max(scale / 2, ulp16(lowest) / 2) + 2^-23 * largest     from lowest to highest
 *   scale      <= range / top * (1 + 2^-10) + 2^-24                       range = highest - minimum
 *
 * With the fit, the root mean square error is no larger, up to a 64th of a step (kvc_fit.h), so the error of a single
 * value is at most sqrt(head_dim) times that. A constant row is read as f16(x). Rows within +-65504 never overflow: the
 * range, at most 131008, is divided by at least 3.
 *
 * ROTATION: a row is stored as H x / head_dim and read as H y, where H is the Hadamard matrix of +-1 (H H = head_dim).
 * Rows of latent layouts are rotated in equal parts, of as many channels as divide those of K and of V.
 * No value grows, and the scaling by a power of two is exact. Reading multiplies the error by sqrt(head_dim) on average
 * and head_dim at worst. Rotating divides the range of a typical row by sqrt(head_dim), and that of a row with outliers
 * by more.
 */
#include "kvc_kernels.h"
#include "kvc_lanes.h"

static void transform_part(float *x, int dim) {
    switch (KVC_OWN_SIZES || dim == 8 ? dim : 0) {
    case 0: kvc_transform(x, dim); break;
    case 8: kvc_eight_steps(x); break;
    case 16: kvc_transform(x, 16); break;
    case 32: kvc_transform(x, 32); break;
    case 64: kvc_transform(x, 64); break;
    case 128: kvc_transform(x, 128); break;
    case 256: kvc_transform(x, 256); break;
    default: kvc_transform(x, 512); break;
    }
}

/* Transforms parts of a row in place, unscaled. A part has 8 to 512 channels, a power of two. */
void KVC_UNFUSED(hadamard)(float *x, int dim, int part) {
    for (int d = 0; d < dim; d += part) transform_part(x + d, part);
}

static void dequantise_row(int dim, const unsigned char *codes, uint16_t scale, uint16_t minimum, float *x) {
    const float s = kvc_float_of_half(scale), m = kvc_float_of_half(minimum);
    for (int d = 0; d < dim; d++) x[d] = m + s * (float)codes[d]; /* the product has 19 bits: exact */
}

/* The switch makes bits and side constants, and so all shifts and divisions. */
static void put_codes(kvc_rows rows, const unsigned char *codes, int t, unsigned char *packed) {
#define PUT(symbol, name, constant_bits, ...)                                   \
    case constant_bits:                                                         \
        rows.bits = constant_bits;                                              \
        if (rows.side == KVC_KEYS)                                              \
            rows.side = KVC_KEYS, kvc_put_tile_codes(rows, codes, t, packed);   \
        else                                                                    \
            rows.side = KVC_VALUES, kvc_put_tile_codes(rows, codes, t, packed); \
        break;
    switch (rows.bits) { KVC_QUANTISED_FORMATS(PUT) }
#undef PUT
}

static void get_codes(kvc_rows rows, const unsigned char *packed, int t, unsigned char *codes) {
#define GET(symbol, name, constant_bits, ...)                                   \
    case constant_bits:                                                         \
        rows.bits = constant_bits;                                              \
        if (rows.side == KVC_KEYS)                                              \
            rows.side = KVC_KEYS, kvc_get_tile_codes(rows, packed, t, codes);   \
        else                                                                    \
            rows.side = KVC_VALUES, kvc_get_tile_codes(rows, packed, t, codes); \
        break;
    switch (rows.bits) { KVC_QUANTISED_FORMATS(GET) }
#undef GET
}

/* Prefetches a tile that is written after its rows are coded. */
static void fetch_tile(kvc_rows rows, const unsigned char *tile) {
    for (size_t b = 0; b < kvc_tile_bytes(rows); b += KVC_UNIT) __builtin_prefetch(tile + b, 1, 2);
}

enum { FEW_TOKENS = 3 }; /* up to this many tokens of a tile are written one by one; a tile takes as long as 16 */

/* Writes tokens [first, first + count) of one tile; next points to the rows of the next tile. */
static void write_tile(kvc_rows rows, unsigned char *tile, int first, int count, const float *x,
                       size_t row_stride, const float *next, const kvc_head_keys *known) {
    unsigned char units[KVC_MAX_HEAD_DIM * KVC_TILE], *packed = tile + KVC_TILE_HEADER;
    kvc_source each[KVC_TILE];
    kvc_coded coded;
    fetch_tile(rows, tile);
    for (int t = 0; t < count; t++) each[t] = (kvc_source){x + (size_t)t * row_stride, known};
    kvc_code_rows(rows, each, next - x, count, &coded);
    memcpy(tile + 2 * first, coded.scales, 2 * (size_t)count);
    memcpy(tile + 2 * (KVC_TILE + first), coded.minima, 2 * (size_t)count);
    if (count == KVC_TILE) {
        kvc_units_of_codes(rows.side, rows.dim, coded.codes, units);
    } else { /* keep the codes of the other tokens */
        kvc_unpack_units(rows.bits, rows.dim, packed, units);
        for (int t = 0; t < count; t++)
            kvc_codes_into_units(rows.side, rows.dim, coded.codes, t, first + t, units);
    }
    kvc_pack_units(rows.bits, rows.dim, units, packed);
}

/* Up to 16 rows that are coded together but written to separate tiles or slots: single tokens of several heads and
 * sequences fill the lanes as well as 16 tokens of one head. Keys and values of one format and
 * length share the queue. */
typedef struct row_queue {
    int count;
    kvc_rows rows; /* of all rows; its side is not used */
    kvc_source x[KVC_TILE];
    unsigned char *to[KVC_TILE]; /* the tile, or the row itself */
    kvc_side side[KVC_TILE];
    int token[KVC_TILE]; /* index in the tile */
} row_queue;

static void write_queue(row_queue *queue) {
    kvc_coded coded;
    unsigned char codes[KVC_MAX_HEAD_DIM], units[KVC_MAX_HEAD_DIM * KVC_TILE];
    kvc_rows rows = queue->rows;
    kvc_code_rows(rows, queue->x, KVC_TILE * rows.dim, queue->count, &coded);
    kvc_units_of_codes(KVC_KEYS, rows.dim, coded.codes, units); /* the order of K has the codes of a row in fours */
    for (int i = 0; i < queue->count; i++) {
        unsigned char *to = queue->to[i];
        uint16_t *scales = (uint16_t *)to, *minima = scales + KVC_TILE;
        kvc_codes_of_units(KVC_KEYS, rows.dim, units, i, codes);
        if (rows.tiled) {
            const int t = queue->token[i];
            scales[t] = coded.scales[i], minima[t] = coded.minima[i];
            rows.side = queue->side[i];
            put_codes(rows, codes, t, to + KVC_TILE_HEADER);
        } else {
            const uint16_t header[2] = {coded.scales[i], coded.minima[i]};
            memcpy(to, header, sizeof header);
            kvc_pack_row(rows.bits, rows.dim, codes, to + sizeof header);
        }
    }
    queue->count = 0;
}

static void enqueue(kvc_rows rows, row_queue *queue, kvc_source x, unsigned char *to, int token) {
    if (queue->count) { /* queue->rows of an empty queue is not set */
        const int other = rows.format != queue->rows.format || rows.dim != queue->rows.dim ||
                          rows.rotated != queue->rows.rotated;
        if (other || queue->count == KVC_TILE) write_queue(queue);
    }
    const int i = queue->count++;
    if (rows.tiled) fetch_tile(rows, to);
    queue->rows = rows;
    queue->x[i] = x, queue->to[i] = to, queue->side[i] = rows.side, queue->token[i] = token;
}

static void read_tile(kvc_rows rows, const unsigned char *tile, int first, int count, float *x,
                      size_t row_stride) {
    unsigned char units[KVC_MAX_HEAD_DIM * KVC_TILE], codes[KVC_MAX_HEAD_DIM];
    const uint16_t *scales = (const uint16_t *)tile, *minima = scales + KVC_TILE;
    const int few = count <= 2;
    if (!few) kvc_unpack_units(rows.bits, rows.dim, tile + KVC_TILE_HEADER, units);
    for (int t = first; t < first + count; t++, x += row_stride) {
        if (few)
            get_codes(rows, tile + KVC_TILE_HEADER, t, codes);
        else
            kvc_codes_of_units(rows.side, rows.dim, units, t, codes);
        dequantise_row(rows.dim, codes, scales[t], minima[t], x);
    }
}

static void read_row(kvc_rows rows, const unsigned char *row, float *x) {
    unsigned char codes[KVC_MAX_HEAD_DIM];
    uint16_t header[2];
    memcpy(header, row, sizeof header);
    kvc_unpack_row(rows.bits, rows.dim, row + sizeof header, codes);
    dequantise_row(rows.dim, codes, header[0], header[1], x);
}

/* The number of tokens from slot to the end of its tile, at most count. */
static int in_tile(int slot, int count) {
    const int rest = KVC_TILE - slot % KVC_TILE;
    return rest < count ? rest : count;
}

/* Writes one side of all runs; the last rows may remain in the queue. */
static void quantise_side(const kvc_layout *layout, kvc_side side, unsigned char *arena, const kvc_run *runs,
                          int64_t num_runs, kvc_float_rows of, const kvc_head_keys *known, row_queue *queue) {
    const kvc_rows rows = kvc_rows_of(layout, side);
    const size_t heads = (size_t)layout->num_heads, dim = (size_t)rows.dim, row_stride = (size_t)of.stride;
    const size_t head_bytes = side == KVC_KEYS ? layout->key_head_bytes : layout->value_head_bytes;
    unsigned char *first_head = arena + (side == KVC_KEYS ? 0 : kvc_values_at(layout));
    const float *x = of.data;
    for (int64_t i = 0; i < num_runs; i++) {
        unsigned char *head = first_head + (size_t)runs[i].block * layout->block_bytes;
        const int stop = runs[i].stop;
        for (size_t h = 0; h < heads; h++, head += head_bytes) {
            const float *row = x + h * dim, *next;
            for (int slot = runs[i].first, n; slot < stop; slot += n, row = next) {
                n = rows.tiled ? in_tile(slot, stop - slot) : 1;
                next = row + (size_t)n * row_stride;
                unsigned char *to = head + (rows.tiled ? (size_t)(slot / KVC_TILE) * kvc_tile_bytes(rows)
                                                       : (size_t)slot * kvc_row_bytes(rows));
                if (n > FEW_TOKENS) {
                    const float *head_after = h + 1 < heads ? x + (h + 1) * dim : next - h * dim;
                    write_tile(rows, to, slot % KVC_TILE, n, row, row_stride,
                               slot + n < stop ? next : head_after, known ? known + h : NULL);
                } else {
                    for (int t = 0; t < n; t++)
                        enqueue(rows, queue, (kvc_source){row + (size_t)t * row_stride, known ? known + h : NULL}, to,
                                slot % KVC_TILE + t);
                }
            }
        }
        x += (size_t)(stop - runs[i].first) * row_stride;
    }
}

void KVC_UNFUSED(quantise_runs)(const kvc_layout *layout, unsigned char *arena, const kvc_run *runs,
                           int64_t num_runs, kvc_float_rows keys, kvc_float_rows values, const kvc_head_keys *known) {
    row_queue queue;
    queue.count = 0;
    if (keys.data) quantise_side(layout, KVC_KEYS, arena, runs, num_runs, keys, known, &queue);
    if (values.data) quantise_side(layout, KVC_VALUES, arena, runs, num_runs, values, NULL, &queue);
    if (queue.count) write_queue(&queue);
}

void KVC_UNFUSED(dequantise_head)(kvc_rows rows, const unsigned char *head, int slot, int count, float *x,
                             size_t row_stride) {
    for (int n; count > 0; count -= n, slot += n, x += (size_t)n * row_stride) {
        n = rows.tiled ? in_tile(slot, count) : 1;
        if (rows.tiled) {
            const unsigned char *tile = head + (size_t)(slot / KVC_TILE) * kvc_tile_bytes(rows);
            read_tile(rows, tile, slot % KVC_TILE, n, x, row_stride);
        } else {
            read_row(rows, head + (size_t)slot * kvc_row_bytes(rows), x);
        }
    }
}
