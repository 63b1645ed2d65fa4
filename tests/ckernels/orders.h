/* orders.h - the twin of products of bf16 by instructions (kvc_matrix.h): each step in double, rounded as the instruction does. */
#ifndef ORDERS_H
#define ORDERS_H

#include "kvc.h"
#include "kvc_half.h"

#include <math.h>
#include <string.h>

static float without_denormals(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

/* sum + x * w with one rounding, to nearest. A product of words has 16 bits, so that the sum in double either is exact or is
 * nowhere near the middle between two floats. What is below 2^-126 when it has 24 bits becomes zero. */
static float fused(float sum, float x, float w) {
    const double all = (double)without_denormals(x) * without_denormals(w) + without_denormals(sum);
    return fabs(all) < 0x1p-126 - 0x1p-151 ? copysignf(0, (float)all) : (float)all;
}

/* a + b, towards zero, and odd where that is not exact. */
static float to_odd(double a, double b) {
    const double sum = a + b, of_b = sum - a, lost = (a - (sum - of_b)) + (b - of_b); /* a + b = sum + lost */
    const uint64_t dropped = (UINT64_C(1) << 29) - 1;                                 /* 53 bits to 24 */
    uint64_t bits;
    double odd;
    if (!isfinite(sum) || sum == 0) return (float)sum;
    memcpy(&bits, &sum, sizeof bits);
    const int exact = !(bits & dropped) && lost == 0;
    if (lost != 0 && signbit(lost) != signbit(sum)) bits--; /* the double before it */
    bits &= ~dropped;
    if (!exact) bits |= dropped + 1;
    memcpy(&odd, &bits, sizeof odd);
    if (fabs(odd) < 0x1p-126) return copysignf(0, (float)sum);
    return (float)odd; /* infinite from 2^128 on */
}
static float quad_of(float sum, const float *x, const float *w) { /* two channels */
    const float first = to_odd((double)without_denormals(x[0]) * without_denormals(w[0]), 0);
    const float second = to_odd((double)without_denormals(x[1]) * without_denormals(w[1]), 0);
    return to_odd(without_denormals(sum), to_odd(first, second));
}

/* sum + 32 channels. */
static float tile_of(float sum, const float *x, const float *w) {
    float even = 0, odd = 0;
    for (int k = 0; k < 32; k += 2) even = fused(even, x[k], w[k]), odd = fused(odd, x[k + 1], w[k + 1]);
    return fused(sum, 1, fused(odd, 1, even));
}

static float as_bf16(float x) { return kvc_float_of_bits((uint32_t)kvc_bf16_of_float(x) << 16); }

/* The product of a row of x with one of weights. */
static float in_order(kvc_bf16_rows order, int64_t columns, const float *x, const float *w) {
    float sum = 0;
    for (int64_t first = 0; first < columns; first += KVC_CHANNEL_BLOCK) {
        float a[KVC_CHANNEL_BLOCK] = {0}, b[KVC_CHANNEL_BLOCK] = {0}, own = 0;
        const int64_t left = columns - first, channels = left < KVC_CHANNEL_BLOCK ? left : KVC_CHANNEL_BLOCK;
        for (int64_t k = 0; k < channels; k++) {
            a[k] = as_bf16(x[first + k]), b[k] = as_bf16(w[first + k]);
        }
        for (int64_t k = 0; k < channels && order == KVC_BF16_PAIRS; k += 2) {
            own = fused(fused(own, a[k + 1], b[k + 1]), a[k], b[k]);
        }
        for (int64_t k = 0; k < channels && order == KVC_BF16_TILES; k += 32) own = tile_of(own, a + k, b + k);
        for (int64_t k = 0; k < channels && order == KVC_BF16_QUADS; k += 2) own = quad_of(own, a + k, b + k);
        sum = first ? sum + own : own;
    }
    return sum;
}

#endif
