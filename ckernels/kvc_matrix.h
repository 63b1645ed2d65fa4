/* kvc_matrix.h - weight matrices as the products read them.
 *
 * A matrix has `rows` outputs and `columns` inputs. It lies in panels of 16 rows; the last panel is filled up with rows
 * of zeros. A panel is read from its first byte to its last, while 1 to 12 rows of activations are multiplied with it.
 *
 * FLOATS (f32, f16, bf16)
 *
 *   one panel     | channel 0 of rows 0 .. 15 | channel 1 of rows 0 .. 15 | ...
 *
 * PACKED (q8_0, q4_0, q4_1), as the field's formats of these names: groups of 32 channels of a row share a scale (and a
 * minimum), in f16. Two groups make a record; channels behind the last are zeros, up to a multiple of 64.
 *
 *     q8_0   value = scale * (code - 128)        codes of 8 bits
 *     q4_0   value = scale * (code - 8)          codes of 4 bits
 *     q4_1   value = minimum + scale * code
 *
 *   one record    | 16 scales of group a | 16 of group b | minima of a, of b: q4_1 alone | codes of a | codes of b |
 *
 *   Codes come in units of 64: unit u has channels 4u .. 4u+3 of the group of all 16 rows, so that one 64-byte load feeds
 *   integer dot products of 4 bytes per lane. Two units of 4 bits share their bytes:
 *
 *     q8    U0 | U1 | ... | U7
 *     q4    U4 << 4 | U0, U5 << 4 | U1, ... U7 << 4 | U3
 *     U0    | row 0: c0 c1 c2 c3 | row 1: c0 c1 c2 c3 | ... | row 15: c0 c1 c2 c3 |
 *
 * ACTIVATIONS meet weights in floats as float32, or, if the call asks for it, weights in bf16 as bf16, rounded half to even.
 * Those that meet packed weights are whole numbers themselves, with a scale per group of 32 channels, the largest
 * magnitude of the group / 127: one digit of 8 bits. With two digits (high * 128 + low) it is the largest / 16256.
 *
 * A RESULT is a sum of integer dot products, each exact, times both scales, added group by group with one rounding each.
 * Floats are added channel by channel in blocks of 256, and the blocks one after another; where a CPU multiplies pairs of
 * bf16 numbers (KVC_BF16_PAIRS), two channels at a time, and what is below 2^-126 counts as zero. So the bits of a row of the
 * result depend on that row of x, the matrix, the digits and the level alone: not on other rows, threads or pieces.
 * Error against exact arithmetic over the same weights, with K = columns, a bound for each output:
 *
 *     floats     (258 + K / 256) * 2^-24 * sum |x w|
 *     packed     sum over groups of  32 * step * (largest |w| of the group) / 2   with step = largest |x| / 127 or / 16256,
 *                and (4 + K / 32) * 2^-23 * sum |x w| of rounding, where with minima |w| is |minimum| + |scale * code|
 *
 * These hold for |x| below 2^40 as long as sum |x w| is a float. Groups of packed x that are nowhere above 2^-100 count as
 * zeros. A row of x with an infinity or NaN has no finite result.
 */
#ifndef KVC_MATRIX_H
#define KVC_MATRIX_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVC_PANEL = 16,       /* rows of a panel */
    KVC_GROUP = 32,       /* channels that share a scale */
    KVC_RECORD = 64,      /* channels of a record */
    KVC_CHANNEL_BLOCK = 256,
    KVC_CHUNK_ROWS = 240,  /* of floats, which meet the panels of a group together; a multiple of every size of a block */
    KVC_GROUP_PANELS = 16,
    KVC_SPARE_ROWS = 12,   /* of sums: the last tiles of a chunk may be four panels wide where fewer panels are left */
    KVC_UNIT_BYTES = 64,
    KVC_WIDE_ROWS = 96,    /* from so many rows on, weights of 16 bits are converted to floats once for all of a chunk: */
    KVC_WIDE_FLOATS = 4 * KVC_PANEL * KVC_CHANNEL_BLOCK, /* a block of channels of up to four panels at a time */
};

/* symbol, name, bits of a code or float, packed, has minima, zero: the code of 0 */
#define KVC_MATRIX_FORMATS(X)         \
    X(F32, "f32", 32, 0, 0, 0)        \
    X(F16, "f16", 16, 0, 0, 0)        \
    X(BF16, "bf16", 16, 0, 0, 0)      \
    X(Q8_0, "q8_0", 8, 1, 0, 128)     \
    X(Q4_0, "q4_0", 4, 1, 0, 8)       \
    X(Q4_1, "q4_1", 4, 1, 1, 0)

#define KVC_NUMBER(symbol, ...) KVC_MATRIX_##symbol,
typedef enum kvc_matrix_format { KVC_MATRIX_FORMATS(KVC_NUMBER) KVC_NUM_MATRIX_FORMATS } kvc_matrix_format;
#undef KVC_NUMBER

typedef struct kvc_matrix_format_info {
    const char *name;
    int bits, packed, has_minima, zero;
} kvc_matrix_format_info;

static inline const kvc_matrix_format_info *kvc_matrix_format_of(kvc_matrix_format format) {
#define KVC_LINE(symbol, ...) {__VA_ARGS__},
    static const kvc_matrix_format_info table[] = {KVC_MATRIX_FORMATS(KVC_LINE)};
#undef KVC_LINE
    return &table[format];
}

typedef struct kvc_matrix {
    kvc_matrix_format format;
    int64_t rows, columns;
    int64_t panels, groups; /* groups: an even number, of packed formats */
    size_t panel_bytes;     /* a multiple of 64 */
    unsigned char *data;    /* panels * panel_bytes, 64-byte aligned */
} kvc_matrix;

static inline size_t kvc_header_bytes(kvc_matrix_format format) { /* of a record: its scales and minima */
    return (kvc_matrix_format_of(format)->has_minima ? 4 : 2) * KVC_PANEL * sizeof(uint16_t);
}
static inline size_t kvc_group_code_bytes(kvc_matrix_format format) {
    return (size_t)(KVC_GROUP * KVC_PANEL * kvc_matrix_format_of(format)->bits / 8);
}
static inline size_t kvc_record_bytes(kvc_matrix_format format) {
    return kvc_header_bytes(format) + 2 * kvc_group_code_bytes(format);
}

/* kvc_matrix.c */

/* Fills in all but data. -1 where the matrix would have no element, or more bytes than can be counted. */
int kvc_matrix_init(kvc_matrix *, kvc_matrix_format, int64_t rows, int64_t columns);
/* Words of the matrix's own float format (count, columns), at any alignment, into rows [row, row + count). */
void kvc_matrix_put_words(const kvc_matrix *, int64_t row, int64_t count, const void *words);
/* Codes (count, columns), scales and minima (count, ceil(columns / 32)) of a packed format. Missing channels of the last
 * group are zeros. minima is NULL where the format has none. */
void kvc_matrix_put_codes(const kvc_matrix *, int64_t row, int64_t count, const unsigned char *codes,
                          const uint16_t *scales, const uint16_t *minima);
/* Row `row` as codes, scales, minima (columns and groups as above): the inverse. */
void kvc_matrix_get_codes(const kvc_matrix *, int64_t row, unsigned char *codes, uint16_t *scales, uint16_t *minima);
/* Row `row` as floats. */
void kvc_matrix_get_row(const kvc_matrix *, int64_t row, float *values);

/* Rows of bf16 as floats; floats as bf16, rounded half to even. */
void kvc_floats_of_bf16(int64_t n, const uint16_t *words, float *x);
void kvc_bf16_of_floats(int64_t n, const float *x, uint16_t *words);

/* How rows of x meet weights in bf16: as float32; rounded to bf16, in float32; rounded, two channels in 32 bits. */
typedef enum kvc_bf16_rows { KVC_BF16_FLOATS, KVC_BF16_ROUNDED, KVC_BF16_PAIRS } kvc_bf16_rows;

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
    kvc_bf16_rows bf16_rows; /* PAIRS where kvc_bf16_rows_of says so, and only there */
    unsigned char *prepared; /* kvc_matmul_scratch_bytes at any alignment of 4: rows, then floats of each thread */
} kvc_matmul_args;

static inline int kvc_in_pairs(const kvc_matmul_args *args) {
    return args->matrix->format == KVC_MATRIX_BF16 && args->bf16_rows == KVC_BF16_PAIRS;
}

/* Sums n of one digit are read as floats without a conversion. They start at KVC_SUM_START, the bits of the float 1.5 * 2^23,
 * and |n| is below 2^22, so that KVC_SUM_START + n has the bits of the float 1.5 * 2^23 + n. One fma, this float times the
 * scale plus `less`, gives n * scale with one rounding: less = -1.5 * 2^23 * scale is exact, for scales have 22 bits. */
enum { KVC_SUM_START = 0x4b400000 };

/* Bytes of a row behind its numbers of a group: scale and correction, and less with one digit. */
static inline size_t kvc_behind_numbers(int digits) { return digits == 1 ? 12 : 8; }

/* Bytes of one prepared row of x. Blocks of rows lie one behind another, as kvc_block_rows divides them; floats do so for
 * each block of 256 channels, packed rows for all channels:
 *
 *   floats     | channel 0 of each row of the block | channel 1 | ...
 *   pairs      | channels 0 and 1 of each row of the block, 16 bits each | 2 and 3 | ...    zero behind the last channel
 *   packed     group by group  | digit, unit, row: 4 bytes each | scale of each row, f32 | correction of each row |
 *              with one digit    less of each row, f32 |
 *
 * The correction is what the offset of codes adds to the sum: -zero * (sum of the row's numbers), i32; with minima it is
 * scale * sum, f32. With one digit an i32 correction is KVC_SUM_START more, and less is -1.5 * 2^23 * scale. */
static inline size_t kvc_prepared_row_bytes(const kvc_matmul_args *args) {
    if (kvc_in_pairs(args)) return (size_t)(args->matrix->columns + 1) / 2 * sizeof(uint32_t);
    if (!kvc_matrix_format_of(args->matrix->format)->packed) return (size_t)args->matrix->columns * sizeof(float);
    return (size_t)args->matrix->groups * ((size_t)(KVC_GROUP * args->digits) + kvc_behind_numbers(args->digits));
}

static inline int kvc_widens(const kvc_matmul_args *args) {
    return kvc_matrix_format_of(args->matrix->format)->bits == 16 && !kvc_in_pairs(args) && args->n >= KVC_WIDE_ROWS;
}

/* Floats that a thread needs: for weights that are converted, and for the sums of a chunk and a group, of the blocks of
 * channels before the last one. */
static inline size_t kvc_thread_floats(const kvc_matmul_args *args) {
    const kvc_matrix *m = args->matrix;
    const int64_t rows = args->n < KVC_CHUNK_ROWS ? args->n : KVC_CHUNK_ROWS;
    const int sums = !kvc_matrix_format_of(m->format)->packed && m->columns > KVC_CHANNEL_BLOCK;
    return (kvc_widens(args) ? KVC_WIDE_FLOATS : 0) +
           (sums ? (size_t)(rows + KVC_SPARE_ROWS) * KVC_GROUP_PANELS * KVC_PANEL : 0);
}

/* Rows of the next block: the largest of 12, 8, 6, 4, 3, 2, 1 that is at most `most` and `left`. */
static inline int kvc_block_rows(int most, int64_t left) {
    static const int sizes[] = {12, 8, 6, 4, 3, 2, 1};
    int i = 0;
    while (sizes[i] > most || sizes[i] > left) i++;
    return sizes[i];
}

#endif
