/* kvc_attend_units.c - the products of attention on packed codes (kvc_tiles.h), compiled for each quantised format. */
#include "kvc_tiles.h"

#if KVC_WHOLE_NUMBERS
/* rows (a constant) times one tile, `tiles` is 1: 16 scores for each row. */
INLINE void unit_dot_tiles(int rows, int tiles, int bits, int dim, const unit_query *q,
                           const unsigned char *const *tile, float *s, const unsigned char *const *ahead) {
    const int together = kvc_units_together(bits), bytes = kvc_bytes_together(bits);
    i32x16 sums[4];
    UNROLL
    for (int r = 0; r < rows; r++) sums[r] = bits == 8 ? i32x16_set1(q[r].start) : i32x16_zero();
    for (int d = 0, at = KVC_TILE_HEADER; d < dim; at += bytes) {
        if (ahead) fetch_lines(*ahead + at, bytes);
        UNROLL
        for (int n = 0; n < together; n++, d += 4) {
            const i16x64 codes = i16x64_of(unit_codes(bits, *tile + at, n));
            UNROLL
            for (int r = 0; r < rows; r++) sums[r] = i32x16_dot_whole(sums[r], codes, q[r].whole + d);
        }
    }
    store_scores(rows, tiles, sums, q, tile, s);
}
#else
/* The codes of unit n and, with shared digits, the bytes a + 16 b of it and its neighbour. */
typedef struct unit_pair {
    u8x64 own, both;
} unit_pair;

INLINE unit_pair pair_codes(int bits, const unsigned char *packed, int n) {
    unit_pair x;
    x.own = x.both = unit_codes(bits, packed, n);
    if (!are_shared(bits) || n % 2) return x;
    x.both = bits == 4 ? u8x64_load(packed) : u8x64_or(x.own, u8x64_shl(unit_codes(bits, packed, n + 1), 4));
    return x;
}

/* rows times tiles (constants): 16 scores for each row and tile. One pointer for the numbers of all rows: the compiler has
 * too few registers for one per row and digit. */
INLINE void unit_dot_tiles(int rows, int tiles, int bits, int dim, const unit_query *q,
                           const unsigned char *const *tile, float *s, const unsigned char *const *ahead) {
    const int together = kvc_units_together(bits), bytes = kvc_bytes_together(bits);
    i32x16 high[8], low[8]; /* [row][tile] */
    UNROLL
    for (int i = 0; i < rows * tiles; i++) {
        high[i] = i32x16_zero();
        low[i] = bits == 8 && !KVC_SIGNED_CODES ? i32x16_set1(q[i / tiles].start) : i32x16_zero();
    }
    const unsigned char *numbers = (const unsigned char *)q + offsetof(unit_query, high), *stop = numbers + dim;
    for (size_t at = KVC_TILE_HEADER; numbers < stop; at += (size_t)bytes) {
        UNROLL
        for (int t = 0; t < tiles; t++) {
            if (ahead) fetch_lines(ahead[t] + at, bytes);
        }
        UNROLL
        for (int n = 0; n < together; n++, numbers += 4) {
            unit_pair codes[4];
            UNROLL
            for (int t = 0; t < tiles; t++) {
                codes[t] = pair_codes(bits, tile[t] + at, n);
                if (bits == 8 && KVC_SIGNED_CODES) codes[t].own = codes[t].both = u8x64_xor(codes[t].own, 0x80);
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                const unsigned char *own = numbers + (size_t)r * sizeof(unit_query);
                const int32_t q_high = four_bytes(own), q_low = four_bytes(own + KVC_MAX_HEAD_DIM);
                UNROLL
                for (int t = 0; t < tiles; t++) {
                    i32x16 *high_one = &high[r * tiles + t], *low_one = &low[r * tiles + t];
                    if (!(are_shared(bits) && n % 2)) *high_one = i32x16_dot_q(*high_one, codes[t].own, q_high);
                    *low_one = i32x16_dot_q(*low_one, codes[t].both, q_low);
                }
            }
        }
    }
    UNROLL
    for (int i = 0; i < rows * tiles; i++) high[i] = i32x16_joined(high[i], low[i], radix_bits(bits));
    store_scores(rows, tiles, high, q, tile, s);
}
#endif

INLINE void unit_dot_rows(int tiles, int bits, int dim, int rows, const unit_query *q,
                          const unsigned char *const *tile, float *s, const unsigned char *const *ahead) {
    int r = 0;
#define DOT_ROWS(n)                                                           \
    for (; n <= KVC_UNIT_DOT_ROWS && (n) * tiles <= 8 && r + (n) <= rows; r += (n), ahead = NULL) \
        unit_dot_tiles(n, tiles, bits, dim, q + r, tile, s + r * KVC_CHUNK, ahead);
    DOT_ROWS(4)
    DOT_ROWS(3)
    DOT_ROWS(2)
    DOT_ROWS(1)
#undef DOT_ROWS
}

/* All rows times `tiles` tiles, KVC_UNIT_DOT_TILES at a time, for which a row's numbers are loaded once. Where that is 2, one
 * and two rows meet four tiles, and four blocks of channels, at a time: so no sum waits for its last product. */
void UNITS(unit_dot)(int bits, int dim, int rows, int tiles, const unit_query *q, const unsigned char *const *tile, float *s,
                     const unsigned char *const *ahead) {
    int t = 0;
#define DOT(symbol, name, bits, ...)                                                                                     \
    case bits:                                                                                                           \
        for (; rows <= 2 && KVC_UNIT_DOT_TILES == 2 && t + 4 <= tiles; t += 4)                                           \
            unit_dot_rows(4, bits, dim, rows, q, tile + t, s + KVC_TILE * t, ahead ? ahead + t : NULL);                  \
        for (; t + KVC_UNIT_DOT_TILES <= tiles; t += KVC_UNIT_DOT_TILES)                                                 \
            unit_dot_rows(KVC_UNIT_DOT_TILES, bits, dim, rows, q, tile + t, s + KVC_TILE * t, ahead ? ahead + t : NULL); \
        for (; KVC_UNIT_DOT_TILES > 1 && t < tiles; t++)                                                                 \
            unit_dot_rows(1, bits, dim, rows, q, tile + t, s + KVC_TILE * t, ahead ? ahead + t : NULL);                  \
        break;
    switch (bits) { KVC_QUANTISED_FORMATS(DOT) }
#undef DOT
}

/* rows times blocks of 16 channels (constants; two or four blocks) from block cb on, over all tiles of a chunk. */
#if KVC_WHOLE_NUMBERS
INLINE void unit_mix_tile(int rows, int blocks, int bits, int cb, int tiles, const unit_weights *w,
                          const unsigned char *const *tile, const float *alpha, float *acc, int acc_stride,
                          const unsigned char *const *ahead) {
    const int together = kvc_units_together(bits), bytes = kvc_bytes_together(bits);
    i32x16 sums[4]; /* [row][block]; codes of 8 bits count from 128 */
    UNROLL
    for (int i = 0; i < blocks * rows; i++) sums[i] = i32x16_set1(bits == 8 ? -128 * (int32_t)w[i / blocks].rounded : 0);
    for (int i = 0; i < tiles; i++) {
        const unsigned char *packed = channels_of(bits, blocks, cb, tile[i], ahead ? ahead[i] : NULL);
        UNROLL
        for (int tg = 0; tg < 4; tg++) {
            UNROLL
            for (int c = 0; c < blocks; c++) {
                const int unit = 4 * c + tg;
                const i16x64 codes = i16x64_of(unit_codes(bits, packed + unit / together * bytes, unit % together));
                UNROLL
                for (int r = 0; r < rows; r++)
                    sums[blocks * r + c] = i32x16_dot_whole(sums[blocks * r + c], codes, w[r].whole + KVC_TILE * i + 4 * tg);
            }
        }
    }
    store_mixed(rows, blocks, cb, sums, w, alpha, acc, acc_stride);
}
#else
INLINE void unit_mix_tile(int rows, int blocks, int bits, int cb, int tiles, const unit_weights *w,
                          const unsigned char *const *tile, const float *alpha, float *acc, int acc_stride,
                          const unsigned char *const *ahead) {
    const int together = kvc_units_together(bits), bytes = kvc_bytes_together(bits);
    i32x16 high[8], low[8]; /* [row][block] */
    UNROLL
    for (int i = 0; i < blocks * rows; i++) {
        high[i] = i32x16_zero();
        low[i] = bits == 8 && !KVC_SIGNED_CODES ? i32x16_set1(-128 * (int32_t)w[i / blocks].rounded) : i32x16_zero();
    }
    const unsigned char *numbers = (const unsigned char *)w + offsetof(unit_weights, high);
    for (int i = 0; i < tiles; i++, numbers += KVC_TILE) {
        const unsigned char *packed = channels_of(bits, blocks, cb, tile[i], ahead ? ahead[i] : NULL);
        UNROLL
        for (int tg = 0; tg < 4; tg++) {
            unit_pair codes[4];
            UNROLL
            for (int c = 0; c < blocks; c++) {
                const int unit = 4 * c + tg;
                codes[c] = pair_codes(bits, packed + unit / together * bytes, unit % together);
                if (bits == 8 && KVC_SIGNED_CODES) codes[c].own = codes[c].both = u8x64_xor(codes[c].own, 0x80);
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                const unsigned char *own = numbers + (size_t)r * sizeof(unit_weights) + 4 * tg;
                const int32_t w_high = four_bytes(own), w_low = four_bytes(own + KVC_CHUNK);
                UNROLL
                for (int c = 0; c < blocks; c++) {
                    i32x16 *high_one = &high[blocks * r + c], *low_one = &low[blocks * r + c];
                    if (!(are_shared(bits) && tg % 2)) *high_one = i32x16_dot_q(*high_one, codes[c].own, w_high);
                    *low_one = i32x16_dot_q(*low_one, codes[c].both, w_low);
                }
            }
        }
    }
    UNROLL
    for (int i = 0; i < blocks * rows; i++) high[i] = i32x16_joined(high[i], low[i], radix_bits(bits));
    store_mixed(rows, blocks, cb, high, w, alpha, acc, acc_stride);
}
#endif

INLINE void unit_mix_rows(int bits, int dim, int rows, int tiles, const unit_weights *w,
                          const unsigned char *const *tile, const float *alpha, float *acc, int acc_stride,
                          const unsigned char *const *ahead) {
    int r = 0;
#define MIX_ROWS(n)                                                                                                \
    for (; n <= KVC_UNIT_MIX_ROWS && r + (n) <= rows; r += (n), ahead = NULL) {                                    \
        int cb = 0;                                                                                                \
        for (; (n) <= 2 && KVC_UNIT_DOT_TILES == 2 && cb + 4 <= dim / 16; cb += 4)                                 \
            unit_mix_tile(n, 4, bits, cb, tiles, w + r, tile, alpha + r, acc + r * acc_stride, acc_stride, ahead); \
        for (; cb < dim / 16; cb += 2)                                                                             \
            unit_mix_tile(n, 2, bits, cb, tiles, w + r, tile, alpha + r, acc + r * acc_stride, acc_stride, ahead); \
    }
    MIX_ROWS(4)
    MIX_ROWS(3)
    MIX_ROWS(2)
    MIX_ROWS(1)
#undef MIX_ROWS
}

void UNITS(unit_mix)(int bits, int dim, int rows, int tiles, const unit_weights *w, const unsigned char *const *tile,
                     const float *alpha, float *acc, int acc_stride, const unsigned char *const *ahead) {
#define MIX_TILES(symbol, name, bits, ...) \
    case bits: unit_mix_rows(bits, dim, rows, tiles, w, tile, alpha, acc, acc_stride, ahead); break;
    switch (bits) { KVC_QUANTISED_FORMATS(MIX_TILES) }
#undef MIX_TILES
}
