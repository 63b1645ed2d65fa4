/* simd_avx512.h - 16 lanes: avx512 f, bw, vl, dq, vnni. 32 registers: 24 sums, 2 vectors, 1 broadcast. */
#include <immintrin.h>

#define KVC_LANES 16
#define KVC_TILE_ROWS 12
#define KVC_TILE_VECS 2
#define KVC_PANEL_LANES 2
#define KVC_DOT_SUMS 16

typedef __m512 f32v;

INLINE f32v f32v_zero(void) { return _mm512_setzero_ps(); }
INLINE f32v f32v_set1(float x) { return _mm512_set1_ps(x); }
INLINE f32v f32v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void f32v_store(float *p, f32v x) { _mm512_storeu_ps(p, x); }
INLINE f32v f32v_load_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE f32v f32v_load_bf16(const uint16_t *p) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
/* Bytes as floats: signed; some of their bits; the bits of kvc_float_of_e8m0, without 255; those of a half, moved by 7. */
INLINE f32v f32v_load_signed(const unsigned char *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE f32v f32v_load_bits(const unsigned char *p, int shift, int mask) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes, (unsigned)shift), _mm512_set1_epi32(mask)));
}
INLINE f32v f32v_load_e8m0(const unsigned char *p) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x400000)));
}
INLINE f32v f32v_load_e4m3(const unsigned char *p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 7));
}
INLINE void f32v_store_half(uint16_t *p, f32v x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE f32v f32v_load8(const float *p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
INLINE void f32v_store8(float *p, f32v x) { _mm256_storeu_ps(p, _mm512_castps512_ps256(x)); }
INLINE f32v f32v_load8_half(const uint16_t *p) {
    return _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)));
}
INLINE void f32v_store8_half(uint16_t *p, f32v x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(_mm512_castps512_ps256(x), _MM_FROUND_TO_NEAREST_INT));
}

INLINE f32v f32v_add(f32v a, f32v b) { return _mm512_add_ps(a, b); }
INLINE f32v f32v_sub(f32v a, f32v b) { return _mm512_sub_ps(a, b); }
INLINE f32v f32v_mul(f32v a, f32v b) { return _mm512_mul_ps(a, b); }
INLINE f32v f32v_div(f32v a, f32v b) { return _mm512_div_ps(a, b); }
INLINE f32v f32v_fma(f32v a, f32v b, f32v c) { return _mm512_fmadd_ps(a, b, c); }
INLINE f32v f32v_min(f32v a, f32v b) { return _mm512_min_ps(a, b); }
INLINE f32v f32v_max(f32v a, f32v b) { return _mm512_max_ps(a, b); }
INLINE f32v f32v_sqrt(f32v x) { return _mm512_sqrt_ps(x); }
INLINE f32v f32v_abs(f32v x) { return _mm512_abs_ps(x); }
INLINE f32v f32v_round(f32v x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#define KVC_SCALE2_ANY 1
INLINE f32v f32v_scale2(f32v p, f32v n) { return _mm512_scalef_ps(p, n); }
INLINE f32v f32v_zero_below(f32v r, f32v x, f32v limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), r);
}
INLINE f32v f32v_pick(f32v x, f32v limit, f32v below, f32v other) {
    return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), below);
}
INLINE unsigned f32v_below(f32v x, f32v limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ); }
INLINE void f32v_store_bytes(unsigned char *p, f32v x) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
INLINE void f32v_store_signed32(unsigned char *p, const f32v x[2]) {
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
    const __m512i words = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    const __m512i bytes = _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(words, words));
    _mm256_storeu_si256((__m256i *)p, _mm512_castsi512_si256(bytes));
}

/* Within each 2n lanes: first half + second half, then first half - second half. */
INLINE f32v f32v_butterfly1(f32v x) {
    const __m512 other = _mm512_permute_ps(x, 0xb1);
    return _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xaaaa, other, x);
}
INLINE f32v f32v_butterfly2(f32v x) {
    const __m512 other = _mm512_permute_ps(x, 0x4e);
    return _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xcccc, other, x);
}
INLINE f32v f32v_butterfly4(f32v x) {
    const __m512 other = _mm512_shuffle_f32x4(x, x, 0xb1);
    return _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xf0f0, other, x);
}
INLINE f32v f32v_butterfly8(f32v x) {
    const __m512 other = _mm512_shuffle_f32x4(x, x, 0x4e);
    return _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xff00, other, x);
}

INLINE float f32v_max_of(f32v x) {
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
INLINE float f32v_sum_of(f32v x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE int f32v_first_not_below(f32v x, float limit) {
    const __mmask16 not_below = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(limit), _CMP_NLT_UQ);
    return not_below ? __builtin_ctz(not_below) : -1;
}

/* Pairs of rows, pairs of pairs, then 128-bit quarters twice. */
INLINE void f32v_transpose(f32v r[16]) {
    f32v t[16];
    UNROLL
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 16; i += 4) { /* r[i + c]: column 4q + c of rows i .. i+3 in quarter q */
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL
    for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x88);     /* quarters 0, 2 of rows 0-3, then of 4-7 */
        t[c + 4] = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xdd); /* quarters 1, 3 */
        t[c + 8] = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0x88); /* the same of rows 8-15 */
        t[c + 12] = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0xdd);
    }
    UNROLL
    for (int c = 0; c < 4; c++) {
        r[c] = _mm512_shuffle_f32x4(t[c], t[c + 8], 0x88);
        r[c + 8] = _mm512_shuffle_f32x4(t[c], t[c + 8], 0xdd);
        r[c + 4] = _mm512_shuffle_f32x4(t[c + 4], t[c + 12], 0x88);
        r[c + 12] = _mm512_shuffle_f32x4(t[c + 4], t[c + 12], 0xdd);
    }
}
INLINE f32v f32v_larger(f32v a, f32v b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
/* By halves; a pair of shuffles keeps the halves of one row in their place and swaps those of the other. */
#define REDUCTION(name, of)                                                                                               \
    INLINE f32v name(const f32v r[16]) {                                                                                  \
        f32v t[8], u[4], w[2];                                                                                            \
        UNROLL                                                                                                            \
        for (int i = 0; i < 8; i++) { /* 8 lanes of row 8 (i % 2) + i / 2, and of the one 4 behind it */                  \
            const f32v a = r[i % 2 * 8 + i / 2], b = r[i % 2 * 8 + i / 2 + 4];                                            \
            t[i] = of(_mm512_mask_mov_ps(a, 0xff00, b), _mm512_shuffle_f32x4(a, b, 0x4e));                                \
        }                                                                                                                 \
        UNROLL                                                                                                            \
        for (int i = 0; i < 4; i++) /* 4 lanes of rows i, 4 + i, 8 + i, 12 + i */                                         \
            u[i] = of(_mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x88), _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xdd)); \
        UNROLL                                                                                                            \
        for (int i = 0; i < 2; i++)                                                                                       \
            w[i] = of(_mm512_mask_mov_ps(u[2 * i], 0xcccc, u[2 * i + 1]), _mm512_shuffle_ps(u[2 * i], u[2 * i + 1], 0x4e)); \
        return of(_mm512_shuffle_ps(w[0], w[1], 0x88), _mm512_shuffle_ps(w[0], w[1], 0xdd));                              \
    }
REDUCTION(f32v_sums, f32v_add)
REDUCTION(f32v_maxima, f32v_larger)
#undef REDUCTION

/* ---- Pairs of 16-bit numbers, one pair per lane (kvc_fit.h). */

typedef __m512i i16v;
typedef __m512i i32v;

INLINE i16v i16v_pair(f32v even, f32v odd) { /* (even & 0xffff) | odd << 16: NaN becomes 0x80000000, so 0 */
    const __m512i high = _mm512_slli_epi32(_mm512_cvtps_epi32(odd), 16);
    return _mm512_ternarylogic_epi32(_mm512_cvtps_epi32(even), _mm512_set1_epi32(0xffff), high, 0xea);
}
INLINE i16v i16v_load(const uint16_t *p) { return _mm512_loadu_si512(p); }
INLINE void i16v_store(uint16_t *p, i16v x) { _mm512_storeu_si512(p, x); }
INLINE i16v i16v_add(i16v a, i16v b) { return _mm512_add_epi16(a, b); }
INLINE i16v i16v_above(i16v a, i16v b) { return _mm512_subs_epu16(a, b); }
INLINE i16v i16v_mul15(i16v a, i16v b) { return _mm512_mulhrs_epi16(a, b); }
INLINE i16v i16v_shr(i16v x, int n) { return _mm512_srli_epi16(x, (unsigned)n); }
INLINE i16v i16v_min(i16v a, i16v b) { return _mm512_min_epi16(a, b); }
INLINE i32v i32v_zero(void) { return _mm512_setzero_si512(); }
INLINE i32v i32v_add(i32v a, i32v b) { return _mm512_add_epi32(a, b); }
INLINE i32v i32v_dot(i32v sums, i16v a, i16v b) { return _mm512_dpwssd_epi32(sums, a, b); }
INLINE f32v i32v_floats(i32v x) { return _mm512_cvtepi32_ps(x); }

/* ---- Units of 64 codes against bytes, 16 sums of 4 products each (kvc_tiles.h). */

#define KVC_SIGNED_CODES 0
#define KVC_SHARED_DIGITS 1
#define KVC_WHOLE_NUMBERS 0
#define KVC_UNIT_DOT_ROWS 4
#define KVC_UNIT_DOT_TILES 2
#define KVC_UNIT_MIX_ROWS 4
#define KVC_UNSIGNED_WEIGHTS 1
#define KVC_PACKED_ROWS(n) ((n) <= 8 ? 8 : 6)
#define KVC_PACKED_PANELS(rows) ((rows) >= 4 && (rows) <= 6 ? 2 : 1)
#define KVC_FLOAT_ROWS 12
#define KVC_FLOAT_SUMS 24

/* Pairs of bf16 numbers: an extension that not every CPU of this level has, so functions that use it name it. */
#define KVC_BF16_TARGET 1
#define KVC_BF16_FEATURE "avx512bf16"
typedef __m512i bf16x2;
/* Channels k and k + 1 of 16 rows, 32 words, as 16 pairs; of the last channel alone, beside zeros. */
INLINE bf16x2 bf16x2_load(const uint16_t *p) {
    const __m512i lanes = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(lanes, _mm512_loadu_si512(p));
}
INLINE bf16x2 bf16x2_load_one(const uint16_t *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
INLINE bf16x2 bf16x2_set1(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE __attribute__((target("avx512bf16"))) f32v bf16x2_dot(f32v sum, bf16x2 a, bf16x2 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

typedef __m512i u8x64;
typedef __m512i i32x16;

INLINE u8x64 u8x64_load(const unsigned char *p) { return _mm512_loadu_si512(p); }
INLINE u8x64 u8x64_and(u8x64 x, int byte) { return _mm512_and_si512(x, _mm512_set1_epi8((char)byte)); }
INLINE u8x64 u8x64_or(u8x64 a, u8x64 b) { return _mm512_or_si512(a, b); }
INLINE u8x64 u8x64_xor(u8x64 x, int byte) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)byte)); }
/* 16 bytes in each quarter, and those of them that x, 0 to 15, says. */
INLINE u8x64 u8x64_table(const unsigned char table[16]) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
}
INLINE u8x64 u8x64_lookup(u8x64 table, u8x64 x) { return _mm512_shuffle_epi8(table, x); }
/* Shifts 16-bit lanes: bits cross bytes, and callers mask them. */
INLINE u8x64 u8x64_shr(u8x64 x, int n) { return _mm512_srli_epi16(x, (unsigned)n); }
INLINE u8x64 u8x64_shl(u8x64 x, int n) { return _mm512_slli_epi16(x, (unsigned)n); }

/* Bytes 4i + n less zero, at most 128 apart, as floats. */
INLINE void u8x64_floats(u8x64 x, int zero, int n, f32v out[16 / KVC_LANES]) {
    const __m512i numbers = _mm512_slli_epi32(_mm512_sub_epi8(x, _mm512_set1_epi8((char)zero)), (unsigned)(24 - 8 * n));
    *out = _mm512_cvtepi32_ps(_mm512_srai_epi32(numbers, 24));
}

INLINE i32x16 i32x16_zero(void) { return _mm512_setzero_si512(); }
INLINE i32x16 i32x16_dot_q(i32x16 sums, u8x64 codes, int32_t q) {
    return _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(q));
}
INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, u8x64 x) { return _mm512_dpbusd_epi32(sums, codes, x); }
INLINE void i32x16_store_sums(const i32x16 x[16], float to[16]) {
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i of[4]; /* of each four: their sums, in each quarter a part of them */
    UNROLL
    for (int i = 0; i < 4; i++, x += 4) {
        const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
        const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
        of[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    const __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(of[0], of[1], 0x44), _mm512_shuffle_i32x4(of[0], of[1], 0xee));
    const __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(of[2], of[3], 0x44), _mm512_shuffle_i32x4(of[2], of[3], 0xee));
    const __m512i all = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    _mm512_storeu_ps(to, _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(in_order, all)));
}
typedef i32x16 part16;
#define KVC_PART_UNITS(code, byte) KVC_MANY_UNITS
INLINE part16 part16_begin(i32x16 sums) { return sums; }
INLINE i32x16 part16_end(part16 part, i32x16 sums) { return (void)sums, part; }
INLINE part16 part16_dot_q(part16 part, u8x64 codes, int32_t q) { return i32x16_dot_q(part, codes, q); }
/* sums[i] += the products of codes[4i .. 4i+3], from u8x64_weights, with 4 signed bytes of -127 to 127. */
INLINE u8x64 u8x64_weights(u8x64 codes) { return codes; }
INLINE i32x16 i32x16_dot_x(i32x16 sums, u8x64 codes, int32_t x) { return i32x16_dot_q(sums, codes, x); }
INLINE i32x16 i32x16_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE i32x16 i32x16_next_digit(i32x16 high, int32_t more) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 7), _mm512_set1_epi32(more));
}
INLINE void i32x16_scaled(i32x16 x, float scale, float less, f32v out[16 / KVC_LANES]) {
    out[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_set1_ps(scale), _mm512_set1_ps(less));
}
INLINE void i32x16_to_floats(i32x16 x, f32v out[16 / KVC_LANES]) { out[0] = _mm512_cvtepi32_ps(x); }
INLINE i32x16 i32x16_joined(i32x16 high, i32x16 low, int bits) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, (unsigned)bits), low);
}
/* Writes 32 whole numbers of 8 bits from each of two vectors of words as f32v_seven_bits packs them: fours of both halves of
 * numbers alternate. */
INLINE void store_digits(__m512i high_words, __m512i low_words, int8_t *high, int8_t *low) {
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(high_words, low_words));
    _mm256_storeu_si256((__m256i *)high, _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256((__m256i *)low, _mm512_extracti64x4_epi64(bytes, 1));
}
INLINE i32v f32v_seven_bits(const f32v x[2], int centre, int8_t *high, int8_t *low) {
    const __m512i whole = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    const __m512i digit = _mm512_srai_epi16(_mm512_add_epi16(whole, _mm512_set1_epi16((short)centre)), 7);
    const __m512i rest = centre ? _mm512_sub_epi16(whole, _mm512_slli_epi16(digit, 7)) : _mm512_and_si512(whole, _mm512_set1_epi16(127));
    store_digits(digit, rest, high, low);
    return _mm512_madd_epi16(whole, _mm512_set1_epi16(1));
}
/* Splits 32 numbers, |x| <= 1791, into shared digits (kvc_tiles.h): of 8, the first four are x_a, the others
 * x_b. With r = x_a modulo 16, low_a = r + 16 m for the m that makes x_b - 16 low_a a byte. Computed in
 * 16-bit lanes. */
INLINE i32v f32v_shared_digits(const f32v numbers[2], int8_t *high, int8_t *low) {
    const __m512i x = _mm512_packs_epi32(_mm512_cvtps_epi32(numbers[0]), _mm512_cvtps_epi32(numbers[1]));
    const __m512i other = _mm512_shuffle_i32x4(x, x, 0xb1);
    const __m512i r16 = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(0xf0));
    const __m512i rest = _mm512_add_epi16(_mm512_sub_epi16(other, r16), _mm512_set1_epi16(128));
    const __m512i low16 = _mm512_add_epi16(r16, _mm512_and_si512(rest, _mm512_set1_epi16(-256)));
    const __m512i low_a = _mm512_srai_epi16(low16, 4), high_a = _mm512_srai_epi16(_mm512_sub_epi16(x, low_a), 4);
    const __m512i low_b = _mm512_sub_epi16(x, _mm512_shuffle_i32x4(low16, low16, 0xb1));
    store_digits(high_a, _mm512_mask_mov_epi64(low_a, 0xcc, low_b), high, low);
    return _mm512_madd_epi16(x, _mm512_set1_epi16(1));
}

typedef __m512i u64x8;

INLINE u64x8 u64x8_zero(void) { return _mm512_setzero_si512(); }
INLINE uint64_t u64x8_sum_of(u64x8 x) { /* the intrinsic's signed sums may not wrap around */
    uint64_t sums[4];
    const __m256i x_u64x4 = _mm256_add_epi64(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    _mm256_storeu_si256((__m256i *)sums, x_u64x4);
    return sums[0] + sums[1] + sums[2] + sums[3];
}
INLINE u64x8 u64x8_add_products(u64x8 sums, u8x64 m, const uint32_t *k) {
    const __m512i x_u32x16 = _mm512_add_epi32(m, _mm512_loadu_si512(k));
    return _mm512_add_epi64(sums, _mm512_mul_epu32(x_u32x16, _mm512_srli_epi64(x_u32x16, 32)));
}
