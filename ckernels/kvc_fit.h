/* kvc_fit.h - the minimum and scale that a row of few bits is stored with: those of least squared error, nearly.
 *
 * From the lowest to the highest value a row of 64 has levels where it has hardly any values. Leaving out a little at
 * both ends errs more on a few values and less on all others. The squared error of normal rows, over that of the whole
 * range (head_dim 64 | 128):
 *
 *   4 bits   0.83 | 0.83        3 bits   0.74 | 0.70        2 bits   0.52 | 0.46        (an exhaustive search: 0.81 | 0.81,
 *                                                                                        0.73 | 0.69, 0.51 | 0.45)
 *
 * Four starts leave out one of two shares of the range at either end. Each gets the codes of its values, and from the
 * codes the line  value = low + step * code  of least squares. The best of the four does so once more (Lloyd's method
 * for a uniform quantiser: Lloyd, "Least squares quantization in PCM", 1982, section IV).
 *
 * The sums are the same at every level because all terms are whole numbers and every sum is below 2^24, hence exact in
 * float in any order: values are first rounded to 2^-fine of a step.
 *
 *   sum of codes * values <= 256 * top * (top << fine)    4 bits: 256 * 15 * (15 << 8) = 14.7e6
 *   256 * sum of squares  <= 256 * 256 * top * top         4 bits: 14.7e6
 */
#ifndef KVC_FIT_H
#define KVC_FIT_H

#include "kvc_quant.h"
#include "kvc_simd.h"

/* Indexed by bits. Outside a step's 2^-fine the fit would not see; the shares are the best of a grid over rows of the
 * demo model and normal ones, flat around it. */
static const int kvc_fine[] = {0, 0, 12, 10, 8};
static const float kvc_left_out[][2] = {{0}, {0}, {0.0675f, 0.2025f}, {0.036f, 0.108f}, {0.016f, 0.048f}};

typedef struct kvc_line {
    double low, step, gain; /* in values; gain: head_dim times the variance that the line explains */
} kvc_line;

/* The line for the codes that `low` and `step` give; u holds whole numbers from 0 to `limit` steps, its spare lanes 0. */
INLINE kvc_line kvc_refit(const float *u, int dim, double sum_u, kvc_line from, int top) {
    const f32v low = f32v_set1((float)from.low), inverse = f32v_set1((float)(1.0 / from.step));
    const f32v most = f32v_set1((float)top);
    f32v codes = f32v_zero(), squares = f32v_zero(), products = f32v_zero();
    for (int d = 0; d < dim; d += KVC_LANES) {
        const f32v value = load_dims(u, d, dim);
        f32v code = f32v_mul(f32v_sub(value, low), inverse);
        code = f32v_round(f32v_min(f32v_max(code, f32v_zero()), most));
        if (KVC_LANES > 8 && d + 8 == dim) {
            float kept[KVC_LANES] = {0};
            f32v_store8(kept, code);
            code = f32v_load(kept);
        }
        codes = f32v_add(codes, code);
        squares = f32v_fma(code, code, squares);
        products = f32v_fma(code, value, products);
    }
    const double n = dim, c = f32v_sum_of(codes), squared = f32v_sum_of(squares);
    const double spread = n * squared - c * c, common = n * (double)f32v_sum_of(products) - c * sum_u;
    if (!(spread > 0 && common > 0)) return (kvc_line){from.low, from.step, 0.0};
    const double step = common / spread, along = step * c;
    return (kvc_line){(sum_u - along) / n, step, common * step};
}

/* The line for a row x of `dim` values between lowest and highest, in its units. */
static kvc_line kvc_fit_row(const float *x, int dim, int bits, float lowest, float highest) {
    const int top = (1 << bits) - 1;
    const float whole = (float)(top << kvc_fine[bits]), range = highest - lowest, finest = whole / range;
    float u[KVC_MAX_HEAD_DIM];
    const f32v from = f32v_set1(lowest), times = f32v_set1(finest);
    f32v sum = f32v_zero();
    for (int d = 0; d < dim; d += KVC_LANES) {
        f32v value = f32v_round(f32v_mul(f32v_sub(load_dims(x, d, dim), from), times));
        store_dims(u, d, dim, value);
        sum = f32v_add(sum, load_dims(u, d, dim));
    }
    const double sum_u = f32v_sum_of(sum);
    kvc_line best = {0.0, 0.0, 0.0};
    for (int start = 0; start < 4; start++) {
        const float below = kvc_left_out[bits][start & 1], above = kvc_left_out[bits][start >> 1];
        const kvc_line cut = {below * whole, (1.0f - below - above) * (float)(1 << kvc_fine[bits]), 0.0};
        const kvc_line line = kvc_refit(u, dim, sum_u, cut, top);
        if (line.gain > best.gain) best = line;
    }
    if (best.gain == 0.0) return best;
    best = kvc_refit(u, dim, sum_u, best, top);
    const double unit = (double)range / whole, low = best.low * unit;
    return (kvc_line){(double)lowest + low, best.step * unit, best.gain};
}

#endif
