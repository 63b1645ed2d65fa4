/* kvc_packed.h - what packed formats store (kvc_matrix.h) as vectors: numbers of a unit, scales and minima of 16 rows. What a
 * format is, its line in the table says: `unit_of` unpacks codes by their bits, or looks numbers up; `scales_of` and `minima_of`
 * read its scales. */
#ifndef KVC_PACKED_H
#define KVC_PACKED_H

#include "kvc_matmul_tile.h"

enum { GROUP_UNITS = KVC_GROUP / 4 };

/* The formats that have code of their own, by the file of their tiles (kvc_packed_tiles.h). Formats that differ in the numbers of
 * their tables alone share it. */
#define PLAIN_FORMATS(X) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1)
#define K_FORMATS(X) X(Q4_K) X(Q5_K) X(Q6_K) X(Q3_K) X(Q2_K)
#define LOOKED_UP_FORMATS(X) X(IQ4_NL) X(IQ4_XS) X(IQ2) X(MXFP4) X(NVFP4)
#define PACKED_FORMATS(X) PLAIN_FORMATS(X) K_FORMATS(X) LOOKED_UP_FORMATS(X)

/* The tiles of a format by their rows (kvc_packed_block_rows), for rows of one digit and of two. */
#define PACKED_TILE(format, digits, rows) KVC_OWN(packed_##format##_##digits##_##rows)
#if defined(KVC_AVX512)
#define ONE_DIGIT(X, f) X(f, 1, 1) X(f, 1, 2) X(f, 1, 3) X(f, 1, 4) X(f, 1, 5) X(f, 1, 6) X(f, 1, 7) X(f, 1, 8)
#define TWO_DIGITS(X, f) X(f, 2, 1) X(f, 2, 2) X(f, 2, 4) X(f, 2, 6) X(f, 2, 7) X(f, 2, 8)
#elif defined(KVC_I8MM)
#define ONE_DIGIT(X, f) X(f, 1, 1) X(f, 1, 2) X(f, 1, 3) X(f, 1, 4) X(f, 1, 5) X(f, 1, 6)
#define TWO_DIGITS(X, f) X(f, 2, 1) X(f, 2, 2) X(f, 2, 4) X(f, 2, 6)
#elif defined(KVC_AVX2) || defined(KVC_NEON)
#define ONE_DIGIT(X, f) X(f, 1, 1) X(f, 1, 2) X(f, 1, 3) X(f, 1, 4)
#define TWO_DIGITS(X, f) X(f, 2, 1) X(f, 2, 2) X(f, 2, 4)
#else
#define ONE_DIGIT(X, f) X(f, 1, 1)
#define TWO_DIGITS(X, f) X(f, 2, 1)
#endif

INLINE int32_t load_i32(const unsigned char *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}
INLINE float load_f32(const unsigned char *p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}

/* Bits [at, at + n) of each byte as bits [to, to + n). */
INLINE u8x64 bits_of(u8x64 x, int at, int n, int to) {
    if (n == 8) return x;
    if (at > to) x = u8x64_shr(x, at - to);
    if (at < to) x = u8x64_shl(x, to - at);
    return u8x64_and(x, ((1 << n) - 1) << to);
}

/* Codes of unit `unit` of a group. */
INLINE u8x64 unit_of(const unsigned char *codes, int bits, int unit) {
    const int low = kvc_plane_bits(bits), high = bits - low;
    const u8x64 first = bits_of(u8x64_load(codes + unit % low * KVC_UNIT_BYTES), unit / low * low, low, 0);
    if (!high) return first;
    const unsigned char *second = codes + (low + unit % high) * KVC_UNIT_BYTES;
    return u8x64_or(first, bits_of(u8x64_load(second), unit / high * high, high, low));
}

/* Whether numbers take all 8 bits of a byte: they are in the form of u8x64_weights then. */
INLINE int is_wide(const kvc_matrix_format_info *info) { return info->zero == 128; }

INLINE u8x64 numbers_of(const kvc_matrix_format_info *info, const unsigned char *codes, int unit, u8x64 table) {
    const u8x64 found = unit_of(codes, info->bits, unit);
    if (info->table) return u8x64_lookup(table, found);
    return is_wide(info) ? u8x64_weights(found) : found;
}

/* The scales number n of a record's rows, a vector of them, times the factor that they lack (kvc_scale_factor), or 1. */
INLINE f32v scales_times(const kvc_matrix_format_info *info, const unsigned char *record, int n, int v, float factor) {
    const unsigned char *own = record + kvc_scales_at(info) +
                               (size_t)(n * KVC_PANEL + v * KVC_LANES) * kvc_scale_bytes(info);
    const f32v unit = !kvc_has_units(info) ? f32v_zero()
                      : info->has_minima   ? f32v_load_half((const uint16_t *)record + v * KVC_LANES)
                                           : f32v_load((const float *)record + v * KVC_LANES);
    switch (info->scales) {
    case KVC_HALVES: return f32v_load_half((const uint16_t *)own);
    case KVC_E8M0: return factor == 1.0f ? f32v_load_e8m0(own) : f32v_mul(f32v_load_e8m0(own), f32v_set1(factor));
    case KVC_E4M3:
        return f32v_mul(unit, factor == 1.0f ? f32v_load_e4m3(own) : f32v_mul(f32v_load_e4m3(own), f32v_set1(factor)));
    case KVC_NIBBLES: return f32v_mul(unit, f32v_load_bits(own, 0, 15));
    default: return f32v_mul(unit, info->has_minima ? f32v_load_bits(own, 0, 255) : f32v_load_signed(own));
    }
}
INLINE f32v scales_of(const kvc_matrix_format_info *info, const unsigned char *record, int n, int v) {
    return scales_times(info, record, n, v, 1.0f);
}

/* The minima likewise, of a format that has them. */
INLINE f32v minima_of(const kvc_matrix_format_info *info, const unsigned char *record, int n, int v) {
    const unsigned char *own = record + kvc_minima_at(info) +
                               (size_t)(n * KVC_PANEL + v * KVC_LANES) * kvc_scale_bytes(info);
    if (info->scales == KVC_HALVES) return f32v_load_half((const uint16_t *)own);
    const f32v unit = f32v_load_half((const uint16_t *)record + KVC_PANEL + v * KVC_LANES);
    return f32v_mul(unit, info->scales == KVC_NIBBLES ? f32v_load_bits(own, 4, 15) : f32v_load_bits(own, 0, 255));
}

/* sum += floats, of one row, times the scales of weights, and the minima times the row's correction (kvc_matrix.h). */
INLINE void add_scaled(int has_minima, const f32v *scaled, const unsigned char *correction, const f32v *scales, const f32v *minima,
                       f32x16 *sum) {
    UNROLL
    for (int v = 0; v < KVC_VECTORS; v++) {
        sum->v[v] = f32v_fma(scaled[v], scales[v], sum->v[v]);
        if (has_minima) sum->v[v] = f32v_fma(minima[v], f32v_set1(load_f32(correction)), sum->v[v]);
    }
}

/* The same of whole numbers, which the row's scale multiplies first. */
INLINE void add_whole(int has_minima, i32x16 dots, const unsigned char *scale, const unsigned char *correction,
                      const f32v *scales, const f32v *minima, f32x16 *sum) {
    f32v scaled[KVC_VECTORS];
    i32x16_to_floats(dots, scaled);
    UNROLL
    for (int v = 0; v < KVC_VECTORS; v++) scaled[v] = f32v_mul(scaled[v], f32v_set1(load_f32(scale)));
    add_scaled(has_minima, scaled, correction, scales, minima, sum);
}

#endif
