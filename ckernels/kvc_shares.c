/* kvc_shares.c - weights of tokens as whole numbers, whose sums are exact in any order. */
#include <string.h>

#include "kvc_row.h"

/* The rounded 2^((x - most) * factor) * 2^40 of n logits, none of which is above `most`, to out unless it is NULL; returns their sum.
 * NaN has the weight 0. The factor is a normal number above 0. Below 2^24 numbers the sum fits in 64 bits. */
uint64_t KVC_FN(shares)(int64_t n, const float *x, float most, float factor, uint64_t *out) {
    const f32v most_v = f32v_set1(most), factor_v = f32v_set1(factor);
    uint64_t sums[KVC_LANES] = {0}, total = 0;
    for (int64_t i = 0; i < n; i += KVC_LANES) {
        float weights[KVC_LANES];
        uint64_t whole[KVC_LANES];
        const f32v power = f32v_exp2(f32v_mul(f32v_sub(load_some(x + i, n - i), most_v), factor_v));
        f32v_store(weights, some_of(f32v_max(power, f32v_zero()), n - i));
        for (int k = 0; k < KVC_LANES; k++) {
            const double raised = (double)weights[k] * 0x1p40 + 0x1p52; /* the product is exact, the sum is rounded to a whole number */
            uint64_t bits;
            memcpy(&bits, &raised, sizeof bits);
            whole[k] = bits - 0x4330000000000000u;
            sums[k] += whole[k];
        }
        if (out) memcpy(out + i, whole, sizeof *whole * (size_t)(n - i < KVC_LANES ? n - i : KVC_LANES));
    }
    for (int k = 0; k < KVC_LANES; k++) total += sums[k];
    return total;
}
