/* simd_avx2.h - 8 lanes: avx2, fma, f16c. 16 registers: 12 sums, 2 vectors, 1 broadcast. */
#include <immintrin.h>

#define KVC_LANES 8
#define KVC_TILE_ROWS 6
#define KVC_TILE_VECS 2
#define KVC_PANEL_LANES 2
#define KVC_DOT_SUMS 8

typedef __m256 f32v;

INLINE f32v f32v_zero(void) { return _mm256_setzero_ps(); }
INLINE f32v f32v_set1(float x) { return _mm256_set1_ps(x); }
INLINE f32v f32v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void f32v_store(float *p, f32v x) { _mm256_storeu_ps(p, x); }
INLINE f32v f32v_load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE f32v f32v_load_bf16(const uint16_t *p) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
/* Bytes as floats: signed; some of their bits; the bits of kvc_float_of_e8m0, without 255; those of a half, moved by 7. */
INLINE f32v f32v_load_signed(const unsigned char *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE f32v f32v_load_bits(const unsigned char *p, int shift, int mask) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bytes, shift), _mm256_set1_epi32(mask)));
}
INLINE f32v f32v_load_e8m0(const unsigned char *p) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x400000)));
}
INLINE f32v f32v_load_e4m3(const unsigned char *p) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7));
}
INLINE void f32v_store_half(uint16_t *p, f32v x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE f32v f32v_load8(const float *p) { return f32v_load(p); }
INLINE void f32v_store8(float *p, f32v x) { f32v_store(p, x); }
INLINE f32v f32v_load8_half(const uint16_t *p) { return f32v_load_half(p); }
INLINE void f32v_store8_half(uint16_t *p, f32v x) { f32v_store_half(p, x); }

INLINE f32v f32v_add(f32v a, f32v b) { return _mm256_add_ps(a, b); }
INLINE f32v f32v_sub(f32v a, f32v b) { return _mm256_sub_ps(a, b); }
INLINE f32v f32v_mul(f32v a, f32v b) { return _mm256_mul_ps(a, b); }
INLINE f32v f32v_div(f32v a, f32v b) { return _mm256_div_ps(a, b); }
INLINE f32v f32v_fma(f32v a, f32v b, f32v c) { return _mm256_fmadd_ps(a, b, c); }
INLINE f32v f32v_min(f32v a, f32v b) { return _mm256_min_ps(a, b); }
INLINE f32v f32v_max(f32v a, f32v b) { return _mm256_max_ps(a, b); }
INLINE f32v f32v_sqrt(f32v x) { return _mm256_sqrt_ps(x); }
INLINE f32v f32v_abs(f32v x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE f32v f32v_round(f32v x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE f32v f32v_scale2(f32v p, f32v n) {
    const __m256i exponent_i32x8 = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent_i32x8));
}
INLINE f32v f32v_zero_below(f32v r, f32v x, f32v limit) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), r);
}
INLINE f32v f32v_pick(f32v x, f32v limit, f32v below, f32v other) {
    return _mm256_blendv_ps(other, below, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
INLINE unsigned f32v_below(f32v x, f32v limit) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ)); }
INLINE void f32v_store_bytes(unsigned char *p, f32v x) {
    const __m256i x_i32x8 = _mm256_cvtps_epi32(x);
    const __m128i x_u16x8 =
        _mm_packus_epi32(_mm256_castsi256_si128(x_i32x8), _mm256_extracti128_si256(x_i32x8, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(x_u16x8, x_u16x8));
}
INLINE void f32v_store_signed32(unsigned char *p, const f32v x[4]) {
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
    const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2]), _mm256_cvtps_epi32(x[3]));
    _mm256_storeu_si256((__m256i *)p, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), in_order));
}

/* Within each 2n lanes: first half + second half, then first half - second half. */
INLINE f32v f32v_butterfly1(f32v x) {
    const __m256 other = _mm256_permute_ps(x, 0xb1);
    return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xaa);
}
INLINE f32v f32v_butterfly2(f32v x) {
    const __m256 other = _mm256_permute_ps(x, 0x4e);
    return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xcc);
}
INLINE f32v f32v_butterfly4(f32v x) {
    const __m256 other = _mm256_permute2f128_ps(x, x, 0x01);
    return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xf0);
}
INLINE f32v f32v_butterfly8(f32v x) { return x; } /* never called: for 16 lanes only */

INLINE float f32v_max_of(f32v x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
INLINE float f32v_sum_of(f32v x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE int f32v_first_not_below(f32v x, float limit) {
    const __m256 below = _mm256_cmp_ps(f32v_abs(x), _mm256_set1_ps(limit), _CMP_LT_OQ);
    const int not_below = ~_mm256_movemask_ps(below) & 0xff;
    return not_below ? __builtin_ctz((unsigned)not_below) : -1;
}

/* Pairs of rows, pairs of pairs, then the two 128-bit halves. */
INLINE void f32v_transpose(f32v r[8]) {
    f32v t[8];
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    UNROLL
    for (int i = 0; i < 8; i++) r[i] = t[i];
}
INLINE f32v f32v_larger(f32v a, f32v b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
/* By halves; a pair of shuffles keeps the halves of one row in their place and swaps those of the other. */
#define REDUCTION(name, of)                                                                                      \
    INLINE f32v name(const f32v r[8]) {                                                                          \
        f32v t[4], u[2];                                                                                         \
        UNROLL                                                                                                   \
        for (int i = 0; i < 4; i++) /* 4 lanes of row i, then of row 4 + i */                                    \
            t[i] = of(_mm256_blend_ps(r[i], r[i + 4], 0xf0), _mm256_permute2f128_ps(r[i], r[i + 4], 0x21));      \
        UNROLL                                                                                                   \
        for (int i = 0; i < 2; i++)                                                                              \
            u[i] = of(_mm256_blend_ps(t[2 * i], t[2 * i + 1], 0xcc), _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0x4e)); \
        return of(_mm256_shuffle_ps(u[0], u[1], 0x88), _mm256_shuffle_ps(u[0], u[1], 0xdd));                     \
    }
REDUCTION(f32v_sums, f32v_add)
REDUCTION(f32v_maxima, f32v_larger)
#undef REDUCTION

/* ---- Pairs of 16-bit numbers, one pair per lane (kvc_fit.h). */

typedef __m256i i16v;
typedef __m256i i32v;

INLINE i16v i16v_pair(f32v even, f32v odd) { /* the low words: NaN becomes 0x80000000, so 0 */
    return _mm256_blend_epi16(_mm256_cvtps_epi32(even), _mm256_slli_epi32(_mm256_cvtps_epi32(odd), 16), 0xaa);
}
INLINE i16v i16v_load(const uint16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void i16v_store(uint16_t *p, i16v x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE i16v i16v_add(i16v a, i16v b) { return _mm256_add_epi16(a, b); }
INLINE i16v i16v_above(i16v a, i16v b) { return _mm256_subs_epu16(a, b); }
INLINE i16v i16v_mul15(i16v a, i16v b) { return _mm256_mulhrs_epi16(a, b); }
INLINE i16v i16v_shr(i16v x, int n) { return _mm256_srli_epi16(x, n); }
INLINE i16v i16v_min(i16v a, i16v b) { return _mm256_min_epi16(a, b); }
INLINE i32v i32v_zero(void) { return _mm256_setzero_si256(); }
INLINE i32v i32v_add(i32v a, i32v b) { return _mm256_add_epi32(a, b); }
INLINE i32v i32v_dot(i32v sums, i16v a, i16v b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
INLINE f32v i32v_floats(i32v x) { return _mm256_cvtepi32_ps(x); }

/* ---- Units of 64 codes against bytes, 16 sums of 4 products each (kvc_matmul.c). vpmaddubsw adds two products in 16
 * bits, where those of small codes leave room for more units: a part. The level avxvnni adds four products in 32 bits by
 * one instruction; its encoding for AVX-512 CPUs, KVC_EVEX, runs where tests run. */

#if defined(KVC_EVEX)
#define dpbusd _mm256_dpbusd_epi32
#define dpwssd _mm256_dpwssd_epi32
#elif defined(KVC_AVXVNNI)
#define dpbusd _mm256_dpbusd_avx_epi32
#define dpwssd _mm256_dpwssd_avx_epi32
#endif

#define KVC_SIGNED_CODES 0
#define KVC_SHARED_DIGITS 0
#define KVC_WHOLE_NUMBERS 1
#define KVC_UNIT_DOT_ROWS 4
#define KVC_UNIT_DOT_TILES 1
#define KVC_UNIT_MIX_ROWS 2
#if defined(KVC_AVXVNNI)
#define KVC_UNSIGNED_WEIGHTS 1
#else
#define KVC_UNSIGNED_WEIGHTS 0
#endif
#define KVC_PACKED_ROWS(n) 4
#define KVC_PACKED_PANELS(rows) 1
#define KVC_FLOAT_ROWS 6
#define KVC_FLOAT_SUMS 12

typedef struct u8x64 {
    __m256i a, b;
} u8x64;
typedef struct i32x16 {
    __m256i a, b;
} i32x16;

INLINE u8x64 u8x64_load(const unsigned char *p) {
    return (u8x64){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
INLINE u8x64 u8x64_and(u8x64 x, int byte) {
    const __m256i mask = _mm256_set1_epi8((char)byte);
    return (u8x64){_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
INLINE u8x64 u8x64_or(u8x64 x, u8x64 y) {
    return (u8x64){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
INLINE u8x64 u8x64_xor(u8x64 x, int byte) {
    const __m256i mask = _mm256_set1_epi8((char)byte);
    return (u8x64){_mm256_xor_si256(x.a, mask), _mm256_xor_si256(x.b, mask)};
}
/* 16 bytes in each quarter, and those of them that x, 0 to 15, says. */
INLINE u8x64 u8x64_table(const unsigned char table[16]) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (u8x64){both, both};
}
INLINE u8x64 u8x64_lookup(u8x64 table, u8x64 x) {
    return (u8x64){_mm256_shuffle_epi8(table.a, x.a), _mm256_shuffle_epi8(table.b, x.b)};
}
/* Shifts 16-bit lanes: bits cross bytes, and callers mask them. */
INLINE u8x64 u8x64_shr(u8x64 x, int n) {
    return (u8x64){_mm256_srli_epi16(x.a, n), _mm256_srli_epi16(x.b, n)};
}
INLINE u8x64 u8x64_shl(u8x64 x, int n) {
    return (u8x64){_mm256_slli_epi16(x.a, n), _mm256_slli_epi16(x.b, n)};
}

/* Bytes 4i + n less zero, at most 128 apart, as floats. */
INLINE void u8x64_floats(u8x64 x, int zero, int n, f32v out[16 / KVC_LANES]) {
    const __m256i less = _mm256_set1_epi8((char)zero);
    const __m256i a = _mm256_slli_epi32(_mm256_sub_epi8(x.a, less), 24 - 8 * n);
    const __m256i b = _mm256_slli_epi32(_mm256_sub_epi8(x.b, less), 24 - 8 * n);
    out[0] = _mm256_cvtepi32_ps(_mm256_srai_epi32(a, 24));
    out[1] = _mm256_cvtepi32_ps(_mm256_srai_epi32(b, 24));
}

/* Keeps `sum` in a register. Without it GCC adds all products at the end of a loop, and stores them until then. */
INLINE __m256i added(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}

INLINE i32x16 i32x16_zero(void) { return (i32x16){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
#if defined(KVC_AVXVNNI)
typedef i32x16 part16;
#define KVC_PART_UNITS(code, byte) KVC_MANY_UNITS
INLINE part16 part16_begin(i32x16 sums) { return sums; }
INLINE i32x16 part16_end(part16 part, i32x16 sums) { return (void)sums, part; }
INLINE part16 part16_dot_q(part16 part, u8x64 codes, int32_t q) {
    const __m256i q_v = _mm256_set1_epi32(q);
    return (part16){dpbusd(part.a, codes.a, q_v), dpbusd(part.b, codes.b, q_v)};
}
/* sums[i] += the products of codes[4i .. 4i+3], from u8x64_weights, with 4 signed bytes of -127 to 127. */
INLINE u8x64 u8x64_weights(u8x64 codes) { return codes; }
INLINE i32x16 i32x16_dot_x(i32x16 sums, u8x64 codes, int32_t x) { return part16_dot_q(sums, codes, x); }
INLINE __m256i i32x8_dot_pairs(__m256i sums, __m256i a, __m256i b) { return dpwssd(sums, a, b); }
INLINE __m256i i32x8_dot(__m256i sums, __m256i u8, __m256i s8) { return dpbusd(sums, u8, s8); }
#else
INLINE __m256i i32x8_dot_pairs(__m256i sums, __m256i a, __m256i b) {
    return added(_mm256_add_epi32(sums, _mm256_madd_epi16(a, b)));
}
INLINE __m256i i32x8_dot(__m256i sums, __m256i u8, __m256i s8) {
    return added(_mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(u8, s8), _mm256_set1_epi16(1))));
}

typedef struct part16 {
    __m256i a, b; /* 32 sums of 16 bits, of two products of each unit */
} part16;

#define KVC_PART_UNITS(code, byte) (INT16_MAX / (2 * (code) * (byte)))
INLINE part16 part16_begin(i32x16 sums) {
    (void)sums;
    return (part16){_mm256_setzero_si256(), _mm256_setzero_si256()};
}
INLINE i32x16 part16_end(part16 part, i32x16 sums) {
    const __m256i one = _mm256_set1_epi16(1);
    return (i32x16){_mm256_add_epi32(sums.a, _mm256_madd_epi16(part.a, one)),
                    _mm256_add_epi32(sums.b, _mm256_madd_epi16(part.b, one))};
}
INLINE part16 part16_dot_q(part16 part, u8x64 codes, int32_t q) {
    const __m256i q_v = _mm256_set1_epi32(q);
    return (part16){added(_mm256_add_epi16(part.a, _mm256_maddubs_epi16(codes.a, q_v))),
                    added(_mm256_add_epi16(part.b, _mm256_maddubs_epi16(codes.b, q_v)))};
}
/* sums[i] += the products of codes[4i .. 4i+3], from u8x64_weights, with 4 signed bytes of -127 to 127. The sign goes to
 * the other factor: 2 * 128 * 127 just fits 16 bits. */
INLINE u8x64 u8x64_weights(u8x64 codes) { return u8x64_xor(codes, 0x80); }
INLINE i32x16 i32x16_dot_x(i32x16 sums, u8x64 codes, int32_t x) {
    const __m256i x_v = _mm256_set1_epi32(x);
    return (i32x16){i32x8_dot(sums.a, _mm256_abs_epi8(codes.a), _mm256_sign_epi8(x_v, codes.a)),
                    i32x8_dot(sums.b, _mm256_abs_epi8(codes.b), _mm256_sign_epi8(x_v, codes.b))};
}
#endif
INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, u8x64 x) {
    return (i32x16){i32x8_dot(sums.a, codes.a, x.a), i32x8_dot(sums.b, codes.b, x.b)};
}
INLINE void i32x16_store_sums(const i32x16 x[16], float to[16]) {
    __m128 of[4];
    UNROLL
    for (int i = 0; i < 4; i++, x += 4) {
        const __m256i a = _mm256_hadd_epi32(_mm256_add_epi32(x[0].a, x[0].b), _mm256_add_epi32(x[1].a, x[1].b));
        const __m256i b = _mm256_hadd_epi32(_mm256_add_epi32(x[2].a, x[2].b), _mm256_add_epi32(x[3].a, x[3].b));
        const __m256i all = _mm256_hadd_epi32(a, b);
        of[i] = _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
    }
    _MM_TRANSPOSE4_PS(of[0], of[1], of[2], of[3]);
    UNROLL
    for (int i = 0; i < 4; i++) _mm_storeu_ps(to + 4 * i, of[i]);
}
INLINE i32x16 i32x16_set1(int32_t x) { return (i32x16){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE i32x16 i32x16_next_digit(i32x16 high, int32_t more) {
    const __m256i more_v = _mm256_set1_epi32(more);
    return (i32x16){_mm256_add_epi32(_mm256_slli_epi32(high.a, 7), more_v),
                    _mm256_add_epi32(_mm256_slli_epi32(high.b, 7), more_v)};
}
INLINE void i32x16_scaled(i32x16 x, float scale, float less, f32v out[16 / KVC_LANES]) {
    const __m256 scale_v = _mm256_set1_ps(scale), less_v = _mm256_set1_ps(less);
    out[0] = _mm256_fmadd_ps(_mm256_castsi256_ps(x.a), scale_v, less_v);
    out[1] = _mm256_fmadd_ps(_mm256_castsi256_ps(x.b), scale_v, less_v);
}
INLINE void i32x16_to_floats(i32x16 x, f32v out[16 / KVC_LANES]) {
    out[0] = _mm256_cvtepi32_ps(x.a), out[1] = _mm256_cvtepi32_ps(x.b);
}

/* 64 codes in 16 bits: of each four, the first and third, and the second and fourth. Numbers are stored in this order. */
typedef struct i16x64 {
    u8x64 even, odd;
} i16x64;

INLINE i16x64 i16x64_of(u8x64 codes) {
    const __m256i low = _mm256_set1_epi16(255);
    return (i16x64){{_mm256_and_si256(codes.a, low), _mm256_and_si256(codes.b, low)}, u8x64_shr(codes, 8)};
}
INLINE i32x16 i32x16_dot_whole(i32x16 sums, i16x64 codes, const int16_t *x) {
    int32_t pairs[2];
    memcpy(pairs, x, sizeof(pairs));
    const __m256i even = _mm256_set1_epi32(pairs[0]), odd = _mm256_set1_epi32(pairs[1]);
    sums.a = i32x8_dot_pairs(sums.a, codes.even.a, even);
    sums.b = i32x8_dot_pairs(sums.b, codes.even.b, even);
    sums.a = i32x8_dot_pairs(sums.a, codes.odd.a, odd);
    sums.b = i32x8_dot_pairs(sums.b, codes.odd.b, odd);
    return sums;
}
INLINE i32v f32v_store_whole(int16_t *p, f32v x) {
    enum { EVEN_FIRST = _MM_SHUFFLE(3, 1, 2, 0) };
    const __m256i x_i32x8 = _mm256_cvtps_epi32(x);
    const __m128i x_i16x8 = _mm_packs_epi32(_mm256_castsi256_si128(x_i32x8), _mm256_extracti128_si256(x_i32x8, 1));
    _mm_storeu_si128((__m128i *)p, _mm_shufflehi_epi16(_mm_shufflelo_epi16(x_i16x8, EVEN_FIRST), EVEN_FIRST));
    return _mm256_zextsi128_si256(_mm_madd_epi16(x_i16x8, _mm_set1_epi16(1)));
}

typedef struct u64x8 {
    __m256i a, b;
} u64x8;

INLINE u64x8 u64x8_zero(void) { return (u64x8){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE uint64_t u64x8_sum_of(u64x8 x) {
    uint64_t sums[4];
    _mm256_storeu_si256((__m256i *)sums, _mm256_add_epi64(x.a, x.b));
    return sums[0] + sums[1] + sums[2] + sums[3];
}
INLINE __m256i u64x4_add_products(__m256i sums, __m256i m, const uint32_t *k) {
    const __m256i x_u32x8 = _mm256_add_epi32(m, _mm256_loadu_si256((const __m256i *)k));
    return _mm256_add_epi64(sums, _mm256_mul_epu32(x_u32x8, _mm256_srli_epi64(x_u32x8, 32)));
}
INLINE u64x8 u64x8_add_products(u64x8 sums, u8x64 m, const uint32_t *k) {
    return (u64x8){u64x4_add_products(sums.a, m.a, k), u64x4_add_products(sums.b, m.b, k + 8)};
}
