/* kvc_tiles.h - the two products of attention on packed codes, in integers.
 *
 * A float (a query value, or a weight times a scale) is rounded to a whole number, which most levels split into two digits:
 * a sum of products is then two sums of products of bytes. Centring the codes reduces the effect of this rounding: codes
 * are counted from the middle of their range, and the term of the middle is added in floats, from the exact sums of queries
 * and weights.
 *
 *   score  =  k_scale * sum(q (code - centre))  +  (k_minimum + centre * k_scale) * sum(q)
 *   mixed  =  sum(u (code - centre))  +  sum(weight * v_minimum + u * centre)
 *
 * Here u = weight * scale of V. The first q and u of each line are rounded, with one step per query and one per row and
 * chunk. The normaliser is the exact sum of the weights.
 *
 * SEVEN-BIT DIGITS
 *
 *   x = 128 high + low       queries: digits in [-64, 63], |x| <= 8127; weights: in [0, 127], x <= 16383
 *
 * WHOLE NUMBERS (KVC_WHOLE_NUMBERS), if the level multiplies pairs of 16 bits, but bytes only into 16 bits (AVX2): the same
 * x and the same sums without digits. Digits would take as many products for codes of few bits, and twice as many for 8.
 *
 * SHARED DIGITS (KVC_SHARED_DIGITS), if a dot product takes whole bytes and codes have 4 bits or fewer. The codes a and
 * b of two neighbouring units share one byte a + 16 b, and one product with low_a serves both:
 *
 *   a x_a + b x_b  =  16 (a high_a)  +  (a + 16 b) low_a  +  b low_b
 *   x_a = 16 high_a + low_a,  x_b = 16 low_a + low_b        |x| <= 1791 always has such digits in [-128, 127]
 *
 * So 128 codes take three dot products instead of four, with numbers of 12 bits.
 *
 * Codes of 4 bits or fewer meet |x| <= 1791 at every level, so that all have the same sums.
 *
 * Error: a query value is off by at most half a step, where a step is 2^-13 (4 bits: 2^-10.8) of the row's largest. A
 * score is then off by about step * max|q| |k| / sqrt(12), with |k| the L2 norm. u is off by at most half a step of
 * 2^-14 (2^-10.8) of the chunk's largest. The bound on the relative L2 error of an output row is 1 % at worst, 0.5 %
 * typically. Measured on Gaussian K and V, head_dim 128, 256 to 4,096 tokens, all formats, worst of some thousand rows:
 *
 *   score spread            1                3                8
 *   more than 4 bits   0.02, 0.03 %     0.03, 0.07 %     0.03, 0.15 %       median, worst
 *   4 bits or fewer    0.12, 0.22 %     0.16, 0.42 %     0.11, 0.90 %
 */
#ifndef KVC_TILES_H
#define KVC_TILES_H

#include "kvc_attend.h"
#include "kvc_kernels.h"

#include <stddef.h>

#if defined(KVC_AVXVNNI)
#define UNITS(name) KVC_OWN(name) /* of other integer dot products */
#else
#define UNITS(name) KVC_FN(name)
#endif

INLINE int32_t four_bytes(const void *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* Prefetches into the L2 cache. */
INLINE void fetch_lines(const unsigned char *p, int bytes) {
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(p + b, 0, 2);
}

/* Codes of unit n among the units that share bytes (kvc_quant.h); bits and n are constant. */
INLINE u8x64 unit_codes(int bits, const unsigned char *packed, int n) {
    const int low = kvc_low_bits(bits), high = bits - low, shift = kvc_low_shift(bits, n);
    const u8x64 first = u8x64_load(packed + kvc_low_at(bits, n));
    if (bits == 8) return first;
    const u8x64 codes = u8x64_and(shift ? u8x64_shr(first, shift) : first, (1 << low) - 1);
    if (!high) return codes;
    const u8x64 second = u8x64_load(packed + kvc_low_bytes(bits));
    const int left = low - n * high;
    const u8x64 rest = left < 0 ? u8x64_shr(second, -left) : u8x64_shl(second, left);
    return u8x64_or(codes, u8x64_and(rest, (1 << bits) - (1 << low)));
}

/* Whether codes of `bits` bits are multiplied by shared digits. */
INLINE int are_shared(int bits) { return KVC_SHARED_DIGITS && bits <= 4; }
INLINE int radix_bits(int bits) { return are_shared(bits) ? 4 : 7; }

/* The number of rows, the first ones of `rows`, that meet codes in the tiles of kvc_tiled.h: their digits have seven bits. */
INLINE int tiled_rows(int rows) { return KVC_TILES ? rows / 16 * 16 : 0; }

/* Rounds x * inverse to the numbers that codes of `bits` bits are multiplied by; n is a multiple of 32. Returns their sum,
 * which is exact. Queries that are not finite become any numbers of 16 bits. */
INLINE float split(int bits, int is_signed, int is_tiled, int n, const float *x, float inverse, int8_t *high, int8_t *low,
                   int16_t *whole) {
    (void)bits, (void)is_signed, (void)is_tiled, (void)high, (void)low, (void)whole;
    i32v sum = i32v_zero();
    for (int i = 0; i < n; i += 32) {
        f32v number[32 / KVC_LANES];
        UNROLL
        for (int v = 0; v < 32 / KVC_LANES; v++) {
            number[v] = f32v_mul(f32v_load(x + i + v * KVC_LANES), f32v_set1(inverse));
#if KVC_WHOLE_NUMBERS
            sum = i32v_add(sum, f32v_store_whole(whole + i + v * KVC_LANES, number[v]));
#endif
        }
#if KVC_SHARED_DIGITS
        if (are_shared(bits) && !(KVC_TILES && is_tiled)) {
            sum = i32v_add(sum, f32v_shared_digits(number, high + i, low + i));
            continue;
        }
#endif
#if !KVC_WHOLE_NUMBERS
        sum = i32v_add(sum, f32v_seven_bits(number, is_signed ? 64 : 0, high + i, low + i));
#endif
    }
    return f32v_sum_of(i32v_floats(sum));
}

/* The largest number that codes of `bits` bits are multiplied by, of queries and of weights: at every level, however it
 * multiplies. */
INLINE float most_of(int bits, int is_query) { return bits <= 4 ? 1791.0f : is_query ? 8127.0f : 16383.0f; }

/* The middle of the codes' range. Products of 8 bits are of code - 128, which may be unsigned: then the sum starts at -128 times
 * the sum of the other factors, or the codes are signed (KVC_SIGNED_CODES). */
INLINE float centre_of(int bits) { return bits == 8 ? 128.0f : 0.5f * (float)((1 << bits) - 1); }

INLINE void quantise_query(int bits, const float *q, int dim, int is_tiled, unit_query *to) { /* dim a multiple of 32 */
    f32x16 most = f32x16_zero(), sum = f32x16_zero();
    for (int d = 0; d < dim; d += 16) {
        const f32x16 x = f32x16_load(q + d);
        most = f32x16_max(most, f32x16_abs(x));
        sum = f32x16_add(sum, x);
    }
    const float limit = most_of(bits, 1), largest = f32x16_max_of(most);
    const float inverse = largest > 0x1p-100f ? limit / largest : 0.0f;
    const float rounded = split(bits, 1, is_tiled, dim, q, inverse, to->high, to->low, to->whole);
    to->scale = largest / limit;
    to->sum = f32x16_sum_of(sum);
    to->centre = centre_of(bits) * (bits == 8 ? to->sum : to->sum - to->scale * rounded);
    to->centre += 0.0f * to->scale; /* NaN where a query is infinite: whole numbers of such mean nothing */
    to->start = (int32_t)(-128u * (uint32_t)(int32_t)rounded); /* may wrap around where q is not finite */
}

/* The scores of a sum, with a query and the scales and minima of a tile. */
INLINE f32v score_of(f32v exact, const unit_query *q, f32v scale, f32v minimum) {
    const f32v product = f32v_fma(exact, f32v_set1(q->scale), f32v_set1(q->centre));
    return f32v_fma(minimum, f32v_set1(q->sum), f32v_mul(scale, product));
}

/* Sums of codes times numbers as scores of rows and tiles (constants). Rows are KVC_CHUNK scores apart. */
INLINE void store_scores(int rows, int tiles, const i32x16 *sums, const unit_query *q, const unsigned char *const *tile,
                         float *s) {
    UNROLL
    for (int t = 0; t < tiles; t++) {
        const uint16_t *scales = (const uint16_t *)tile[t], *minima = scales + KVC_TILE;
        f32v scale[KVC_VECTORS], minimum[KVC_VECTORS];
        UNROLL
        for (int v = 0; v < KVC_VECTORS; v++) {
            scale[v] = f32v_load_half(scales + v * KVC_LANES);
            minimum[v] = f32v_load_half(minima + v * KVC_LANES);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            f32v exact[KVC_VECTORS];
            i32x16_to_floats(sums[r * tiles + t], exact);
            UNROLL
            for (int v = 0; v < KVC_VECTORS; v++)
                f32v_store(s + r * KVC_CHUNK + t * KVC_TILE + v * KVC_LANES, score_of(exact[v], q + r, scale[v], minimum[v]));
        }
    }
}

/* Weights of the lanes from t on times the scales of V; the largest of a row and the term of every channel, but for the
 * centre of the codes, lane by lane. */
INLINE f32v scaled_weights(const v_scales *v, int t, f32v w_v, f32v *largest_v, f32v *base_v) {
    const f32v u_v = f32v_mul(w_v, f32v_load(v->scales + t));
    *largest_v = f32v_max(*largest_v, f32v_abs(u_v)); /* bytes that no call wrote may be negative scales */
    *base_v = f32v_fma(w_v, f32v_load(v->middles + t), *base_v);
    return u_v;
}

/* With a scale of V that is not finite, neither is any mixed value: whole numbers of such weights mean nothing. */
INLINE void end_scaled(int lanes, float *w, f32x16 largest, f32x16 base, unit_weights *to) {
    for (int t = lanes; t % 32; t++) w[t] = 0.0f;
    to->scale = f32x16_max_of(largest), to->base = f32x16_sum_of(base) + 0.0f * to->scale;
}

/* In digits or whole. */
INLINE void round_row(int bits, int is_tiled, int lanes, const float *u, unit_weights *to) {
    const float limit = most_of(bits, 0), largest = to->scale;
    const float inverse = largest > 0x1p-100f ? limit / largest : 0.0f;
    const float sum = split(bits, 0, is_tiled, (lanes + 31) / 32 * 32, u, inverse, to->high, to->low, to->whole);
    to->scale = largest / limit;
    to->rounded = sum;
    if (bits != 8) to->base -= centre_of(bits) * to->scale * sum;
}

/* Rounds the scaled weights of some rows. */
INLINE void round_weights(int bits, int is_tiled, int rows, int lanes, const float *u, unit_weights *to) {
#define ROWS(symbol, name, bits, ...)                                                                            \
    case bits:                                                                                                   \
        for (int r = 0; r < rows; r++) round_row(bits, is_tiled, lanes, u + r * KVC_CHUNK, to + r); \
        break;
    switch (bits) { KVC_QUANTISED_FORMATS(ROWS) }
#undef ROWS
}

/* acc = acc * alpha + sums of codes times weights. */
INLINE void mix_into(float *acc, f32v exact, const unit_weights *w, float alpha) {
    const f32v mixed = f32v_fma(exact, f32v_set1(w->scale), f32v_set1(w->base));
    f32v_store(acc, f32v_fma(f32v_load(acc), f32v_set1(alpha), mixed));
}

/* The same for rows and blocks of 16 channels (constants). */
INLINE void store_mixed(int rows, int blocks, int cb, const i32x16 *sums, const unit_weights *w, const float *alpha, float *acc,
                        int acc_stride) {
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < blocks; c++) {
            f32v exact[KVC_VECTORS];
            i32x16_to_floats(sums[blocks * r + c], exact);
            UNROLL
            for (int v = 0; v < KVC_VECTORS; v++)
                mix_into(acc + r * acc_stride + 16 * (cb + c) + v * KVC_LANES, exact[v], w + r, alpha[r]);
        }
    }
}

/* The codes of a tile from block `cb` of 16 channels on, of which a block has 32 * bits bytes. Prefetches as many blocks of
 * the tile `ahead`; NULL: nothing. */
INLINE const unsigned char *channels_of(int bits, int blocks, int cb, const unsigned char *tile, const unsigned char *ahead) {
    const int at = KVC_TILE_HEADER + cb * bits * 32;
    if (ahead) fetch_lines(ahead + at, blocks * bits * 32);
    return tile + at;
}

/* kvc_attend_units.c: all rows times `tiles` tiles, and acc = acc * alpha + the mixed values of a chunk's tiles. Each prefetches as
 * much of the tiles `ahead`; NULL: nothing. */
void UNITS(unit_dot)(int bits, int dim, int rows, int tiles, const unit_query *q, const unsigned char *const *tile, float *s,
                     const unsigned char *const *ahead);
void UNITS(unit_mix)(int bits, int dim, int rows, int tiles, const unit_weights *w, const unsigned char *const *tile,
                     const float *alpha, float *acc, int acc_stride, const unsigned char *const *ahead);

#endif
