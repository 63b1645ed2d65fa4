/* kvc_packed_tiles.h - tiles of prepared rows times packed panels of a matrix (kvc_matrix.h), which kvc_matmul_packed.c calls.
 *
 * For the channels of each scale a tile adds integers, exactly, and multiplies them with both scales. The tiles of a format are
 * compiled for it alone, in one of three files by what the format stores: kvc_packed_plain.c, kvc_packed_k.c, kvc_packed_looked_up.c.
 */
#ifndef KVC_PACKED_TILES_H
#define KVC_PACKED_TILES_H

#include "kvc_packed.h"

enum {
    PACKED_AHEAD = 4096,   /* bytes from what is read to what is prefetched into the first level of the cache, measured */
    MOST_TILES = 12,       /* of sums: 6 rows of 2 panels, or 8 of one */
};

/* Places units that share lines of memory one after the other. */
INLINE int unit_at(const kvc_matrix_format_info *info, int i, int count) {
    const int low = kvc_plane_bits(info->bits), shared = GROUP_UNITS / low;
    return count == GROUP_UNITS ? i % shared * low + i / shared : i;
}

/* dots[row, panel] += the products of units [first, first + count) of a group with one digit of each row's numbers. */
INLINE void dot_units(const kvc_matrix_format_info *info, const unsigned char *const *codes, u8x64 table, int first,
                      int count, const unsigned char *numbers, int rows, int panels, i32x16 *dots) {
    /* Others are at most 24, twice the largest 4-bit float of either sign, or the largest code. */
    const int fitting = is_wide(info) ? count : KVC_PART_UNITS(info->table == KVC_FP4 ? 24 : (1 << info->bits) - 1, 127);
    const int step = fitting >= count ? count : fitting >= count / 2 ? count / 2 : count / 4;
    _Static_assert(KVC_PART_UNITS(63, 127) >= GROUP_UNITS / 4, "a quarter of a group is a part");
    UNROLL
    for (int start = 0; start < count; start += step) {
        part16 parts[MOST_TILES];
        if (!is_wide(info)) begin_parts(rows * panels, dots, parts);
        UNROLL
        for (int n = start; n < start + step; n++) {
            const int unit = first + unit_at(info, n, count);
            u8x64 w[2];
            UNROLL
            for (int p = 0; p < panels; p++) w[p] = numbers_of(info, codes[p], unit, table);
            UNROLL
            for (int i = 0; i < rows; i++) {
                const int32_t x = load_i32(numbers + 4 * (unit * rows + i));
                UNROLL
                for (int p = 0; p < panels; p++) {
                    const int at = i * panels + p;
                    if (is_wide(info))
                        dots[at] = i32x16_dot_x(dots[at], w[p], x);
                    else
                        parts[at] = part16_dot_q(parts[at], w[p], x);
                }
            }
        }
        if (!is_wide(info)) end_parts(rows * panels, parts, dots);
    }
}

#if defined(KVC_UNIT_PAIRS)
/* The same for one panel and rows in twos, two units at a time; of an odd number of rows the last one goes alone. */
INLINE void dot_pairs(const kvc_matrix_format_info *info, const unsigned char *codes, u8x64 table, int first, int count,
                      const unsigned char *numbers, int rows, i32x16 *dots) {
    const int last = rows - 1;
    i32x32 pairs[MOST_TILES / 2];
    UNROLL
    for (int i = 0; i < rows / 2; i++) pairs[i] = i32x32_of(dots[2 * i], dots[2 * i + 1]);
    UNROLL
    for (int n = 0; n < count; n += 2) {
        const int unit = first + unit_at(info, n, count), next = first + unit_at(info, n + 1, count);
        const u8x64 a = numbers_of(info, codes, unit, table), b = numbers_of(info, codes, next, table);
        const unsigned char *x = numbers + 4 * (unit * rows), *y = numbers + 4 * (next * rows);
        i32x32_dot(rows / 2, pairs, a, b, x, y);
        if (rows % 2) dots[last] = i32x16_dot_x(i32x16_dot_x(dots[last], a, load_i32(x + 4 * last)), b, load_i32(y + 4 * last));
    }
    UNROLL
    for (int i = 0; i < rows / 2; i++)
        dots[2 * i] = i32x32_first_of(pairs[i]), dots[2 * i + 1] = i32x32_second_of(pairs[i]);
}
#endif

/* The rows of a block in one group, and where in it the channels of a scale are. */
typedef struct share {
    const unsigned char *x, *behind; /* of the group */
    int number;                      /* of the scale, in the record */
    int first, count;                /* units */
    int part;                        /* of the group: which of its scales */
} share;

INLINE void add_units(const kvc_matrix_format_info *info, const unsigned char *const *codes, u8x64 table, int first,
                      int count, const unsigned char *numbers, int rows, int panels, i32x16 *dots) {
#if defined(KVC_UNIT_PAIRS)
    if (rows > 1) {
        dot_pairs(info, codes[0], table, first, count, numbers, rows, dots);
        return;
    }
#endif
    dot_units(info, codes, table, first, count, numbers, rows, panels, dots);
}

/* dots[row, panel] = the products of a share, with all digits, and what the offset of codes adds. */
INLINE void dot_share(const kvc_matrix_format_info *info, const unsigned char *const *codes, u8x64 table, share at,
                      int digits, int rows, int panels, i32x16 *dots) {
    const unsigned char *corrections = at.behind + 4 * rows * (1 + at.part);
    UNROLL
    for (int i = 0; i < rows; i++) {
        const i32x16 start = digits == 2         ? i32x16_zero()
                             : info->has_minima ? i32x16_set1(KVC_SUM_START)
                                                : i32x16_set1(load_i32(corrections + 4 * i));
        UNROLL
        for (int p = 0; p < panels; p++) dots[i * panels + p] = start;
    }
    add_units(info, codes, table, at.first, at.count, at.x, rows, panels, dots);
    if (digits == 1) return;
    UNROLL
    for (int i = 0; i < rows * panels; i++)
        dots[i] = i32x16_next_digit(dots[i], info->has_minima ? 0 : load_i32(corrections + 4 * (i / panels)));
    add_units(info, codes, table, at.first, at.count, at.x + KVC_GROUP * rows, rows, panels, dots);
}

/* sums[row, panel] += dots times both scales, and the minima times the sums of the rows' numbers. */
INLINE void add_share(const kvc_matrix_format_info *info, const unsigned char *const *records, share at, int digits,
                      int rows, int panels, const i32x16 *dots, f32x16 *sums) {
    const unsigned char *corrections = at.behind + 4 * rows * (1 + at.part);
    const unsigned char *less = at.behind + 4 * rows * (1 + kvc_scales_per_group(info));
    UNROLL
    for (int p = 0; p < panels; p++) {
        f32v scales[KVC_VECTORS], minima[KVC_VECTORS];
        UNROLL
        for (int v = 0; v < KVC_VECTORS; v++) {
            scales[v] = scales_of(info, records[p], at.number, v);
            minima[v] = info->has_minima ? minima_of(info, records[p], at.number, v) : f32v_zero();
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            const unsigned char *scale = at.behind + 4 * i, *correction = corrections + 4 * i;
            if (digits == 2) {
                add_whole(info->has_minima, dots[i * panels + p], scale, correction, scales, minima, &sums[i * panels + p]);
                continue;
            }
            f32v scaled[KVC_VECTORS];
            i32x16_scaled(dots[i * panels + p], load_f32(scale), load_f32(less + 4 * i), scaled);
            add_scaled(info->has_minima, scaled, correction, scales, minima, &sums[i * panels + p]);
        }
    }
}

INLINE void packed_tile(const kvc_matrix *matrix, kvc_matrix_format format, int digits, int rows, int panels,
                        const unsigned char *x, tile *t) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(format);
    const size_t header = kvc_header_bytes(info), code_bytes = kvc_group_code_bytes(info);
    const int parts = kvc_scales_per_group(info), units = GROUP_UNITS / parts;
    const size_t numbers = (size_t)(KVC_GROUP * rows * digits), behind = kvc_behind_numbers(info, digits) * (size_t)rows;
    const u8x64 own = u8x64_table(kvc_table_of(kvc_matrix_format_of(matrix->format)->table));
    const u8x64 table = is_wide(info) ? u8x64_weights(own) : own;
    const unsigned char *records[2];
    f32x16 sums[MOST_TILES];
    UNROLL
    for (int p = 0; p < panels; p++)
        records[p] = matrix->data + (size_t)(t->panel + (p < t->existing ? p : t->existing - 1)) * matrix->panel_bytes;
    UNROLL
    for (int i = 0; i < rows * panels; i++) {
        UNROLL
        for (int v = 0; v < KVC_VECTORS; v++) sums[i].v[v] = f32v_zero();
    }
    for (size_t at = 0; at < matrix->panel_bytes; at += kvc_record_bytes(info)) {
        const unsigned char *heads[2], *codes[2];
        UNROLL
        for (int p = 0; p < panels; p++) {
            heads[p] = records[p] + at, codes[p] = heads[p] + header;
            if (t->cold) prefetch(1, heads[p] + ahead_of(t, at, PACKED_AHEAD), header);
        }
        ROLLED
        for (int group = 0; group < kvc_groups_per_record(info); group++, x += numbers + behind) {
            UNROLL
            for (int p = 0; p < panels; p++) {
                if (t->cold) prefetch(1, codes[p] + ahead_of(t, (size_t)(codes[p] - records[p]), PACKED_AHEAD), code_bytes);
            }
            UNROLL
            for (int part = 0; part < parts; part++) {
                const share own = {x, x + numbers, group * parts + part, part * units, units, part};
                i32x16 dots[MOST_TILES];
                dot_share(info, codes, table, own, digits, rows, panels, dots);
                add_share(info, heads, own, digits, rows, panels, dots, sums);
            }
            UNROLL
            for (int p = 0; p < panels; p++) codes[p] += code_bytes;
        }
    }
    keep(t, rows, panels, sums);
}

#define TILE(format, digits, rows)                                                                       \
    void PACKED_TILE(format, digits, rows)(const kvc_matrix *matrix, const unsigned char *x, tile *t) {  \
        packed_tile(matrix, KVC_MATRIX_##format, digits, rows, KVC_PACKED_PANELS(rows), x, t);           \
    }
#define TILES(format) ONE_DIGIT(TILE, format) TWO_DIGITS(TILE, format)

#endif
