/* kvc_matmul.c - prepared rows times panels of a matrix (kvc_matrix.h): those of floats.
 *
 * A tile multiplies a block of rows with one or two panels (packed, kvc_matmul_packed.c) or up to four (floats). All its sums are
 * in registers:
 *
 *                one 64-byte load        for each row of the block
 *     packed     a unit of codes         dots[row] += unit . 4 numbers of the row, broadcast
 *     floats     a channel of 16 rows    sums[row] += weights * the row's value, broadcast
 *
 * One row takes as long as its panel is read, many rows as long as they are multiplied. Many rows are divided into chunks. The
 * prepared bytes of a chunk stay in the second level of the cache. A chunk is multiplied with a panel (packed), or with 256
 * channels of it (floats), while these are in the first level or the second. f16 and bf16 are converted once for the chunk.
 */
#include "kvc_matmul_tile.h"

enum {
    /* Bytes of a panel from what is read to what is prefetched into the second level of the cache, up to four panels at a time,
     * measured. */
    WORDS_AHEAD_OF_FEW = 2048, /* of f16 and bf16, up to four rows */
    FLOATS_AHEAD = 4096,
    FEW_ROWS = 16, /* of floats: the speed of memory is the limit */
};

INLINE f32v load_weights(kvc_matrix_format format, const unsigned char *p, int64_t at) {
    if (format == KVC_MATRIX_F32) return f32v_load((const float *)p + at);
    if (format == KVC_MATRIX_F16) return f32v_load_half((const uint16_t *)p + at);
    return f32v_load_bf16((const uint16_t *)p + at);
}

/* Channels of `weights`, of which x has the prepared rows. */
INLINE void float_tile(const block *weights, kvc_matrix_format format, int rows, int panels, const float *x, tile *t) {
    const int size = format == KVC_MATRIX_F32 ? 4 : 2;
    const size_t ahead = size == 2 && rows <= 4 ? WORDS_AHEAD_OF_FEW : FLOATS_AHEAD;
    const int64_t channels = weights->channels;
    const unsigned char *data[4];
    sums16 sums[24];
    UNROLL
    for (int p = 0; p < panels; p++) data[p] = panel_of(weights, p, t);
    UNROLL
    for (int i = 0; i < rows * panels; i++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) sums[i].v[v] = f32v_zero();
    }
    for (int64_t k = 0; k < channels; k++, x += rows) {
        f32v w[4][VECTORS];
        UNROLL
        for (int p = 0; p < panels; p++) {
            if (t->cold && k % (64 / (KVC_PANEL * size)) == 0) {
                const size_t at = (size_t)(k * KVC_PANEL * size);
                prefetch(0, data[p] + at + ahead_of(t, at, ahead), 64);
            }
            UNROLL
            for (int v = 0; v < VECTORS; v++) w[p][v] = load_weights(format, data[p], k * KVC_PANEL + v * KVC_LANES);
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            const f32v value = f32v_set1(x[i]);
            UNROLL
            for (int p = 0; p < panels; p++) {
                UNROLL
                for (int v = 0; v < VECTORS; v++)
                    sums[i * panels + p].v[v] = f32v_fma(w[p][v], value, sums[i * panels + p].v[v]);
            }
        }
    }
    keep(t, rows, panels, sums);
}

/* Panels of a tile of so many rows: their sums, two vectors of weights at least and a broadcast fit the registers. */
#define PANELS(rows) ((rows) * 4 * VECTORS <= KVC_FLOAT_SUMS ? 4 : (rows) * 2 * VECTORS <= KVC_FLOAT_SUMS ? 2 : 1)

#define FLOAT(format, unused, rows)                                                        \
    NOINLINE void float_##format##_##rows(const block *weights, const float *x, tile *t) { \
        float_tile(weights, KVC_MATRIX_##format, rows, PANELS(rows), x, t);                \
    }
#if KVC_FLOAT_ROWS == 12
#define FLOAT_BLOCKS(X, format) \
    X(format, , 1) X(format, , 2) X(format, , 3) X(format, , 4) X(format, , 6) X(format, , 8) X(format, , 12)
#elif KVC_FLOAT_ROWS == 6
#define FLOAT_BLOCKS(X, format) X(format, , 1) X(format, , 2) X(format, , 3) X(format, , 4) X(format, , 6)
#else
#define FLOAT_BLOCKS(X, format) X(format, , 1) X(format, , 2)
#endif
FLOAT_BLOCKS(FLOAT, F32) FLOAT_BLOCKS(FLOAT, F16) FLOAT_BLOCKS(FLOAT, BF16)

typedef void float_fn(const block *weights, const float *x, tile *);
#define FLOAT_LINE(format, unused, rows) [rows] = float_##format##_##rows,
static float_fn *const float_tiles[3][KVC_FLOAT_ROWS + 1] = {
    {FLOAT_BLOCKS(FLOAT_LINE, F32)}, {FLOAT_BLOCKS(FLOAT_LINE, F16)}, {FLOAT_BLOCKS(FLOAT_LINE, BF16)}};

/* ---- Pairs of bf16, on CPUs that have them: as floats, two channels at a time. */

#if KVC_BF16_TARGET
INLINE __attribute__((target(KVC_BF16_FEATURE))) void pair_tile(const block *weights, int rows, int panels, const uint32_t *x,
                                                                tile *t) {
    const size_t ahead = rows <= 4 ? WORDS_AHEAD_OF_FEW : FLOATS_AHEAD;
    const int64_t channels = weights->channels;
    const unsigned char *data[4];
    sums16 sums[24]; /* of one vector */
    UNROLL
    for (int p = 0; p < panels; p++) data[p] = panel_of(weights, p, t);
    UNROLL
    for (int i = 0; i < rows * panels; i++) sums[i].v[0] = f32v_zero();
    for (int64_t k = 0; k < channels; k += 2, x += rows) {
        bf16x2 w[4];
        UNROLL
        for (int p = 0; p < panels; p++) {
            const uint16_t *words = (const uint16_t *)data[p] + k * KVC_PANEL;
            if (t->cold)
                prefetch(0, (const unsigned char *)words + ahead_of(t, (size_t)(2 * k * KVC_PANEL), ahead), 64);
            w[p] = k + 1 < channels ? bf16x2_load(words) : bf16x2_load_one(words);
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            const bf16x2 pair = bf16x2_set1(x[i]);
            UNROLL
            for (int p = 0; p < panels; p++) sums[i * panels + p].v[0] = bf16x2_dot(sums[i * panels + p].v[0], w[p], pair);
        }
    }
    keep(t, rows, panels, sums);
}

#define PAIRS(unused, also, rows)                                                                                   \
    NOINLINE __attribute__((target(KVC_BF16_FEATURE))) void pairs_##rows(const block *weights, const float *x,      \
                                                                         tile *t) {                                 \
        pair_tile(weights, rows, PANELS(rows), (const uint32_t *)(const void *)x, t);                               \
    }
FLOAT_BLOCKS(PAIRS, )
#define PAIRS_LINE(unused, also, rows) [rows] = pairs_##rows,
static float_fn *const pair_tiles[KVC_FLOAT_ROWS + 1] = {FLOAT_BLOCKS(PAIRS_LINE, )};
#else
static float_fn *const *const pair_tiles = NULL;
#endif

/* ---- Blocks of channels. */

INLINE size_t channel_bytes(const kvc_matrix *matrix, int64_t channels) {
    return (size_t)(channels * KVC_PANEL * kvc_matrix_format_of(matrix->format)->bits / 8);
}

/* Of panels from `panel` on, the channels from k on that are multiplied together. */
INLINE block block_at(const kvc_matrix *matrix, int64_t panel, int64_t k) {
    const int64_t left = matrix->columns - k;
    return (block){matrix->data + (size_t)panel * matrix->panel_bytes + channel_bytes(matrix, k), matrix->panel_bytes,
                   left < KVC_CHANNEL_BLOCK ? left : KVC_CHANNEL_BLOCK};
}

INLINE void widen_panels(kvc_matrix_format format, block weights, int64_t panels, float *to) {
    const int64_t count = weights.channels * KVC_PANEL;
    for (int64_t p = 0; p < panels; p++, to += count) {
        const unsigned char *from = weights.data + (size_t)p * weights.stride;
        for (int64_t at = 0; at < count; at += KVC_PANEL) { /* half a line */
            __builtin_prefetch(from + (size_t)panels * weights.stride + 2 * at, 0, 2);
            UNROLL
            for (int v = 0; v < KVC_PANEL; v += KVC_LANES) f32v_store(to + at + v, load_weights(format, from, at + v));
        }
    }
}

/* Panels of 16 bits as floats, in `to`: many rows convert them once, not in each tile. */
static block widened(kvc_matrix_format format, block weights, int64_t panels, float *to) {
    const size_t stride = (size_t)(weights.channels * KVC_PANEL) * sizeof(float);
    if (format == KVC_MATRIX_F16) widen_panels(KVC_MATRIX_F16, weights, panels, to);
    if (format == KVC_MATRIX_BF16) widen_panels(KVC_MATRIX_BF16, weights, panels, to);
    return (block){(const unsigned char *)to, stride, weights.channels};
}

/* Panels [panel, panel_stop) times rows [start, stop), over the block of channels from k on. `sums`: of these panels and rows,
 * tile by tile, over the blocks before. */
INLINE void multiply_block(const kvc_matmul_args *args, int64_t start, int64_t stop, int64_t panel, int64_t panel_stop,
                           int64_t k, float *sums, float *floats) {
    const kvc_matrix *matrix = args->matrix;
    const block stored = block_at(matrix, panel, k);
    const int64_t channels = stored.channels, left = matrix->columns - k;
    const int pairs = kvc_in_pairs(args), widens = kvc_widens(args);
    const size_t read_stop = channel_bytes(matrix, args->n > FEW_ROWS ? channels : left);
    const block weights = widens ? widened(matrix->format, stored, panel_stop - panel, floats) : stored;
    float_fn *const *tiles = pairs ? pair_tiles : float_tiles[widens ? KVC_MATRIX_F32 : matrix->format];
    const float *x = (const float *)args->prepared + (pairs ? k / 2 : k) * args->n;
    for (int64_t row = start; row < stop;) {
        const int rows = kvc_block_rows(KVC_FLOAT_ROWS, stop - row);
        const float *mine = x + row * (pairs ? (channels + 1) / 2 : channels);
        const int64_t step = PANELS(rows);
        for (int64_t q = panel; q < panel_stop; q += step, sums += rows * step * KVC_PANEL) {
            const block here = {weights.data + (size_t)(q - panel) * weights.stride, weights.stride, channels};
            tile t;
            begin(&t, args, row, rows, q, step, panel_stop, row == start && !widens, k > 0 ? sums : NULL,
                  channels < left ? sums : NULL);
            t.read_stop = read_stop, t.skipped = (size_t)step * matrix->panel_bytes - read_stop;
            tiles[rows](&here, mine, &t);
            give(args, &t);
        }
        row += rows;
    }
}

/* Few rows read four panels from begin to end, at the speed of memory. Many rows go in chunks. A chunk is multiplied with
 * one group of panels after another, and with each group block by block of channels. Meanwhile the second level of the
 * cache keeps the chunk's prepared rows of this block and its sums of the group, the first keeps `wide` panels of it. */
static void multiply_floats(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    const int64_t wide = args->n <= FEW_ROWS ? 4 : PANELS(KVC_FLOAT_ROWS);
    const int64_t group = args->n <= FEW_ROWS ? 4 : KVC_GROUP_PANELS;
    float *sums = scratch + (kvc_widens(args) ? KVC_WIDE_FLOATS : 0);
    for (int64_t start = 0; start < args->n; start += KVC_CHUNK_ROWS) {
        const int64_t stop = start + KVC_CHUNK_ROWS < args->n ? start + KVC_CHUNK_ROWS : args->n;
        for (int64_t first = panel; first < panel_stop; first += group) {
            const int64_t last = first + group < panel_stop ? first + group : panel_stop;
            for (int64_t k = 0; k < args->matrix->columns; k += KVC_CHANNEL_BLOCK) {
                for (int64_t p = first; p < last; p += wide)
                    multiply_block(args, start, stop, p, p + wide < last ? p + wide : last, k,
                                   sums + (p - first) * (stop - start + KVC_SPARE_ROWS) * KVC_PANEL, scratch);
            }
        }
    }
}

/* The results of panels [panel, panel_stop) for all rows. */
void KVC_OWN(multiply_panels)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    if (kvc_matrix_format_of(args->matrix->format)->packed)
        KVC_FN(multiply_packed)(args, 0, panel, panel_stop);
    else
        multiply_floats(args, panel, panel_stop, scratch);
}
