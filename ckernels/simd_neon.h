/* simd_neon.h - 4 lanes: neon, dotprod; at level i8mm products of matrices too, of bytes and of bf16. 32 registers: 24 sums, 4
 * vectors, 1 broadcast. */
#include <arm_neon.h>

#define KVC_LANES 4
#define KVC_TILE_ROWS 6
#define KVC_TILE_VECS 4
#define KVC_PANEL_LANES 1
#define KVC_DOT_SUMS 16

typedef float32x4_t f32v;

INLINE f32v f32v_zero(void) { return vdupq_n_f32(0.0f); }
INLINE f32v f32v_set1(float x) { return vdupq_n_f32(x); }
INLINE f32v f32v_load(const float *p) { return vld1q_f32(p); }
INLINE void f32v_store(float *p, f32v x) { vst1q_f32(p, x); }
INLINE f32v f32v_load_half(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE f32v f32v_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
/* Four bytes as whole numbers. */
INLINE uint32x4_t u32x4_of_bytes(const unsigned char *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}
/* Bytes as floats: signed; some of their bits; the bits of kvc_float_of_e8m0, without 255; those of a half, moved by 7. */
INLINE f32v f32v_load_signed(const unsigned char *p) {
    const int32x4_t high = vreinterpretq_s32_u32(vshlq_n_u32(u32x4_of_bytes(p), 24));
    return vcvtq_f32_s32(vshrq_n_s32(high, 24));
}
INLINE f32v f32v_load_bits(const unsigned char *p, int shift, int mask) {
    const uint32x4_t moved = vshlq_u32(u32x4_of_bytes(p), vdupq_n_s32(-shift));
    return vcvtq_f32_u32(vandq_u32(moved, vdupq_n_u32((uint32_t)mask)));
}
INLINE f32v f32v_load_e8m0(const unsigned char *p) {
    return vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(u32x4_of_bytes(p), 23), vdupq_n_u32(0x400000)));
}
INLINE f32v f32v_load_e4m3(const unsigned char *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(vshlq_n_u32(u32x4_of_bytes(p), 7))));
}
INLINE void f32v_store_half(uint16_t *p, f32v x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE f32v f32v_load8(const float *p) { return f32v_load(p); } /* never called: 4 lanes never exceed a row */
INLINE void f32v_store8(float *p, f32v x) { f32v_store(p, x); }
INLINE f32v f32v_load8_half(const uint16_t *p) { return f32v_load_half(p); }
INLINE void f32v_store8_half(uint16_t *p, f32v x) { f32v_store_half(p, x); }

INLINE f32v f32v_add(f32v a, f32v b) { return vaddq_f32(a, b); }
INLINE f32v f32v_sub(f32v a, f32v b) { return vsubq_f32(a, b); }
INLINE f32v f32v_mul(f32v a, f32v b) { return vmulq_f32(a, b); }
INLINE f32v f32v_div(f32v a, f32v b) { return vdivq_f32(a, b); }
INLINE f32v f32v_fma(f32v a, f32v b, f32v c) { return vfmaq_f32(c, a, b); }
/* The second where one is NaN or both are zeros, as x86 has it. */
INLINE f32v f32v_min(f32v a, f32v b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
INLINE f32v f32v_max(f32v a, f32v b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE f32v f32v_sqrt(f32v x) { return vsqrtq_f32(x); }
INLINE f32v f32v_abs(f32v x) { return vabsq_f32(x); }
INLINE f32v f32v_round(f32v x) { return vrndnq_f32(x); }
INLINE f32v f32v_scale2(f32v p, f32v n) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vcvtq_s32_f32(n), 23)));
}
INLINE f32v f32v_zero_below(f32v r, f32v x, f32v limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(r), vcltq_f32(x, limit)));
}
INLINE unsigned f32v_below(f32v x, f32v limit) {
    const uint32_t bits[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcltq_f32(x, limit), vld1q_u32(bits)));
}
INLINE f32v f32v_pick(f32v x, f32v limit, f32v below, f32v other) {
    return vbslq_f32(vcltq_f32(x, limit), below, other);
}
INLINE void f32v_store_bytes(unsigned char *p, f32v x) {
    const uint16x4_t x_u16x4 = vmovn_u32(vcvtnq_u32_f32(x));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(x_u16x4, x_u16x4))), 0);
    __builtin_memcpy(p, &four, sizeof four);
}
INLINE void f32v_store_signed32(unsigned char *p, const f32v x[8]) {
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        const int16x4_t low = vmovn_s32(vcvtnq_s32_f32(x[i])), high = vmovn_s32(vcvtnq_s32_f32(x[i + 1]));
        vst1_s8((int8_t *)p + 4 * i, vmovn_s16(vcombine_s16(low, high)));
    }
}

INLINE float f32v_max_of(f32v x) {
    x = f32v_max(x, vextq_f32(x, x, 2));
    return vgetq_lane_f32(f32v_max(x, vextq_f32(x, x, 1)), 0);
}
INLINE float f32v_sum_of(f32v x) {
    const float32x2_t half = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(vpadd_f32(half, half), 0);
}
INLINE int f32v_first_not_below(f32v x, float limit) {
    const uint32x4_t below = vcaltq_f32(x, vdupq_n_f32(limit));
    if (vminvq_u32(below)) return -1;
    uint32_t lanes[4];
    vst1q_u32(lanes, below);
    int i = 0;
    while (lanes[i]) i++;
    return i;
}

#define TRN64(n, x, y) \
    vreinterpretq_f32_f64(vtrn##n##q_f64(vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y)))
INLINE void f32v_transpose(f32v r[4]) {
    const f32v a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
    const f32v c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
    r[0] = TRN64(1, a, c);
    r[1] = TRN64(1, b, d);
    r[2] = TRN64(2, a, c);
    r[3] = TRN64(2, b, d);
}
INLINE f32v f32v_sums(const f32v r[4]) {
    const f32v a = vaddq_f32(TRN64(1, r[0], r[1]), TRN64(2, r[0], r[1]));
    const f32v b = vaddq_f32(TRN64(1, r[2], r[3]), TRN64(2, r[2], r[3]));
    return vpaddq_f32(a, b);
}
#undef TRN64
INLINE f32v f32v_larger(f32v a, f32v b) { return vmaxq_f32(a, b); }
INLINE f32v f32v_maxima(const f32v r[4]) { return vpmaxq_f32(vpmaxq_f32(r[0], r[1]), vpmaxq_f32(r[2], r[3])); }

/* ---- Pairs of 16-bit numbers, one pair per lane (kvc_fit.h). */

typedef uint16x8_t i16v;
typedef int32x4_t i32v;

/* As CPUs of x86 have it, -2^31 for numbers from 2^31 on; NaN becomes 0, which has the same low bits. */
INLINE uint32x4_t u32x4_whole(f32v x) {
    const int32x4_t whole = vcvtnq_s32_f32(x);
    return vsubq_u32(vreinterpretq_u32_s32(whole), vceqq_s32(whole, vdupq_n_s32(INT32_MAX)));
}
INLINE i16v i16v_pair(f32v even, f32v odd) { return vreinterpretq_u16_u32(vsliq_n_u32(u32x4_whole(even), u32x4_whole(odd), 16)); }
INLINE i16v i16v_load(const uint16_t *p) { return vld1q_u16(p); }
INLINE void i16v_store(uint16_t *p, i16v x) { vst1q_u16(p, x); }
INLINE i16v i16v_add(i16v a, i16v b) { return vaddq_u16(a, b); }
INLINE i16v i16v_above(i16v a, i16v b) { return vqsubq_u16(a, b); }
INLINE i16v i16v_mul15(i16v a, i16v b) {
    return vreinterpretq_u16_s16(vqrdmulhq_s16(vreinterpretq_s16_u16(a), vreinterpretq_s16_u16(b)));
}
INLINE i16v i16v_shr(i16v x, int n) { return vshlq_u16(x, vdupq_n_s16((int16_t)-n)); }
INLINE i16v i16v_min(i16v a, i16v b) { return vminq_u16(a, b); }
INLINE i32v i32v_zero(void) { return vdupq_n_s32(0); }
INLINE i32v i32v_add(i32v a, i32v b) { return vaddq_s32(a, b); }
INLINE i32v i32v_dot(i32v sums, i16v a, i16v b) {
    const int16x8_t a_i16x8 = vreinterpretq_s16_u16(a), b_i16x8 = vreinterpretq_s16_u16(b);
    const int32x4_t low = vmull_s16(vget_low_s16(a_i16x8), vget_low_s16(b_i16x8));
    return vaddq_s32(sums, vpaddq_s32(low, vmull_high_s16(a_i16x8, b_i16x8)));
}
INLINE f32v i32v_floats(i32v x) { return vcvtq_f32_s32(x); }

/* ---- Units of 64 codes against bytes, 16 sums of 4 products each (kvc_tiles.h). Both operands of sdot are signed. */

#define KVC_SIGNED_CODES 1
#define KVC_SHARED_DIGITS 0
#define KVC_WHOLE_NUMBERS 0
#define KVC_UNIT_DOT_ROWS 2
#define KVC_UNIT_DOT_TILES 1
#define KVC_UNIT_MIX_ROWS 1
#define KVC_UNSIGNED_WEIGHTS 0
#if defined(KVC_I8MM)
#define KVC_PACKED_ROWS(n) 6
#define KVC_UNIT_PAIRS 1
#else
#define KVC_PACKED_ROWS(n) 4
#endif
#define KVC_PACKED_PANELS(rows) 1
#define KVC_FLOAT_ROWS 6
#define KVC_FLOAT_SUMS 24

typedef uint8x16x4_t u8x64;
typedef int32x4x4_t i32x16;

INLINE u8x64 u8x64_load(const unsigned char *p) {
    return (u8x64){{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
#define EACH(x, op) ((u8x64){{op((x).val[0]), op((x).val[1]), op((x).val[2]), op((x).val[3])}})
INLINE u8x64 u8x64_and(u8x64 x, int byte) {
    const uint8x16_t mask = vdupq_n_u8((uint8_t)byte);
#define AND(v) vandq_u8(v, mask)
    return EACH(x, AND);
#undef AND
}
INLINE u8x64 u8x64_xor(u8x64 x, int byte) {
    const uint8x16_t mask = vdupq_n_u8((uint8_t)byte);
#define XOR(v) veorq_u8(v, mask)
    return EACH(x, XOR);
#undef XOR
}
INLINE u8x64 u8x64_or(u8x64 x, u8x64 y) {
    return (u8x64){{vorrq_u8(x.val[0], y.val[0]), vorrq_u8(x.val[1], y.val[1]), vorrq_u8(x.val[2], y.val[2]),
                    vorrq_u8(x.val[3], y.val[3])}};
}
/* 16 bytes in each quarter, and those of them that x, 0 to 15, says. */
INLINE u8x64 u8x64_table(const unsigned char table[16]) {
    const uint8x16_t one = vld1q_u8(table);
    return (u8x64){{one, one, one, one}};
}
INLINE u8x64 u8x64_lookup(u8x64 table, u8x64 x) {
#define LOOK_UP(v) vqtbl1q_u8(table.val[0], v)
    return EACH(x, LOOK_UP);
#undef LOOK_UP
}
INLINE u8x64 u8x64_shl(u8x64 x, int n) {
    const int8x16_t count = vdupq_n_s8((int8_t)n);
#define SHL(v) vshlq_u8(v, count)
    return EACH(x, SHL);
#undef SHL
}
INLINE u8x64 u8x64_shr(u8x64 x, int n) { return u8x64_shl(x, -n); }
#undef EACH

/* Bytes 4i + n less zero, at most 128 apart, as floats. */
INLINE void u8x64_floats(u8x64 x, int zero, int n, f32v out[16 / KVC_LANES]) {
    UNROLL
    for (int v = 0; v < 4; v++) {
        const int32x4_t numbers = vreinterpretq_s32_u8(vsubq_u8(x.val[v], vdupq_n_u8((uint8_t)zero)));
        out[v] = vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(numbers, vdupq_n_s32(24 - 8 * n)), 24));
    }
}

INLINE i32x16 i32x16_zero(void) {
    return (i32x16){{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}};
}
/* Codes and bytes are signed, both. */
INLINE i32x16 i32x16_dot_q(i32x16 sums, u8x64 codes, int32_t q) {
    const int8x16_t q_v = vreinterpretq_s8_s32(vdupq_n_s32(q));
    UNROLL
    for (int i = 0; i < 4; i++) {
        sums.val[i] = vdotq_s32(sums.val[i], vreinterpretq_s8_u8(codes.val[i]), q_v);
    }
    return sums;
}
INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, u8x64 x) {
    UNROLL
    for (int i = 0; i < 4; i++)
        sums.val[i] = vdotq_s32(sums.val[i], vreinterpretq_s8_u8(codes.val[i]), vreinterpretq_s8_u8(x.val[i]));
    return sums;
}
INLINE void i32x16_store_sums(const i32x16 x[16], float to[16]) {
    f32v of[4];
    UNROLL
    for (int i = 0; i < 4; i++, x += 4) {
        int32x4_t parts[4];
        UNROLL
        for (int r = 0; r < 4; r++)
            parts[r] = vaddq_s32(vaddq_s32(x[r].val[0], x[r].val[1]), vaddq_s32(x[r].val[2], x[r].val[3]));
        of[i] = vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(parts[0], parts[1]), vpaddq_s32(parts[2], parts[3])));
    }
    f32v_transpose(of);
    UNROLL
    for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, of[i]);
}
typedef i32x16 part16;
#define KVC_PART_UNITS(code, byte) KVC_MANY_UNITS
INLINE part16 part16_begin(i32x16 sums) { return sums; }
INLINE i32x16 part16_end(part16 part, i32x16 sums) { return (void)sums, part; }
INLINE part16 part16_dot_q(part16 part, u8x64 codes, int32_t q) { return i32x16_dot_q(part, codes, q); }
/* sums[i] += the products of codes[4i .. 4i+3], from u8x64_weights, with 4 signed bytes. */
INLINE u8x64 u8x64_weights(u8x64 codes) { return u8x64_xor(codes, 0x80); }
INLINE i32x16 i32x16_dot_x(i32x16 sums, u8x64 codes, int32_t x) { return i32x16_dot_q(sums, codes, x); }
INLINE i32x16 i32x16_set1(int32_t x) {
    return (i32x16){{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}};
}
INLINE i32x16 i32x16_next_digit(i32x16 high, int32_t more) {
    UNROLL
    for (int i = 0; i < 4; i++) high.val[i] = vaddq_s32(vshlq_n_s32(high.val[i], 7), vdupq_n_s32(more));
    return high;
}
INLINE void i32x16_scaled(i32x16 x, float scale, float less, f32v out[16 / KVC_LANES]) {
    UNROLL
    for (int i = 0; i < 4; i++)
        out[i] = vfmaq_f32(vdupq_n_f32(less), vreinterpretq_f32_s32(x.val[i]), vdupq_n_f32(scale));
}
INLINE void i32x16_to_floats(i32x16 x, f32v out[16 / KVC_LANES]) {
    UNROLL
    for (int i = 0; i < 4; i++) out[i] = vcvtq_f32_s32(x.val[i]);
}
INLINE i32v f32v_seven_bits(const f32v x[8], int centre, int8_t *high, int8_t *low) {
    i32v sum = i32v_zero();
    UNROLL
    for (int i = 0; i < 8; i++) {
        const int32x4_t whole = vcvtnq_s32_f32(x[i]), digit = vshrq_n_s32(vaddq_s32(whole, vdupq_n_s32(centre)), 7);
        const int16x4_t rest = vmovn_s32(vsubq_s32(whole, vshlq_n_s32(digit, 7)));
        const int8x8_t both = vmovn_s16(vcombine_s16(vmovn_s32(digit), rest));
        int8_t bytes[8];
        vst1_s8(bytes, both);
        memcpy(high + 4 * i, bytes, 4), memcpy(low + 4 * i, bytes + 4, 4);
        sum = i32v_add(sum, whole);
    }
    return sum;
}
INLINE i32x16 i32x16_joined(i32x16 high, i32x16 low, int bits) {
    UNROLL
    for (int i = 0; i < 4; i++) high.val[i] = vaddq_s32(vshlq_s32(high.val[i], vdupq_n_s32(bits)), low.val[i]);
    return high;
}

#if defined(KVC_I8MM)
/* Sums of two rows, outputs 2i and 2i + 1 in vector i: the first row's, the second row's. smmla multiplies 8 channels of two
 * rows with 8 channels of two outputs: two units, zipped. The sums are those of sdot, which are exact. */
typedef struct i32x32 {
    int32x4_t val[8];
} i32x32;

#define ZIP64(n, x, y) vreinterpretq_s32_s64(vzip##n##q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)))
INLINE i32x32 i32x32_of(i32x16 first, i32x16 second) {
    i32x32 both;
    UNROLL
    for (int i = 0; i < 4; i++) {
        both.val[2 * i] = ZIP64(1, first.val[i], second.val[i]);
        both.val[2 * i + 1] = ZIP64(2, first.val[i], second.val[i]);
    }
    return both;
}
INLINE i32x16 i32x32_first_of(i32x32 x) {
    return (i32x16){{ZIP64(1, x.val[0], x.val[1]), ZIP64(1, x.val[2], x.val[3]), ZIP64(1, x.val[4], x.val[5]),
                     ZIP64(1, x.val[6], x.val[7])}};
}
INLINE i32x16 i32x32_second_of(i32x32 x) {
    return (i32x16){{ZIP64(2, x.val[0], x.val[1]), ZIP64(2, x.val[2], x.val[3]), ZIP64(2, x.val[4], x.val[5]),
                     ZIP64(2, x.val[6], x.val[7])}};
}
#undef ZIP64

/* Four bytes of each of two rows. */
INLINE int32x4_t i32x4_of_rows(const unsigned char *numbers) {
    const int32x2_t two = vreinterpret_s32_u8(vld1_u8(numbers));
    return vcombine_s32(two, two);
}
/* The number of pairs is a constant. */
INLINE void i32x32_dot(int pairs, i32x32 *sums, u8x64 a, u8x64 b, const unsigned char *x, const unsigned char *y) {
    int8x16_t rows[KVC_PACKED_ROWS(0) / 2];
    UNROLL
    for (int i = 0; i < pairs; i++)
        rows[i] = vreinterpretq_s8_s32(vzip1q_s32(i32x4_of_rows(x + 8 * i), i32x4_of_rows(y + 8 * i)));
    UNROLL
    for (int v = 0; v < 4; v++) {
        const uint32x4_t of_a = vreinterpretq_u32_u8(a.val[v]), of_b = vreinterpretq_u32_u8(b.val[v]);
        const int8x16_t low = vreinterpretq_s8_u32(vzip1q_u32(of_a, of_b));
        const int8x16_t high = vreinterpretq_s8_u32(vzip2q_u32(of_a, of_b));
        UNROLL
        for (int i = 0; i < pairs; i++) {
            sums[i].val[2 * v] = vmmlaq_s32(sums[i].val[2 * v], rows[i], low);
            sums[i].val[2 * v + 1] = vmmlaq_s32(sums[i].val[2 * v + 1], rows[i], high);
        }
    }
}
#endif

#if defined(KVC_I8MM)
/* Words of bf16: 4 channels of two rows, or of two outputs; and the sums of both rows with both outputs, row by row. */
#define KVC_BF16_SIDE 4
typedef bfloat16x8_t bf16x4x2;
typedef float32x4_t f32x2x2;

INLINE bf16x4x2 bf16x4x2_load(const uint16_t *p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }
INLINE bf16x4x2 bf16x4x2_load_one(const uint16_t *p) { /* and a row of zeros */
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(p), vdup_n_u16(0)));
}
INLINE f32x2x2 f32x2x2_dot(f32x2x2 sums, bf16x4x2 rows, bf16x4x2 outputs) { return vbfmmlaq_f32(sums, rows, outputs); }
/* The sums of a row with four outputs. */
INLINE f32v f32v_of_row(int row, f32x2x2 first, f32x2x2 second) {
    const float64x2_t a = vreinterpretq_f64_f32(first), b = vreinterpretq_f64_f32(second);
    return vreinterpretq_f32_f64(row ? vzip2q_f64(a, b) : vzip1q_f64(a, b));
}
INLINE void put_side(uint16_t *to, const uint16_t *from) {
    UNROLL
    for (int half = 0; half < 16; half += 8, to += 32) {
        const uint16x8_t a = vld1q_u16(from + half), b = vld1q_u16(from + half + 16);
        const uint16x8_t c = vld1q_u16(from + half + 32), d = vld1q_u16(from + half + 48);
        const uint32x4_t ab[2] = {vreinterpretq_u32_u16(vzip1q_u16(a, b)), vreinterpretq_u32_u16(vzip2q_u16(a, b))};
        const uint32x4_t cd[2] = {vreinterpretq_u32_u16(vzip1q_u16(c, d)), vreinterpretq_u32_u16(vzip2q_u16(c, d))};
        UNROLL
        for (int i = 0; i < 2; i++) {
            vst1q_u16(to + 16 * i, vreinterpretq_u16_u32(vzip1q_u32(ab[i], cd[i])));
            vst1q_u16(to + 16 * i + 8, vreinterpretq_u16_u32(vzip2q_u32(ab[i], cd[i])));
        }
    }
}
#endif

typedef struct u64x8 {
    uint64x2_t val[4];
} u64x8;

INLINE u64x8 u64x8_zero(void) {
    const uint64x2_t zero = vdupq_n_u64(0);
    return (u64x8){{zero, zero, zero, zero}};
}
INLINE uint64_t u64x8_sum_of(u64x8 x) {
    return vaddvq_u64(vaddq_u64(vaddq_u64(x.val[0], x.val[1]), vaddq_u64(x.val[2], x.val[3])));
}
INLINE u64x8 u64x8_add_products(u64x8 sums, u8x64 m, const uint32_t *k) {
    UNROLL for (int i = 0; i < 4; i++) {
        const uint32x4_t x_u32x4 = vaddq_u32(vreinterpretq_u32_u8(m.val[i]), vld1q_u32(k + 4 * i));
        const uint64x2_t x_u64x2 = vreinterpretq_u64_u32(x_u32x4);
        sums.val[i] = vmlal_u32(sums.val[i], vmovn_u64(x_u64x2), vshrn_n_u64(x_u64x2, 32));
    }
    return sums;
}
