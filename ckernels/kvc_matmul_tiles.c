/* kvc_matmul_tiles.c - blocks of 16 prepared rows times packed panels (kvc_matrix.h) in the tiles of simd_amx.h.
 *
 * A group of a panel, eight units of codes, is a tile when it is unpacked, and so are 32 numbers of 16 rows. Codes are less their
 * zero, so that nothing corrects a product. It is exact, and meets the scales in the order of kvc_matmul_packed.c, with the same
 * roundings: a row has the bits that it has there.
 *
 *     for 16 rows x 16 outputs x 32 channels:    product -> memory -> floats -> * scale of the row -> * scale of the output, sum
 *
 * That takes 28 loads, 16 stores and 24 vector operations of 512 bits in the place of 64 dot products (counted, at two loads and
 * two operations a cycle). Sums of 16 rows stay in registers over a span of groups, whose codes stay in the first level of the
 * cache beside the numbers of the rows; between spans they are in memory. A product is read some shares after it was begun: one
 * takes 50 cycles, and begins every 16.
 */
#include "kvc_packed.h"

enum {
    SPAN = 32,               /* groups of a panel: 16 KiB of numbers, a multiple of every record */
    MOST_ROWS = 512,         /* of a chunk, which a span meets */
    CHUNK_BYTES = 1 << 20,   /* of prepared rows of a chunk: they stay in the second level of the cache */
    LAG = 2,                 /* shares between a product and its scales */
    SLOTS = 4,               /* of products */
    TILE_BYTES = KVC_GROUP * KVC_PANEL,
};
_Static_assert(SPAN % (KVC_MOST_RECORD / KVC_GROUP) == 0, "a span is whole records");

/* Some groups of a panel as tiles and floats. */
typedef struct span {
    int groups;
    f32v scales[2 * SPAN], minima[2 * SPAN];
    _Alignas(64) unsigned char codes[SPAN][TILE_BYTES]; /* signed */
} span;

/* Reads groups of a panel from a record on. */
INLINE void open_span(const kvc_matrix *matrix, kvc_matrix_format format, const unsigned char *record, span *s) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(format);
    const int parts = kvc_scales_per_group(info), together = kvc_groups_per_record(info);
    const u8x64 table = u8x64_table(kvc_table_of(kvc_matrix_format_of(matrix->format)->table));
    for (int g = 0; g < s->groups; g++) {
        const unsigned char *from = record + kvc_header_bytes(info) + (size_t)(g % together) * kvc_group_code_bytes(info);
        UNROLL
        for (int unit = 0; unit < GROUP_UNITS; unit++)
            u8x64_store(s->codes[g] + unit * KVC_UNIT_BYTES, u8x64_sub(numbers_of(info, from, unit, table), info->zero));
        UNROLL
        for (int part = 0; part < parts; part++) {
            const int number = g % together * parts + part;
            s->scales[g * parts + part] = scales_of(info, record, number, 0);
            if (info->has_minima) s->minima[g * parts + part] = minima_of(info, record, number, 0);
        }
        if (g % together + 1 == together) record += kvc_record_bytes(info);
    }
}

#define OPEN(format)                                                                                             \
    NOINLINE void open_##format(const kvc_matrix *matrix, const unsigned char *record, span *s) {                \
        open_span(matrix, KVC_MATRIX_##format, record, s);                                                       \
    }
PACKED_FORMATS(OPEN)
typedef void open_fn(const kvc_matrix *, const unsigned char *record, span *);
#define OPEN_LINE(format) [KVC_MATRIX_##format] = open_##format,
static open_fn *const open_format[KVC_NUM_MATRIX_FORMATS] = {
    PACKED_FORMATS(OPEN_LINE)[KVC_MATRIX_IQ3_S] = open_IQ4_XS,
    [KVC_MATRIX_IQ3_XXS] = open_IQ4_XS,
};

/* The lines that the next span is read from: some for each share of this one. */
typedef struct coming {
    const unsigned char *lines; /* NULL: none */
    size_t bytes;               /* for each share */
} coming;

/* sums of 16 rows += a product of high digits and of low ones, of the share of a scale, times both scales. */
INLINE void add_product(const span *s, int share, int parts, int has_minima, int digits,
                        int32_t dots[2][KVC_TILED_ROWS][KVC_PANEL], const unsigned char *behind, sums16 *sums) {
    const unsigned char *corrections = behind + 4 * KVC_TILED_ROWS * (1 + share % parts);
    UNROLL
    for (int r = 0; r < KVC_TILED_ROWS; r++) {
        i32x16 all = i32x16_load(dots[0][r]);
        if (digits == 2) all = i32x16_joined(all, i32x16_load(dots[1][r]), 7);
        add_whole(has_minima, all, behind + 4 * r, corrections + 4 * r, &s->scales[share], &s->minima[share], &sums[r]);
    }
}

/* sums of 16 rows += those of a span, of whose groups x has the prepared rows. A share, the channels of a scale, begins at `first`
 * of the group's. Tiles 0 to 3 are products, of the high digits and of the low ones. */
INLINE void multiply_span(const span *s, int parts, int has_minima, int digits, const unsigned char *x, sums16 *to, coming next) {
    const size_t numbers = (size_t)(TILE_BYTES * digits);
    const size_t group_bytes = numbers + 4 * KVC_TILED_ROWS * (size_t)(1 + parts + (digits == 1));
    const int shares = s->groups * parts, channels = KVC_GROUP / parts;
    _Alignas(64) int32_t dots[SLOTS][2][KVC_TILED_ROWS][KVC_PANEL];
    sums16 sums[KVC_TILED_ROWS];
    UNROLL
    for (int i = 0; i < KVC_TILED_ROWS; i++) sums[i] = to[i];
#define ONE(slot, c, a, b, own)                                                                            \
    amx_load(b, s->codes[group] + first * KVC_PANEL, KVC_UNIT_BYTES);                                      \
    amx_load(a, own + first, KVC_GROUP);                                                                   \
    amx_zero(c);                                                                                           \
    amx_dot_ss(c, a, b);                                                                                      \
    amx_store(c, dots[slot][0], 64);
#define BOTH(slot, high, low, a, b, own)                                                                   \
    ONE(slot, high, a, b, own)                                                                             \
    amx_load(a, own + TILE_BYTES + first, KVC_GROUP);                                                      \
    amx_zero(low);                                                                                         \
    amx_dot_ss(low, a, b);                                                                                    \
    amx_store(low, dots[slot][1], 64);
#define STEP(slot, c, high, low, a, b)                                                                     \
    if (i + slot < shares) {                                                                               \
        const int group = (i + slot) / parts, first = (i + slot) % parts * channels;                       \
        const unsigned char *own = x + (size_t)group * group_bytes;                                        \
        if (next.lines) prefetch(0, next.lines + (size_t)(i + slot) * next.bytes, next.bytes);             \
        if (digits == 1) {                                                                                 \
            ONE(slot, c, a, b, own)                                                                        \
        } else {                                                                                           \
            BOTH(slot, high, low, a, b, own)                                                               \
        }                                                                                                  \
    }                                                                                                      \
    if (i + slot >= LAG && i + slot < shares + LAG)                                                        \
        add_product(s, i + slot - LAG, parts, has_minima, digits, dots[(slot + SLOTS - LAG) % SLOTS],      \
                    x + (size_t)((i + slot - LAG) / parts) * group_bytes + numbers, sums);
    for (int i = 0; i < shares + LAG; i += SLOTS) {
        STEP(0, 0, 0, 1, 4, 5)
        STEP(1, 1, 2, 3, 6, 7)
        STEP(2, 2, 0, 1, 4, 5)
        STEP(3, 3, 2, 3, 6, 7)
    }
#undef STEP
#undef BOTH
#undef ONE
    UNROLL
    for (int i = 0; i < KVC_TILED_ROWS; i++) to[i] = sums[i];
}

#define SPANS(X) X(1, 0, 1) X(1, 0, 2) X(1, 1, 1) X(1, 1, 2) X(2, 0, 1) X(2, 0, 2) X(2, 1, 1) X(2, 1, 2)
#define MULTIPLY(parts, has_minima, digits)                                                                               \
    NOINLINE void span_##parts##_##has_minima##_##digits(const span *s, const unsigned char *x, sums16 *to, coming next) { \
        multiply_span(s, parts, has_minima, digits, x, to, next);                                                         \
    }
SPANS(MULTIPLY)
typedef void span_fn(const span *, const unsigned char *x, sums16 *, coming);
#define SPAN_LINE(parts, has_minima, digits) [parts - 1][has_minima][digits - 1] = span_##parts##_##has_minima##_##digits,
static span_fn *const spans[2][2][2] = {SPANS(SPAN_LINE)};

/* The results of a panel for rows [start, stop) of a chunk. */
static void multiply_panel(const kvc_matmul_args *args, int64_t start, int64_t stop, int64_t panel, int64_t panel_stop) {
    const kvc_matrix *matrix = args->matrix;
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    const int parts = kvc_scales_per_group(info);
    const size_t row_bytes = kvc_prepared_row_bytes(args);
    span_fn *const multiply = spans[parts - 1][info->has_minima][args->digits - 1];
    const unsigned char *record = matrix->data + (size_t)panel * matrix->panel_bytes;
    sums16 sums[MOST_ROWS];
    span s;
    for (int64_t r = 0; r < stop - start; r++) sums[r].v[0] = f32v_zero();
    for (int64_t g = 0; g < matrix->groups; g += SPAN) {
        s.groups = matrix->groups - g < SPAN ? (int)(matrix->groups - g) : SPAN;
        open_format[matrix->format](matrix, record, &s);
        const size_t bytes = (size_t)(s.groups / kvc_groups_per_record(info)) * kvc_record_bytes(info);
        record += bytes;
        for (int64_t row = start; row < stop; row += KVC_TILED_ROWS) {
            const size_t before = (size_t)g * (row_bytes / (size_t)matrix->groups) * KVC_TILED_ROWS;
            const coming next = {row == start ? record : NULL, bytes / (size_t)(s.groups * parts)};
            multiply(&s, args->prepared + (size_t)row * row_bytes + before, sums + (row - start), next);
        }
    }
    for (int64_t row = start; row < stop; row += KVC_TILED_ROWS) {
        tile t;
        begin(&t, args, row, KVC_TILED_ROWS, panel, 1, panel_stop, 0, NULL, NULL);
        keep(&t, KVC_TILED_ROWS, 1, sums + (row - start));
        give(args, &t);
    }
}

/* Products in tiles 0 to 3; numbers of rows in 4 and 6, codes in 5 and 7. */
static void configure(int channels) {
    _Alignas(64) amx_shapes shapes = {.palette = 1};
    for (int t = 0; t < 4; t++) shapes.rows[t] = KVC_TILED_ROWS, shapes.bytes[t] = 4 * KVC_PANEL;
    for (int t = 4; t < 8; t += 2) {
        shapes.rows[t] = KVC_TILED_ROWS, shapes.bytes[t] = (uint16_t)channels;
        shapes.rows[t + 1] = (uint8_t)(channels / 4), shapes.bytes[t + 1] = KVC_UNIT_BYTES;
    }
    amx_configure(&shapes);
}

void KVC_FN(multiply_panels)(const kvc_matmul_args *, int64_t panel, int64_t panel_stop, float *scratch);

/* The results of panels [panel, panel_stop) for all rows. */
void KVC_OWN(multiply_panels)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    if (!args->tiled) {
        KVC_FN(multiply_panels)(args, panel, panel_stop, scratch);
        return;
    }
    const int64_t fitting = (int64_t)(CHUNK_BYTES / kvc_prepared_row_bytes(args)) / KVC_TILED_ROWS * KVC_TILED_ROWS;
    const int64_t chunk = fitting < KVC_TILED_ROWS ? KVC_TILED_ROWS : fitting < MOST_ROWS ? fitting : MOST_ROWS;
    configure(kvc_matrix_format_of(args->matrix->format)->channels);
    for (int64_t start = 0; start < args->tiled; start += chunk) {
        const int64_t stop = start + chunk < args->tiled ? start + chunk : args->tiled;
        for (int64_t p = panel; p < panel_stop; p++) multiply_panel(args, start, stop, p, panel_stop);
    }
    amx_release();
    if (args->tiled < args->n) KVC_FN(multiply_packed)(args, args->tiled, panel, panel_stop);
}
