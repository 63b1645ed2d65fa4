/* kvc_matmul_bf16.c - rows rounded to bf16 times panels of bf16 by instructions that multiply matrices (kvc_matrix.h): the tiles of
 * amx, blocks of 16 rows times four panels, or the quads of i8mm, 2 rows x 4 channels times 2 outputs x 4 channels.
 *
 * A panel has the words of a channel side by side, the instructions want the channels of an output so. A block of channels is
 * brought into that order once for all rows of a chunk, in the first level of the cache. Sums of a block start from zero, and the
 * blocks are added as those of floats are.
 *
 *     tiles    C (rows x 16 outputs) += A (rows x 32 channels) times B (16 pairs of channels x 16 outputs): four C at a time,
 *              since one takes 50 cycles and another begins every 16
 *     quads    sums of 2 rows x 2 outputs in a vector: 24 of them, and each vector of weights meets up to 3 pairs of rows
 */
#include "kvc_matmul_blocks.h"

enum { CHANNELS = KVC_TILES ? KVC_TILE_CHANNELS : KVC_BF16_SIDE }; /* of a row, side by side */

/* Panels in the order of the instructions, in `to`; zeros behind their last channel, up to CHANNELS. */
static block ordered(kvc_matrix_format format, block weights, int64_t panels, size_t ahead, float *to) {
    enum { WORDS = KVC_BF16_SIDE * KVC_PANEL };
    const int64_t filled = (weights.channels + CHANNELS - 1) / CHANNELS * CHANNELS * KVC_PANEL;
    const int64_t existing = weights.channels * KVC_PANEL, whole = existing / WORDS * WORDS;
    uint16_t *words = (uint16_t *)(void *)to;
    (void)format;
    for (int64_t p = 0; p < panels; p++, words += filled) {
        const uint16_t *from = (const uint16_t *)(const void *)(weights.data + (size_t)p * weights.stride);
        for (int64_t at = 0; at < whole; at += WORDS) {
            prefetch(0, (const unsigned char *)(from + at) + ahead, WORDS * sizeof *from);
            put_side(words + at, from + at);
        }
        if (whole == filled) continue;
        uint16_t last[WORDS] = {0};
        memcpy(last, from + whole, (size_t)(existing - whole) * sizeof *from);
        memset(words + whole, 0, (size_t)(filled - whole) * sizeof *words);
        if (whole < existing) put_side(words + whole, last);
    }
    return (block){(const unsigned char *)to, (size_t)filled * sizeof *words, weights.channels};
}

#if KVC_TILES
enum { MOST_ROWS = KVC_TILED_ROWS, PANELS = 4 };

static void tile_of_16(const block *weights, const void *x, tile *t) {
    const size_t step = sizeof(uint16_t) * KVC_TILE_CHANNELS; /* bytes of a row, and of 16 pairs times 16 outputs / 16 */
    const unsigned char *numbers = x, *words[PANELS];
    const size_t rows = (size_t)t->block_rows;
    f32x16 sums[KVC_TILED_ROWS][PANELS];
    for (int p = 0; p < PANELS; p++) words[p] = panel_of(weights, p, t);
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int64_t k = 0; k < weights->channels; k += KVC_TILE_CHANNELS, numbers += rows * step) {
        const size_t at = (size_t)k * KVC_PANEL * sizeof(uint16_t);
        amx_load(4, numbers, step);
        amx_load(5, words[0] + at, KVC_UNIT_BYTES);
        amx_dot_bf16(0, 4, 5);
        amx_load(6, words[1] + at, KVC_UNIT_BYTES);
        amx_dot_bf16(1, 4, 6);
        amx_load(7, words[2] + at, KVC_UNIT_BYTES);
        amx_dot_bf16(2, 4, 7);
        amx_load(5, words[3] + at, KVC_UNIT_BYTES);
        amx_dot_bf16(3, 4, 5);
    }
    amx_store(0, &sums[0][0], sizeof sums[0]);
    amx_store(1, &sums[0][1], sizeof sums[0]);
    amx_store(2, &sums[0][2], sizeof sums[0]);
    amx_store(3, &sums[0][3], sizeof sums[0]);
    for (int i = 0; i < t->rows; i++) keep_row(t, i, PANELS, sums[i]);
}

#define FOUR tile_of_16, tile_of_16, tile_of_16, tile_of_16
static float_fn *const tiles[MOST_ROWS + 1] = {NULL, FOUR, FOUR, FOUR, FOUR};
static int rows_of(int64_t left) { return left < MOST_ROWS ? (int)left : MOST_ROWS; }
static int64_t panels_of(int rows) { return (void)rows, PANELS; }

/* Sums in tiles 0 to 3, numbers of rows in 4, words in the others. */
static void configure(int rows) {
    _Alignas(64) amx_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) shapes.rows[t] = (uint8_t)(t < 5 ? rows : 16), shapes.bytes[t] = 64;
    amx_configure(&shapes);
}
static void release(void) { amx_release(); }
#else
enum { MOST_ROWS = KVC_FLOAT_ROWS, OF_PANEL = KVC_PANEL / 2 };

/* Rows and panels are constants. */
INLINE void quad_tile(const block *weights, int rows, int panels, const uint16_t *x, tile *t) {
    const int pairs = (rows + 1) / 2;
    const uint16_t *words[2];
    f32x2x2 both[KVC_FLOAT_SUMS];
    f32x16 sums[2 * KVC_FLOAT_ROWS];
    UNROLL
    for (int p = 0; p < panels; p++) words[p] = (const uint16_t *)(const void *)panel_of(weights, p, t);
    UNROLL
    for (int i = 0; i < pairs * panels * OF_PANEL; i++) both[i] = f32v_zero();
    for (int64_t k = 0; k < weights->channels; k += CHANNELS, x += rows * CHANNELS) {
        bf16x4x2 numbers[KVC_FLOAT_ROWS / 2];
        UNROLL
        for (int i = 0; i < pairs; i++)
            numbers[i] = 2 * i + 1 < rows ? bf16x4x2_load(x + 2 * i * CHANNELS) : bf16x4x2_load_one(x + 2 * i * CHANNELS);
        UNROLL
        for (int p = 0; p < panels; p++) {
            UNROLL
            for (int v = 0; v < OF_PANEL; v++) {
                const bf16x4x2 w = bf16x4x2_load(words[p] + k * KVC_PANEL + 2 * v * CHANNELS);
                UNROLL
                for (int i = 0; i < pairs; i++) {
                    f32x2x2 *sum = &both[(i * panels + p) * OF_PANEL + v];
                    *sum = f32x2x2_dot(*sum, numbers[i], w);
                }
            }
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int p = 0; p < panels; p++) {
            const f32x2x2 *from = both + (i / 2 * panels + p) * OF_PANEL;
            UNROLL
            for (int v = 0; v < VECTORS; v++) sums[i * panels + p].v[v] = f32v_of_row(i % 2, from[2 * v], from[2 * v + 1]);
        }
    }
    keep(t, rows, panels, sums);
}

static int rows_of(int64_t left) { return kvc_block_rows(MOST_ROWS, left); }
static int64_t panels_of(int rows) { return rows <= 2 ? 2 : 1; }

#define QUADS(rows) \
    NOINLINE void quads_##rows(const block *weights, const void *x, tile *t) { quad_tile(weights, rows, rows <= 2 ? 2 : 1, x, t); }
QUADS(1) QUADS(2) QUADS(3) QUADS(4) QUADS(5) QUADS(6)
static float_fn *const tiles[MOST_ROWS + 1] = {NULL, quads_1, quads_2, quads_3, quads_4, quads_5, quads_6};

static void configure(int rows) { (void)rows; }
static void release(void) {}
#endif

/* The results of panels [panel, panel_stop) for all rows. */
void KVC_OWN(multiply_bf16)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    const meeting how = {.tiles = tiles, .rows = rows_of, .panels = panels_of, .changed = ordered,
                         .channels = CHANNELS, .bytes = sizeof(uint16_t)};
    configure(rows_of(args->n));
    multiply_blocks(args, &how, MOST_ROWS, panel, panel_stop, scratch);
    release();
}
