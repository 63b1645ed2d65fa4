/* kvc_matmul_bf16.c - rows rounded to bf16 times panels by instructions that multiply matrices of bf16 (kvc_matrix.h): the tiles of
 * amx, two blocks of 16 rows times two panels, or the quads of i8mm, 2 rows x 4 channels times 2 outputs x 4 channels.
 *
 * A panel has the words of a channel side by side, the instructions want the channels of an output so. A block of channels is
 * brought into that order once for all rows of a chunk, in the first level of the cache; weights of other formats become bf16 on
 * the way. Sums of a block start from zero, and the blocks are added as those of floats are.
 *
 *     tiles    C (rows x 16 outputs) += A (rows x 32 channels) times B (16 pairs of channels x 16 outputs): four C of two A and
 *              two B, 32 KiB of both for 256 channels. The sums of the tile before are kept among the instructions of tiles.
 *     quads    sums of 2 rows x 2 outputs in a vector: 24 of them, and each vector of weights meets up to 3 pairs of rows
 */
#include "kvc_bf16_weights.h"

enum {
    CHANNELS = KVC_TILES ? KVC_TILE_CHANNELS : KVC_BF16_SIDE, /* of a row, side by side */
    GROUP_BYTES = GROUP_WEIGHTS * sizeof(uint16_t),
};

/* A group of floats as words in the order of the instructions. */
INLINE void put_ordered(const float *group, void *to) {
    enum { WORDS = KVC_BF16_SIDE * KVC_PANEL };
#if KVC_TILES
    for (int at = 0; at < GROUP_WEIGHTS; at += WORDS) put_side_of_floats((uint16_t *)to + at, group + at);
#else
    uint16_t words[GROUP_WEIGHTS];
    put_words(group, words);
    for (int at = 0; at < GROUP_WEIGHTS; at += WORDS) put_side((uint16_t *)to + at, words + at);
#endif
}

/* Panels in the order of the instructions, in `to`; zeros behind their last channel, up to CHANNELS or more. */
static block ordered(kvc_matrix_format format, block weights, int64_t panels, size_t ahead, float *to) {
    enum { WORDS = KVC_BF16_SIDE * KVC_PANEL };
    const int64_t filled = (weights.channels + CHANNELS - 1) / CHANNELS * CHANNELS * KVC_PANEL;
    const int64_t existing = weights.channels * KVC_PANEL, whole = existing / WORDS * WORDS;
    uint16_t *words = (uint16_t *)(void *)to;
    if (format != KVC_MATRIX_BF16) return rounded_panels(format, weights, panels, ahead, sizeof *words, put_ordered, to);
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
enum { MOST_ROWS = TILE_ROWS };

/* The sums of the tile before, in vectors of 16, and where they go. */
typedef struct kept {
    const float *own, *before; /* before: the sums of blocks of channels before, or NULL */
    target place;
    int64_t count; /* of vectors: 0 if there is no tile */
} kept;

INLINE kept kept_of(tile *last) {
    if (!last) return (kept){.count = 0};
    return (kept){last->sums[0], last->before, target_of(last, TILE_PANELS), last->rows * TILE_PANELS};
}

/* Keeps vector `at`. Where none is left, the instructions of tiles need others between them all the same: back to back they wait for
 * each other, most of all if the core's other thread is busy. */
INLINE void keep_one(const kept *from, int64_t at) {
    if (at >= from->count) {
        amx_pause();
        return;
    }
    float *to = from->place.to + at / TILE_PANELS * from->place.stride + at % TILE_PANELS * KVC_PANEL;
    f32v sum = f32v_load(from->own + at * KVC_PANEL);
    if (from->before) sum = f32v_add(f32v_load(from->before + at * KVC_PANEL), sum);
    f32v_store(to, from->place.add ? f32v_add(f32v_load(to), sum) : sum);
}

static void keep_from(const kept *from, int64_t at) {
    for (; at < from->count; at++) keep_one(from, at);
}

/* One block of 16 rows times two panels, or two (a constant). The sums of the block of channels start from zero. */
INLINE void multiply_tile(const block *weights, int blocks, const unsigned char *x, tile *t) {
    enum { STEP = sizeof(uint16_t) * KVC_TILE_CHANNELS }; /* bytes of a row, and of 16 pairs times 16 outputs / 16 */
    const int64_t steps = (weights->channels + KVC_TILE_CHANNELS - 1) / KVC_TILE_CHANNELS;
    const size_t rows = (size_t)(t->block_rows < KVC_TILED_ROWS ? t->block_rows : KVC_TILED_ROWS), size = rows * STEP;
    const unsigned char *first = panel_of(weights, 0, t), *second = panel_of(weights, 1, t), *below = x + (size_t)steps * size;
    const kept last = kept_of(t->last);
    int64_t at = 0;
    amx_zero(0);
    amx_zero(1);
    if (blocks == 2) {
        amx_zero(2);
        amx_zero(3);
    }
    for (int64_t k = 0; k < steps; k++, x += size, below += size, first += GROUP_BYTES, second += GROUP_BYTES) {
        amx_load(4, x, STEP);
        keep_one(&last, at++);
        amx_load(6, first, KVC_UNIT_BYTES);
        keep_one(&last, at++);
        amx_dot_bf16(0, 4, 6);
        keep_one(&last, at++);
        amx_load(7, second, KVC_UNIT_BYTES);
        keep_one(&last, at++);
        amx_dot_bf16(1, 4, 7);
        keep_one(&last, at++);
        if (blocks == 1) continue;
        amx_load(5, below, STEP);
        keep_one(&last, at++);
        amx_dot_bf16(2, 5, 6);
        keep_one(&last, at++);
        amx_dot_bf16(3, 5, 7);
        keep_one(&last, at++);
    }
    amx_store(0, t->sums[0], sizeof t->sums[0]);
    amx_pause();
    amx_store(1, t->sums[0] + KVC_PANEL, sizeof t->sums[0]);
    if (blocks == 2) {
        amx_pause();
        amx_store(2, t->sums[KVC_TILED_ROWS], sizeof t->sums[0]);
        amx_pause();
        amx_store(3, t->sums[KVC_TILED_ROWS] + KVC_PANEL, sizeof t->sums[0]);
    }
    keep_from(&last, at);
}

static void tile_of_16(const block *weights, const void *x, tile *t) { multiply_tile(weights, 1, x, t); }
static void tile_of_32(const block *weights, const void *x, tile *t) { multiply_tile(weights, 2, x, t); }
#define EIGHT(f) f, f, f, f, f, f, f, f
static float_fn *const tiles[MOST_ROWS + 1] = {NULL, EIGHT(tile_of_16), EIGHT(tile_of_16), EIGHT(tile_of_32), EIGHT(tile_of_32)};
static int rows_of(int64_t left) { return left < MOST_ROWS ? (int)left : MOST_ROWS; }
static int64_t panels_of(int rows) { return (void)rows, TILE_PANELS; }
static void keep_all(tile *t) {
    const kept last = kept_of(t);
    keep_from(&last, 0);
}

/* Sums in tiles 0 to 3, numbers of rows in 4 and 5, words in the others. */
static void configure(int rows) {
    _Alignas(64) amx_shapes shapes = {.palette = 1};
    const int of_block = rows < KVC_TILED_ROWS ? rows : KVC_TILED_ROWS;
    for (int t = 0; t < 8; t++) shapes.rows[t] = (uint8_t)(t < 6 ? of_block : 16), shapes.bytes[t] = 64;
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
            for (int v = 0; v < KVC_VECTORS; v++) sums[i * panels + p].v[v] = f32v_of_row(i % 2, from[2 * v], from[2 * v + 1]);
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
static void (*const keep_all)(tile *) = NULL;
#endif

/* The results of panels [panel, panel_stop) for all rows. */
void KVC_OWN(multiply_bf16)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    const meeting how = {.tiles = tiles, .rows = rows_of, .panels = panels_of, .changed = ordered,
                         .channels = CHANNELS, .bytes = sizeof(uint16_t), .finish = keep_all};
    configure(rows_of(args->n));
    multiply_blocks(args, &how, MOST_ROWS, panel, panel_stop, scratch);
    release();
}
