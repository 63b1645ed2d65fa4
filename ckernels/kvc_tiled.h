/* kvc_tiled.h - the two products of kvc_tiles.h for blocks of 16 rows, in the tiles of simd_amx.h.
 *
 * Digits of 16 rows are one operand, 64 channels of a tile of K or 64 tokens of V the other, as they lie (q8, K) or unpacked for
 * all rows. Codes of all bits meet seven-bit digits: of the same numbers, so that the sums are those of other rows, and with them
 * every float.
 *
 *     4 products   high and low digits x two tiles of K, or two blocks of 16 channels of V: each waits for none of the others
 *
 * Where head_dim is no multiple of 64 a product has 32 channels, or tokens.
 *
 * Tile instructions back to back wait for each other, most of all if the core's other thread is busy. So the sums of a block of rows
 * become scores, or mixed values, while the next block is multiplied: some of them between each two tile instructions.
 */
#ifndef KVC_TILED_H
#define KVC_TILED_H

#include "kvc_tiles.h"

#if KVC_TILES

enum { BLOCK = 16, /* rows of a product */ SUMS = 2 * BLOCK /* vectors of 16, of both codes */ };

INLINE int depth_of(int dim) { return dim % 64 ? 32 : 64; }

/* Gives the tiles their shapes for an item: products in 0 to 3, digits in 4 and 6, codes in 5 and 7. */
static void begin_tiled(int dim) {
    _Alignas(64) amx_shapes shapes = {.palette = 1};
    for (int t = 0; t < 4; t++) shapes.rows[t] = BLOCK, shapes.bytes[t] = 64;
    for (int t = 4; t < 8; t += 2) {
        shapes.rows[t] = BLOCK, shapes.bytes[t] = (uint16_t)depth_of(dim);
        shapes.rows[t + 1] = (uint8_t)(depth_of(dim) / 4), shapes.bytes[t + 1] = KVC_UNIT;
    }
    amx_configure(&shapes);
}

typedef struct products {
    _Alignas(64) int32_t high[2][BLOCK][16], low[2][BLOCK][16]; /* with the first codes and with the second */
} products;

/* What becomes of sum `at` of SUMS, of the row at / 2 and the codes at % 2. `context`: of a block that is multiplied already, or NULL. */
typedef void use_fn(const void *context, int at);

/* Uses the next `count` sums, if so many are left. */
INLINE int use_some(use_fn *use, const void *context, int at, int count) {
    const int stop = at + count < SUMS ? at + count : SUMS;
    if (!context || at == SUMS) amx_pause();
    for (; context && at < stop; at++) use(context, at);
    return at;
}

/* Sum `at` of 16 rows with both digits; `more` belongs to the low ones. */
INLINE f32v sum_of(const products *of, int at, int32_t more) {
    const i32x16 low = i32x16_add(i32x16_load(of->low[at % 2][at / 2]), i32x16_set1(more));
    f32v exact;
    i32x16_to_floats(i32x16_joined(i32x16_load(of->high[at % 2][at / 2]), low, 7), &exact);
    return exact;
}

/* Both digits of 16 rows, which lie `stride` bytes apart, times units of codes, 4 numbers each; between them the sums of the block
 * before are used. */
INLINE void multiply_digits(const int8_t *high, const int8_t *low, size_t stride, const unsigned char *first,
                            const unsigned char *second, int count, int depth, products *to, use_fn *use, const void *before) {
    const int places = 8 * (count / depth), each = (SUMS + places - 1) / places;
    int at = 0;
#define AMONG at = use_some(use, before, at, each);
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int k = 0; k < count; k += depth) {
        amx_load(4, high + k, stride);
        AMONG
        amx_load(5, first + k * KVC_UNIT / 4, KVC_UNIT);
        AMONG
        amx_dot_su(0, 4, 5);
        AMONG
        amx_load(6, low + k, stride);
        AMONG
        amx_dot_su(1, 6, 5);
        AMONG
        amx_load(7, second + k * KVC_UNIT / 4, KVC_UNIT);
        AMONG
        amx_dot_su(2, 4, 7);
        AMONG
        amx_dot_su(3, 6, 7);
        AMONG
    }
#undef AMONG
    amx_store(0, to->high[0], 64);
    amx_pause();
    amx_store(1, to->low[0], 64);
    amx_pause();
    amx_store(2, to->high[1], 64);
    amx_pause();
    amx_store(3, to->low[1], 64);
}

/* Unpacks `count` units, a multiple of those that share bytes. */
INLINE void unpack_some(int bits, int count, const unsigned char *packed, unsigned char *to) {
    const int together = kvc_units_together(bits);
    for (int unit = 0; unit < count; unit += together, packed += kvc_bytes_together(bits)) {
        UNROLL
        for (int n = 0; n < together; n++, to += KVC_UNIT) u8x64_store(to, unit_codes(bits, packed, n));
    }
}

NOINLINE void unpack_codes(int bits, int count, const unsigned char *packed, unsigned char *to) {
#define UNPACK(symbol, name, bits, ...) \
    case bits: unpack_some(bits, count, packed, to); break;
    switch (bits) { KVC_QUANTISED_FORMATS(UNPACK) }
#undef UNPACK
}

/* A block of rows whose sums become scores with one or two tiles of K. */
typedef struct scored {
    const products *of;
    const unit_query *q;
    const f32v *scales, *minima; /* of each tile */
    float *s;
    int is_shifted, tiles; /* is_shifted: sums start at those of the query */
} scored;

INLINE void use_score(const void *context, int at) {
    const scored *block = context;
    const int row = at / 2, t = at % 2;
    if (t >= block->tiles) return;
    const unit_query *q = block->q + row;
    const f32v exact = sum_of(block->of, at, block->is_shifted ? q->start : 0);
    f32v_store(block->s + row * KVC_CHUNK + t * KVC_TILE, score_of(exact, q, block->scales[t], block->minima[t]));
}

/* Scores of rows, a multiple of 16, with two tiles of K; or with one, which stands for both. */
static void dot_pair(int bits, int dim, int rows, int tiles, const unit_query *q, const unsigned char *const *tile, float *s) {
    unsigned char units[2][KVC_MAX_HEAD_DIM * KVC_TILE];
    const unsigned char *codes[2];
    f32v scales[2], minima[2];
    for (int t = 0; t < 2; t++) {
        const unsigned char *packed = tile[t < tiles ? t : 0] + KVC_TILE_HEADER;
        codes[t] = bits == 8 ? packed : units[t];
        if (bits != 8) unpack_codes(bits, dim / 4, packed, units[t]);
        const uint16_t *header = (const uint16_t *)(const void *)tile[t < tiles ? t : 0];
        scales[t] = f32v_load_half(header), minima[t] = f32v_load_half(header + KVC_TILE);
    }
    products of[2];
    scored blocks[2], *last = NULL;
    for (int r = 0; r < rows; r += BLOCK, q += BLOCK, s += BLOCK * KVC_CHUNK) {
        const int n = r / BLOCK % 2;
        multiply_digits(q->high, q->low, sizeof *q, codes[0], codes[1], dim, depth_of(dim), &of[n], use_score, last);
        last = &blocks[n];
        *last = (scored){&of[n], q, scales, minima, s, bits == 8, tiles};
    }
    use_some(use_score, last, 0, SUMS);
}

/* Scores of rows, a multiple of 16, with all tiles of a chunk. */
static void dot_tiled(int bits, int dim, int rows, int tiles, const unit_query *q, const unsigned char *const *tile, float *s,
                      const unsigned char *const *ahead) {
    for (int t = 0; t < tiles; t += 2) {
        for (int i = t; ahead && i < tiles && i < t + 2; i++) fetch_lines(ahead[i], KVC_TILE_HEADER + dim * bits * 2);
        dot_pair(bits, dim, rows, tiles - t < 2 ? 1 : 2, q, tile + t, s + KVC_TILE * t);
    }
}

/* A block of rows whose sums become mixed values of 32 channels. */
typedef struct blended {
    const products *of;
    const unit_weights *w;
    const float *alpha;
    float *acc;
    int stride, is_shifted; /* stride: of acc; is_shifted: codes are less 128 */
} blended;

INLINE void use_mixed(const void *context, int at) {
    const blended *block = context;
    const int row = at / 2;
    const unit_weights *w = block->w + row;
    const f32v exact = sum_of(block->of, at, block->is_shifted ? -128 * (int32_t)w->rounded : 0);
    mix_into(block->acc + row * block->stride + at % 2 * 16, exact, w, block->alpha[row]);
}

/* acc = acc * alpha + the sums of codes times weights, for rows, a multiple of 16. Tokens behind the last one have zeros as
 * codes. */
static void mix_tiled(int bits, int dim, int rows, int tiles, int depth, const unit_weights *w, const unsigned char *const *tile,
                      const float *alpha, float *acc, int acc_stride, const unsigned char *const *ahead) {
    enum { UNITS = KVC_CHUNK / 4, OF_TILE = KVC_TILE / 4 };
    const int tokens = (tiles * KVC_TILE + depth - 1) / depth * depth;
    unsigned char codes[2][UNITS * KVC_UNIT], units[2 * OF_TILE * KVC_UNIT];
    products of[2];
    blended blocks[2], *last = NULL;
    int n = 0;
    for (int c = 0; c < 2; c++) memset(codes[c] + tiles * OF_TILE * KVC_UNIT, 0, (size_t)((tokens / 4 - tiles * OF_TILE) * KVC_UNIT));
    for (int cb = 0; cb < dim / 16; cb += 2) {
        for (int t = 0; t < tiles; t++) {
            unpack_codes(bits, 2 * OF_TILE, channels_of(bits, 2, cb, tile[t], ahead ? ahead[t] : NULL), units);
            for (int c = 0; c < 2; c++)
                memcpy(codes[c] + t * OF_TILE * KVC_UNIT, units + c * OF_TILE * KVC_UNIT, OF_TILE * KVC_UNIT);
        }
        for (int r = 0; r < rows; r += BLOCK, n = !n) {
            const unit_weights *own = w + r;
            multiply_digits(own->high, own->low, sizeof *own, codes[0], codes[1], tokens, depth, &of[n], use_mixed, last);
            last = &blocks[n];
            *last = (blended){&of[n], own, alpha + r, acc + r * acc_stride + 16 * cb, acc_stride, bits == 8};
        }
    }
    use_some(use_mixed, last, 0, SUMS);
}

#endif
#endif
