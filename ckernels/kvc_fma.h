/* kvc_fma.h - a * b + c with one rounding, by an instruction where the compiler may use it, otherwise by IEEE arithmetic alone. */
#ifndef KVC_FMA_H
#define KVC_FMA_H

#include <stdint.h>
#include <string.h>

/* The product is exact in double: 48 bits, from 2^-298 to below 2^256. So is `lost`, what the sum leaves out (Knuth's two-sum).
 * Where that is not 0, the sum is rounded to odd: of the two doubles beside the exact sum, the one whose last bit is 1. A double
 * has more than 24 + 2 bits, so the rounding to float, or to a denormal of fewer bits, is then that of the exact sum (Boldo and
 * Melquiond, "Emulation of FMA and correctly rounded sums", 2008). */
static inline float kvc_fma_by_double(float a, float b, float c) {
    const double product = (double)a * (double)b, sum = product + (double)c, of_c = sum - product;
    const double lost = (product - (sum - of_c)) + ((double)c - of_c);
    int64_t bits;
    double odd;
    memcpy(&bits, &sum, sizeof bits);
    const int inexact = lost < 0.0 || lost > 0.0; /* not where the sum is infinite or NaN: there `lost` is NaN */
    const int64_t toward_lost = (lost < 0.0) == (sum < 0.0) ? 1 : -1;
    bits += inexact && !(bits & 1) ? toward_lost : 0;
    memcpy(&odd, &bits, sizeof odd);
    return (float)odd;
}

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
static inline float kvc_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
static inline float kvc_fma(float a, float b, float c) { return kvc_fma_by_double(a, b, c); }
#endif

#endif
