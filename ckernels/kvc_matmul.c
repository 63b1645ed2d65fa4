/* kvc_matmul.c - prepared rows times panels of a matrix (kvc_matrix.h).
 *
 * A tile multiplies a block of rows with one panel (packed) or up to four (floats). All its sums are in registers:
 *
 *                one 64-byte load        for each row of the block
 *     packed     a unit of codes         dots[row] += unit . 4 numbers of the row, broadcast
 *     floats     a channel of 16 rows    sums[row] += weights * the row's value, broadcast
 *
 * One row takes as long as its panel is read, many rows as long as they are multiplied. Many rows are divided into chunks. The
 * prepared bytes of a chunk stay in the second level of the cache. A chunk is multiplied with a panel (packed), or with 256
 * channels of it (floats), while these are in the first level or the second. f16 and bf16 are converted once for the chunk.
 */
#include "kvc_matmul_tile.h"

enum {
    CHUNK_BYTES = 2 << 20, /* of prepared rows that a packed panel meets */
    /* Bytes of a panel from what is read to what is prefetched, measured: of packed weights into the first level of the
     * cache; of floats, up to four panels at a time, into the second. */
    PACKED_AHEAD = 4096,
    WORDS_AHEAD_OF_FEW = 2048, /* of f16 and bf16, up to four rows */
    FLOATS_AHEAD = 4096,
    FEW_ROWS = 16, /* of floats: the speed of memory is the limit */
};

/* The distance from byte `at` of a panel to the byte that is read `ahead` bytes later. */
INLINE size_t ahead_of(const tile *t, size_t at, size_t ahead) {
    return at + ahead < t->read_stop ? ahead : ahead + t->skipped;
}
/* Into the first level of the cache (near), or into the second. */
INLINE void prefetch(int near, const unsigned char *p, size_t bytes) {
    UNROLL
    for (size_t line = 0; line < bytes; line += 64) {
        if (near)
            __builtin_prefetch(p + line, 0, 3);
        else
            __builtin_prefetch(p + line, 0, 2);
    }
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

/* dots[row, panel] += the products of a group's codes with one digit of each row's numbers. */
INLINE void dot_group(const unsigned char *const *codes, int bits, const unsigned char *numbers, int rows, int panels,
                      i32x16 *dots) {
    if (bits == 8) {
        UNROLL
        for (int unit = 0; unit < 8; unit++) {
            u8x64 w[2];
            UNROLL
            for (int p = 0; p < panels; p++) w[p] = u8x64_weights(u8x64_load(codes[p] + unit * KVC_UNIT_BYTES));
            UNROLL
            for (int i = 0; i < rows; i++) {
                const int32_t x = load_i32(numbers + 4 * (unit * rows + i));
                UNROLL
                for (int p = 0; p < panels; p++) dots[i * panels + p] = i32x16_dot_x(dots[i * panels + p], w[p], x);
            }
        }
        return;
    }
    part16 parts[12];
    _Static_assert(KVC_GROUP / 4 <= KVC_PART_UNITS(15, 127), "the units of a group are one part");
    begin_parts(rows * panels, dots, parts);
    UNROLL
    for (int unit = 0; unit < 4; unit++) {
        u8x64 low[2], high[2];
        UNROLL
        for (int p = 0; p < panels; p++) {
            const u8x64 both = u8x64_load(codes[p] + unit * KVC_UNIT_BYTES);
            low[p] = u8x64_and(both, 15), high[p] = u8x64_and(u8x64_shr(both, 4), 15);
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            const int32_t x = load_i32(numbers + 4 * (unit * rows + i));
            const int32_t next = load_i32(numbers + 4 * ((unit + 4) * rows + i));
            UNROLL
            for (int p = 0; p < panels; p++) {
                part16 *part = &parts[i * panels + p];
                *part = part16_dot_q(part16_dot_q(*part, low[p], x), high[p], next);
            }
        }
    }
    end_parts(rows * panels, parts, dots);
}

INLINE void packed_tile(const kvc_matrix *matrix, kvc_matrix_format format, int digits, int rows, int panels,
                        const unsigned char *x, tile *t) {
    const int minima = format == KVC_MATRIX_Q4_1, bits = format == KVC_MATRIX_Q8_0 ? 8 : 4;
    const size_t numbers = (size_t)(KVC_GROUP * rows), header = (minima ? 4 : 2) * KVC_PANEL * 2;
    const size_t code_bytes = (size_t)(KVC_GROUP * KVC_PANEL * bits / 8), record_bytes = header + 2 * code_bytes;
    const unsigned char *records[2];
    sums16 sums[12]; /* 6 rows of 2 panels, or 8 of one */
    UNROLL
    for (int p = 0; p < panels; p++)
        records[p] = matrix->data + (size_t)(t->panel + (p < t->existing ? p : t->existing - 1)) * matrix->panel_bytes;
    UNROLL
    for (int i = 0; i < rows * panels; i++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) sums[i].v[v] = f32v_zero();
    }
    for (size_t at = 0; at < matrix->panel_bytes; at += record_bytes) {
        for (int half = 0; half < 2; half++) {
            const unsigned char *behind = x + numbers * (size_t)digits, *codes[2];
            i32x16 dots[12];
            UNROLL
            for (int p = 0; p < panels; p++) {
                codes[p] = records[p] + at + header + (size_t)half * code_bytes;
                if (t->cold) prefetch(1, codes[p] + ahead_of(t, at, PACKED_AHEAD), code_bytes);
            }
            UNROLL
            for (int i = 0; i < rows; i++) {
                const i32x16 start = digits == 2 ? i32x16_zero()
                                     : minima    ? i32x16_set1(KVC_SUM_START)
                                                 : i32x16_set1(load_i32(behind + 4 * (rows + i)));
                UNROLL
                for (int p = 0; p < panels; p++) dots[i * panels + p] = start;
            }
            dot_group(codes, bits, x, rows, panels, dots);
            if (digits == 2) {
                UNROLL
                for (int i = 0; i < rows * panels; i++)
                    dots[i] = i32x16_next_digit(dots[i], minima ? 0 : load_i32(behind + 4 * (rows + i / panels)));
                dot_group(codes, bits, x + numbers, rows, panels, dots);
            }
            UNROLL
            for (int p = 0; p < panels; p++) {
                const uint16_t *scales = (const uint16_t *)(records[p] + at) + half * KVC_PANEL;
                UNROLL
                for (int i = 0; i < rows; i++) {
                    sums16 *sum = &sums[i * panels + p];
                    const float scale = load_f32(behind + 4 * i);
                    f32v scaled[VECTORS];
                    if (digits == 1) {
                        i32x16_scaled(dots[i * panels + p], scale, load_f32(behind + 4 * (2 * rows + i)), scaled);
                    } else {
                        i32x16_to_floats(dots[i * panels + p], scaled);
                        UNROLL
                        for (int v = 0; v < VECTORS; v++) scaled[v] = f32v_mul(scaled[v], f32v_set1(scale));
                    }
                    UNROLL
                    for (int v = 0; v < VECTORS; v++) {
                        sum->v[v] = f32v_fma(scaled[v], f32v_load_half(scales + v * KVC_LANES), sum->v[v]);
                        if (minima)
                            sum->v[v] = f32v_fma(f32v_load_half(scales + 2 * KVC_PANEL + v * KVC_LANES),
                                                 f32v_set1(load_f32(behind + 4 * (rows + i))), sum->v[v]);
                    }
                }
            }
            x = behind + kvc_behind_numbers(digits) * (size_t)rows;
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
#define DIGITS(X, format) BLOCKS(X, format, 1) BLOCKS(X, format, 2)
DIGITS(PACKED, Q8_0) DIGITS(PACKED, Q4_0) DIGITS(PACKED, Q4_1)

typedef void packed_fn(const kvc_matrix *, const unsigned char *x, tile *);
#define LINE(format, digits, rows) [rows] = packed_##format##_##digits##_##rows,
#define TABLE(format) {{BLOCKS(LINE, format, 1)}, {BLOCKS(LINE, format, 2)}}
static packed_fn *const packed_tiles[3][2][9] = {TABLE(Q8_0), TABLE(Q4_0), TABLE(Q4_1)};

static void multiply_packed(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop) {
    const size_t row_bytes = kvc_prepared_row_bytes(args);
    packed_fn *const *tiles = packed_tiles[args->matrix->format - KVC_MATRIX_Q8_0][args->digits - 1];
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

/* ---- Floats. */

INLINE f32v load_weights(kvc_matrix_format format, const unsigned char *p, int64_t at) {
    if (format == KVC_MATRIX_F32) return f32v_load((const float *)p + at);
    if (format == KVC_MATRIX_F16) return f32v_load_half((const uint16_t *)p + at);
    return f32v_load_bf16((const uint16_t *)p + at);
}

/* Channels of `weights`, of which x has the prepared rows. */
INLINE void float_tile(const block *weights, kvc_matrix_format format, int rows, int panels, const float *x, tile *t) {
    const int size = format == KVC_MATRIX_F32 ? 4 : 2;
    const size_t ahead = size == 2 && rows <= 4 ? WORDS_AHEAD_OF_FEW : FLOATS_AHEAD;
    const int64_t channels = weights->channels;
    const unsigned char *data[4];
    sums16 sums[24];
    UNROLL
    for (int p = 0; p < panels; p++) data[p] = panel_of(weights, p, t);
    UNROLL
    for (int i = 0; i < rows * panels; i++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) sums[i].v[v] = f32v_zero();
    }
    for (int64_t k = 0; k < channels; k++, x += rows) {
        f32v w[4][VECTORS];
        UNROLL
        for (int p = 0; p < panels; p++) {
            if (t->cold && k % (64 / (KVC_PANEL * size)) == 0) {
                const size_t at = (size_t)(k * KVC_PANEL * size);
                prefetch(0, data[p] + at + ahead_of(t, at, ahead), 64);
            }
            UNROLL
            for (int v = 0; v < VECTORS; v++) w[p][v] = load_weights(format, data[p], k * KVC_PANEL + v * KVC_LANES);
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            const f32v value = f32v_set1(x[i]);
            UNROLL
            for (int p = 0; p < panels; p++) {
                UNROLL
                for (int v = 0; v < VECTORS; v++)
                    sums[i * panels + p].v[v] = f32v_fma(w[p][v], value, sums[i * panels + p].v[v]);
            }
        }
    }
    keep(t, rows, panels, sums);
}

/* Panels of a tile of so many rows: their sums, two vectors of weights at least and a broadcast fit the registers. */
#define PANELS(rows) ((rows) * 4 * VECTORS <= KVC_FLOAT_SUMS ? 4 : (rows) * 2 * VECTORS <= KVC_FLOAT_SUMS ? 2 : 1)

#define FLOAT(format, unused, rows)                                                        \
    NOINLINE void float_##format##_##rows(const block *weights, const float *x, tile *t) { \
        float_tile(weights, KVC_MATRIX_##format, rows, PANELS(rows), x, t);                \
    }
#if KVC_FLOAT_ROWS == 12
#define FLOAT_BLOCKS(X, format) \
    X(format, , 1) X(format, , 2) X(format, , 3) X(format, , 4) X(format, , 6) X(format, , 8) X(format, , 12)
#elif KVC_FLOAT_ROWS == 6
#define FLOAT_BLOCKS(X, format) X(format, , 1) X(format, , 2) X(format, , 3) X(format, , 4) X(format, , 6)
#else
#define FLOAT_BLOCKS(X, format) X(format, , 1) X(format, , 2)
#endif
FLOAT_BLOCKS(FLOAT, F32) FLOAT_BLOCKS(FLOAT, F16) FLOAT_BLOCKS(FLOAT, BF16)

typedef void float_fn(const block *weights, const float *x, tile *);
#define FLOAT_LINE(format, unused, rows) [rows] = float_##format##_##rows,
static float_fn *const float_tiles[3][KVC_FLOAT_ROWS + 1] = {
    {FLOAT_BLOCKS(FLOAT_LINE, F32)}, {FLOAT_BLOCKS(FLOAT_LINE, F16)}, {FLOAT_BLOCKS(FLOAT_LINE, BF16)}};

/* ---- Pairs of bf16, on CPUs that have them: as floats, two channels at a time. */

#if KVC_BF16_TARGET
INLINE __attribute__((target(KVC_BF16_FEATURE))) void pair_tile(const block *weights, int rows, int panels, const uint32_t *x,
                                                                tile *t) {
    const size_t ahead = rows <= 4 ? WORDS_AHEAD_OF_FEW : FLOATS_AHEAD;
    const int64_t channels = weights->channels;
    const unsigned char *data[4];
    sums16 sums[24]; /* of one vector */
    UNROLL
    for (int p = 0; p < panels; p++) data[p] = panel_of(weights, p, t);
    UNROLL
    for (int i = 0; i < rows * panels; i++) sums[i].v[0] = f32v_zero();
    for (int64_t k = 0; k < channels; k += 2, x += rows) {
        bf16x2 w[4];
        UNROLL
        for (int p = 0; p < panels; p++) {
            const uint16_t *words = (const uint16_t *)data[p] + k * KVC_PANEL;
            if (t->cold)
                prefetch(0, (const unsigned char *)words + ahead_of(t, (size_t)(2 * k * KVC_PANEL), ahead), 64);
            w[p] = k + 1 < channels ? bf16x2_load(words) : bf16x2_load_one(words);
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            const bf16x2 pair = bf16x2_set1(x[i]);
            UNROLL
            for (int p = 0; p < panels; p++) sums[i * panels + p].v[0] = bf16x2_dot(sums[i * panels + p].v[0], w[p], pair);
        }
    }
    keep(t, rows, panels, sums);
}

#define PAIRS(unused, also, rows)                                                                                   \
    NOINLINE __attribute__((target(KVC_BF16_FEATURE))) void pairs_##rows(const block *weights, const float *x,      \
                                                                         tile *t) {                                 \
        pair_tile(weights, rows, PANELS(rows), (const uint32_t *)(const void *)x, t);                               \
    }
FLOAT_BLOCKS(PAIRS, )
#define PAIRS_LINE(unused, also, rows) [rows] = pairs_##rows,
static float_fn *const pair_tiles[KVC_FLOAT_ROWS + 1] = {FLOAT_BLOCKS(PAIRS_LINE, )};
#else
static float_fn *const *const pair_tiles = NULL;
#endif

/* ---- Blocks of channels. */

INLINE size_t channel_bytes(const kvc_matrix *matrix, int64_t channels) {
    return (size_t)(channels * KVC_PANEL * kvc_matrix_format_of(matrix->format)->bits / 8);
}

/* Of panels from `panel` on, the channels from k on that are multiplied together. */
INLINE block block_at(const kvc_matrix *matrix, int64_t panel, int64_t k) {
    const int64_t left = matrix->columns - k;
    return (block){matrix->data + (size_t)panel * matrix->panel_bytes + channel_bytes(matrix, k), matrix->panel_bytes,
                   left < KVC_CHANNEL_BLOCK ? left : KVC_CHANNEL_BLOCK};
}

INLINE void widen_panels(kvc_matrix_format format, block weights, int64_t panels, float *to) {
    const int64_t count = weights.channels * KVC_PANEL;
    for (int64_t p = 0; p < panels; p++, to += count) {
        const unsigned char *from = weights.data + (size_t)p * weights.stride;
        for (int64_t at = 0; at < count; at += KVC_PANEL) { /* half a line */
            __builtin_prefetch(from + (size_t)panels * weights.stride + 2 * at, 0, 2);
            UNROLL
            for (int v = 0; v < KVC_PANEL; v += KVC_LANES) f32v_store(to + at + v, load_weights(format, from, at + v));
        }
    }
}

/* Panels of 16 bits as floats, in `to`: many rows convert them once, not in each tile. */
static block widened(kvc_matrix_format format, block weights, int64_t panels, float *to) {
    const size_t stride = (size_t)(weights.channels * KVC_PANEL) * sizeof(float);
    if (format == KVC_MATRIX_F16) widen_panels(KVC_MATRIX_F16, weights, panels, to);
    if (format == KVC_MATRIX_BF16) widen_panels(KVC_MATRIX_BF16, weights, panels, to);
    return (block){(const unsigned char *)to, stride, weights.channels};
}

/* Panels [panel, panel_stop) times rows [start, stop), over the block of channels from k on. `sums`: of these panels and rows,
 * tile by tile, over the blocks before. */
INLINE void multiply_block(const kvc_matmul_args *args, int64_t start, int64_t stop, int64_t panel, int64_t panel_stop,
                           int64_t k, float *sums, float *floats) {
    const kvc_matrix *matrix = args->matrix;
    const block stored = block_at(matrix, panel, k);
    const int64_t channels = stored.channels, left = matrix->columns - k;
    const int pairs = kvc_in_pairs(args), widens = kvc_widens(args);
    const size_t read_stop = channel_bytes(matrix, args->n > FEW_ROWS ? channels : left);
    const block weights = widens ? widened(matrix->format, stored, panel_stop - panel, floats) : stored;
    float_fn *const *tiles = pairs ? pair_tiles : float_tiles[widens ? KVC_MATRIX_F32 : matrix->format];
    const float *x = (const float *)args->prepared + (pairs ? k / 2 : k) * args->n;
    for (int64_t row = start; row < stop;) {
        const int rows = kvc_block_rows(KVC_FLOAT_ROWS, stop - row);
        const float *mine = x + row * (pairs ? (channels + 1) / 2 : channels);
        const int64_t step = PANELS(rows);
        for (int64_t q = panel; q < panel_stop; q += step, sums += rows * step * KVC_PANEL) {
            const block here = {weights.data + (size_t)(q - panel) * weights.stride, weights.stride, channels};
            tile t;
            begin(&t, args, row, rows, q, step, panel_stop, row == start && !widens, k > 0 ? sums : NULL,
                  channels < left ? sums : NULL);
            t.read_stop = read_stop, t.skipped = (size_t)step * matrix->panel_bytes - read_stop;
            tiles[rows](&here, mine, &t);
            give(args, &t);
        }
        row += rows;
    }
}

/* Few rows read four panels from begin to end, at the speed of memory. Many rows go in chunks. A chunk is multiplied with
 * one group of panels after another, and with each group block by block of channels. Meanwhile the second level of the
 * cache keeps the chunk's prepared rows of this block and its sums of the group, the first keeps `wide` panels of it. */
static void multiply_floats(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    const int64_t wide = args->n <= FEW_ROWS ? 4 : PANELS(KVC_FLOAT_ROWS);
    const int64_t group = args->n <= FEW_ROWS ? 4 : KVC_GROUP_PANELS;
    float *sums = scratch + (kvc_widens(args) ? KVC_WIDE_FLOATS : 0);
    for (int64_t start = 0; start < args->n; start += KVC_CHUNK_ROWS) {
        const int64_t stop = start + KVC_CHUNK_ROWS < args->n ? start + KVC_CHUNK_ROWS : args->n;
        for (int64_t first = panel; first < panel_stop; first += group) {
            const int64_t last = first + group < panel_stop ? first + group : panel_stop;
            for (int64_t k = 0; k < args->matrix->columns; k += KVC_CHANNEL_BLOCK) {
                for (int64_t p = first; p < last; p += wide)
                    multiply_block(args, start, stop, p, p + wide < last ? p + wide : last, k,
                                   sums + (p - first) * (stop - start + KVC_SPARE_ROWS) * KVC_PANEL, scratch);
            }
        }
    }
}

/* The results of panels [panel, panel_stop) for all rows. */
void KVC_FN(multiply_panels)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    if (kvc_matrix_format_of(args->matrix->format)->packed)
        multiply_packed(args, panel, panel_stop);
    else
        multiply_floats(args, panel, panel_stop, scratch);
}
