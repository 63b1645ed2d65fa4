/* kvc_half.h - IEEE half precision and bfloat16 in integer arithmetic: round half to even, denormals, infinities, NaN.
 *
 *   f32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm    bias 127
 *   f16   s eeeee mmmmmmmmmm                    bias 15
 *   bf16  s eeeeeeee mmmmmmm                    bias 127: the upper half of an f32
 */
#ifndef KVC_HALF_H
#define KVC_HALF_H

#include <stdint.h>
#include <string.h>

/* The smallest |x| that rounds to infinity: halfway between the largest half, 65504, and 65536. */
#define KVC_HALF_OVERFLOW 65520.0f

static inline uint32_t kvc_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float kvc_float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint16_t kvc_half_of_float(float x) {
    const uint32_t bits = kvc_float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff)); /* NaN, made quiet */
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);    /* 65520 and above */
    if (magnitude >= 0x38800000) { /* normal: rebias by 127 - 15 = 112, drop 13 bits, half to even */
        const uint32_t rebiased = magnitude - (112u << 23);
        return (uint16_t)(sign | ((rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13));
    }
    if (magnitude < 0x33000000) return (uint16_t)sign; /* below 2^-25, half of the smallest denormal 2^-24 */
    const uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t drop =
        126 - (magnitude >> 23); /* value = mantissa * 2^(e - 150) = (mantissa >> drop) * 2^-24 */
    const uint32_t kept = mantissa >> drop, rest = mantissa & ((1u << drop) - 1), half = 1u << (drop - 1);
    return (uint16_t)(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
}

static inline float kvc_float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f,
                   mantissa = half & 0x3ff;
    if (exponent == 0) { /* zero and denormals: mantissa * 2^-24, exact */
        const float magnitude = (float)mantissa * 0x1p-24f;
        return kvc_float_of_bits(sign | kvc_float_bits(magnitude));
    }
    if (exponent == 31)
        return kvc_float_of_bits(sign | 0x7f800000 | (mantissa ? 0x400000 | mantissa << 13 : 0));
    return kvc_float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t kvc_bf16_of_float(float x) {
    const uint32_t bits = kvc_float_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* NaN, made quiet */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* 2^(b - 127), a denormal for b = 0; infinity for 255. */
static inline float kvc_float_of_e8m0(unsigned char b) {
    return kvc_float_of_bits(b ? (uint32_t)b << 23 : 0x400000);
}

#endif
