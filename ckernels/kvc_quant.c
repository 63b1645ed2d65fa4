/* kvc_quant.c - float rows to codes and back.
 *
 *   minimum = f16(lowest)      scale = f16((highest - minimum) / top), the next half where that is too small
 *   code    = round((x - minimum) / scale), half to even, within 0 .. top = 2^bits - 1
 *
 * In fitted formats (kvc_formats.h), the minimum and scale of kvc_fit.h instead, where the row's squared error is smaller with them.
 *
 * All levels store the same bytes, a row those that it has alone: the arithmetic is plain float32, never fused, in one
 * order, or exact. Writing takes up to 36 KiB of the stack: 16 rows as floats, as whole numbers and as codes.
 *
 * Error of a row, in what is stored (under rotation: of the rotated row), with ulp16 the spacing of halves:
 *
 *   |read - x| <= max(scale / 2, ulp16(lowest) / 2) + 2^-23 * largest     from lowest to highest
 *   scale      <= range / top * (1 + 2^-10) + 2^-24                       range = highest - minimum
 *
 * and with the fit no larger in the root of the mean square, up to a 64th of a step (kvc_fit.h), so that no single
 * value errs more than sqrt(head_dim) times that. A constant row comes back as f16(x). Rows within +-65504 never
 * overflow: the range, at most 131008, is divided by at least 3.
 *
 * ROTATION: a row is stored as H x / head_dim and read as H y, with H the Hadamard matrix of +-1 (H H =
 * head_dim), so no value grows and the scaling, by a power of two, is exact. Reading multiplies the error by
 * sqrt(head_dim) in the mean and head_dim at worst, but rotating divides the range of a typical row by
 * sqrt(head_dim), and that of a row with outliers by more.
 */
#include "kvc_kernels.h"
#include "kvc_lanes.h"

/* Of a row in place, unscaled; dim a power of two, 8 to 256. */
void KVC_FN(hadamard)(float *x, int dim) {
    switch (dim) {
    case 8: kvc_eight_steps(x); break;
    case 16: kvc_transform(x, 16); break;
    case 32: kvc_transform(x, 32); break;
    case 64: kvc_transform(x, 64); break;
    case 128: kvc_transform(x, 128); break;
    default: kvc_transform(x, 256); break;
    }
}

static void dequantise_row(int dim, const unsigned char *codes, uint16_t scale, uint16_t minimum, float *x) {
    const float s = kvc_float_of_half(scale), m = kvc_float_of_half(minimum);
    for (int d = 0; d < dim; d++) x[d] = m + s * (float)codes[d]; /* the product has 19 bits: exact */
}

/* Through constants, so that shifts and divisions are. */
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

/* To be written once its rows are coded. */
static void fetch_tile(kvc_rows rows, const unsigned char *tile) {
    for (size_t b = 0; b < kvc_tile_bytes(rows); b += KVC_UNIT) __builtin_prefetch(tile + b, 1, 2);
}

enum { FEW_TOKENS = 3 }; /* of a tile, written one by one: a tile is 16 times the work of a token */

/* Tokens [first, first + count) of one tile; next are the rows of the next. */
static void write_tile(kvc_rows rows, unsigned char *tile, int first, int count, const float *x,
                       size_t row_stride, const float *next) {
    unsigned char units[KVC_MAX_HEAD_DIM * KVC_TILE], *packed = tile + KVC_TILE_HEADER;
    const float *each[KVC_TILE];
    kvc_coded coded;
    fetch_tile(rows, tile);
    for (int t = 0; t < count; t++) each[t] = x + (size_t)t * row_stride;
    kvc_code_rows(rows, each, next - x, count, &coded);
    memcpy(tile + 2 * first, coded.scales, 2 * (size_t)count);
    memcpy(tile + 2 * (KVC_TILE + first), coded.minima, 2 * (size_t)count);
    if (count == KVC_TILE) {
        kvc_units_of_codes(rows.side, rows.dim, coded.codes, units);
    } else { /* the codes of the other tokens stay */
        kvc_unpack_units(rows.bits, rows.dim, packed, units);
        for (int t = 0; t < count; t++)
            kvc_codes_into_units(rows.side, rows.dim, coded.codes, t, first + t, units);
    }
    kvc_pack_units(rows.bits, rows.dim, units, packed);
}

/* Rows on their way to tiles and slots of their own: a token of each of many heads and sequences fills the lanes as 16
 * tokens of one head do, and so do keys and values of one format. */
typedef struct row_queue {
    int count;
    kvc_rows rows; /* but for the side */
    const float *x[KVC_TILE];
    unsigned char *to[KVC_TILE]; /* the tile, or the row itself */
    kvc_side side[KVC_TILE];
    int token[KVC_TILE]; /* of the tile */
} row_queue;

static void write_queue(row_queue *queue) {
    kvc_coded coded;
    unsigned char codes[KVC_MAX_HEAD_DIM], units[KVC_MAX_HEAD_DIM * KVC_TILE];
    kvc_rows rows = queue->rows;
    kvc_code_rows(rows, queue->x, KVC_TILE * rows.dim, queue->count, &coded);
    kvc_units_of_codes(KVC_KEYS, rows.dim, coded.codes, units); /* in which the codes of a row lie in fours */
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

static void enqueue(kvc_rows rows, row_queue *queue, const float *x, unsigned char *to, int token) {
    if (queue->count) { /* else nothing says yet what its rows are */
        const int other = rows.format != queue->rows.format || rows.rotated != queue->rows.rotated;
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
    kvc_unpack_units(rows.bits, rows.dim, tile + KVC_TILE_HEADER, units);
    for (int t = first; t < first + count; t++, x += row_stride) {
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

/* Tokens of the tile that holds slot, from slot on, at most count. */
static int in_tile(int slot, int count) {
    const int rest = KVC_TILE - slot % KVC_TILE;
    return rest < count ? rest : count;
}

/* One side of all runs, except the rows that stay in the queue. */
static void quantise_side(const kvc_layout *layout, kvc_side side, unsigned char *arena, const kvc_run *runs,
                          int64_t num_runs, const float *x, row_queue *queue) {
    const kvc_rows rows = kvc_rows_of(layout, side);
    const size_t heads = (size_t)layout->num_heads, dim = (size_t)rows.dim, row_stride = heads * dim;
    const size_t head_bytes = side == KVC_KEYS ? layout->key_head_bytes : layout->value_head_bytes;
    unsigned char *first_head = arena + (side == KVC_KEYS ? 0 : heads * layout->key_head_bytes);
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
                               slot + n < stop ? next : head_after);
                } else {
                    for (int t = 0; t < n; t++)
                        enqueue(rows, queue, row + (size_t)t * row_stride, to, slot % KVC_TILE + t);
                }
            }
        }
        x += (size_t)(stop - runs[i].first) * row_stride;
    }
}

void KVC_FN(quantise_runs)(const kvc_layout *layout, unsigned char *arena, const kvc_run *runs,
                           int64_t num_runs, const float *keys, const float *values) {
    row_queue queue;
    queue.count = 0;
    if (keys) quantise_side(layout, KVC_KEYS, arena, runs, num_runs, keys, &queue);
    if (values) quantise_side(layout, KVC_VALUES, arena, runs, num_runs, values, &queue);
    if (queue.count) write_queue(&queue);
}

void KVC_FN(dequantise_head)(kvc_rows rows, const unsigned char *head, int slot, int count, float *x,
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
