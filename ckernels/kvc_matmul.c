/* kvc_matmul.c - prepared rows times panels of a matrix (kvc_matrix.h).
 *
 * A tile multiplies a block of rows with one panel (packed) or up to four (floats). All its sums are in registers:
 *
 *                one 64-byte load        for each row of the block
 *     packed     a unit of codes         dots[row] += unit . 4 numbers of the row, broadcast
 *     floats     a channel of 16 rows    sums[row] += weights * the row's value, broadcast
 *
 * At one row the panel's bytes are the limit, at many the arithmetic. The blocks of a call go over one panel while it is
 * in the cache, and the chunks of rows are so large that their prepared bytes stay in the second level.
 */
#include <string.h>

#include "kvc_matrix.h"
#include "kvc_simd.h"

enum {
    VECTORS = KVC_PANEL / KVC_LANES, /* of 16 rows */
    CHUNK_BYTES = 384 << 10,
    AHEAD = 2048, /* bytes from what is read to what is prefetched */
};

typedef struct sums16 {
    f32v v[VECTORS];
} sums16;

/* Adds to the 16 results at `out`, of which `count` exist, or sets them; bias may be NULL. */
INLINE void give(float *out, int64_t count, sums16 sums, int add, const float *bias) {
    float some[KVC_PANEL], *to = out;
    if (count < KVC_PANEL) {
        to = some;
        memset(some, 0, sizeof some);
        if (add) memcpy(some, out, (size_t)count * sizeof(float));
    }
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        f32v x = sums.v[v];
        if (add) x = f32v_add(f32v_load(to + v * KVC_LANES), x);
        f32v_store(to + v * KVC_LANES, x);
    }
    if (bias) {
        for (int i = 0; i < (count < KVC_PANEL ? (int)count : KVC_PANEL); i++) to[i] += bias[i];
    }
    if (count < KVC_PANEL) memcpy(out, some, (size_t)count * sizeof(float));
}

/* ---- Packed weights. */

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

/* dots += the products of a group's codes with one digit of each row's numbers. */
INLINE void dot_group(const unsigned char *codes, int bits, const unsigned char *numbers, int rows, i32x16 *dots) {
    if (bits == 8) {
        UNROLL
        for (int unit = 0; unit < 8; unit++) {
            const u8x64 w = u8x64_weights(u8x64_load(codes + unit * KVC_UNIT_BYTES));
            UNROLL
            for (int i = 0; i < rows; i++) dots[i] = i32x16_dot_x(dots[i], w, load_i32(numbers + 4 * (unit * rows + i)));
        }
        return;
    }
    UNROLL
    for (int unit = 0; unit < 4; unit++) {
        const u8x64 both = u8x64_load(codes + unit * KVC_UNIT_BYTES);
        const u8x64 low = u8x64_and(both, 15), high = u8x64_and(u8x64_shr(both, 4), 15);
        UNROLL
        for (int i = 0; i < rows; i++)
            dots[i] = i32x16_dot_q(dots[i], low, load_i32(numbers + 4 * (unit * rows + i)));
        UNROLL
        for (int i = 0; i < rows; i++)
            dots[i] = i32x16_dot_q(dots[i], high, load_i32(numbers + 4 * ((unit + 4) * rows + i)));
    }
}

INLINE void packed_tile(const kvc_matmul_args *args, kvc_matrix_format format, int digits, int rows, int64_t panel,
                        const unsigned char *x, int64_t first) {
    const int minima = format == KVC_MATRIX_Q4_1, bits = format == KVC_MATRIX_Q8_0 ? 8 : 4;
    const size_t numbers = (size_t)(KVC_GROUP / 4 * rows * 4), header = (minima ? 4 : 2) * KVC_PANEL * 2;
    const size_t code_bytes = (size_t)(KVC_GROUP * KVC_PANEL * bits / 8), record_bytes = header + 2 * code_bytes;
    const unsigned char *record = args->matrix->data + (size_t)panel * args->matrix->panel_bytes;
    const unsigned char *end = record + args->matrix->panel_bytes;
    sums16 sums[12];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) sums[i].v[v] = f32v_zero();
    }
    for (; record < end; record += record_bytes) {
        for (int half = 0; half < 2; half++) {
            const unsigned char *codes = record + header + half * code_bytes, *behind = x + numbers * (size_t)digits;
            const uint16_t *scales = (const uint16_t *)record + half * KVC_PANEL;
            i32x16 dots[12];
            if (rows <= 2) {
                for (size_t at = 0; at < code_bytes; at += 64) __builtin_prefetch(codes + AHEAD + at, 0, 2);
            }
            if (digits == 2) {
                UNROLL
                for (int i = 0; i < rows; i++) dots[i] = i32x16_zero();
                dot_group(codes, bits, x, rows, dots);
                UNROLL
                for (int i = 0; i < rows; i++)
                    dots[i] = i32x16_next_digit(dots[i], minima ? 0 : load_i32(behind + 4 * (rows + i)));
                dot_group(codes, bits, x + numbers, rows, dots);
            } else {
                UNROLL
                for (int i = 0; i < rows; i++)
                    dots[i] = minima ? i32x16_zero() : i32x16_set1(load_i32(behind + 4 * (rows + i)));
                dot_group(codes, bits, x, rows, dots);
            }
            UNROLL
            for (int i = 0; i < rows; i++) {
                f32v exact[VECTORS];
                i32x16_to_floats(dots[i], exact);
                UNROLL
                for (int v = 0; v < VECTORS; v++) {
                    const f32v scaled = f32v_mul(exact[v], f32v_set1(load_f32(behind + 4 * i)));
                    sums[i].v[v] = f32v_fma(scaled, f32v_load_half(scales + v * KVC_LANES), sums[i].v[v]);
                    if (minima)
                        sums[i].v[v] = f32v_fma(f32v_load_half(scales + 2 * KVC_PANEL + v * KVC_LANES),
                                                f32v_set1(load_f32(behind + 4 * (rows + i))), sums[i].v[v]);
                }
            }
            x = behind + 8 * rows;
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        float *out = args->out + (first + i) * args->matrix->rows + panel * KVC_PANEL;
        give(out, args->matrix->rows - panel * KVC_PANEL, sums[i], 0, args->bias ? args->bias + panel * KVC_PANEL : NULL);
    }
}

#define PACKED(format, digits, rows)                                                                        \
    NOINLINE void packed_##format##_##digits##_##rows(const kvc_matmul_args *args, int64_t panel,           \
                                                      const unsigned char *x, int64_t first) {              \
        packed_tile(args, KVC_MATRIX_##format, digits, rows, panel, x, first);                              \
    }
#if KVC_PACKED_ROWS == 12
#define BLOCKS(X, ...) X(__VA_ARGS__, 1) X(__VA_ARGS__, 2) X(__VA_ARGS__, 4) X(__VA_ARGS__, 6) X(__VA_ARGS__, 8) X(__VA_ARGS__, 12)
#else
#define BLOCKS(X, ...) X(__VA_ARGS__, 1) X(__VA_ARGS__, 2)
#endif
#define DIGITS(X, format) BLOCKS(X, format, 1) BLOCKS(X, format, 2)
DIGITS(PACKED, Q8_0) DIGITS(PACKED, Q4_0) DIGITS(PACKED, Q4_1)

typedef void packed_fn(const kvc_matmul_args *, int64_t panel, const unsigned char *x, int64_t first);
#define LINE(format, digits, rows) [rows] = packed_##format##_##digits##_##rows,
#define TABLE(format) {{BLOCKS(LINE, format, 1)}, {BLOCKS(LINE, format, 2)}}
static packed_fn *const packed_tiles[3][2][13] = {TABLE(Q8_0), TABLE(Q4_0), TABLE(Q4_1)};

static void multiply_packed(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop) {
    const size_t row_bytes = kvc_prepared_row_bytes(args);
    packed_fn *const *tiles = packed_tiles[args->matrix->format - KVC_MATRIX_Q8_0][args->digits - 1];
    const int64_t fitting = (int64_t)(CHUNK_BYTES / row_bytes) / KVC_PACKED_ROWS * KVC_PACKED_ROWS;
    const int64_t chunk = fitting > KVC_PACKED_ROWS ? fitting : KVC_PACKED_ROWS;
    for (int64_t start = 0; start < args->n; start += chunk) {
        const int64_t stop = start + chunk < args->n ? start + chunk : args->n;
        for (int64_t p = panel; p < panel_stop; p++) {
            for (int64_t row = start; row < stop;) {
                const int rows = kvc_block_rows(KVC_PACKED_ROWS, stop - row);
                tiles[rows](args, p, args->prepared + (size_t)row * row_bytes, row);
                row += rows;
            }
        }
    }
}

/* ---- Floats. */

INLINE f32v load_weights(kvc_matrix_format format, const unsigned char *p, int64_t at) {
    if (format == KVC_MATRIX_F32) return f32v_load((const float *)p + at);
    if (format == KVC_MATRIX_F16) return f32v_load_half((const uint16_t *)p + at);
    return f32v_load_bf16((const uint16_t *)p + at);
}

/* Channels [k, k_stop) of `panels` panels, whose pointers may repeat. */
INLINE void float_tile(const kvc_matmul_args *args, kvc_matrix_format format, int panels, int rows, int64_t panel,
                       int64_t existing, int64_t k, int64_t k_stop, const float *x, int64_t first) {
    const kvc_matrix *matrix = args->matrix;
    const int size = format == KVC_MATRIX_F32 ? 4 : 2;
    const unsigned char *data[4];
    sums16 sums[24];
    UNROLL
    for (int p = 0; p < panels; p++) {
        const int64_t here = p < existing ? p : existing - 1;
        data[p] = matrix->data + (size_t)(panel + here) * matrix->panel_bytes;
    }
    UNROLL
    for (int i = 0; i < rows * panels; i++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) sums[i].v[v] = f32v_zero();
    }
    const int add = k > 0;
    const float *bias = k_stop == matrix->columns ? args->bias : NULL;
    for (; k < k_stop; k++) {
        f32v w[4][VECTORS];
        UNROLL
        for (int p = 0; p < panels; p++) {
            if (rows <= 2 && k % (64 / (KVC_PANEL * size)) == 0)
                __builtin_prefetch(data[p] + (size_t)(k * KVC_PANEL * size) + AHEAD / 2, 0, 2);
            UNROLL
            for (int v = 0; v < VECTORS; v++) w[p][v] = load_weights(format, data[p], k * KVC_PANEL + v * KVC_LANES);
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            const f32v value = f32v_set1(x[k * rows + i]);
            UNROLL
            for (int p = 0; p < panels; p++) {
                UNROLL
                for (int v = 0; v < VECTORS; v++)
                    sums[i * panels + p].v[v] = f32v_fma(w[p][v], value, sums[i * panels + p].v[v]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int p = 0; p < panels; p++) {
            const int64_t column = (panel + p) * KVC_PANEL;
            if (p < existing)
                give(args->out + (first + i) * matrix->rows + column, matrix->rows - column, sums[i * panels + p], add,
                     bias ? bias + column : NULL);
        }
    }
}

/* Panels of a tile of so many rows: their sums, two vectors of weights at least and a broadcast fit the registers. */
#define PANELS(rows) \
    ((rows) * 4 * VECTORS <= KVC_FLOAT_SUMS ? 4 : (rows) * 2 * VECTORS <= KVC_FLOAT_SUMS ? 2 : 1)

#define FLOAT(format, unused, rows)                                                                                \
    NOINLINE void float_##format##_##rows(const kvc_matmul_args *args, int64_t panel, int64_t existing, int64_t k, \
                                          int64_t k_stop, const float *x, int64_t first) {                         \
        float_tile(args, KVC_MATRIX_##format, PANELS(rows), rows, panel, existing, k, k_stop, x, first);           \
    }
#if KVC_FLOAT_ROWS == 12
#define FLOAT_BLOCKS(X, format) \
    X(format, , 1) X(format, , 2) X(format, , 4) X(format, , 6) X(format, , 8) X(format, , 12)
#elif KVC_FLOAT_ROWS == 6
#define FLOAT_BLOCKS(X, format) X(format, , 1) X(format, , 2) X(format, , 4) X(format, , 6)
#else
#define FLOAT_BLOCKS(X, format) X(format, , 1) X(format, , 2)
#endif
FLOAT_BLOCKS(FLOAT, F32) FLOAT_BLOCKS(FLOAT, F16) FLOAT_BLOCKS(FLOAT, BF16)

typedef void float_fn(const kvc_matmul_args *, int64_t, int64_t, int64_t, int64_t, const float *, int64_t);
#define FLOAT_LINE(format, unused, rows) [rows] = float_##format##_##rows,
static float_fn *const float_tiles[3][13] = {
    {FLOAT_BLOCKS(FLOAT_LINE, F32)}, {FLOAT_BLOCKS(FLOAT_LINE, F16)}, {FLOAT_BLOCKS(FLOAT_LINE, BF16)}};

/* For few rows a block of channels is no detour: panels are so long that each reads like one stream. */
static void multiply_floats(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop) {
    const int64_t columns = args->matrix->columns;
    float_fn *const *tiles = float_tiles[args->matrix->format];
    enum { CHUNK = CHUNK_BYTES / (KVC_CHANNEL_BLOCK * 4) / KVC_FLOAT_ROWS * KVC_FLOAT_ROWS };
    for (int64_t start = 0; start < args->n; start += CHUNK) {
        const int64_t stop = start + CHUNK < args->n ? start + CHUNK : args->n;
        const int most = kvc_block_rows(KVC_FLOAT_ROWS, stop - start);
        const int64_t wide = PANELS(most);
        for (int64_t p = panel; p < panel_stop; p += wide) {
            for (int64_t k = 0; k < columns; k += KVC_CHANNEL_BLOCK) {
                const int64_t k_stop = k + KVC_CHANNEL_BLOCK < columns ? k + KVC_CHANNEL_BLOCK : columns;
                for (int64_t row = start; row < stop;) {
                    const int rows = kvc_block_rows(KVC_FLOAT_ROWS, stop - row);
                    const float *x = (const float *)args->prepared + row * columns;
                    const int64_t left = panel_stop - p < wide ? panel_stop - p : wide, step = PANELS(rows);
                    for (int64_t q = 0; q < left; q += step)
                        tiles[rows](args, p + q, left - q < step ? left - q : step, k, k_stop, x, row);
                    row += rows;
                }
            }
        }
    }
}

/* The results of panels [panel, panel_stop) for all rows. */
void KVC_FN(multiply_panels)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop) {
    if (kvc_matrix_format_of(args->matrix->format)->packed)
        multiply_packed(args, panel, panel_stop);
    else
        multiply_floats(args, panel, panel_stop);
}
