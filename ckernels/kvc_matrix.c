/* kvc_matrix.c - the place of each weight in a matrix (kvc_matrix.h), and rows in and out of it. */
#include "kvc_matrix.h"

#include <string.h>

#include "kvc_half.h"

int kvc_matrix_init(kvc_matrix *matrix, kvc_matrix_format format, int64_t rows, int64_t columns) {
    if ((unsigned)format >= KVC_NUM_MATRIX_FORMATS || rows < 1 || columns < 1) return -1;
    if (columns > INT64_MAX / 8 - KVC_RECORD || rows > INT64_MAX / 8 / (columns + KVC_RECORD) - KVC_PANEL) return -1;
    const kvc_matrix_format_info *info = kvc_matrix_format_of(format);
    const int64_t records = (columns + KVC_RECORD - 1) / KVC_RECORD;
    matrix->format = format;
    matrix->rows = rows, matrix->columns = columns;
    matrix->panels = (rows + KVC_PANEL - 1) / KVC_PANEL;
    matrix->groups = 2 * records;
    matrix->panel_bytes = info->packed ? (size_t)records * kvc_record_bytes(format)
                                       : ((size_t)(columns * KVC_PANEL * info->bits / 8) + 63) / 64 * 64;
    return 0;
}

static unsigned char *panel_of(const kvc_matrix *matrix, int64_t row) {
    return matrix->data + (size_t)(row / KVC_PANEL) * matrix->panel_bytes;
}

void kvc_matrix_put_words(const kvc_matrix *matrix, int64_t row, int64_t count, const void *words) {
    const int64_t columns = matrix->columns;
    const int wide = kvc_matrix_format_of(matrix->format)->bits == 32;
    for (int64_t i = 0; i < count; i++, row++) {
        unsigned char *panel = panel_of(matrix, row);
        const int64_t lane = row % KVC_PANEL;
        if (wide) {
            const unsigned char *from = (const unsigned char *)words + i * columns * 4;
            for (int64_t k = 0; k < columns; k++) memcpy(panel + (k * KVC_PANEL + lane) * 4, from + k * 4, 4);
        } else {
            const unsigned char *from = (const unsigned char *)words + i * columns * 2;
            for (int64_t k = 0; k < columns; k++) memcpy(panel + (k * KVC_PANEL + lane) * 2, from + k * 2, 2);
        }
    }
}

/* Where the scale, the minimum and the codes of one group of a row are. */
typedef struct place {
    uint16_t *scale, *minimum; /* minimum: NULL where the format has none */
    unsigned char *codes;      /* channels 0 .. 3 of the row */
    int bits;
} place;

static place place_of(const kvc_matrix *matrix, int64_t row, int64_t group) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    const size_t header = kvc_header_bytes(matrix->format), lane = (size_t)(row % KVC_PANEL), half = (size_t)(group % 2);
    unsigned char *record = panel_of(matrix, row) + (size_t)(group / 2) * kvc_record_bytes(matrix->format);
    uint16_t *scales = (uint16_t *)record + half * KVC_PANEL + lane;
    unsigned char *codes = record + header + half * kvc_group_code_bytes(matrix->format) + 4 * lane;
    return (place){scales, info->has_minima ? scales + 2 * KVC_PANEL : NULL, codes, info->bits};
}

static void put_group(place at, const unsigned char codes[KVC_GROUP]) {
    for (int k = 0; k < KVC_GROUP; k++) {
        const int unit = k / 4;
        if (at.bits == 8) {
            at.codes[unit * KVC_UNIT_BYTES + k % 4] = codes[k];
        } else {
            unsigned char *byte = at.codes + unit % 4 * KVC_UNIT_BYTES + k % 4;
            *byte = (unsigned char)(unit < 4 ? (*byte & 0xf0) | codes[k] : (*byte & 0x0f) | codes[k] << 4);
        }
    }
}

static void get_group(place at, unsigned char codes[KVC_GROUP]) {
    for (int k = 0; k < KVC_GROUP; k++) {
        const int unit = k / 4;
        if (at.bits == 8)
            codes[k] = at.codes[unit * KVC_UNIT_BYTES + k % 4];
        else
            codes[k] = at.codes[unit % 4 * KVC_UNIT_BYTES + k % 4] >> (unit < 4 ? 0 : 4) & 15;
    }
}

static int channels_of(const kvc_matrix *matrix, int64_t group) { /* of the 32, those that are columns */
    const int64_t left = matrix->columns - group * KVC_GROUP;
    return left < 0 ? 0 : left < KVC_GROUP ? (int)left : KVC_GROUP;
}

void kvc_matrix_put_codes(const kvc_matrix *matrix, int64_t row, int64_t count, const unsigned char *codes,
                          const uint16_t *scales, const uint16_t *minima) {
    const int64_t known = (matrix->columns + KVC_GROUP - 1) / KVC_GROUP;
    const int zero = kvc_matrix_format_of(matrix->format)->zero;
    for (int64_t i = 0; i < count; i++, row++) {
        for (int64_t g = 0; g < matrix->groups; g++) {
            const place at = place_of(matrix, row, g);
            const int channels = channels_of(matrix, g);
            unsigned char group[KVC_GROUP];
            memset(group, zero, sizeof group); /* with minima its code is 0: x is 0 there, whatever the value */
            if (channels) memcpy(group, codes + i * matrix->columns + g * KVC_GROUP, (size_t)channels);
            *at.scale = g < known ? scales[i * known + g] : 0;
            if (at.minimum) *at.minimum = g < known ? minima[i * known + g] : 0;
            put_group(at, group);
        }
    }
}

void kvc_matrix_get_codes(const kvc_matrix *matrix, int64_t row, unsigned char *codes, uint16_t *scales,
                          uint16_t *minima) {
    const int64_t known = (matrix->columns + KVC_GROUP - 1) / KVC_GROUP;
    for (int64_t g = 0; g < known; g++) {
        const place at = place_of(matrix, row, g);
        unsigned char group[KVC_GROUP];
        get_group(at, group);
        memcpy(codes + g * KVC_GROUP, group, (size_t)channels_of(matrix, g));
        scales[g] = *at.scale;
        if (at.minimum) minima[g] = *at.minimum;
    }
}

static void get_packed_row(const kvc_matrix *matrix, int64_t row, float *values) {
    const int zero = kvc_matrix_format_of(matrix->format)->zero;
    const int64_t known = (matrix->columns + KVC_GROUP - 1) / KVC_GROUP;
    for (int64_t g = 0; g < known; g++) {
        const place at = place_of(matrix, row, g);
        const float scale = kvc_float_of_half(*at.scale), minimum = at.minimum ? kvc_float_of_half(*at.minimum) : 0.0f;
        unsigned char codes[KVC_GROUP];
        get_group(at, codes);
        for (int k = 0; k < channels_of(matrix, g); k++)
            values[g * KVC_GROUP + k] = minimum + scale * (float)(codes[k] - zero);
    }
}

void kvc_matrix_get_row(const kvc_matrix *matrix, int64_t row, float *values) {
    const unsigned char *panel = panel_of(matrix, row);
    const int64_t lane = row % KVC_PANEL;
    switch (matrix->format) {
    case KVC_MATRIX_F32:
        for (int64_t k = 0; k < matrix->columns; k++) values[k] = ((const float *)panel)[k * KVC_PANEL + lane];
        break;
    case KVC_MATRIX_F16:
        for (int64_t k = 0; k < matrix->columns; k++)
            values[k] = kvc_float_of_half(((const uint16_t *)panel)[k * KVC_PANEL + lane]);
        break;
    case KVC_MATRIX_BF16:
        for (int64_t k = 0; k < matrix->columns; k++)
            values[k] = kvc_float_of_bits((uint32_t)((const uint16_t *)panel)[k * KVC_PANEL + lane] << 16);
        break;
    default: get_packed_row(matrix, row, values);
    }
}

void kvc_floats_of_bf16(int64_t n, const uint16_t *restrict words, float *restrict x) {
    for (int64_t i = 0; i < n; i++) x[i] = kvc_float_of_bits((uint32_t)words[i] << 16);
}

void kvc_bf16_of_floats(int64_t n, const float *restrict x, uint16_t *restrict words) {
    for (int64_t i = 0; i < n; i++) words[i] = kvc_bf16_of_float(x[i]);
}
