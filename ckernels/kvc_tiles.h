/* kvc_tiles.h - the two products of attention straight on packed codes, in integers.
 *
 * Floats become numbers of two 7-bit digits, so that every product fits the 16-bit steps of vpmaddubsw:
 *
 *   query     q = q_scale * (128 * high + low)     digits in [-64, 63], |q| <= 8127 q_scale
 *   weights   u = u_scale * (128 * high + low)     digits in [0, 127], u = weight * scale of V; one u_scale
 *                                                  per row and chunk
 *
 *   score  = k_scale * q_scale * sum(q code) + k_minimum * q_scale * sum(q)     the same rounded q in both
 *   mixed  = u_scale * sum(u code) + sum(weight * v_minimum)                    exact weights in the last sum
 *                                                                               and in the normaliser
 *
 * Error: a query value is off by at most 2^-14 of the row's largest, so a score by about 2^-14 max|q| |k| /
 * sqrt(3), with |k| the L2 norm; a u is off by 2^-15 of the chunk's largest. The promise, relative L2 of an
 * output row: 1 % at worst, 0.5 % typically. Measured on Gaussian K and V, head_dim 128, score spreads 1 to 8,
 * 256 and 4,096 tokens, all formats: mean 0.04 %, worst 0.2 %.
 */
#ifndef KVC_TILES_H
#define KVC_TILES_H

#include "kvc_attend.h"
#include "kvc_kernels.h"

#if defined(KVC_HAVE_DOTS)

enum { UNIT_VECS = 16 / KVC_LANES };

INLINE int32_t four_bytes(const void *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* Into the L2 cache. */
INLINE void fetch_lines(const unsigned char *p, int bytes) {
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(p + b, 0, 2);
}

/* Codes of unit n of the units that share bytes: 1 of 8 bits, 2 of 4, 4 of 2, 8 of 3 (kvc_quant.h). */
INLINE u8x64 unit_codes(int bits, const unsigned char *packed, int n) {
    const u8x64 x = u8x64_load(packed + (bits == 3 ? n / 4 * KVC_UNIT : 0));
    if (bits == 8) return x;
    if (bits == 4) return u8x64_and(n ? u8x64_shr(x, 4) : x, 15);
    const u8x64 low = u8x64_and(n % 4 ? u8x64_shr(x, 2 * (n % 4)) : x, 3);
    if (bits == 2) return low;
    const u8x64 y = u8x64_load(packed + 2 * KVC_UNIT);
    return u8x64_or(low, u8x64_and(n < 2 ? u8x64_shl(y, 2 - n) : u8x64_shr(y, n - 2), 4));
}
#define UNITS_TOGETHER(bits) ((bits) == 3 ? 8 : 8 / (bits))
#define BYTES_TOGETHER(bits) ((bits) == 3 ? 3 * KVC_UNIT : KVC_UNIT)

static void quantise_query(const float *q, int dim, unit_query *to) { /* dim a multiple of 32: no odd lanes */
    f32v largest_v = f32v_zero();
    for (int d = 0; d < dim; d += KVC_LANES) largest_v = f32v_max(largest_v, f32v_abs(f32v_load(q + d)));
    const float largest = f32v_max_of(largest_v), inverse = largest > 0x1p-100f ? 8127.0f / largest : 0.0f;
    int32_t sum = 0;
    for (int d = 0; d < dim; d++) {
        const float rounded = (q[d] * inverse + 0x1.8p23f) - 0x1.8p23f;
        const int32_t whole = (int32_t)rounded, high = (whole + 64) >> 7;
        to->high[d] = (int8_t)high;
        to->low[d] = (int8_t)(whole - 128 * high);
        sum += whole;
    }
    to->scale = largest / 8127.0f;
    to->sum = to->scale * (float)sum;
}

/* rows (constant) x one tile: 16 scores each, KVC_CHUNK apart. */
INLINE void unit_dot_tile(int rows, int bits, int dim, const unit_query *q, const unsigned char *tile,
                          float *s, const unsigned char *ahead) {
    const int together = UNITS_TOGETHER(bits);
    const unsigned char *packed = tile + KVC_TILE_HEADER;
    i32x16 high[4], low[4];
    UNROLL
    for (int r = 0; r < rows; r++) high[r] = low[r] = i32x16_zero();
    for (int d = 0; d < dim; packed += BYTES_TOGETHER(bits)) {
        if (ahead) fetch_lines(ahead + (packed - tile), BYTES_TOGETHER(bits));
        UNROLL
        for (int n = 0; n < together; n++, d += 4) {
            u8x64 codes = unit_codes(bits, packed, n);
            if (bits == 8 && KVC_SIGNED_KEYS) codes = u8x64_xor(codes, 0x80);
            UNROLL
            for (int r = 0; r < rows; r++) {
                high[r] = i32x16_dot_q(high[r], codes, four_bytes(q[r].high + d));
                low[r] = i32x16_dot_q(low[r], codes, four_bytes(q[r].low + d));
            }
        }
    }
    const uint16_t *scales = (const uint16_t *)tile, *minima = scales + KVC_TILE;
    UNROLL
    for (int r = 0; r < rows; r++) {
        f32v sums[UNIT_VECS];
        i32x16_floats(high[r], low[r], sums);
        UNROLL
        for (int v = 0; v < UNIT_VECS; v++) {
            const f32v scale = f32v_load_half(scales + v * KVC_LANES),
                       minimum = f32v_load_half(minima + v * KVC_LANES);
            const f32v sum_q = f32v_set1(q[r].sum), product = f32v_mul(sums[v], f32v_set1(q[r].scale));
            f32v score = f32v_fma(minimum, sum_q, f32v_mul(scale, product));
            if (bits == 8 && KVC_SIGNED_KEYS)
                score = f32v_fma(f32v_mul(scale, sum_q), f32v_set1(128.0f), score);
            f32v_store(s + r * KVC_CHUNK + v * KVC_LANES, score);
        }
    }
}

INLINE void unit_dot_rows(int bits, int dim, int rows, const unit_query *q, const unsigned char *tile,
                          float *s, const unsigned char *ahead) {
    int r = 0;
#define DOT_ROWS(n)                                                           \
    for (; n <= KVC_UNIT_DOT_ROWS && r + (n) <= rows; r += (n), ahead = NULL) \
        unit_dot_tile(n, bits, dim, q + r, tile, s + r * KVC_CHUNK, ahead);
    DOT_ROWS(4)
    DOT_ROWS(2)
    DOT_ROWS(1)
#undef DOT_ROWS
}

static void unit_dot(int bits, int dim, int rows, const unit_query *q, const unsigned char *tile, float *s,
                     const unsigned char *ahead) {
    switch (bits) {
    case 8: unit_dot_rows(8, dim, rows, q, tile, s, ahead); break;
    case 4: unit_dot_rows(4, dim, rows, q, tile, s, ahead); break;
    case 3: unit_dot_rows(3, dim, rows, q, tile, s, ahead); break;
    default: unit_dot_rows(2, dim, rows, q, tile, s, ahead); break;
    }
}

/* One row's weights times the scales of V, in digits. */
static void quantise_weights(int bits, int lanes, const float *w, const float *scales, const float *minima,
                             unit_weights *to) {
    float u[KVC_CHUNK];
    f32v largest_v = f32v_zero(), base_v = f32v_zero();
    for (int t = 0; t < lanes; t += KVC_LANES) {
        const f32v w_v = f32v_load(w + t), u_v = f32v_mul(w_v, f32v_load(scales + t));
        largest_v = f32v_max(largest_v, u_v);
        base_v = f32v_fma(w_v, f32v_load(minima + t), base_v);
        f32v_store(u + t, u_v);
    }
    const float largest = f32v_max_of(largest_v), inverse = largest > 0x1p-100f ? 16383.0f / largest : 0.0f;
    int32_t sum = 0;
    for (int t = 0; t < lanes; t++) {
        const int32_t whole = (int32_t)(u[t] * inverse + 0.5f);
        to->high[t] = (unsigned char)(whole >> 7);
        to->low[t] = (unsigned char)(whole & 127);
        sum += whole;
    }
    to->scale = largest / 16383.0f;
    to->base = f32v_sum_of(base_v) + (bits == 8 ? 128.0f * to->scale * (float)sum : 0.0f);
}

/* rows (constant) x 32 channels over all tiles of a chunk; cb: the first block of 16 channels, even. */
INLINE void unit_mix_tile(int rows, int bits, int cb, int tiles, const unit_weights *w,
                          const unsigned char *const *tile, const float *alpha, float *acc, int acc_stride,
                          const unsigned char *const *ahead) {
    i32x16 high[4][2], low[4][2];
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < 2; c++) high[r][c] = low[r][c] = i32x16_zero();
    }
    for (int i = 0; i < tiles; i++) {
        const unsigned char *packed =
            tile[i] + KVC_TILE_HEADER + cb * bits * 32; /* 16 channels are 32 * bits bytes */
        if (ahead) fetch_lines(ahead[i] + (packed - tile[i]), bits * 64);
        UNROLL
        for (int tg = 0; tg < 4; tg++) {
            u8x64 codes[2];
            UNROLL
            for (int c = 0; c < 2; c++) {
                const int unit = 4 * c + tg, together = UNITS_TOGETHER(bits);
                codes[c] = unit_codes(bits, packed + unit / together * BYTES_TOGETHER(bits), unit % together);
                if (bits == 8) codes[c] = u8x64_xor(codes[c], 0x80);
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                const int32_t w_high = four_bytes(w[r].high + KVC_TILE * i + 4 * tg);
                const int32_t w_low = four_bytes(w[r].low + KVC_TILE * i + 4 * tg);
                UNROLL
                for (int c = 0; c < 2; c++) {
                    high[r][c] = i32x16_dot_w(high[r][c], codes[c], w_high);
                    low[r][c] = i32x16_dot_w(low[r][c], codes[c], w_low);
                }
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int c = 0; c < 2; c++) {
            f32v sums[UNIT_VECS];
            i32x16_floats(high[r][c], low[r][c], sums);
            UNROLL
            for (int v = 0; v < UNIT_VECS; v++) {
                float *to = acc + r * acc_stride + 16 * (cb + c) + v * KVC_LANES;
                const f32v mixed = f32v_fma(sums[v], f32v_set1(w[r].scale), f32v_set1(w[r].base));
                f32v_store(to, f32v_fma(f32v_load(to), f32v_set1(alpha[r]), mixed));
            }
        }
    }
}

INLINE void unit_mix_rows(int bits, int dim, int rows, int tiles, const unit_weights *w,
                          const unsigned char *const *tile, const float *alpha, float *acc, int acc_stride,
                          const unsigned char *const *ahead) {
    int r = 0;
#define MIX_ROWS(n)                                                                                     \
    for (; n <= KVC_UNIT_MIX_ROWS && r + (n) <= rows; r += (n), ahead = NULL) {                         \
        for (int cb = 0; cb < dim / 16; cb += 2) {                                                      \
            unit_mix_tile(n, bits, cb, tiles, w + r, tile, alpha + r, acc + r * acc_stride, acc_stride, \
                          ahead);                                                                       \
        }                                                                                               \
    }
    MIX_ROWS(4)
    MIX_ROWS(2)
    MIX_ROWS(1)
#undef MIX_ROWS
}

static void unit_mix(int bits, int dim, int rows, int tiles, const unit_weights *w,
                     const unsigned char *const *tile, const float *alpha, float *acc, int acc_stride,
                     const unsigned char *const *ahead) {
    switch (bits) {
    case 8: unit_mix_rows(8, dim, rows, tiles, w, tile, alpha, acc, acc_stride, ahead); break;
    case 4: unit_mix_rows(4, dim, rows, tiles, w, tile, alpha, acc, acc_stride, ahead); break;
    case 3: unit_mix_rows(3, dim, rows, tiles, w, tile, alpha, acc, acc_stride, ahead); break;
    default: unit_mix_rows(2, dim, rows, tiles, w, tile, alpha, acc, acc_stride, ahead); break;
    }
}

#endif
#endif
