/* kvc_simd.h - selects the primitives of the level that is being compiled.
 *
 * A level defines one vector type f32v of KVC_LANES floats and these functions on it:
 *   load, store, load_half, store_half, load_bf16, zero, set1, add, sub, mul, div, fma, min, max, round (half to even), abs,
 *   scale2(p, n) = p * 2^n for whole n in [-127, 128], by a sum with the exponent's bits, where that is a normal number, infinite
 *   or NaN; with KVC_SCALE2_ANY for any n; min(a, b) = a < b ? a : b, max(a, b) = a > b ? a : b; zero_below(r, x, limit) = x < limit ? 0 : r,
 *   pick(x, limit, below, other) = x < limit ? below : other, below(x, limit): a bit for each lane with x < limit,
 *   store_bytes: rounded as by round, 0 to 255,
 *   store_signed32: 32 rounded floats, -128 to 127,
 *   max_of, sum_of (over the lanes), first_not_below(x, limit): the first lane without |x| < limit, or -1,
 *   (both by halves: 8 lanes i with i + 8, then 4 with i + 4, then 2, then 1, the lower one on the left),
 *   transpose(rows[KVC_LANES]) in place, sums(rows[KVC_LANES]): lane i is the sum of the lanes of row i, likewise by halves,
 *   larger(a, b) of numbers that are not negative, NaN if one is NaN, and maxima(rows[KVC_LANES]), likewise,
 *   load8/store8 (and _half): 8 floats, if a vector is wider than 8.
 * Its types i16v, a pair of whole numbers from 0 to 2^15 - 1 per lane, and i32v, a sum per lane, have (of larger ones: unsigned, but
 * products are of signed ones)
 *   pair(even, odd): of floats, rounded as by round, load, store, add, min, shr, above(a, b) = max(a - b, 0),
 *   mul15(a, b) = (a * b + 2^14) >> 15, dot(sums, a, b) = sums + the products of both pairs, floats.
 * Products with weights (kvc_matmul_packed.c) take scales in bytes: load_signed, load_bits(p, shift, mask), load_e8m0, load_e4m3
 *   (floats / 256); and units of 64 codes, u8x64, and 16 sums, i32x16:
 *   u8x64_load, and, or, shr, shl, table(16 bytes), lookup(table, x of 0 to 15), weights: the form of 8-bit codes that
 *   dot_x takes; dot_x adds the products of codes 4i .. 4i+3 with 4 signed bytes to sum i; set1, zero, next_digit(x, more) = x * 128 + more, to_floats,
 *   dot_bytes(sums, codes, x): sum i += the products of codes 4i .. 4i+3, of 0 to 31, with signed bytes 4i .. 4i+3 of x;
 *   u8x64_floats(x, zero, n, floats[16]): bytes 4i + n less zero, as floats;
 *   store_sums(x[16], to[16]): to[4r + n] = all sums of x[4n + r], as floats;
 *   scaled(x, scale, less): (x - KVC_SUM_START) * scale as floats (kvc_matrix.h).
 * Other codes are added to a part of such sums, part16, which a level may keep in fewer bits: begin(sums), dot_q (codes
 *   times signed bytes), and end(part, sums), the sums with the part added. KVC_PART_UNITS(code, byte) units fit a part
 *   where no factor is larger than these. Only the AVX2 level has a limit; at the others a part is the sums themselves.
 *   A level with KVC_UNIT_PAIRS multiplies two units with two rows at a time, in sums of both rows, i32x32: of(first, second),
 *   first_of, second_of, and i32x32_dot(pairs, sums, a, b, x, y): of unit a with the numbers of the rows at x, of b at y.
 * Attention (kvc_tiles.h) adds the products of a unit to sums, in one of two ways:
 *   i32x16_dot_q (codes, signed ones with KVC_SIGNED_CODES, times signed bytes), joined(high, low, bits) =
 *   high * 2^bits + low, f32v_seven_bits(x, centre, high, low): 32 rounded x = 128 high + low, high is (x + centre) / 128,
 *   rounded down; or, with KVC_WHOLE_NUMBERS, i16x64_of(u8x64) and i32x16_dot_whole: codes times four numbers of 16 bits,
 *   in the order of f32v_store_whole, which rounds. What rounds returns i32v with the same sum as the rounded numbers.
 * Its type u64x8 has sums for kvc_digest.c: zero, sum_of, add_products(sums, u8x64, key).
 * It also defines the shape of its register tiles:
 *   KVC_TILE_ROWS x KVC_TILE_VECS   accumulators of the product over many rows
 *   KVC_PANEL_LANES                 lanes of a dot product that the scores of many rows sum at a time: more of them
 *                                   leave fewer rows in a tile, and fewer partial sums in memory
 *   KVC_DOT_SUMS                    accumulators of the product over few rows
 *   KVC_PACKED_ROWS(n)              rows that a tile of packed weights multiplies at a time, in a call of n rows
 *   KVC_PACKED_PANELS(rows)         panels of that tile: one reads like a stream, two use each broadcast twice and have more sums at a time
 *   KVC_FLOAT_ROWS                  the most rows of a tile of float weights: 12, 6 or 2
 *   KVC_FLOAT_SUMS                  accumulators of a tile of float weights
 *   KVC_BF16_TARGET                 1: the level has bf16x2, for CPUs with the feature that KVC_BF16_FEATURE names
 * A level with KVC_BF16_SIDE multiplies that number of channels of bf16 of 16 outputs at a time (kvc_matmul_bf16.c):
 *   put_side(to, from)              KVC_BF16_SIDE channels of 16 words each: those of an output side by side
 */
#ifndef KVC_SIMD_H
#define KVC_SIMD_H

#include "kvc.h"

#define KVC_JOIN2(a, b) kvc_##a##_##b
#define KVC_JOIN(a, b) KVC_JOIN2(a, b)
#define KVC_OWN(name) KVC_JOIN(name, KVC_LEVEL) /* kvc_<name>_<level>: each level's own copy of a function */
#define KVC_FN(name) KVC_JOIN(name, KVC_BASE)   /* the same, or that of the level that this one is but for a few */
#if defined(KVC_SCALARFMA) /* the scalar level with instructions for fma */
#define KVC_SCALAR 1
#define KVC_UNFUSED(name) KVC_JOIN(name, scalar)
#else
#define KVC_UNFUSED(name) KVC_FN(name) /* of a file without fma */
#endif
#define KVC_STR2(x) #x
#define KVC_STR(x) KVC_STR2(x)

#if defined(KVC_AVXVNNI)
#define KVC_AVX2 1 /* this level is avx2 with other integer dot products */
#elif defined(KVC_I8MM)
#define KVC_NEON 1 /* this one neon with products of two units and two rows, and of bf16 */
#endif
#if defined(KVC_AMX)
#define KVC_AVX512 1 /* this level is avx512, bit for bit, with other products of whole numbers where rows are many, and of bf16 */
#define KVC_BASE avx512
#elif defined(KVC_I8MM)
#define KVC_BASE neon
#elif defined(KVC_AVXVNNI)
#define KVC_BASE avx2
#else
#define KVC_BASE KVC_LEVEL
#endif

/* Keeps products in separate functions: several in one leave the compiler too few registers for their addresses. */
#define NOINLINE static __attribute__((noinline))
/* Loops over registers. The scalar level leaves them to the compiler: unrolled they take it ten times as long (15 s), and the
 * code runs no faster. */
#if defined(KVC_AVX512) || defined(KVC_AVX2) || defined(KVC_NEON)
#define UNROLL _Pragma("GCC unroll 32")
#else
#define UNROLL
#endif
/* Loops over lanes in memory: unrolled, they would take them out of a register one by one. */
#define ROLLED _Pragma("GCC unroll 1")

enum { KVC_MANY_UNITS = 1 << 20 }; /* of a part without a limit: more than any call adds */

#if defined(KVC_AMX)
#include "simd_amx.h"
#elif defined(KVC_AVX512)
#include "simd_avx512.h"
#elif defined(KVC_AVX2)
#include "simd_avx2.h"
#elif defined(KVC_NEON)
#include "simd_neon.h"
#else
#include "simd_scalar.h"
#endif
#if !defined(KVC_SCALE2_ANY)
#define KVC_SCALE2_ANY 0 /* 1: numbers of that size, infinite ones too, are powers of two as they are */
#endif
#if !defined(KVC_OWN_SIZES)
#define KVC_OWN_SIZES 1 /* 1: sizes of heads have code of their own, where they are constants */
#endif
#if !defined(KVC_TILES)
#define KVC_TILES 0 /* 1: the level has those of simd_amx.h */
#endif

/* Parts of n sums (a constant). */
INLINE void begin_parts(int n, const i32x16 *sums, part16 *parts) {
    UNROLL
    for (int i = 0; i < n; i++) parts[i] = part16_begin(sums[i]);
}
INLINE void end_parts(int n, const part16 *parts, i32x16 *sums) {
    UNROLL
    for (int i = 0; i < n; i++) sums[i] = part16_end(parts[i], sums[i]);
}

/* 16 floats: a reduction is by these lanes at every level, then by halves. */
enum { KVC_VECTORS = 16 / KVC_LANES };
typedef struct f32x16 {
    f32v v[KVC_VECTORS];
} f32x16;

INLINE f32x16 f32x16_set1(float x) {
    f32x16 all;
    UNROLL
    for (int i = 0; i < KVC_VECTORS; i++) all.v[i] = f32v_set1(x);
    return all;
}
INLINE f32x16 f32x16_zero(void) { return f32x16_set1(0.0f); }
INLINE f32x16 f32x16_load(const float *p) {
    f32x16 x;
    UNROLL
    for (int i = 0; i < KVC_VECTORS; i++) x.v[i] = f32v_load(p + i * KVC_LANES);
    return x;
}
INLINE void f32x16_store(float *p, f32x16 x) {
    UNROLL
    for (int v = 0; v < KVC_VECTORS; v++) f32v_store(p + v * KVC_LANES, x.v[v]);
}
INLINE f32x16 f32x16_add(f32x16 a, f32x16 b) {
    UNROLL
    for (int i = 0; i < KVC_VECTORS; i++) a.v[i] = f32v_add(a.v[i], b.v[i]);
    return a;
}
INLINE f32x16 f32x16_fma(f32x16 a, f32x16 b, f32x16 c) {
    UNROLL
    for (int i = 0; i < KVC_VECTORS; i++) c.v[i] = f32v_fma(a.v[i], b.v[i], c.v[i]);
    return c;
}
INLINE f32x16 f32x16_max(f32x16 a, f32x16 b) {
    UNROLL
    for (int i = 0; i < KVC_VECTORS; i++) a.v[i] = f32v_max(a.v[i], b.v[i]);
    return a;
}
INLINE f32x16 f32x16_abs(f32x16 x) {
    UNROLL
    for (int i = 0; i < KVC_VECTORS; i++) x.v[i] = f32v_abs(x.v[i]);
    return x;
}
#define REDUCTION(name, of, of_lanes)                                            \
    INLINE float name(f32x16 x) {                                               \
        UNROLL                                                                  \
        for (int half = KVC_VECTORS / 2; half > 0; half /= 2) {                 \
            UNROLL                                                              \
            for (int i = 0; i < half; i++) x.v[i] = of(x.v[i], x.v[i + half]);  \
        }                                                                       \
        return of_lanes(x.v[0]);                                                \
    }
REDUCTION(f32x16_sum_of, f32v_add, f32v_sum_of)
REDUCTION(f32x16_max_of, f32v_max, f32v_max_of)
#undef REDUCTION

/* Lane i of the 16 in the order in which those that are added first are neighbours: 0, 8, 4, 12, 2, 10, 6, 14, 1, .. */
INLINE int kvc_lane(int i) { return (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | (i & 8) >> 3; }

/* Adds the sums of turn g to those on their left: of 16 lanes in that order, some in each turn, left[n] has the sums of 2^n
 * turns until the next 2^n are there. The number of sums is a constant. */
INLINE int f32v_join(int g, int count, f32v *sums, const f32v *left) {
    int n = 0;
    for (; g >> n & 1; n++) {
        UNROLL
        for (int i = 0; i < count; i++) sums[i] = f32v_add(left[n * count + i], sums[i]);
    }
    return n;
}

/* Values [d, d + KVC_LANES) of a row of dim values, dim a multiple of 8. Only 16 lanes can exceed the row, by 8. */
INLINE f32v load_dims(const float *row, int d, int dim) {
    return KVC_LANES > 8 && d + 8 == dim ? f32v_load8(row + d) : f32v_load(row + d);
}
INLINE f32v load_dims_half(const uint16_t *row, int d, int dim) {
    return KVC_LANES > 8 && d + 8 == dim ? f32v_load8_half(row + d) : f32v_load_half(row + d);
}
INLINE void store_dims(float *row, int d, int dim, f32v x) {
    if (KVC_LANES > 8 && d + 8 == dim)
        f32v_store8(row + d, x);
    else
        f32v_store(row + d, x);
}
INLINE void store_dims_half(uint16_t *row, int d, int dim, f32v x) {
    if (KVC_LANES > 8 && d + 8 == dim)
        f32v_store8_half(row + d, x);
    else
        f32v_store_half(row + d, x);
}

/* The same of a row of a float format. */
INLINE f32v load_row(kvc_format format, const unsigned char *row, int d, int dim) {
    return format == KVC_F32 ? load_dims((const float *)row, d, dim)
                             : load_dims_half((const uint16_t *)row, d, dim);
}
INLINE void store_row(kvc_format format, unsigned char *row, int d, int dim, f32v x) {
    if (format == KVC_F32)
        store_dims((float *)row, d, dim, x);
    else
        store_dims_half((uint16_t *)row, d, dim, x);
}

/* 2^x: 0 where x < -126, infinite from 128 on; NaN for NaN, since f32v_max and f32v_min return their second argument if it is NaN.
 * x = n + f with |f| <= 1/2; 2^f is a polynomial, its coefficients from the highest degree down to 0 (constants). */
INLINE f32v f32v_exp2_by(int degree, const float *coefficients, f32v x) {
    const f32v held = KVC_SCALE2_ANY ? x : f32v_min(f32v_set1(128.0f), f32v_max(f32v_set1(-127.0f), x));
    const f32v n = f32v_round(held), f = f32v_sub(held, n);
    f32v p = f32v_set1(coefficients[0]);
    UNROLL
    for (int i = 1; i <= degree; i++) p = f32v_fma(p, f, f32v_set1(coefficients[i]));
    return f32v_zero_below(f32v_scale2(p, n), x, f32v_set1(-126.0f));
}

/* Within 1 ulp. Of degree 6, with the least maximal relative error (1.9e-9, Remez). */
INLINE f32v f32v_exp2(f32v x) {
    static const float by[] = {0x1.41d334p-13f, 0x1.5f456ap-10f, 0x1.3b2dbcp-7f, 0x1.c6aed4p-5f, 0x1.ebfbdap-3f, 0x1.62e430p-1f, 1.0f};
    return f32v_exp2_by(6, by, x);
}

/* Within 4e-6 of it, relatively: weights that become whole numbers of 14 bits need no more. Likewise of degree 4 and 1 at 0. */
INLINE f32v f32v_exp2_short(f32v x) {
    static const float by[] = {0x1.409104p-7f, 0x1.ca9008p-5f, 0x1.ebf1b4p-3f, 0x1.62dfcap-1f, 1.0f};
    return f32v_exp2_by(4, by, x);
}

/* tanh(x), relative error at most 3e-7. Below 5/8 an odd polynomial of degree 11 (Cephes, tanhf; 1.3e-8 without rounding), from
 * there on 1 - 2 / (e^(2|x|) + 1), which is at least 0.55 and so keeps the relative error of the exponential. */
INLINE f32v f32v_tanh(f32v x) {
    const f32v magnitude = f32v_abs(x), square = f32v_mul(x, x), one = f32v_set1(1.0f);
    f32v p = f32v_set1(-5.70498872745e-3f);
    p = f32v_fma(p, square, f32v_set1(2.06390887954e-2f));
    p = f32v_fma(p, square, f32v_set1(-5.37397155531e-2f));
    p = f32v_fma(p, square, f32v_set1(1.33314422036e-1f));
    p = f32v_fma(p, square, f32v_set1(-3.33332819422e-1f));
    p = f32v_fma(f32v_mul(p, square), x, x);
    const f32v power = f32v_exp2(f32v_min(f32v_set1(100.0f), f32v_mul(magnitude, f32v_set1(0x1.715476p+1f))));
    const f32v far = f32v_sub(one, f32v_div(f32v_set1(2.0f), f32v_add(power, one)));
    const f32v limit = f32v_set1(0.625f);
    return f32v_pick(magnitude, limit, p, f32v_pick(x, f32v_zero(), f32v_sub(f32v_zero(), far), far));
}

#endif
