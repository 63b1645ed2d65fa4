/* simd_amx.h - avx512, and tiles: products of up to 16 rows with 16 columns by one instruction, in exact whole numbers.
 *
 * Eight tiles have up to 16 rows of 64 bytes. amx_configure gives each its rows and bytes of a row, and clears them:
 *
 *   amx_dot_ss(c, a, b)    c (rows x 16 sums) += a (rows x 4n signed bytes) times b (n units of 64 signed codes, kvc_matrix.h)
 *   amx_dot_su(c, a, b)    the same of unsigned codes
 *   amx_dot_bf16(c, a, b)  c (rows x 16 floats) += a (rows x 2n words) times b (n pairs of words of 16 columns), in an order of
 *                          its own (kvc_matrix.h)
 *
 * amx_pause() is eight instructions that do nothing: between two of tiles they save time where another thread shares the core.
 * Numbers of tiles are literals. Other libraries configure tiles too, and a thread that holds them is slow to switch: each item
 * of a call configures and releases its own. The system gives tiles to processes that ask (kvc_permitted).
 *
 * With KVC_EMULATED_TILES, in builds for tests, tiles are memory and a product is a loop over instructions of avx512, so that the
 * level runs wherever avx512 does. A use that the instructions would refuse traps.
 */
#include "simd_avx512.h"

#define KVC_TILES 1
#define KVC_BF16_SIDE 2

/* The memory operand of LDTILECFG. */
typedef struct amx_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} amx_shapes;
_Static_assert(sizeof(amx_shapes) == 64, "as the instruction reads it");

INLINE u8x64 u8x64_sub(u8x64 x, int byte) { return _mm512_sub_epi8(x, _mm512_set1_epi8((char)byte)); }
INLINE void u8x64_store(unsigned char *p, u8x64 x) { _mm512_storeu_si512(p, x); }
INLINE i32x16 i32x16_load(const int32_t *p) { return _mm512_loadu_si512(p); }
INLINE i32x16 i32x16_add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
INLINE void put_side(uint16_t *to, const uint16_t *from) { _mm512_storeu_si512(to, bf16x2_load(from)); }
/* Floats as bf16 in the upper half of each lane, as kvc_bf16_of_float has them; below it any bits. */
INLINE __m512i bf16_above(const float *from) {
    const __m512i x = _mm512_loadu_si512(from), lowest = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), lowest);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(x), _mm512_castsi512_ps(x), _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(near, is_nan, x, _mm512_set1_epi32(0x400000));
}
/* The same of floats, rounded. */
INLINE void put_side_of_floats(uint16_t *to, const float *from) {
    const __m512i even = _mm512_srli_epi32(bf16_above(from), 16);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaa, even, bf16_above(from + 16)));
}

#if defined(KVC_EMULATED_TILES)
#include <string.h>

typedef struct amx_state {
    amx_shapes shapes;
    unsigned char tile[8][16][64];
} amx_state;
static _Thread_local amx_state amx;

INLINE void amx_expect(int right) {
    if (!right) __builtin_trap();
}
INLINE void amx_configure(const amx_shapes *shapes) {
    amx_expect(shapes->palette == 1);
    for (int t = 0; t < 8; t++) amx_expect(shapes->rows[t] <= 16 && shapes->bytes[t] <= 64);
    memset(&amx, 0, sizeof amx);
    amx.shapes = *shapes;
}
INLINE void amx_release(void) { memset(&amx, 0, sizeof amx); }
INLINE void amx_zero(int t) {
    amx_expect(amx.shapes.rows[t] > 0);
    memset(amx.tile[t], 0, sizeof amx.tile[t]);
}
INLINE void amx_load(int t, const void *p, size_t stride) {
    amx_zero(t);
    for (int r = 0; r < amx.shapes.rows[t]; r++)
        memcpy(amx.tile[t][r], (const unsigned char *)p + (size_t)r * stride, amx.shapes.bytes[t]);
}
INLINE void amx_store(int t, void *p, size_t stride) {
    amx_expect(amx.shapes.rows[t] > 0);
    for (int r = 0; r < amx.shapes.rows[t]; r++)
        memcpy((unsigned char *)p + (size_t)r * stride, amx.tile[t][r], amx.shapes.bytes[t]);
}
INLINE void amx_expect_shapes(int c, int a, int b) {
    const amx_shapes *of = &amx.shapes;
    amx_expect(of->rows[c] == of->rows[a] && of->bytes[a] == 4 * of->rows[b] && of->bytes[b] == 64 && of->bytes[c] == 64);
    amx_expect(of->rows[c] > 0 && of->rows[b] > 0 && c != a && c != b && a != b);
}
static __attribute__((noinline, unused)) void amx_dot(int c, int a, int b, int is_signed) { /* 8 bits, less 128 if signed */
    const amx_shapes *of = &amx.shapes;
    amx_expect_shapes(c, a, b);
    for (int r = 0; r < of->rows[c]; r++) {
        __m512i sums = _mm512_loadu_si512(amx.tile[c][r]);
        for (int k = 0; k < of->rows[b]; k++) {
            int32_t x;
            memcpy(&x, amx.tile[a][r] + 4 * k, 4);
            const __m512i four = _mm512_set1_epi32(x), middle = _mm512_set1_epi8((char)(is_signed ? 128 : 0));
            const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(amx.tile[b][k]), middle);
            const __m512i more = _mm512_dpbusd_epi32(_mm512_setzero_si512(), middle, four);
            sums = _mm512_sub_epi32(_mm512_dpbusd_epi32(sums, codes, four), more);
        }
        _mm512_storeu_si512(amx.tile[c][r], sums);
    }
}
/* Words as floats: of the even channels of pairs, of the odd ones. */
INLINE f32v amx_even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE f32v amx_odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}
/* With denormals as zeros, as operands and as sums, and rounding to nearest: the instruction does not ask for the mode. */
static __attribute__((noinline, unused)) void amx_dot_floats(int c, int a, int b) {
    const amx_shapes *of = &amx.shapes;
    for (int r = 0; r < of->rows[c]; r++) {
        f32v even = f32v_zero(), odd = f32v_zero();
        for (int k = 0; k < of->rows[b]; k++) {
            int32_t x;
            memcpy(&x, amx.tile[a][r] + 4 * k, 4);
            const __m512i pair = _mm512_set1_epi32(x), words = _mm512_loadu_si512(amx.tile[b][k]);
            even = f32v_fma(amx_even(pair), amx_even(words), even);
            odd = f32v_fma(amx_odd(pair), amx_odd(words), odd);
        }
        f32v_store((float *)(void *)amx.tile[c][r], f32v_add(f32v_load((float *)(void *)amx.tile[c][r]), f32v_add(even, odd)));
    }
}
static __attribute__((noinline, unused)) void amx_dot_bf16(int c, int a, int b) {
    enum { MASKED = 0x1f80, DENORMALS_ARE_ZEROS = 1 << 6, FLUSH_TO_ZERO = 1 << 15 };
    const unsigned before = __builtin_ia32_stmxcsr();
    amx_expect_shapes(c, a, b);
    __builtin_ia32_ldmxcsr(MASKED | DENORMALS_ARE_ZEROS | FLUSH_TO_ZERO);
    amx_dot_floats(c, a, b);
    __builtin_ia32_ldmxcsr(before);
}
INLINE void amx_pause(void) {}
INLINE void amx_dot_ss(int c, int a, int b) { amx_dot(c, a, b, 1); }
INLINE void amx_dot_su(int c, int a, int b) { amx_dot(c, a, b, 0); }
#else
/* The compilers' own macros do not say which memory they read. */
#define amx_configure(shapes) __asm__ __volatile__("ldtilecfg %0" : : "m"(*(shapes)) : "memory")
#define amx_pause() __asm__ __volatile__(".rept 8\n\tnop\n\t.endr")
#define amx_release() __asm__ __volatile__("tilerelease" : : : "memory")
#define amx_zero(t) __asm__ __volatile__("tilezero %%tmm" #t : : : "memory")
#define amx_load(t, p, stride) \
    __asm__ __volatile__("tileloadd (%0,%1,1), %%tmm" #t : : "r"((const void *)(p)), "r"((size_t)(stride)) : "memory")
#define amx_store(t, p, stride) \
    __asm__ __volatile__("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"((void *)(p)), "r"((size_t)(stride)) : "memory")
#define amx_dot_ss(c, a, b) __asm__ __volatile__("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")
#define amx_dot_su(c, a, b) __asm__ __volatile__("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")
#define amx_dot_bf16(c, a, b) __asm__ __volatile__("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")
#endif
