/* kvc_quantise_weights.c - rows of floats as codes, scales and minima of a packed matrix. */
#include <math.h>

#include "kvc_lanes.h"
#include "kvc_matrix.h"

/* q8_0, q4_0: the scale is the largest magnitude over the largest code, on the side that has one code more. */
static void code_group(const float x[KVC_GROUP], int bits, unsigned char codes[KVC_GROUP], uint16_t *scale) {
    const int zero = 1 << (bits - 1);
    float far = 0.0f;
    for (int k = 0; k < KVC_GROUP; k++) {
        if (fabsf(x[k]) > fabsf(far)) far = x[k];
    }
    const uint16_t half = kvc_half_of_float(bits == 8 ? fabsf(far) / 127.0f : far / -8.0f);
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
void KVC_FN(quantise_weights)(kvc_matrix_format format, int64_t count, int64_t columns, const float *x,
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
            const float *group[KVC_TILE];
            for (int i = 0; i < here; i++) {
                const float *from = x + (first + i) * columns + g * KVC_GROUP;
                memcpy(padded[i], from, channels * sizeof(float));
                /* The last value again changes neither the range nor, much, the fit. */
                for (size_t k = channels; k < KVC_GROUP; k++) padded[i][k] = fitted ? from[channels - 1] : 0.0f;
                group[i] = padded[i];
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
