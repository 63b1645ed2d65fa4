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
 * channels of it (floats), while these are in the first level or the second. f16 and bf16 are converted once for the chunk, and so are
 * weights of other formats that become bf16.
 */
#include "kvc_bf16_weights.h"

INLINE f32v load_weights(kvc_matrix_format format, const unsigned char *p, int64_t at) {
    if (format == KVC_MATRIX_F32) return f32v_load((const float *)p + at);
    if (format == KVC_MATRIX_F16) return f32v_load_half((const uint16_t *)p + at);
    return f32v_load_bf16((const uint16_t *)p + at);
}

/* Channels [first, stop) of `weights`, of which x has the prepared rows. */
INLINE void float_block(const block *weights, kvc_matrix_format format, int rows, int panels, int64_t first, int64_t stop,
                        const float *x, tile *t) {
    const int size = format == KVC_MATRIX_F32 ? 4 : 2;
    /* One row meets each panel by itself where the weights of all would not fit the registers beside its sums. */
    const int at_once = rows == 1 && 2 * panels * KVC_VECTORS > KVC_FLOAT_SUMS ? 1 : panels;
    const unsigned char *data[4];
    f32x16 sums[24];
    UNROLL
    for (int p = 0; p < panels; p++) data[p] = panel_of(weights, p, t);
    UNROLL
    for (int i = 0; i < rows * panels; i++) {
        UNROLL
        for (int v = 0; v < KVC_VECTORS; v++) sums[i].v[v] = f32v_zero();
    }
    for (int64_t k = first; k < stop; k++, x += rows) {
        if (t->cold && k % (64 / (KVC_PANEL * size)) == 0) {
            UNROLL
            for (int p = 0; p < panels; p++) fetch(t, rows, data[p], (size_t)(k * KVC_PANEL * size));
        }
        UNROLL
        for (int q = 0; q < panels; q += at_once) {
            f32v w[4][KVC_VECTORS];
            UNROLL
            for (int p = q; p < q + at_once; p++) {
                UNROLL
                for (int v = 0; v < KVC_VECTORS; v++) w[p][v] = load_weights(format, data[p], k * KVC_PANEL + v * KVC_LANES);
            }
            UNROLL
            for (int i = 0; i < rows; i++) {
                const f32v value = f32v_set1(x[i]);
                UNROLL
                for (int p = q; p < q + at_once; p++) {
                    UNROLL
                    for (int v = 0; v < KVC_VECTORS; v++)
                        sums[i * panels + p].v[v] = f32v_fma(w[p][v], value, sums[i * panels + p].v[v]);
                }
            }
        }
    }
    keep(t, rows, panels, sums);
}

/* Panels of a tile of `rows` rows: their sums, two vectors of weights at least and a broadcast fit the registers. */
#define PANELS(rows) ((rows) * 4 * KVC_VECTORS <= KVC_FLOAT_SUMS ? 4 : (rows) * 2 * KVC_VECTORS <= KVC_FLOAT_SUMS ? 2 : 1)

#define FLOAT(format, unused, rows)                                                                          \
    NOINLINE void float_##format##_##rows(const block *weights, const void *x, tile *t) {                    \
        for (int64_t k = 0, stop; (stop = begin_block(weights, k, t)) > k; k = stop)                         \
            float_block(weights, KVC_MATRIX_##format, rows, PANELS(rows), k, stop, (const float *)x + k * rows, t); \
    }
#if KVC_FLOAT_ROWS == 12
#define FLOAT_BLOCKS(X, format)                                                                     \
    X(format, , 1) X(format, , 2) X(format, , 3) X(format, , 4) X(format, , 5) X(format, , 6) X(format, , 7) \
    X(format, , 8) X(format, , 9) X(format, , 10) X(format, , 11) X(format, , 12)
#elif KVC_FLOAT_ROWS == 6
#define FLOAT_BLOCKS(X, format) X(format, , 1) X(format, , 2) X(format, , 3) X(format, , 4) X(format, , 5) X(format, , 6)
#else
#define FLOAT_BLOCKS(X, format) X(format, , 1) X(format, , 2)
#endif
FLOAT_BLOCKS(FLOAT, F32) FLOAT_BLOCKS(FLOAT, F16) FLOAT_BLOCKS(FLOAT, BF16)

#define FLOAT_LINE(format, unused, rows) [rows] = float_##format##_##rows,
static float_fn *const float_tiles[3][KVC_FLOAT_ROWS + 1] = {
    {FLOAT_BLOCKS(FLOAT_LINE, F32)}, {FLOAT_BLOCKS(FLOAT_LINE, F16)}, {FLOAT_BLOCKS(FLOAT_LINE, BF16)}};

/* ---- Pairs of bf16, on CPUs that have them: as floats, two channels at a time. */

#if KVC_BF16_TARGET
INLINE __attribute__((target(KVC_BF16_FEATURE))) void pair_block(const block *weights, int rows, int panels, int64_t first,
                                                                 int64_t stop, const uint32_t *x, tile *t) {
    const unsigned char *data[4];
    f32x16 sums[24]; /* of one vector */
    UNROLL
    for (int p = 0; p < panels; p++) data[p] = panel_of(weights, p, t);
    UNROLL
    for (int i = 0; i < rows * panels; i++) sums[i].v[0] = f32v_zero();
    for (int64_t k = first; k < stop; k += 2, x += rows) {
        bf16x2 w[4];
        UNROLL
        for (int p = 0; p < panels; p++) {
            const uint16_t *words = (const uint16_t *)data[p] + k * KVC_PANEL;
            if (t->cold) fetch(t, rows, data[p], (size_t)(2 * k * KVC_PANEL));
            w[p] = k + 1 < stop ? bf16x2_load(words) : bf16x2_load_one(words);
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
    NOINLINE __attribute__((target(KVC_BF16_FEATURE))) void pairs_##rows(const block *weights, const void *x,       \
                                                                         tile *t) {                                 \
        for (int64_t k = 0, stop; (stop = begin_block(weights, k, t)) > k; k = stop)                                \
            pair_block(weights, rows, PANELS(rows), k, stop, (const uint32_t *)x + k / 2 * rows, t);                \
    }
FLOAT_BLOCKS(PAIRS, )
#define PAIRS_LINE(unused, also, rows) [rows] = pairs_##rows,
static float_fn *const pair_tiles[KVC_FLOAT_ROWS + 1] = {FLOAT_BLOCKS(PAIRS_LINE, )};
#else
static float_fn *const *const pair_tiles = NULL;
#endif

/* ---- Blocks of channels. */

static int rows_of(int64_t left) { return kvc_block_rows(KVC_FLOAT_ROWS, left); }
static int64_t panels_of(int rows) { return PANELS(rows); }

INLINE void widen_panels(kvc_matrix_format format, block weights, int64_t panels, size_t ahead, float *to) {
    const int64_t count = weights.channels * KVC_PANEL;
    for (int64_t p = 0; p < panels; p++, to += count) {
        const unsigned char *from = weights.data + (size_t)p * weights.stride;
        for (int64_t at = 0; at < count; at += KVC_PANEL) { /* half a line */
            __builtin_prefetch(from + ahead + 2 * at, 0, 2);
            UNROLL
            for (int v = 0; v < KVC_PANEL; v += KVC_LANES) f32v_store(to + at + v, load_weights(format, from, at + v));
        }
    }
}

/* Panels of 16 bits as floats, in `to`: many rows convert them once, not in each tile. */
static block widened(kvc_matrix_format format, block weights, int64_t panels, size_t ahead, float *to) {
    const size_t stride = (size_t)(weights.channels * KVC_PANEL) * sizeof(float);
    if (format == KVC_MATRIX_F16) widen_panels(KVC_MATRIX_F16, weights, panels, ahead, to);
    if (format == KVC_MATRIX_BF16) widen_panels(KVC_MATRIX_BF16, weights, panels, ahead, to);
    return (block){(const unsigned char *)to, stride, weights.channels};
}

INLINE void put_rounded(const float *group, void *to) {
    float *floats = to;
    for (int i = 0; i < GROUP_WEIGHTS; i++) floats[i] = kvc_float_of_bits((uint32_t)kvc_bf16_of_float(group[i]) << 16);
}

/* Panels as bf16: in floats, or in words. */
static block as_floats(kvc_matrix_format format, block weights, int64_t panels, size_t ahead, float *to) {
    return rounded_panels(format, weights, panels, ahead, sizeof(float), put_rounded, to);
}
static block as_words(kvc_matrix_format format, block weights, int64_t panels, size_t ahead, float *to) {
    return rounded_panels(format, weights, panels, ahead, sizeof(uint16_t), put_words, to);
}

/* The results of panels [panel, panel_stop) for all rows. */
void KVC_OWN(multiply_floats)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    const int words = kvc_word_channels(args), rounds = kvc_rounds(args), widens = kvc_widens(args);
    const meeting how = {
        .tiles = words ? pair_tiles : float_tiles[rounds || widens ? KVC_MATRIX_F32 : args->matrix->format],
        .rows = rows_of, .panels = panels_of, .changed = rounds ? words ? as_words : as_floats : widens ? widened : NULL,
        .channels = words ? words : 1, .bytes = words ? sizeof(uint16_t) : sizeof(float),
    };
    multiply_blocks(args, &how, KVC_FLOAT_ROWS, panel, panel_stop, scratch);
}
