/* kvc_matrix.c - the place of each weight in a matrix (kvc_matrix.h), and rows in and out of it. */
#include "kvc_matrix.h"

#include <string.h>

#include "kvc_half.h"

int kvc_matrix_init(kvc_matrix *matrix, kvc_matrix_format format, int64_t rows, int64_t columns) {
    if ((unsigned)format >= KVC_NUM_MATRIX_FORMATS || rows < 1 || columns < 1) return -1;
    if (columns > INT64_MAX / 8 - KVC_MOST_RECORD || rows > INT64_MAX / 8 / (columns + KVC_MOST_RECORD) - KVC_PANEL) return -1;
    const kvc_matrix_format_info *info = kvc_matrix_format_of(format);
    const int64_t groups = kvc_groups_per_record(info);
    const int64_t records = (columns + groups * KVC_GROUP - 1) / (groups * KVC_GROUP);
    matrix->format = format;
    matrix->rows = rows, matrix->columns = columns;
    matrix->panels = (rows + KVC_PANEL - 1) / KVC_PANEL;
    matrix->groups = groups * records;
    matrix->panel_bytes = info->packed ? (size_t)records * kvc_record_bytes(info)
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

/* Where one group of a row is. */
typedef struct place {
    const kvc_matrix_format_info *info;
    unsigned char *units, *scales, *minima; /* of the row, the first; the next of each are `stride` bytes away */
    size_t stride;
    unsigned char *codes; /* channels 0 .. 3 of the row */
    int begins;           /* a record */
} place;

static place place_of(const kvc_matrix *matrix, int64_t row, int64_t group) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    const int64_t groups = kvc_groups_per_record(info), inside = group % groups;
    const size_t lane = (size_t)(row % KVC_PANEL), size = kvc_scale_bytes(info), stride = KVC_PANEL * size;
    unsigned char *record = panel_of(matrix, row) + (size_t)(group / groups) * kvc_record_bytes(info);
    const size_t scale = (size_t)(inside * kvc_scales_per_group(info)) * stride + lane * size;
    unsigned char *units = record + lane * (info->has_minima ? sizeof(uint16_t) : sizeof(float));
    unsigned char *codes = record + kvc_header_bytes(info) + (size_t)inside * kvc_group_code_bytes(info) + 4 * lane;
    unsigned char *scales = record + kvc_scales_at(info) + scale, *minima = record + kvc_minima_at(info) + scale;
    return (place){info, units, scales, minima, stride, codes, inside == 0};
}

/* Bits [drop, drop + bits) of the codes of a group into a plane. */
static void put_plane(unsigned char *plane, int bits, int drop, const unsigned char codes[KVC_GROUP]) {
    const int mask = (1 << bits) - 1;
    for (int at = 0; at < 4 * bits; at++) { /* bytes of the row: four of each line */
        int byte = 0;
        for (int shift = 0; shift < 8; shift += bits) byte |= (codes[at + 4 * shift] >> drop & mask) << shift;
        plane[at / 4 * KVC_UNIT_BYTES + at % 4] = (unsigned char)byte;
    }
}

/* The same bits of each code from there. */
static void get_plane(const unsigned char *plane, int bits, int drop, unsigned char codes[KVC_GROUP]) {
    const int mask = (1 << bits) - 1;
    for (int at = 0; at < 4 * bits; at++) {
        const int byte = plane[at / 4 * KVC_UNIT_BYTES + at % 4];
        for (int shift = 0; shift < 8; shift += bits)
            codes[at + 4 * shift] = (unsigned char)(codes[at + 4 * shift] | (byte >> shift & mask) << drop);
    }
}

static void put_group(place at, const unsigned char codes[KVC_GROUP]) {
    const int low = kvc_plane_bits(at.info->bits), high = at.info->bits - low;
    put_plane(at.codes, low, 0, codes);
    if (high) put_plane(at.codes + low * KVC_UNIT_BYTES, high, low, codes);
}

static void get_group(place at, unsigned char codes[KVC_GROUP]) {
    const int low = kvc_plane_bits(at.info->bits), high = at.info->bits - low;
    memset(codes, 0, KVC_GROUP);
    get_plane(at.codes, low, 0, codes);
    if (high) get_plane(at.codes + low * KVC_UNIT_BYTES, high, low, codes);
}

static void put_scale(place at, int i, const kvc_parts *parts, int64_t from) {
    unsigned char *scale = at.scales + (size_t)i * at.stride, *minimum = at.minima + (size_t)i * at.stride;
    const unsigned char *scales = parts->scales, *minima = parts->minima;
    const size_t size = kvc_scale_bytes(at.info);
    if (at.info->scales == KVC_NIBBLES) {
        *scale = from < 0 ? 0 : (unsigned char)(scales[from] | minima[from] << 4);
        return;
    }
    memset(scale, 0, size);
    if (from >= 0) memcpy(scale, scales + (size_t)from * size, size);
    if (!at.info->has_minima) return;
    memset(minimum, 0, size);
    if (from >= 0) memcpy(minimum, minima + (size_t)from * size, size);
}

static void get_scale(place at, int i, const kvc_parts *parts, int64_t to) {
    const unsigned char *scale = at.scales + (size_t)i * at.stride, *minimum = at.minima + (size_t)i * at.stride;
    unsigned char *scales = parts->scales, *minima = parts->minima;
    const size_t size = kvc_scale_bytes(at.info);
    if (at.info->scales == KVC_NIBBLES) {
        scales[to] = *scale & 15, minima[to] = *scale >> 4;
        return;
    }
    memcpy(scales + (size_t)to * size, scale, size);
    if (at.info->has_minima) memcpy(minima + (size_t)to * size, minimum, size);
}

static void put_units(place at, const float *units) {
    if (at.info->has_minima) {
        const uint16_t halves[] = {kvc_half_of_float(units[0]), kvc_half_of_float(units[1])};
        memcpy(at.units, halves, 2), memcpy(at.units + 2 * KVC_PANEL, halves + 1, 2);
    } else {
        memcpy(at.units, units, sizeof *units);
    }
}

/* The unit and the minimum unit of the record that `at` is in. */
static void get_units(place at, float units[2]) {
    uint16_t halves[2];
    if (at.info->has_minima) {
        memcpy(halves, at.units, 2), memcpy(halves + 1, at.units + 2 * KVC_PANEL, 2);
        units[0] = kvc_float_of_half(halves[0]), units[1] = kvc_float_of_half(halves[1]);
    } else {
        memcpy(units, at.units, sizeof *units);
    }
}

static int channels_of(const kvc_matrix *matrix, int64_t group) { /* of the 32, those that are columns */
    const int64_t left = matrix->columns - group * KVC_GROUP;
    return left < 0 ? 0 : left < KVC_GROUP ? (int)left : KVC_GROUP;
}

static int64_t scales_of_row(const kvc_matrix *matrix) {
    const int channels = kvc_matrix_format_of(matrix->format)->channels;
    return (matrix->columns + channels - 1) / channels;
}

static int64_t units_of_row(const kvc_matrix *matrix) { /* floats: with minima two of each record */
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    return matrix->groups / kvc_groups_per_record(info) * (1 + info->has_minima);
}

void kvc_matrix_put_parts(const kvc_matrix *matrix, int64_t row, int64_t count, const kvc_parts *parts) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    const int64_t known = scales_of_row(matrix), per_group = kvc_scales_per_group(info);
    /* The code of 0; of a table the first one, and with minima 0: x is 0 there, whatever the value. */
    const int zero = info->table ? 0 : info->zero;
    for (int64_t i = 0; i < count; i++, row++) {
        const float *units = kvc_has_units(info) ? parts->units + i * units_of_row(matrix) : NULL;
        for (int64_t g = 0; g < matrix->groups; g++) {
            const place at = place_of(matrix, row, g);
            const int channels = channels_of(matrix, g);
            unsigned char group[KVC_GROUP];
            memset(group, zero, sizeof group);
            if (channels) memcpy(group, parts->codes + i * matrix->columns + g * KVC_GROUP, (size_t)channels);
            put_group(at, group);
            for (int64_t s = g * per_group; s < (g + 1) * per_group; s++)
                put_scale(at, (int)(s - g * per_group), parts, s < known ? i * known + s : -1);
            if (units && at.begins) put_units(at, units), units += 1 + info->has_minima;
        }
    }
}

void kvc_matrix_get_parts(const kvc_matrix *matrix, int64_t row, const kvc_parts *parts) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    const int64_t known = scales_of_row(matrix), per_group = kvc_scales_per_group(info);
    float *to = parts->units;
    for (int64_t g = 0; channels_of(matrix, g); g++) {
        const place at = place_of(matrix, row, g);
        unsigned char group[KVC_GROUP];
        get_group(at, group);
        memcpy(parts->codes + g * KVC_GROUP, group, (size_t)channels_of(matrix, g));
        for (int64_t s = g * per_group; s < (g + 1) * per_group && s < known; s++)
            get_scale(at, (int)(s - g * per_group), parts, s);
        if (kvc_has_units(info) && at.begins) {
            float units[2];
            get_units(at, units);
            memcpy(to, units, (size_t)(1 + info->has_minima) * sizeof *units), to += 1 + info->has_minima;
        }
    }
}

static float half_at(const unsigned char *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return kvc_float_of_half(half);
}

/* Scale i of a group, and its minimum, or 0. */
static float scale_value(place at, int i, float units[2], float *minimum) {
    const kvc_matrix_format_info *info = at.info;
    const unsigned char *scale = at.scales + (size_t)i * at.stride, *least = at.minima + (size_t)i * at.stride;
    *minimum = 0.0f;
    switch (info->scales) {
    case KVC_HALVES:
        if (info->has_minima) *minimum = half_at(least);
        return half_at(scale);
    case KVC_BYTES:
        if (!info->has_minima) return units[0] * (float)(int8_t)*scale;
        *minimum = units[1] * (float)*least;
        return units[0] * (float)*scale;
    case KVC_NIBBLES: *minimum = units[1] * (float)(*scale >> 4); return units[0] * (float)(*scale & 15);
    case KVC_E8M0: return kvc_float_of_e8m0(*scale) * kvc_scale_factor(info);
    default: return units[0] * (kvc_float_of_half((uint16_t)(*scale << 7)) * kvc_scale_factor(info));
    }
}

static void get_packed_row(const kvc_matrix *matrix, int64_t row, float *values) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    const unsigned char *table = info->table ? kvc_table_of(info->table) : NULL;
    float units[2] = {0.0f, 0.0f};
    for (int64_t g = 0; channels_of(matrix, g); g++) {
        const place at = place_of(matrix, row, g);
        unsigned char codes[KVC_GROUP];
        get_group(at, codes);
        if (kvc_has_units(info)) get_units(at, units);
        for (int k = 0; k < channels_of(matrix, g); k++) {
            float minimum;
            const float scale = scale_value(at, k / info->channels, units, &minimum);
            const float number = (float)((table ? table[codes[k]] : codes[k]) - info->zero);
            values[g * KVC_GROUP + k] = info->has_minima ? minimum + scale * number : scale * number;
        }
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
