/* kvc_matmul_packed.c - prepared rows times packed panels of a matrix (kvc_matrix.h, kvc_matmul.c).
 *
 * For the channels of each scale a tile adds integers, exactly, and multiplies them with both scales. What a format is, its line
 * in the table says: `unit_of` unpacks codes by their bits, or looks numbers up; `scales_of` and `minima_of` read its scales. Its
 * tiles are compiled for it alone.
 */
#include "kvc_matmul_tile.h"

enum {
    CHUNK_BYTES = 2 << 20, /* of prepared rows that a panel meets */
    PACKED_AHEAD = 4096,   /* bytes from what is read to what is prefetched into the first level of the cache, measured */
    MOST_TILES = 12,       /* of sums: 6 rows of 2 panels, or 8 of one */
    GROUP_UNITS = KVC_GROUP / 4,
};

INLINE int32_t load_i32(const unsigned char *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}
INLINE float load_f32(const unsigned char *p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}

/* Bits [at, at + n) of each byte as bits [to, to + n). */
INLINE u8x64 bits_of(u8x64 x, int at, int n, int to) {
    if (n == 8) return x;
    if (at > to) x = u8x64_shr(x, at - to);
    if (at < to) x = u8x64_shl(x, to - at);
    return u8x64_and(x, ((1 << n) - 1) << to);
}

/* Codes of unit `unit` of a group. */
INLINE u8x64 unit_of(const unsigned char *codes, int bits, int unit) {
    const int low = kvc_plane_bits(bits), high = bits - low;
    const u8x64 first = bits_of(u8x64_load(codes + unit % low * KVC_UNIT_BYTES), unit / low * low, low, 0);
    if (!high) return first;
    const unsigned char *second = codes + (low + unit % high) * KVC_UNIT_BYTES;
    return u8x64_or(first, bits_of(u8x64_load(second), unit / high * high, high, low));
}

/* Whether numbers take all 8 bits of a byte: they are in the form of u8x64_weights then. */
INLINE int is_wide(const kvc_matrix_format_info *info) { return info->zero == 128; }

INLINE u8x64 numbers_of(const kvc_matrix_format_info *info, const unsigned char *codes, int unit, u8x64 table) {
    const u8x64 found = unit_of(codes, info->bits, unit);
    if (info->table) return u8x64_lookup(table, found);
    return is_wide(info) ? u8x64_weights(found) : found;
}

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

/* The scales number n of a record's rows, a vector of them. */
INLINE f32v scales_of(const kvc_matrix_format_info *info, const unsigned char *record, int n, int v) {
    const unsigned char *own = record + kvc_scales_at(info) +
                               (size_t)(n * KVC_PANEL + v * KVC_LANES) * kvc_scale_bytes(info);
    const f32v unit = !kvc_has_units(info) ? f32v_zero()
                      : info->has_minima   ? f32v_load_half((const uint16_t *)record + v * KVC_LANES)
                                           : f32v_load((const float *)record + v * KVC_LANES);
    switch (info->scales) {
    case KVC_HALVES: return f32v_load_half((const uint16_t *)own);
    case KVC_E8M0: return f32v_load_e8m0(own);
    case KVC_E4M3: return f32v_mul(unit, f32v_load_e4m3(own));
    case KVC_NIBBLES: return f32v_mul(unit, f32v_load_bits(own, 0, 15));
    default: return f32v_mul(unit, info->has_minima ? f32v_load_bits(own, 0, 255) : f32v_load_signed(own));
    }
}

/* The minima likewise, of a format that has them. */
INLINE f32v minima_of(const kvc_matrix_format_info *info, const unsigned char *record, int n, int v) {
    const unsigned char *own = record + kvc_minima_at(info) +
                               (size_t)(n * KVC_PANEL + v * KVC_LANES) * kvc_scale_bytes(info);
    if (info->scales == KVC_HALVES) return f32v_load_half((const uint16_t *)own);
    const f32v unit = f32v_load_half((const uint16_t *)record + KVC_PANEL + v * KVC_LANES);
    return f32v_mul(unit, info->scales == KVC_NIBBLES ? f32v_load_bits(own, 4, 15) : f32v_load_bits(own, 0, 255));
}

/* The rows of a block in one group, and where in it the channels of a scale are. */
typedef struct share {
    const unsigned char *x, *behind; /* of the group */
    int number;                      /* of the scale, in the record */
    int first, count;                /* units */
    int part;                        /* of the group: which of its scales */
} share;

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
    dot_units(info, codes, table, at.first, at.count, at.x, rows, panels, dots);
    if (digits == 1) return;
    UNROLL
    for (int i = 0; i < rows * panels; i++)
        dots[i] = i32x16_next_digit(dots[i], info->has_minima ? 0 : load_i32(corrections + 4 * (i / panels)));
    dot_units(info, codes, table, at.first, at.count, at.x + KVC_GROUP * rows, rows, panels, dots);
}

/* sums[row, panel] += dots times both scales, and the minima times the sums of the rows' numbers. */
INLINE void add_share(const kvc_matrix_format_info *info, const unsigned char *const *records, share at, int digits,
                      int rows, int panels, const i32x16 *dots, sums16 *sums) {
    const unsigned char *corrections = at.behind + 4 * rows * (1 + at.part);
    const unsigned char *less = at.behind + 4 * rows * (1 + kvc_scales_per_group(info));
    UNROLL
    for (int p = 0; p < panels; p++) {
        f32v scales[VECTORS], minima[VECTORS];
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            scales[v] = scales_of(info, records[p], at.number, v);
            minima[v] = info->has_minima ? minima_of(info, records[p], at.number, v) : f32v_zero();
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            sums16 *sum = &sums[i * panels + p];
            const float scale = load_f32(at.behind + 4 * i);
            f32v scaled[VECTORS];
            if (digits == 1) {
                i32x16_scaled(dots[i * panels + p], scale, load_f32(less + 4 * i), scaled);
            } else {
                i32x16_to_floats(dots[i * panels + p], scaled);
                UNROLL
                for (int v = 0; v < VECTORS; v++) scaled[v] = f32v_mul(scaled[v], f32v_set1(scale));
            }
            UNROLL
            for (int v = 0; v < VECTORS; v++) {
                sum->v[v] = f32v_fma(scaled[v], scales[v], sum->v[v]);
                if (info->has_minima)
                    sum->v[v] = f32v_fma(minima[v], f32v_set1(load_f32(corrections + 4 * i)), sum->v[v]);
            }
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
    sums16 sums[MOST_TILES];
    UNROLL
    for (int p = 0; p < panels; p++)
        records[p] = matrix->data + (size_t)(t->panel + (p < t->existing ? p : t->existing - 1)) * matrix->panel_bytes;
    UNROLL
    for (int i = 0; i < rows * panels; i++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) sums[i].v[v] = f32v_zero();
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
                if (t->cold) prefetch(1, codes[p] + ahead_of(t, at, PACKED_AHEAD), code_bytes);
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

#define PACKED(format, digits, rows)                                                                              \
    NOINLINE void packed_##format##_##digits##_##rows(const kvc_matrix *matrix, const unsigned char *x, tile *t) { \
        packed_tile(matrix, KVC_MATRIX_##format, digits, rows, KVC_PACKED_PANELS(rows), x, t);                           \
    }
#if defined(KVC_AVX512)
#define BLOCKS(X, ...) \
    X(__VA_ARGS__, 1) X(__VA_ARGS__, 2) X(__VA_ARGS__, 3) X(__VA_ARGS__, 4) X(__VA_ARGS__, 6) X(__VA_ARGS__, 8)
#elif defined(KVC_AVX2)
#define BLOCKS(X, ...) X(__VA_ARGS__, 1) X(__VA_ARGS__, 2) X(__VA_ARGS__, 3) X(__VA_ARGS__, 4)
#else
#define BLOCKS(X, ...) X(__VA_ARGS__, 1) X(__VA_ARGS__, 2)
#endif
#define PACKED_FORMATS(X)                                                                                    \
    X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q4_K) X(Q5_K) X(Q6_K) X(Q3_K) X(Q2_K) X(IQ4_NL) X(IQ4_XS) X(IQ2)   \
    X(MXFP4) X(NVFP4)
#define TILES(format) BLOCKS(PACKED, format, 1) BLOCKS(PACKED, format, 2)
PACKED_FORMATS(TILES)

typedef void packed_fn(const kvc_matrix *, const unsigned char *x, tile *);
#define LINE(format, digits, rows) [rows] = packed_##format##_##digits##_##rows,
#define TABLE(format) [KVC_MATRIX_##format] = {{BLOCKS(LINE, format, 1)}, {BLOCKS(LINE, format, 2)}},
/* Formats that differ in nothing but the numbers of their tables share tiles. */
static packed_fn *const packed_tiles[KVC_NUM_MATRIX_FORMATS][2][9] = {
    PACKED_FORMATS(TABLE)[KVC_MATRIX_IQ3_S] = {{BLOCKS(LINE, IQ4_XS, 1)}, {BLOCKS(LINE, IQ4_XS, 2)}},
    [KVC_MATRIX_IQ3_XXS] = {{BLOCKS(LINE, IQ4_XS, 1)}, {BLOCKS(LINE, IQ4_XS, 2)}},
};

void KVC_FN(multiply_packed)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop) {
    const size_t row_bytes = kvc_prepared_row_bytes(args);
    packed_fn *const *tiles = packed_tiles[args->matrix->format][args->digits - 1];
    const int most = KVC_PACKED_ROWS(args->n);
    const int64_t fitting = (int64_t)(CHUNK_BYTES / row_bytes) / most * most, chunk = fitting > most ? fitting : most;
    for (int64_t start = 0; start < args->n; start += chunk) {
        const int64_t stop = start + chunk < args->n ? start + chunk : args->n;
        for (int64_t p = panel; p < panel_stop; p += 2) {
            for (int64_t row = start; row < stop;) {
                const int rows = kvc_block_rows(most, stop - row);
                const int64_t step = KVC_PACKED_PANELS(rows);
                for (int64_t q = p; q < panel_stop && q < p + 2; q += step) {
                    tile t;
                    begin(&t, args, row, rows, q, step, panel_stop, row == start, NULL, NULL);
                    tiles[rows](args->matrix, args->prepared + (size_t)row * row_bytes, &t);
                    give(args, &t);
                }
                row += rows;
            }
        }
    }
}
