/* kvc_quantise_weights.c - rows of floats as codes, scales and minima of a packed matrix. */
#include <math.h>

#include "kvc_lanes.h"
#include "kvc_matrix.h"

/* q8_0 tries this many scales above the smallest that clips nothing, in steps of 1 / KVC_PER_TRY of it. Errors of
 * rounding differ by chance from scale to scale: the least of 9 has 0.83 of the first one's squared error for normal
 * weights, and 0.61 where the weights are those of a 4-bit file. Twice as many would give 0.81 and 0.57. */
enum { KVC_TRIES = 8, KVC_PER_TRY = 200 };

/* The squared error of 8 bits with this scale, in units of (step * 2^-9)^2. Each value's is a whole number of at most
 * 2^18, so the sum is exact and the same at every level: 32 * 2^18 = 2^23. */
INLINE float squared_error(const float x[KVC_GROUP], float step) {
    const f32v per_step = f32v_set1(1.0f / step), most = f32v_set1(127.0f), fine = f32v_set1(512.0f);
    f32v sum = f32v_zero();
    for (int k = 0; k < KVC_GROUP; k += KVC_LANES) {
        const f32v number = f32v_mul(f32v_load(x + k), per_step);
        const f32v code = f32v_min(f32v_abs(f32v_round(number)), most);
        const f32v away = f32v_round(f32v_mul(f32v_abs(f32v_sub(f32v_abs(number), code)), fine));
        const f32v bounded = f32v_min(away, fine);
        sum = f32v_add(sum, f32v_mul(bounded, bounded));
    }
    return f32v_sum_of(sum);
}

/* The scale of q8_0 for a group whose largest magnitude is `far`. */
static uint16_t fitted_scale(const float x[KVC_GROUP], float far) {
    enum { SLOTS = 16 }; /* at least KVC_TRIES + 1, and whole vectors */
    uint16_t halves[SLOTS];
    float steps[SLOTS], least = INFINITY;
    const float first = far / 127.0f;
    for (int i = 0; i < SLOTS; i++) steps[i] = first * (1.0f + (float)i / KVC_PER_TRY);
    for (int i = 0; i < SLOTS; i += KVC_LANES) {
        f32v_store_half(halves + i, f32v_load(steps + i));
        f32v_store(steps + i, f32v_load_half(halves + i));
    }
    uint16_t best = halves[0];
    for (int i = 0; i <= KVC_TRIES; i++) {
        if (steps[i] < 0x1p-126f || !(steps[i] < INFINITY)) continue;
        const float error = squared_error(x, steps[i]) * steps[i] * steps[i];
        if (error < least) least = error, best = halves[i];
    }
    return best;
}

/* q8_0, q4_0: the scale is about the largest magnitude over the largest code, on the side that has one code more. */
static void code_group(const float x[KVC_GROUP], int bits, unsigned char codes[KVC_GROUP], uint16_t *scale) {
    const int zero = 1 << (bits - 1);
    f32v largest = f32v_zero();
    for (int k = 0; k < KVC_GROUP; k += KVC_LANES) largest = f32v_max(largest, f32v_abs(f32v_load(x + k)));
    float far = f32v_max_of(largest);
    for (int k = 0; bits == 4 && k < KVC_GROUP; k++) {
        if (fabsf(x[k]) == fabsf(far)) {
            far = x[k]; /* with its sign */
            break;
        }
    }
    const uint16_t half = bits == 8 ? fitted_scale(x, far) : kvc_half_of_float(far / -8.0f);
    const float step = kvc_float_of_half(half), per_step = fabsf(step) < 0x1p-126f ? 0.0f : 1.0f / step;
    const float low = bits == 8 ? 1.0f : 0.0f, high = (float)(2 * zero - 1);
    for (int k = 0; k < KVC_GROUP; k++) {
        const float code = x[k] * per_step + (float)zero;
        codes[k] = (unsigned char)(int)((code < low ? low : code > high ? high : code) + 0.5f);
    }
    *scale = half;
}

/* Rows x (count, columns), finite halves at most, as codes (count, columns), scales and minima (count, groups) of a packed
 * format: see kvc_matrix_put_codes. q4_1 has the minimum and scale of least squared error (kvc_fit.h). */
void KVC_UNFUSED(quantise_weights)(kvc_matrix_format format, int64_t count, int64_t columns, const float *x,
                              unsigned char *codes, uint16_t *scales, uint16_t *minima) {
    const int bits = kvc_matrix_format_of(format)->bits, fitted = kvc_matrix_format_of(format)->has_minima;
    const kvc_rows rows = {.format = KVC_Q4, .bits = bits, .quantised = 1, .dim = KVC_GROUP, .side = KVC_KEYS};
    const int64_t groups = (columns + KVC_GROUP - 1) / KVC_GROUP;
    for (int64_t first = 0; first < count; first += KVC_TILE) {
        const int here = (int)(count - first < KVC_TILE ? count - first : KVC_TILE);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t left = columns - g * KVC_GROUP;
            const size_t channels = (size_t)(left < KVC_GROUP ? left : KVC_GROUP);
            float padded[KVC_TILE][KVC_GROUP];
            kvc_source group[KVC_TILE];
            for (int i = 0; i < here; i++) {
                const float *from = x + (first + i) * columns + g * KVC_GROUP;
                memcpy(padded[i], from, channels * sizeof(float));
                /* The last value again changes neither the range nor, much, the fit. */
                for (size_t k = channels; k < KVC_GROUP; k++) padded[i][k] = fitted ? from[channels - 1] : 0.0f;
                group[i] = (kvc_source){padded[i], NULL};
            }
            kvc_coded coded;
            if (fitted) kvc_code_rows(rows, group, 0, here, &coded);
            for (int i = 0; i < here; i++) {
                const int64_t place = (first + i) * groups + g;
                unsigned char row[KVC_GROUP];
                if (fitted) {
                    for (int k = 0; k < KVC_GROUP; k++) row[k] = coded.codes[k * KVC_TILE + i];
                    scales[place] = coded.scales[i], minima[place] = coded.minima[i];
                } else {
                    code_group(padded[i], bits, row, &scales[place]);
                }
                memcpy(codes + (first + i) * columns + g * KVC_GROUP, row, channels);
            }
        }
    }
}
