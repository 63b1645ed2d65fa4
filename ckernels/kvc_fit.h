/* kvc_fit.h - the minimum and scale of a row of 5 to 2 bits, chosen for nearly the least squared error.
 *
 * Levels spread over the whole range of a row of 64 values are partly wasted on its ends, where few values are.
 * Clipping both ends a little increases the error of a few values and decreases that of all others. The squared error
 * of normal rows, relative to that with the whole range (head_dim 64 | 128):
 *
 *                       5 bits              4 bits              3 bits              2 bits
 *                       0.86 | 0.89         0.83 | 0.83         0.74 | 0.70         0.51 | 0.45
 *   exhaustive search   0.83 | 0.87         0.81 | 0.81         0.73 | 0.69         0.51 | 0.45
 *
 * There are four starts: each clips one of two shares of the range at either end. The values are coded, and the line
 * value = low + step * code  is fitted to the codes by least squares. The best of the four is coded and fitted once
 * more (Lloyd's method for a uniform quantiser: Lloyd, "Least squares quantization in PCM", 1982, section IV).
 *
 * KVC_LANES rows are fitted at a time, one per lane: nothing is summed across lanes, and work that is done once per row
 * costs one lane. Values are whole numbers u of 15 bits, 2^fine per step of the range, the lowest at 2^fine - 1:
 *
 *   0 .. 2^fine - 1 .. 2^15 - 1     fine = 15 - bits:  2^fine - 1 + top * 2^fine = (top + 1) * 2^fine - 1 = 2^15 - 1
 *     a line's low end  range
 *
 * Codes and their sums are then products of 16 bits, exact in 32 bits, and the same at every level:
 *
 *   sum of codes * u <= 512 * top * 2^15      5 bits: 521e6        sum of u < 512 * 2^15 = 2^24
 *
 * The code of u is  (u - low) / step + 1/2  rounded down, computed with 9 fractional bits. This moves the line a
 * little: low is off by at most 2^-12 of a step, and 1 / step by 2^-12 of itself. The stored codes are computed from
 * the floats.
 */
#ifndef KVC_FIT_H
#define KVC_FIT_H

#include "kvc_quant.h"
#include "kvc_simd.h"

/* The two clipped shares, indexed by bits. Found by a grid search over rows of the demo model and normal rows; the
 * error is flat around them. */
static const float kvc_left_out[][2] = {{0}, {0}, {0.0675f, 0.2025f}, {0.036f, 0.108f}, {0.016f, 0.048f},
                                       {0.002f, 0.02f}};

/* Smaller numbers count as 0. It is a normal number, so no mode of the CPU flushes it to 0. */
#define KVC_TINY 0x1p-126f

/* Rows as numbers u, and their means. */
typedef struct kvc_fitted {
    uint16_t u[KVC_MAX_HEAD_DIM * KVC_LANES]; /* lane i of pair d / 2: numbers d and d + 1 of row i */
    int dim, bits;
    f32v mean;
} kvc_fitted;

typedef struct kvc_line { /* one per lane, in numbers u */
    f32v low, step;
} kvc_line;

typedef struct kvc_sums { /* over the codes of a row under a line */
    f32v codes, squares;
    f32v products; /* of codes with u less its mean */
} kvc_sums;

INLINE kvc_sums kvc_sums_of(const kvc_fitted *rows, kvc_line line) {
    enum { BELOW_POINT = 9 }; /* (top + 1) * 2^9 < 2^15; steps are at least 2^9, the range of 2^10 to 2^13 */
    const f32v most = f32v_set1(32767.0f), unit = f32v_set1((float)(1 << (15 + BELOW_POINT)));
    const f32v half_below = f32v_sub(line.low, f32v_mul(line.step, f32v_set1(0.5f)));
    const f32v cut = f32v_min(f32v_max(half_below, f32v_zero()), most),
               times = f32v_min(f32v_div(unit, line.step), most);
    const i16v cut_i16 = i16v_pair(cut, cut), times_i16 = i16v_pair(times, times);
    const f32v top = f32v_set1((float)((1 << rows->bits) - 1)), one = f32v_set1(1.0f);
    const i16v top_i16 = i16v_pair(top, top), one_i16 = i16v_pair(one, one);
    i16v codes = i16v_pair(f32v_zero(), f32v_zero());
    i32v squares = i32v_zero(), products = i32v_zero();
    for (int d = 0; d < rows->dim; d += 2) {
        const i16v u = i16v_load(rows->u + d * KVC_LANES);
        const i16v parts = i16v_mul15(i16v_above(u, cut_i16), times_i16);
        const i16v code = i16v_min(i16v_shr(parts, BELOW_POINT), top_i16);
        codes = i16v_add(codes, code);
        squares = i32v_dot(squares, code, code);
        products = i32v_dot(products, code, u);
    }
    const f32v sum = i32v_floats(i32v_dot(i32v_zero(), codes, one_i16));
    return (kvc_sums){sum, i32v_floats(squares), f32v_sub(i32v_floats(products), f32v_mul(sum, rows->mean))};
}

/* Fits a line by least squares to the codes of the line `from`. gain is its reduction of the sum of squares. If all
 * codes are equal, the result is `from` and the gain 0. */
INLINE kvc_line kvc_refit(const kvc_fitted *rows, kvc_line from, f32v *gain) {
    const f32v n = f32v_set1((float)rows->dim), per_value = f32v_set1(1.0f / (float)rows->dim),
               tiny = f32v_set1(KVC_TINY);
    const kvc_sums sums = kvc_sums_of(rows, from);
    const f32v spread =
        f32v_sub(f32v_mul(n, sums.squares), f32v_mul(sums.codes, sums.codes)); /* exact up to 256 values; equal codes give 0 */
    const f32v step = f32v_div(f32v_mul(n, sums.products), spread);
    const f32v low = f32v_sub(rows->mean, f32v_mul(step, f32v_mul(sums.codes, per_value)));
    *gain =
        f32v_zero_below(f32v_zero_below(f32v_mul(sums.products, step), spread, tiny), sums.products, tiny);
    return (kvc_line){f32v_pick(*gain, tiny, from.low, low), f32v_pick(*gain, tiny, from.step, step)};
}

/* The squared error of a line and its codes, minus the sum of squares of u around its mean. */
INLINE f32v kvc_error_of(const kvc_fitted *rows, kvc_line line) {
    const kvc_sums sums = kvc_sums_of(rows, line);
    const f32v n = f32v_set1((float)rows->dim), two = f32v_set1(2.0f), away = f32v_sub(line.low, rows->mean);
    const f32v across = f32v_mul(two, f32v_sub(f32v_mul(away, sums.codes), sums.products));
    return f32v_add(f32v_mul(n, f32v_mul(away, away)),
                    f32v_mul(line.step, f32v_add(across, f32v_mul(line.step, sums.squares))));
}

INLINE f32v kvc_rounded_to_half(f32v x) {
    uint16_t halves[KVC_LANES];
    f32v_store_half(halves, x);
    return f32v_load_half(halves);
}

/* Replaces the minimum and scale of the range by the fitted ones, both halves, if that reduces the squared error by
 * more than 2^-12 of a squared step per value. A smaller difference may be rounding: the errors are those of values
 * rounded to 2^-12 of a step (5 bits: 2^-11), and differences of sums of 24 bits, at most (2 top)^2 squared steps per value. Keeps the
 * range where halves are so coarse that the minimum is half a step from the lowest value. Value d of row i is
 * lanes[d * KVC_LANES + i]. */
static void kvc_fit(const float *lanes, int dim, int bits, f32v lowest, f32v highest, f32v *minimum,
                    f32v *scale) {
    const float per_step = (float)(1 << (15 - bits)), first = per_step - 1.0f,
                whole = (float)((1 << bits) - 1) * per_step;
    const f32v range = f32v_max(f32v_sub(highest, lowest), f32v_set1(0x1p-40f));
    const f32v finest = f32v_div(f32v_set1(whole), range), unit = f32v_div(range, f32v_set1(whole));
    const f32v first_v = f32v_set1(first), one = f32v_set1(1.0f);
    const i16v first_i16 = i16v_pair(first_v, first_v), one_i16 = i16v_pair(one, one);
    kvc_fitted rows;
    rows.dim = dim, rows.bits = bits;
    i32v sum = i32v_zero();
    for (int d = 0; d < dim; d += 2) {
        const f32v even = f32v_mul(f32v_sub(f32v_load(lanes + d * KVC_LANES), lowest), finest);
        const f32v odd = f32v_mul(f32v_sub(f32v_load(lanes + (d + 1) * KVC_LANES), lowest), finest);
        const i16v u = i16v_add(i16v_pair(even, odd), first_i16);
        i16v_store(rows.u + d * KVC_LANES, u);
        sum = i32v_dot(sum, u, one_i16);
    }
    rows.mean = f32v_mul(i32v_floats(sum), f32v_set1(1.0f / (float)dim));

    kvc_line best = {first_v, f32v_set1(per_step)};
    f32v best_gain = f32v_zero(), gain;
    for (int start = 0; start < 4; start++) {
        const float below = kvc_left_out[bits][start & 1], above = kvc_left_out[bits][start >> 1];
        const kvc_line cut = {f32v_set1(first + below * whole), f32v_set1((1.0f - below - above) * per_step)};
        const kvc_line line = kvc_refit(&rows, cut, &gain);
        best.low = f32v_pick(best_gain, gain, line.low, best.low);
        best.step = f32v_pick(best_gain, gain, line.step, best.step);
        best_gain = f32v_max(best_gain, gain);
    }
    best = kvc_refit(&rows, best, &gain);

    const f32v most = f32v_set1(65504.0f),
               low = f32v_add(lowest, f32v_mul(f32v_sub(best.low, first_v), unit));
    const f32v fitted_low = kvc_rounded_to_half(f32v_min(f32v_max(low, f32v_sub(f32v_zero(), most)), most));
    const f32v fitted_step = kvc_rounded_to_half(f32v_mul(best.step, unit));
    const kvc_line fitted = {f32v_add(f32v_mul(f32v_sub(fitted_low, lowest), finest), first_v),
                             f32v_mul(fitted_step, finest)};
    const kvc_line ranged = {f32v_add(f32v_mul(f32v_sub(*minimum, lowest), finest), first_v),
                             f32v_mul(*scale, finest)};
    const f32v margin = f32v_set1((float)dim * per_step * per_step * 0x1p-12f);
    const f32v error = f32v_add(kvc_error_of(&rows, fitted), margin);
    f32v limit = kvc_error_of(&rows, ranged);
    const f32v worst = f32v_set1(-0x1p100f), tiny = f32v_set1(KVC_TINY); /* worst: below every error */
    limit = f32v_pick(fitted_step, tiny, worst, limit);
    limit = f32v_pick(f32v_abs(f32v_sub(*minimum, lowest)), f32v_mul(*scale, f32v_set1(0.5f)), limit, worst);
    *minimum = f32v_pick(error, limit, fitted_low, *minimum);
    *scale = f32v_pick(error, limit, fitted_step, *scale);
}

#endif
