/* simd_scalar.h - the specification (BITS.md): vectors of 16 lanes, lane by lane. */
#include <math.h>

#include "kvc_fma.h"
#include "kvc_half.h"

#define KVC_LANES 16
#define KVC_TILE_ROWS 4
#define KVC_TILE_VECS 1
#define KVC_PANEL_LANES 1
#define KVC_DOT_SUMS 16
#define KVC_OWN_SIZES 0

/* Half to even, by a sum that leaves no bits below the point; with the sign of x. */
INLINE float kvc_rounded(float x) {
    const float magnitude = fabsf(x), whole = (magnitude + 0x1p23f) - 0x1p23f;
    return magnitude < 0x1p23f ? copysignf(whole, x) : x;
}
/* p * 2^n for n from -127 to 128, where the result is a normal number, infinite or NaN. */
INLINE float kvc_scaled(float p, float n) {
    return kvc_float_of_bits(kvc_float_bits(p) + ((uint32_t)(int32_t)(n == n ? n : 0.0f) << 23));
}
/* The whole number of 32 bits; for what is none, and NaN, -2^31, as CPUs of x86 have it. */
INLINE int32_t kvc_whole(float x) { return fabsf(x) < 0x1p31f ? (int32_t)kvc_rounded(x) : INT32_MIN; }

#define EACH_LANE ROLLED for (int i = 0; i < KVC_LANES; i++)

typedef struct f32v {
    float lane[KVC_LANES];
} f32v;

INLINE f32v f32v_set1(float x) {
    f32v all;
    EACH_LANE all.lane[i] = x;
    return all;
}
INLINE f32v f32v_zero(void) { return f32v_set1(0.0f); }

/* What is in memory as floats. */
#define LOAD(name, type, value)          \
    INLINE f32v name(const type *p) {    \
        f32v x;                          \
        EACH_LANE x.lane[i] = (value);   \
        return x;                        \
    }
LOAD(f32v_load, float, p[i])
LOAD(f32v_load_half, uint16_t, kvc_float_of_half(p[i]))
LOAD(f32v_load_bf16, uint16_t, kvc_float_of_bits((uint32_t)p[i] << 16))
LOAD(f32v_load_signed, unsigned char, (float)(int8_t)p[i])
LOAD(f32v_load_e8m0, unsigned char, kvc_float_of_e8m0(p[i]))
LOAD(f32v_load_e4m3, unsigned char, kvc_float_of_half((uint16_t)(p[i] << 7)))
LOAD(f32v_load8, float, i < 8 ? p[i] : 0.0f)
LOAD(f32v_load8_half, uint16_t, i < 8 ? kvc_float_of_half(p[i]) : 0.0f)
#undef LOAD
INLINE f32v f32v_load_bits(const unsigned char *p, int shift, int mask) {
    f32v x;
    EACH_LANE x.lane[i] = (float)(p[i] >> shift & mask);
    return x;
}
INLINE void f32v_store(float *p, f32v x) { memcpy(p, x.lane, sizeof x); }
INLINE void f32v_store8(float *p, f32v x) { memcpy(p, x.lane, sizeof x / 2); }
INLINE void f32v_store_half(uint16_t *p, f32v x) {
    EACH_LANE p[i] = kvc_half_of_float(x.lane[i]);
}
INLINE void f32v_store8_half(uint16_t *p, f32v x) {
    for (int i = 0; i < 8; i++) p[i] = kvc_half_of_float(x.lane[i]);
}

/* Operations of one and of two vectors. min and max give b where a number is NaN, or both are zeros. */
#define ONE(name, value)                       \
    INLINE f32v name(f32v x) {                 \
        EACH_LANE {                            \
            const float a = x.lane[i];         \
            x.lane[i] = (value);               \
        }                                      \
        return x;                              \
    }
ONE(f32v_sqrt, sqrtf(a))
ONE(f32v_abs, fabsf(a))
ONE(f32v_round, kvc_rounded(a))
#undef ONE
#define TWO(name, value)                                  \
    INLINE f32v name(f32v x, f32v y) {                    \
        EACH_LANE {                                       \
            const float a = x.lane[i], b = y.lane[i];     \
            x.lane[i] = (value);                          \
        }                                                 \
        return x;                                         \
    }
TWO(f32v_add, a + b)
TWO(f32v_sub, a - b)
TWO(f32v_mul, a * b)
TWO(f32v_div, a / b)
TWO(f32v_min, a < b ? a : b)
TWO(f32v_max, a > b ? a : b)
TWO(f32v_larger, a > b || a != a ? a : b)
TWO(f32v_scale2, kvc_scaled(a, b))
#undef TWO
INLINE f32v f32v_fma(f32v a, f32v b, f32v c) {
    EACH_LANE c.lane[i] = kvc_fma(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}
INLINE f32v f32v_zero_below(f32v r, f32v x, f32v limit) {
    EACH_LANE r.lane[i] = x.lane[i] < limit.lane[i] ? 0.0f : r.lane[i];
    return r;
}
INLINE f32v f32v_pick(f32v x, f32v limit, f32v below, f32v other) {
    EACH_LANE x.lane[i] = x.lane[i] < limit.lane[i] ? below.lane[i] : other.lane[i];
    return x;
}
INLINE unsigned f32v_below(f32v x, f32v limit) {
    unsigned lanes = 0;
    EACH_LANE lanes |= (unsigned)(x.lane[i] < limit.lane[i]) << i;
    return lanes;
}
INLINE int f32v_first_not_below(f32v x, float limit) {
    EACH_LANE {
        if (!(fabsf(x.lane[i]) < limit)) return i;
    }
    return -1;
}
INLINE void f32v_store_bytes(unsigned char *p, f32v x) {
    EACH_LANE p[i] = (unsigned char)kvc_whole(x.lane[i]);
}
INLINE void f32v_store_signed32(unsigned char *p, const f32v x[2]) {
    f32v_store_bytes(p, x[0]), f32v_store_bytes(p + KVC_LANES, x[1]);
}

/* Reductions go by halves: lane i with lane i + 8, then i + 4, i + 2 and i + 1, the lower one on the left. */
#define REDUCTION(of_lanes, of_rows, value)                                 \
    INLINE float of_lanes(f32v x) {                                         \
        for (int half = KVC_LANES / 2; half > 0; half /= 2) {               \
            for (int i = 0; i < half; i++) {                                \
                const float a = x.lane[i], b = x.lane[i + half];            \
                x.lane[i] = (value);                                        \
            }                                                               \
        }                                                                   \
        return x.lane[0];                                                   \
    }                                                                       \
    INLINE f32v of_rows(const f32v rows[KVC_LANES]) {                       \
        f32v all;                                                           \
        EACH_LANE all.lane[i] = of_lanes(rows[i]);                          \
        return all;                                                         \
    }
REDUCTION(f32v_sum_of, f32v_sums, a + b)
REDUCTION(f32v_larger_of, f32v_maxima, a > b || a != a ? a : b)
INLINE float f32v_max_of(f32v x) {
    for (int half = KVC_LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) x.lane[i] = x.lane[i] > x.lane[i + half] ? x.lane[i] : x.lane[i + half];
    }
    return x.lane[0];
}
#undef REDUCTION

INLINE void f32v_transpose(f32v rows[KVC_LANES]) {
    EACH_LANE {
        for (int j = 0; j < i; j++) {
            const float x = rows[i].lane[j];
            rows[i].lane[j] = rows[j].lane[i], rows[j].lane[i] = x;
        }
    }
}

/* Within each 2n lanes: first half + second half, then first half - second half. */
INLINE f32v f32v_butterflies(f32v x, int n) {
    f32v all;
    EACH_LANE all.lane[i] = i & n ? x.lane[i - n] - x.lane[i] : x.lane[i] + x.lane[i + n];
    return all;
}
INLINE f32v f32v_butterfly1(f32v x) { return f32v_butterflies(x, 1); }
INLINE f32v f32v_butterfly2(f32v x) { return f32v_butterflies(x, 2); }
INLINE f32v f32v_butterfly4(f32v x) { return f32v_butterflies(x, 4); }
INLINE f32v f32v_butterfly8(f32v x) { return f32v_butterflies(x, 8); }

/* ---- Pairs of 16-bit numbers, one pair per lane (kvc_fit.h). Products are of signed ones, also of what a NaN has become. */

typedef struct i16v {
    uint16_t number[2 * KVC_LANES]; /* lane by lane */
} i16v;
typedef struct i32v {
    int32_t lane[KVC_LANES];
} i32v;

#define EACH_NUMBER ROLLED for (int i = 0; i < 2 * KVC_LANES; i++)
INLINE i16v i16v_pair(f32v even, f32v odd) {
    i16v x;
    EACH_LANE {
        x.number[2 * i] = (uint16_t)kvc_whole(even.lane[i]);
        x.number[2 * i + 1] = (uint16_t)kvc_whole(odd.lane[i]);
    }
    return x;
}
INLINE i16v i16v_load(const uint16_t *p) {
    i16v x;
    memcpy(x.number, p, sizeof x);
    return x;
}
INLINE void i16v_store(uint16_t *p, i16v x) { memcpy(p, x.number, sizeof x); }
INLINE i16v i16v_add(i16v a, i16v b) {
    EACH_NUMBER a.number[i] = (uint16_t)(a.number[i] + b.number[i]);
    return a;
}
INLINE i16v i16v_above(i16v a, i16v b) {
    EACH_NUMBER a.number[i] = (uint16_t)(a.number[i] > b.number[i] ? a.number[i] - b.number[i] : 0);
    return a;
}
INLINE i16v i16v_mul15(i16v a, i16v b) {
    EACH_NUMBER a.number[i] = (uint16_t)(((int16_t)a.number[i] * (int16_t)b.number[i] + (1 << 14)) >> 15);
    return a;
}
INLINE i16v i16v_shr(i16v x, int n) {
    EACH_NUMBER x.number[i] = (uint16_t)(x.number[i] >> n);
    return x;
}
INLINE i16v i16v_min(i16v a, i16v b) {
    EACH_NUMBER a.number[i] = a.number[i] < b.number[i] ? a.number[i] : b.number[i];
    return a;
}
INLINE i32v i32v_zero(void) { return (i32v){{0}}; }
INLINE i32v i32v_add(i32v a, i32v b) {
    EACH_LANE a.lane[i] += b.lane[i];
    return a;
}
INLINE i32v i32v_dot(i32v sums, i16v a, i16v b) {
    EACH_LANE {
        const int16_t *x = (const int16_t *)a.number + 2 * i, *y = (const int16_t *)b.number + 2 * i;
        sums.lane[i] += x[0] * y[0] + x[1] * y[1];
    }
    return sums;
}
INLINE f32v i32v_floats(i32v x) {
    f32v all;
    EACH_LANE all.lane[i] = (float)x.lane[i];
    return all;
}

/* ---- Units of 64 codes against bytes, 16 sums of 4 products each (kvc_matmul.c). */

#define KVC_SIGNED_CODES 0
#define KVC_SHARED_DIGITS 0
#define KVC_WHOLE_NUMBERS 1
#define KVC_UNIT_DOT_ROWS 4
#define KVC_UNIT_DOT_TILES 1
#define KVC_UNIT_MIX_ROWS 2
#define KVC_UNSIGNED_WEIGHTS 0
#define KVC_PACKED_ROWS(n) 1
#define KVC_PACKED_PANELS(rows) 1
#define KVC_FLOAT_ROWS 2
#define KVC_FLOAT_SUMS 2

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
    ROLLED for (int i = 0; i < 64; i++) x.byte[i] &= (uint8_t)byte;
    return x;
}
INLINE u8x64 u8x64_shr(u8x64 x, int n) {
    ROLLED for (int i = 0; i < 64; i++) x.byte[i] = (uint8_t)(x.byte[i] >> n);
    return x;
}
INLINE u8x64 u8x64_shl(u8x64 x, int n) {
    ROLLED for (int i = 0; i < 64; i++) x.byte[i] = (uint8_t)(x.byte[i] << n);
    return x;
}
INLINE u8x64 u8x64_or(u8x64 x, u8x64 y) {
    ROLLED for (int i = 0; i < 64; i++) x.byte[i] |= y.byte[i];
    return x;
}
INLINE u8x64 u8x64_table(const unsigned char table[16]) {
    u8x64 x;
    ROLLED for (int i = 0; i < 64; i++) x.byte[i] = table[i % 16];
    return x;
}
INLINE u8x64 u8x64_lookup(u8x64 table, u8x64 x) {
    ROLLED for (int i = 0; i < 64; i++) x.byte[i] = table.byte[x.byte[i] & 15];
    return x;
}
/* Bytes 4i + n less zero, at most 128 apart, as floats. */
INLINE void u8x64_floats(u8x64 x, int zero, int n, f32v out[16 / KVC_LANES]) {
    ROLLED for (int i = 0; i < 16; i++) out->lane[i] = (float)(x.byte[4 * i + n] - zero);
}
INLINE u8x64 u8x64_weights(u8x64 codes) {
    ROLLED for (int i = 0; i < 64; i++) codes.byte[i] ^= 0x80;
    return codes;
}
INLINE i32x16 i32x16_set1(int32_t x) {
    i32x16 all;
    ROLLED for (int i = 0; i < 16; i++) all.sum[i] = x;
    return all;
}
INLINE i32x16 i32x16_zero(void) { return i32x16_set1(0); }
/* sums[i] += the products of codes[4i .. 4i+3], from u8x64_weights, with 4 signed bytes. */
INLINE i32x16 i32x16_dot_x(i32x16 sums, u8x64 codes, int32_t x) {
    ROLLED for (int i = 0; i < 64; i++) sums.sum[i / 4] += (int8_t)codes.byte[i] * (int8_t)((uint32_t)x >> 8 * (i % 4));
    return sums;
}

INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, u8x64 x) {
    ROLLED for (int i = 0; i < 64; i++) sums.sum[i / 4] += codes.byte[i] * (int8_t)x.byte[i];
    return sums;
}
INLINE void i32x16_store_sums(const i32x16 x[16], float to[16]) {
    ROLLED for (int i = 0; i < 16; i++) {
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
    ROLLED for (int i = 0; i < 16; i++) high.sum[i] = high.sum[i] * 128 + more;
    return high;
}
INLINE void i32x16_scaled(i32x16 x, float scale, float less, f32v out[1]) {
    EACH_LANE out->lane[i] = kvc_fma(kvc_float_of_bits((uint32_t)x.sum[i]), scale, less);
}
INLINE void i32x16_to_floats(i32x16 x, f32v out[1]) {
    EACH_LANE out->lane[i] = (float)x.sum[i];
}

/* 64 codes: the first of each four, the second, and so on, which meet the same number. */
typedef struct i16x64 {
    int16_t code[4][16];
} i16x64;

INLINE i16x64 i16x64_of(u8x64 codes) {
    i16x64 x;
    ROLLED for (int n = 0; n < 4; n++) {
        EACH_LANE x.code[n][i] = codes.byte[4 * i + n];
    }
    return x;
}
INLINE i32x16 i32x16_dot_whole(i32x16 sums, i16x64 codes, const int16_t *x) {
    ROLLED for (int n = 0; n < 4; n++) {
        EACH_LANE sums.sum[i] += codes.code[n][i] * x[n];
    }
    return sums;
}
INLINE i32v f32v_store_whole(int16_t *p, f32v x) {
    i32v whole;
    EACH_LANE {
        const int32_t x_i32 = kvc_whole(x.lane[i]);
        whole.lane[i] = p[i] = (int16_t)(x_i32 < INT16_MIN ? INT16_MIN : x_i32);
    }
    return whole;
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
