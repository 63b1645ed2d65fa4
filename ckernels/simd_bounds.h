/* simd_bounds.h - two primitives of each level, of sparse attention (kvc_choice.h).
 *
 *   f32v_below(x, limit)               a bit for each lane with x < limit
 *   i32x16_dot_bytes(sums, codes, x)   sums[i] += the products of codes[4i .. 4i+3], of 0 to 15, with signed bytes 4i .. 4i+3
 */
#ifndef SIMD_BOUNDS_H
#define SIMD_BOUNDS_H

#include "kvc_simd.h"

#if defined(KVC_AVX512)
INLINE unsigned f32v_below(f32v x, f32v limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ); }
INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, const int8_t *x) {
    return _mm512_dpbusd_epi32(sums, codes, _mm512_loadu_si512(x));
}
#elif defined(KVC_AVX2)
INLINE unsigned f32v_below(f32v x, f32v limit) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ)); }
#if defined(KVC_AVXVNNI)
INLINE __m256i i32x8_dot_bytes(__m256i sums, __m256i codes, __m256i x) { return dpbusd(sums, codes, x); }
#else
INLINE __m256i i32x8_dot_bytes(__m256i sums, __m256i codes, __m256i x) { return i32x8_dot(sums, codes, x); }
#endif
INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, const int8_t *x) {
    return (i32x16){i32x8_dot_bytes(sums.a, codes.a, _mm256_loadu_si256((const __m256i *)x)),
                    i32x8_dot_bytes(sums.b, codes.b, _mm256_loadu_si256((const __m256i *)(x + 32)))};
}
#elif defined(KVC_NEON)
INLINE unsigned f32v_below(f32v x, f32v limit) {
    const uint32_t bits[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcltq_f32(x, limit), vld1q_u32(bits)));
}
INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, const int8_t *x) {
    UNROLL
    for (int i = 0; i < 4; i++) sums.val[i] = vdotq_s32(sums.val[i], vreinterpretq_s8_u8(codes.val[i]), vld1q_s8(x + 16 * i));
    return sums;
}
#else
INLINE unsigned f32v_below(f32v x, f32v limit) { return x < limit; }
INLINE i32x16 i32x16_dot_bytes(i32x16 sums, u8x64 codes, const int8_t *x) {
    for (int i = 0; i < 64; i++) sums.sum[i / 4] += codes.byte[i] * x[i];
    return sums;
}
#endif

#endif
