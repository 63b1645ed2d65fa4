/* simd_scalar.h - the specification: vectors of one float. */
#include <math.h>

#include "kvc_half.h"

#define KVC_LANES 1
#define KVC_TILE_ROWS 4
#define KVC_TILE_VECS 4
#define KVC_PANEL_LANES 1
#define KVC_DOT_SUMS 4

typedef float f32v;

INLINE f32v f32v_zero(void) { return 0.0f; }
INLINE f32v f32v_set1(float x) { return x; }
INLINE f32v f32v_load(const float *p) { return *p; }
INLINE void f32v_store(float *p, f32v x) { *p = x; }
INLINE f32v f32v_load_half(const uint16_t *p) { return kvc_float_of_half(*p); }
INLINE f32v f32v_load_bf16(const uint16_t *p) { return kvc_float_of_bits((uint32_t)*p << 16); }
INLINE f32v f32v_load_signed(const unsigned char *p) { return (float)(int8_t)*p; }
INLINE f32v f32v_load_bits(const unsigned char *p, int shift, int mask) { return (float)(*p >> shift & mask); }
INLINE f32v f32v_load_e8m0(const unsigned char *p) { return kvc_float_of_e8m0(*p); }
INLINE f32v f32v_load_e4m3(const unsigned char *p) { return kvc_float_of_half((uint16_t)(*p << 7)); }
INLINE void f32v_store_half(uint16_t *p, f32v x) { *p = kvc_half_of_float(x); }
INLINE f32v f32v_load8(const float *p) { return *p; } /* never called: one lane never exceeds a row */
INLINE void f32v_store8(float *p, f32v x) { *p = x; }
INLINE f32v f32v_load8_half(const uint16_t *p) { return kvc_float_of_half(*p); }
INLINE void f32v_store8_half(uint16_t *p, f32v x) { *p = kvc_half_of_float(x); }

INLINE f32v f32v_add(f32v a, f32v b) { return a + b; }
INLINE f32v f32v_sub(f32v a, f32v b) { return a - b; }
INLINE f32v f32v_mul(f32v a, f32v b) { return a * b; }
INLINE f32v f32v_div(f32v a, f32v b) { return a / b; }
INLINE f32v f32v_fma(f32v a, f32v b, f32v c) { return a * b + c; }
INLINE f32v f32v_min(f32v a, f32v b) { return a < b ? a : b; }
INLINE f32v f32v_max(f32v a, f32v b) { return a > b ? a : b; }
INLINE f32v f32v_sqrt(f32v x) { return sqrtf(x); }
INLINE f32v f32v_abs(f32v x) { return fabsf(x); }
/* Adding 1.5 * 2^23 leaves no bits below the point; |x| < 2^22. */
INLINE f32v f32v_round(f32v x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
/* Infinite from 2^128 on, which only scores of unwritten K reach; NaN of NaN. */
INLINE f32v f32v_scale2(f32v p, f32v n) {
    if (!(n < 128.0f)) return n * INFINITY;
    return kvc_float_of_bits(kvc_float_bits(p) + ((uint32_t)(int32_t)n << 23));
}
INLINE f32v f32v_zero_below(f32v r, f32v x, f32v limit) { return x < limit ? 0.0f : r; }
INLINE f32v f32v_pick(f32v x, f32v limit, f32v below, f32v other) { return x < limit ? below : other; }
INLINE unsigned f32v_below(f32v x, f32v limit) { return x < limit; }
INLINE void f32v_store_bytes(unsigned char *p, f32v x) { *p = (unsigned char)(int)f32v_round(x); }
INLINE void f32v_store_signed32(unsigned char *p, const f32v x[32]) {
    for (int i = 0; i < 32; i++) f32v_store_bytes(p + i, x[i]);
}

INLINE float f32v_max_of(f32v x) { return x; }
INLINE float f32v_sum_of(f32v x) { return x; }
INLINE int f32v_first_not_below(f32v x, float limit) { return fabsf(x) < limit ? -1 : 0; }
INLINE void f32v_transpose(f32v rows[KVC_LANES]) { (void)rows; }
INLINE f32v f32v_sums(const f32v rows[KVC_LANES]) { return rows[0]; }
INLINE f32v f32v_larger(f32v a, f32v b) { return a < b || b != b ? b : a; }
INLINE f32v f32v_maxima(const f32v rows[KVC_LANES]) { return rows[0]; }

typedef struct i16v {
    int even, odd; /* 0 to 2^15 - 1 */
} i16v;
typedef int32_t i32v;

/* Defined for every float, like the instructions of the other levels; NaN becomes 0. */
INLINE int i16_of(f32v x) { return x > 0.0f ? (int)f32v_round(x < 32767.0f ? x : 32767.0f) : 0; }
INLINE i16v i16v_pair(f32v even, f32v odd) { return (i16v){i16_of(even), i16_of(odd)}; }
INLINE i16v i16v_load(const uint16_t *p) { return (i16v){p[0], p[1]}; }
INLINE void i16v_store(uint16_t *p, i16v x) { p[0] = (uint16_t)x.even, p[1] = (uint16_t)x.odd; }
INLINE i16v i16v_add(i16v a, i16v b) { return (i16v){a.even + b.even, a.odd + b.odd}; }
INLINE i16v i16v_above(i16v a, i16v b) {
    return (i16v){a.even > b.even ? a.even - b.even : 0, a.odd > b.odd ? a.odd - b.odd : 0};
}
INLINE i16v i16v_mul15(i16v a, i16v b) {
    return (i16v){(a.even * b.even + (1 << 14)) >> 15, (a.odd * b.odd + (1 << 14)) >> 15};
}
INLINE i16v i16v_shr(i16v x, int n) { return (i16v){x.even >> n, x.odd >> n}; }
INLINE i16v i16v_min(i16v a, i16v b) {
    return (i16v){a.even < b.even ? a.even : b.even, a.odd < b.odd ? a.odd : b.odd};
}
INLINE i32v i32v_zero(void) { return 0; }
INLINE i32v i32v_dot(i32v sums, i16v a, i16v b) { return sums + a.even * b.even + a.odd * b.odd; }
INLINE f32v i32v_floats(i32v x) { return (float)x; }

/* ---- Units of 64 codes against bytes, 16 sums of 4 products each (kvc_matmul.c). */

#define KVC_UNSIGNED_WEIGHTS 0
#define KVC_PACKED_ROWS(n) 1
#define KVC_PACKED_PANELS(rows) 1
#define KVC_FLOAT_ROWS 2
#define KVC_FLOAT_SUMS 32

typedef struct u8x64 {
    uint8_t byte[64];
} u8x64;
typedef struct i32x16 {
    int32_t sum[16];
} i32x16;

INLINE u8x64 u8x64_load(const unsigned char *p) {
    u8x64 x;
    memcpy(x.byte, p, 64);
    return x;
}
INLINE u8x64 u8x64_and(u8x64 x, int byte) {
    for (int i = 0; i < 64; i++) x.byte[i] &= (uint8_t)byte;
    return x;
}
INLINE u8x64 u8x64_shr(u8x64 x, int n) {
    for (int i = 0; i < 64; i++) x.byte[i] = (uint8_t)(x.byte[i] >> n);
    return x;
}
INLINE u8x64 u8x64_shl(u8x64 x, int n) {
    for (int i = 0; i < 64; i++) x.byte[i] = (uint8_t)(x.byte[i] << n);
    return x;
}
INLINE u8x64 u8x64_or(u8x64 x, u8x64 y) {
    for (int i = 0; i < 64; i++) x.byte[i] |= y.byte[i];
    return x;
}
INLINE u8x64 u8x64_table(const unsigned char table[16]) {
    u8x64 x;
    for (int i = 0; i < 64; i++) x.byte[i] = table[i % 16];
    return x;
}
INLINE u8x64 u8x64_lookup(u8x64 table, u8x64 x) {
    for (int i = 0; i < 64; i++) x.byte[i] = table.byte[x.byte[i] & 15];
    return x;
}
INLINE u8x64 u8x64_weights(u8x64 codes) {
    for (int i = 0; i < 64; i++) codes.byte[i] ^= 0x80;
    return codes;
}
INLINE i32x16 i32x16_set1(int32_t x) {
    i32x16 all;
    for (int i = 0; i < 16; i++) all.sum[i] = x;
    return all;
}
INLINE i32x16 i32x16_zero(void) { return i32x16_set1(0); }
/* sums[i] += the products of codes[4i .. 4i+3], from u8x64_weights, with 4 signed bytes. */
INLINE i32x16 i32x16_dot_x(i32x16 sums, u8x64 codes, int32_t x) {
    for (int i = 0; i < 64; i++) sums.sum[i / 4] += (int8_t)codes.byte[i] * (int8_t)((uint32_t)x >> 8 * (i % 4));
    return sums;
}

INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, u8x64 x) {
    for (int i = 0; i < 64; i++) sums.sum[i / 4] += codes.byte[i] * (int8_t)x.byte[i];
    return sums;
}
INLINE void i32x16_store_sums(const i32x16 x[16], float to[16]) {
    for (int i = 0; i < 16; i++) {
        int32_t sum = 0;
        for (int t = 0; t < 16; t++) sum += x[i].sum[t];
        to[i % 4 * 4 + i / 4] = (float)sum;
    }
}
typedef i32x16 part16;
#define KVC_PART_UNITS(code, byte) KVC_MANY_UNITS
INLINE part16 part16_begin(i32x16 sums) { return sums; }
INLINE i32x16 part16_end(part16 part, i32x16 sums) { return (void)sums, part; }
INLINE part16 part16_dot_q(part16 part, u8x64 codes, int32_t q) { return i32x16_dot_x(part, codes, q); }

INLINE i32x16 i32x16_next_digit(i32x16 high, int32_t more) {
    for (int i = 0; i < 16; i++) high.sum[i] = high.sum[i] * 128 + more;
    return high;
}
INLINE void i32x16_scaled(i32x16 x, float scale, float less, f32v out[16]) {
    (void)less;
    for (int i = 0; i < 16; i++) out[i] = (float)(x.sum[i] - KVC_SUM_START) * scale;
}
INLINE void i32x16_to_floats(i32x16 x, f32v out[16]) {
    for (int i = 0; i < 16; i++) out[i] = (float)x.sum[i];
}

typedef struct u64x8 {
    uint64_t sum[8];
} u64x8;

INLINE u64x8 u64x8_zero(void) { return (u64x8){{0}}; }
INLINE uint64_t u64x8_sum_of(u64x8 x) {
    uint64_t sum = 0;
    for (int i = 0; i < 8; i++) sum += x.sum[i];
    return sum;
}
/* sums[i] += (m[2i] + k[2i]) * (m[2i + 1] + k[2i + 1]), of words of 32 bits whose sums wrap around. */
INLINE u64x8 u64x8_add_products(u64x8 sums, u8x64 m, const uint32_t *k) {
    uint32_t word[16];
    memcpy(word, m.byte, sizeof word);
    for (int i = 0; i < 8; i++)
        sums.sum[i] += (uint64_t)(uint32_t)(word[2 * i] + k[2 * i]) * (uint32_t)(word[2 * i + 1] + k[2 * i + 1]);
    return sums;
}
