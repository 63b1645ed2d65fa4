/* kvc_matrix.h - weight matrices as the products read them.
 *
 * A matrix has `rows` outputs and `columns` inputs. It lies in panels of 16 rows; the last panel is filled up with rows
 * of zeros. A panel is read from its first byte to its last, while 1 to 12 rows of activations are multiplied with it.
 *
 * FLOATS (f32, f16, bf16)
 *
 *   one panel     | channel 0 of rows 0 .. 15 | channel 1 of rows 0 .. 15 | ...
 *
 * PACKED, as the field's formats of these names. A group has 32 channels of a row; one scale, and perhaps a minimum, belongs to
 * the `channels` of it in this table:
 *
 *     format  channels  codes   value                                         scales and minima
 *     q8_0          32  8 bits  scale * (code - 128)                          f16
 *     q4_0          32  4       scale * (code - 8)                            f16
 *     q4_1          32  4       minimum + scale * code                        f16, f16
 *     q5_0          32  5       scale * (code - 16)                           f16
 *     q5_1          32  5       minimum + scale * code                        f16, f16
 *     q4_k, q5_k    32  4, 5    minimum_unit * minimum + unit * scale * code  bytes, of 0 to 255; units: f16
 *     q6_k          16  6       unit * scale * (code - 32)                    bytes, signed; unit: f32
 *     q3_k          16  3       unit * scale * (code - 4)                     bytes, signed; unit: f32
 *     q2_k          16  2       minimum_unit * minimum + unit * scale * code  4 bits each, in a byte; units: f16
 *     iq4_nl        32  4       scale * number                                f16
 *     iq4_xs        32  4       unit * scale * number                         bytes, signed; unit: f32
 *     iq3_s, iq3_xxs  the same, with tables of their own
 *     iq2           16  4       unit * scale * number                         bytes, signed; unit: f32
 *     mxfp4         32  4       scale * number                                bytes b: 2^(b - 128); 255 is none
 *     nvfp4         16  4       unit * scale * number                         bytes b: 8-bit floats / 2, see below; unit: f32
 *
 *   A number is that at the code's place in a table of 16 (KVC_MATRIX_TABLES), less the zero of the format. The floats of nvfp4
 *   have 4 bits of exponent and 3 of mantissa, no sign, and 127 is none. Units belong to 256 channels.
 *
 *   Some groups make a record; channels behind the last are zeros, up to a whole record. It has 8 groups where there are units,
 *   4 in mxfp4, else 2:
 *
 *   | 16 units, with minima 16 minimum units | 16 scales of each channels | 16 minima of each, or none | codes of each group |
 *
 *   Codes come in units of 64: unit u has channels 4u .. 4u+3 of the group of all 16 rows, so that one 64-byte load feeds
 *   integer dot products of 4 bytes per lane.
 *
 *     U0    | row 0: c0 c1 c2 c3 | row 1: c0 c1 c2 c3 | ... | row 15: c0 c1 c2 c3 |
 *
 *   A code lies in planes of 8, 4, 2 or 1 bits: 6 bits are the lower 4 in one plane and the upper 2 in the next, 5 are 4 and 1,
 *   3 are 2 and 1. A plane of b bits has b lines of 64 bytes. Unit u is in line u % b, at bits b * (u / b) and above of each byte:
 *
 *     8     U0 | U1 | ... | U7
 *     4     U4 << 4 | U0, U5 << 4 | U1, ... U7 << 4 | U3
 *
 * ACTIVATIONS meet weights in floats as float32. If the call asks for it, they and the weights of any format are rounded to bf16, half
 * to even. Otherwise those that meet packed weights are whole numbers themselves, with a scale per group of 32 channels, the largest
 * magnitude of the group / 127: one digit of 8 bits. With two digits (high * 128 + low) it is the largest / 16256.
 *
 * A RESULT is a sum of integer dot products over the channels of a scale, each exact, times both scales, added with one
 * rounding each.
 * Floats are added channel by channel in blocks of 256, and the blocks one after another. So the bits of a row of the result
 * depend on that row of x, the matrix and the digits alone: not on other rows, threads, pieces or the level. Where the call asks
 * for x in bf16 they depend on the order of a block's sums too (kvc_bf16_rows), which is that of the instruction: what is below
 * 2^-126, as an operand or a sum, counts as zero in
 *
 *   pairs      channels 2i + 1, then 2i, each product added with one rounding (avx512bf16)
 *   tiles      of every 32 channels the even ones and the odd ones apart, from zero, each product added with one rounding; then
 *              even + odd, then sum + this (the tiles of amx)
 *   quads      of every two channels product + product, then sum + this, each rounded to odd: towards zero, and where that is
 *              not exact to the odd one of both neighbours (the bf16 products of i8mm, while FPCR.EBF is 0)
 *
 * Error against exact arithmetic over the same weights, with K = columns, a bound for each output:
 *
 *     floats     (258 + K / 256) * 2^-24 * sum |x w|
 *     packed     sum over groups of  32 * step * (largest |w| of the group) / 2   with step = largest |x| / 127 or / 16256,
 *                and (4 + K / channels) * 2^-23 * sum |x w| of rounding, where with minima |w| is |minimum| + |scale * code|
 *
 * These hold for |x| below 2^40 as long as sum |x w| is a float. Groups of packed x that are nowhere above 2^-100 count as
 * zeros. A row of x with an infinity or NaN, or with packed weights and one digit a value from 2^100 on, has no finite result.
 */
#ifndef KVC_MATRIX_H
#define KVC_MATRIX_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVC_PANEL = 16,       /* rows of a panel */
    KVC_GROUP = 32,       /* channels of a row of x that share a scale */
    KVC_MOST_RECORD = 256, /* channels of the longest record */
    KVC_CHANNEL_BLOCK = 256,
    KVC_CHUNK_ROWS = 240,  /* of floats, which meet the panels of a group together; a multiple of every size of a block */
    KVC_GROUP_PANELS = 16,
    KVC_SPARE_ROWS = 12,   /* of sums: the last tiles of a chunk may be four panels wide where fewer panels are left */
    KVC_UNIT_BYTES = 64,
    KVC_TILED_ROWS = 16,   /* of a block that meets packed weights in tiles (simd_amx.h) */
    KVC_TILED_CHUNK = 512, /* rows that meet a span of channels there */
    KVC_TILED_PANELS = 8,  /* that these rows meet one after another */
    KVC_WIDE_ROWS = 96,    /* from these on, weights of 16 bits are converted to floats once for all rows of a chunk: */
    KVC_WIDE_FLOATS = 4 * KVC_PANEL * KVC_CHANNEL_BLOCK, /* a block of channels of up to four panels at a time */
    KVC_TILE_CHANNELS = 32, /* of bf16: 16 pairs */
};

/* How the scales of a packed format are stored. BYTES are unsigned where there are minima. */
typedef enum kvc_scales { KVC_HALVES, KVC_BYTES, KVC_NIBBLES, KVC_E8M0, KVC_E4M3 } kvc_scales;

/* Numbers that codes of 4 bits stand for, with the zero of their formats added: bytes, which products take like codes. */
#define KVC_MATRIX_TABLES(X)                                                                   \
    X(NO_TABLE, {0})                                                                           \
    X(IQ4, {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241})          \
    X(IQ3_S, {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113}) \
    X(IQ3_XXS, {132, 140, 148, 156, 164, 172, 180, 190, 124, 116, 108, 100, 92, 84, 76, 66})   \
    X(IQ2, {136, 153, 171, 128, 128, 128, 128, 128, 120, 103, 85, 128, 128, 128, 128, 128})    \
    X(FP4, {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}) /* twice 4-bit floats */

#define KVC_SYMBOL(symbol, ...) KVC_##symbol,
typedef enum kvc_table { KVC_MATRIX_TABLES(KVC_SYMBOL) KVC_NUM_TABLES } kvc_table;
#undef KVC_SYMBOL

/* symbol, name, bits of a code or float, packed, has minima, zero: the code or the number of 0, channels of a scale, scales,
 * table */
#define KVC_MATRIX_FORMATS(X)                                       \
    X(F32, "f32", 32, 0, 0, 0, 1, KVC_HALVES, KVC_NO_TABLE)         \
    X(F16, "f16", 16, 0, 0, 0, 1, KVC_HALVES, KVC_NO_TABLE)         \
    X(BF16, "bf16", 16, 0, 0, 0, 1, KVC_HALVES, KVC_NO_TABLE)       \
    X(Q8_0, "q8_0", 8, 1, 0, 128, 32, KVC_HALVES, KVC_NO_TABLE)     \
    X(Q4_0, "q4_0", 4, 1, 0, 8, 32, KVC_HALVES, KVC_NO_TABLE)       \
    X(Q4_1, "q4_1", 4, 1, 1, 0, 32, KVC_HALVES, KVC_NO_TABLE)       \
    X(Q5_0, "q5_0", 5, 1, 0, 16, 32, KVC_HALVES, KVC_NO_TABLE)      \
    X(Q5_1, "q5_1", 5, 1, 1, 0, 32, KVC_HALVES, KVC_NO_TABLE)       \
    X(Q4_K, "q4_k", 4, 1, 1, 0, 32, KVC_BYTES, KVC_NO_TABLE)        \
    X(Q5_K, "q5_k", 5, 1, 1, 0, 32, KVC_BYTES, KVC_NO_TABLE)        \
    X(Q6_K, "q6_k", 6, 1, 0, 32, 16, KVC_BYTES, KVC_NO_TABLE)       \
    X(Q3_K, "q3_k", 3, 1, 0, 4, 16, KVC_BYTES, KVC_NO_TABLE)        \
    X(Q2_K, "q2_k", 2, 1, 1, 0, 16, KVC_NIBBLES, KVC_NO_TABLE)      \
    X(IQ4_NL, "iq4_nl", 4, 1, 0, 128, 32, KVC_HALVES, KVC_IQ4)      \
    X(IQ4_XS, "iq4_xs", 4, 1, 0, 128, 32, KVC_BYTES, KVC_IQ4)       \
    X(IQ3_S, "iq3_s", 4, 1, 0, 128, 32, KVC_BYTES, KVC_IQ3_S)       \
    X(IQ3_XXS, "iq3_xxs", 4, 1, 0, 128, 32, KVC_BYTES, KVC_IQ3_XXS) \
    X(IQ2, "iq2", 4, 1, 0, 128, 16, KVC_BYTES, KVC_IQ2)             \
    X(MXFP4, "mxfp4", 4, 1, 0, 12, 32, KVC_E8M0, KVC_FP4)           \
    X(NVFP4, "nvfp4", 4, 1, 0, 12, 16, KVC_E4M3, KVC_FP4)

#define KVC_NUMBER(symbol, ...) KVC_MATRIX_##symbol,
typedef enum kvc_matrix_format { KVC_MATRIX_FORMATS(KVC_NUMBER) KVC_NUM_MATRIX_FORMATS } kvc_matrix_format;
#undef KVC_NUMBER

typedef struct kvc_matrix_format_info {
    const char *name;
    int bits, packed, has_minima, zero, channels;
    kvc_scales scales;
    kvc_table table;
} kvc_matrix_format_info;

static inline const kvc_matrix_format_info *kvc_matrix_format_of(kvc_matrix_format format) {
#define KVC_LINE(symbol, ...) {__VA_ARGS__},
    static const kvc_matrix_format_info table[] = {KVC_MATRIX_FORMATS(KVC_LINE)};
#undef KVC_LINE
    return &table[format];
}

/* The 16 numbers of a table. */
static inline const unsigned char *kvc_table_of(kvc_table table) {
#define KVC_LINE(symbol, ...) __VA_ARGS__,
    static const unsigned char tables[][16] = {KVC_MATRIX_TABLES(KVC_LINE)};
#undef KVC_LINE
    return tables[table];
}

typedef struct kvc_matrix {
    kvc_matrix_format format;
    int64_t rows, columns;
    int64_t panels, groups; /* groups: those of whole records, of packed formats */
    size_t panel_bytes;     /* a multiple of 64 */
    unsigned char *data;    /* panels * panel_bytes, 64-byte aligned */
} kvc_matrix;

/* Of a packed format: */
static inline int kvc_scales_per_group(const kvc_matrix_format_info *info) { return KVC_GROUP / info->channels; }
static inline int kvc_has_units(const kvc_matrix_format_info *info) {
    return info->scales != KVC_HALVES && info->scales != KVC_E8M0;
}
static inline int kvc_groups_per_record(const kvc_matrix_format_info *info) {
    return kvc_has_units(info) ? 8 : info->scales == KVC_E8M0 ? 4 : 2;
}
static inline size_t kvc_scale_bytes(const kvc_matrix_format_info *info) { return info->scales == KVC_HALVES ? 2 : 1; }
/* From a record's first byte: its scales; its minima, which share the bytes of scales of 4 bits; its codes. */
static inline size_t kvc_scales_at(const kvc_matrix_format_info *info) { return kvc_has_units(info) ? 4 * KVC_PANEL : 0; }
static inline size_t kvc_minima_at(const kvc_matrix_format_info *info) {
    const int own = info->has_minima && info->scales != KVC_NIBBLES;
    const size_t scales = (size_t)(kvc_groups_per_record(info) * kvc_scales_per_group(info) * KVC_PANEL);
    return kvc_scales_at(info) + (own ? scales * kvc_scale_bytes(info) : 0);
}
static inline size_t kvc_header_bytes(const kvc_matrix_format_info *info) {
    const size_t scales = (size_t)(kvc_groups_per_record(info) * kvc_scales_per_group(info) * KVC_PANEL);
    return kvc_minima_at(info) + scales * kvc_scale_bytes(info);
}
static inline size_t kvc_group_code_bytes(const kvc_matrix_format_info *info) {
    return (size_t)(KVC_GROUP * KVC_PANEL * info->bits / 8);
}
static inline size_t kvc_record_bytes(const kvc_matrix_format_info *info) {
    return kvc_header_bytes(info) + (size_t)kvc_groups_per_record(info) * kvc_group_code_bytes(info);
}
/* Whether floats become codes of the format (kvc_quantise_weights.c); others come from files alone. */
static inline int kvc_quantises(const kvc_matrix_format_info *info) {
    return info->packed && info->scales == KVC_HALVES && !info->table && info->bits != 5;
}
/* The bits of a code in its first plane; the others, if there are any, are in its second. */
static inline int kvc_plane_bits(int bits) { return bits >= 8 ? 8 : bits >= 4 ? 4 : 2; }
/* What the bits of a scale lack of its value, and the scales of x have instead: 2^(b - 127) / 2; f16 has the exponents of 8-bit
 * floats / 256, and half of those is meant. */
static inline float kvc_scale_factor(const kvc_matrix_format_info *info) {
    return info->scales == KVC_E8M0 ? 0.5f : info->scales == KVC_E4M3 ? 128.0f : 1.0f;
}

/* Rows of a packed format, in parts. A row has ceil(columns / channels) scales and minima, ceil(columns / 256) units. */
typedef struct kvc_parts {
    unsigned char *codes;  /* (n, columns) */
    void *scales, *minima; /* (n, scales of a row): f16 or bytes; minima: NULL where the format has none */
    float *units;          /* (n, units of a row), pairs of a unit and a minimum unit where there are minima; or NULL */
} kvc_parts;

/* kvc_matrix.c */

/* Fills in all but data. -1 where the matrix would have no element, or more bytes than can be counted. */
int kvc_matrix_init(kvc_matrix *, kvc_matrix_format, int64_t rows, int64_t columns);
/* Words of the matrix's own float format (count, columns), at any alignment, into rows [row, row + count). */
void kvc_matrix_put_words(const kvc_matrix *, int64_t row, int64_t count, const void *words);
/* Rows [row, row + count) of a packed format. Missing channels of the last group are zeros. */
void kvc_matrix_put_parts(const kvc_matrix *, int64_t row, int64_t count, const kvc_parts *);
/* Row `row` in parts: the inverse. */
void kvc_matrix_get_parts(const kvc_matrix *, int64_t row, const kvc_parts *);
/* Row `row` as floats. */
void kvc_matrix_get_row(const kvc_matrix *, int64_t row, float *values);

/* Rows of bf16 as floats; floats as bf16, rounded half to even. */
void kvc_floats_of_bf16(int64_t n, const uint16_t *words, float *x);
void kvc_bf16_of_floats(int64_t n, const float *x, uint16_t *words);

/* How rows of x meet weights: as float32, or packed ones as whole numbers; both rounded to bf16, in float32; rounded, as words of
 * 16 bits, for instructions that multiply 2, 32 or 4 channels of a row. */
typedef enum kvc_bf16_rows {
    KVC_BF16_FLOATS,
    KVC_BF16_ROUNDED,
    KVC_BF16_PAIRS,
    KVC_BF16_TILES,
    KVC_BF16_QUADS,
} kvc_bf16_rows;

/* The product of a call: out (n, matrix->rows) = x (n, matrix->columns) times the matrix transposed, plus bias; or, with add,
 * what `out` has plus the product, plus bias. */
typedef struct kvc_matmul_args {
    const kvc_matrix *matrix;
    const float *x;
    const float *bias; /* (matrix->rows), or NULL */
    float *out;
    int64_t n;
    int add;
    int digits; /* of activations that meet packed weights: 1 or 2 */
    kvc_bf16_rows bf16_rows; /* words of 16 bits where kvc_bf16_rows_of says so, and only there; weights are bf16 then too */
    int64_t tiled; /* the number of first rows that are prepared in blocks of KVC_TILED_ROWS; kvc_matmul sets it */
    unsigned char *prepared; /* kvc_matmul_scratch_bytes at any alignment of 4: rows, then floats of each thread */
} kvc_matmul_args;

/* Whether rows meet packed weights as whole numbers. */
static inline int kvc_in_codes(const kvc_matmul_args *args) {
    return kvc_matrix_format_of(args->matrix->format)->packed && !args->bf16_rows;
}
/* Whether weights of another format become bf16 first (kvc_bf16_weights.h). */
static inline int kvc_rounds(const kvc_matmul_args *args) {
    return args->bf16_rows && args->matrix->format != KVC_MATRIX_BF16;
}
/* Channels of a row that lie side by side as words; 0: they are no words. */
static inline int kvc_word_channels(const kvc_matmul_args *args) {
    static const int channels[] = {[KVC_BF16_PAIRS] = 2, [KVC_BF16_TILES] = KVC_TILE_CHANNELS, [KVC_BF16_QUADS] = 4};
    return channels[args->bf16_rows];
}
/* Whether the weights are brought into the order of the instruction first (kvc_matmul_bf16.c). */
static inline int kvc_in_order(const kvc_matmul_args *args) { return kvc_word_channels(args) > 2; }
/* Rows that meet the panels of a group together, and these panels: more rows in tiles, since their weights are changed for each
 * chunk of rows. */
static inline int64_t kvc_chunk_rows(const kvc_matmul_args *args) {
    return kvc_word_channels(args) == KVC_TILE_CHANNELS ? KVC_TILED_CHUNK : KVC_CHUNK_ROWS;
}
static inline int64_t kvc_group_panels(const kvc_matmul_args *args) {
    return kvc_word_channels(args) == KVC_TILE_CHANNELS ? KVC_TILED_PANELS : KVC_GROUP_PANELS;
}
/* Rows for which prepared ones have room: blocks in tiles are whole, if there is more than one. */
static inline int64_t kvc_prepared_rows(const kvc_matmul_args *args) {
    const int whole = kvc_word_channels(args) == KVC_TILE_CHANNELS && args->n > KVC_TILED_ROWS;
    return whole ? (args->n + KVC_TILED_ROWS - 1) / KVC_TILED_ROWS * KVC_TILED_ROWS : args->n;
}

/* Sums n of one digit are read as floats without a conversion. They start at KVC_SUM_START, the bits of the float 1.5 * 2^23,
 * and |n| is below 2^22, so that KVC_SUM_START + n has the bits of the float 1.5 * 2^23 + n. One fma, this float times the
 * scale plus `less`, gives n * scale with one rounding: less = -1.5 * 2^23 * scale is exact, for scales have 22 bits. */
enum { KVC_SUM_START = 0x4b400000 };
#define KVC_LARGEST 0x1p100f /* from there on x counts as infinite with one digit, for `less` could be; so both ways agree */

/* Bytes of a row behind its numbers of a group: scale and corrections, and less with one digit. */
static inline size_t kvc_behind_numbers(const kvc_matrix_format_info *info, int digits) {
    return 4 * (size_t)(1 + kvc_scales_per_group(info) + (digits == 1));
}

/* Bytes of one prepared row of x. Blocks of rows lie one behind another, as kvc_block_rows and kvc_packed_block_rows divide them;
 * floats do so for each block of 256 channels, packed rows for all channels:
 *
 *   floats     | channel 0 of each row of the block | channel 1 | ...
 *   words      | channels 0 and 1, or as many as kvc_word_channels says, of each row of the block | the next ones | ...
 *                    of 16 bits each; zeros are channels behind the last one, and rows behind the last one of tiles
 *   packed     group by group  | digit, unit, row: 4 bytes each | scale of each row, f32 | corrections of each row |
 *              with one digit    less of each row, f32 |
 *   tiled      as packed, but  | digit, row, unit: 4 bytes each |
 *
 * A correction is what the offset of codes adds to the sum over the channels of a scale: -zero * (sum of the row's numbers),
 * i32; with minima it is scale * sum, f32. With one digit an i32 correction is KVC_SUM_START more, and less is
 * -1.5 * 2^23 * scale. The scales have the factor that the format's own lack (kvc_scale_factor). */
static inline size_t kvc_prepared_row_bytes(const kvc_matmul_args *args) {
    const int64_t words = kvc_word_channels(args);
    if (words) return (size_t)((args->matrix->columns + words - 1) / words * words) * sizeof(uint16_t);
    const kvc_matrix_format_info *info = kvc_matrix_format_of(args->matrix->format);
    if (!kvc_in_codes(args)) return (size_t)args->matrix->columns * sizeof(float);
    return (size_t)args->matrix->groups * ((size_t)(KVC_GROUP * args->digits) + kvc_behind_numbers(info, args->digits));
}

static inline int kvc_widens(const kvc_matmul_args *args) {
    const int words = kvc_word_channels(args) != 0;
    return kvc_matrix_format_of(args->matrix->format)->bits == 16 && !words && args->n >= KVC_WIDE_ROWS;
}

/* Floats that a thread needs: for weights that are converted or brought into order, and for the sums of a chunk and a group, of
 * the blocks of channels before the last one; with packed weights for those of tiles, which the level may have. */
static inline size_t kvc_thread_floats(const kvc_matmul_args *args) {
    const kvc_matrix *m = args->matrix;
    const int64_t most = kvc_chunk_rows(args), rows = args->n < most ? args->n : most;
    if (kvc_in_codes(args)) {
        const int64_t tiled = args->n / KVC_TILED_ROWS * KVC_TILED_ROWS;
        return (size_t)(tiled < KVC_TILED_CHUNK ? tiled : KVC_TILED_CHUNK) * KVC_TILED_PANELS * KVC_PANEL;
    }
    const int sums = m->columns > KVC_CHANNEL_BLOCK, changes = kvc_widens(args) || kvc_in_order(args) || kvc_rounds(args);
    return (changes ? KVC_WIDE_FLOATS : 0) + (sums ? (size_t)((rows + KVC_SPARE_ROWS) * kvc_group_panels(args) * KVC_PANEL) : 0);
}

/* Rows of the next block, but for tiled ones: as many as are left, up to `most`. Each count has a tile of its own, since a tile
 * of one row beside another one takes as long as two or three rows of a larger one. */
static inline int kvc_block_rows(int most, int64_t left) { return left < most ? (int)left : most; }

/* The same of packed formats. With two digits blocks of fewer rows are 1, 2, 4, 6 or 7: the other tiles are not compiled. Six and one
 * would take longer than eight. */
static inline int kvc_packed_block_rows(int most, int digits, int64_t left) {
    if (digits == 1 || left >= most) return kvc_block_rows(most, left);
    return left > 1 && left < 7 ? (int)left / 2 * 2 : (int)left;
}

#endif
