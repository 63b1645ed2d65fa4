/* kvc_activations.c - blocks of rows of x as the products read them (kvc_matrix.h). */
#include <string.h>

#include "kvc_half.h"
#include "kvc_matrix.h"
#include "kvc_simd.h"

enum { GROUP_VECTORS = KVC_GROUP / KVC_LANES, MOST_ROWS = 16 /* of a block */ };

/* One group of the rows of a block, of which row i is at x[i]. With a value that is not finite the scale is NaN. With one
 * digit the scale has 22 bits. The steps of all rows come first: so the processor divides for some rows while it looks for
 * the largest of others. */
INLINE void put_group(const float *const *x, int rows, int digits, int zero, int has_minima, unsigned char *to) {
    const float most = digits == 1 ? 127.0f : 127.0f * 128.0f;
    unsigned char *behind = to + (size_t)(KVC_GROUP * digits * rows);
    float steps[MOST_ROWS], scales[MOST_ROWS];
    for (int i = 0; i < rows; i++) {
        f32v largest_v = f32v_zero();
        UNROLL
        for (int v = 0; v < GROUP_VECTORS; v++) largest_v = f32v_max(largest_v, f32v_abs(f32v_load(x[i] + v * KVC_LANES)));
        const float largest = f32v_max_of(largest_v);
        steps[i] = largest > 0x1p-100f ? most / largest : 0.0f;
        scales[i] = largest / most;
    }
    for (int i = 0; i < rows; i++) {
        unsigned char high[KVC_GROUP], low[KVC_GROUP]; /* signed */
        f32v sum = f32v_zero(), finite = f32v_zero();
        UNROLL
        for (int v = 0; v < GROUP_VECTORS; v++) {
            const f32v x_v = f32v_load(x[i] + v * KVC_LANES);
            f32v number = f32v_round(f32v_mul(x_v, f32v_set1(steps[i])));
            number = f32v_min(f32v_max(number, f32v_set1(-most)), f32v_set1(most)); /* NaN becomes -most */
            finite = f32v_fma(x_v, f32v_zero(), finite); /* 0, or NaN from infinities and NaN */
            sum = f32v_add(sum, number);
            if (digits == 2) {
                const f32v above = f32v_round(f32v_mul(number, f32v_set1(1.0f / 128.0f)));
                f32v_store_signed_bytes(low + v * KVC_LANES, f32v_fma(above, f32v_set1(-128.0f), number));
                number = above;
            }
            f32v_store_signed_bytes(high + v * KVC_LANES, number);
        }
        for (int unit = 0; unit < KVC_GROUP / 4; unit++) {
            memcpy(to + (unit * rows + i) * 4, high + 4 * unit, 4);
            if (digits == 2) memcpy(to + ((KVC_GROUP / 4 + unit) * rows + i) * 4, low + 4 * unit, 4);
        }
        const int32_t numbers = (int32_t)f32v_sum_of(sum); /* exact: below 2^24 */
        const int32_t shift = (digits == 1 ? KVC_SUM_START : 0) - zero * numbers;
        float scale = scales[i] + f32v_sum_of(finite);
        if (digits == 1) scale = kvc_float_of_bits(kvc_float_bits(scale) & ~3u);
        const float correction = scale * (float)numbers, less = -0x1.8p23f * scale;
        memcpy(behind + 4 * (size_t)i, &scale, 4);
        memcpy(behind + 4 * (size_t)(rows + i), has_minima ? (const void *)&correction : &shift, 4);
        if (digits == 1) memcpy(behind + 4 * (size_t)(2 * rows + i), &less, 4);
    }
}

/* Levels whose dot products take signed weights subtract 128 from codes of 8 bits themselves (u8x64_weights). */
INLINE void put_packed(const kvc_matmul_args *args, int64_t first, int rows, int digits, unsigned char *to) {
    const kvc_matrix *matrix = args->matrix;
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    const int zero = info->bits == 8 && !KVC_UNSIGNED_WEIGHTS ? 0 : info->zero;
    const size_t group_bytes = ((size_t)(KVC_GROUP * digits) + kvc_behind_numbers(digits)) * (size_t)rows;
    float padded[MOST_ROWS][KVC_GROUP];
    const float *x[MOST_ROWS];
    for (int64_t g = 0; g < matrix->groups; g++, to += group_bytes) {
        const int64_t left = matrix->columns - g * KVC_GROUP;
        for (int i = 0; i < rows; i++) {
            x[i] = args->x + (first + i) * matrix->columns + g * KVC_GROUP;
            if (left >= KVC_GROUP) continue;
            memset(padded[i], 0, sizeof padded[i]);
            if (left > 0) memcpy(padded[i], x[i], (size_t)left * sizeof(float));
            x[i] = padded[i];
        }
        put_group(x, rows, digits, zero, info->has_minima, to);
    }
}

INLINE void put_floats(const kvc_matmul_args *args, int64_t first, int rows, int rounded) {
    const int64_t columns = args->matrix->columns;
    const float *x = args->x + first * columns;
    for (int64_t block = 0; block < columns; block += KVC_CHANNEL_BLOCK) {
        const int64_t left = columns - block, channels = left < KVC_CHANNEL_BLOCK ? left : KVC_CHANNEL_BLOCK;
        float *to = (float *)args->prepared + block * args->n + first * channels;
        for (int64_t k = 0; k < channels; k++) {
            for (int i = 0; i < rows; i++) {
                const float value = x[i * columns + block + k];
                to[k * rows + i] = rounded ? kvc_float_of_bits((uint32_t)kvc_bf16_of_float(value) << 16) : value;
            }
        }
    }
}

INLINE void put_pairs(const kvc_matmul_args *args, int64_t first, int rows) {
    const int64_t columns = args->matrix->columns;
    for (int64_t block = 0; block < columns; block += KVC_CHANNEL_BLOCK) {
        const int64_t left = columns - block, channels = left < KVC_CHANNEL_BLOCK ? left : KVC_CHANNEL_BLOCK;
        const float *x = args->x + first * columns + block;
        uint32_t *to = (uint32_t *)args->prepared + block / 2 * args->n + first * ((channels + 1) / 2);
        for (int i = 0; i < rows; i++, x += columns) {
            for (int64_t k = 0; k < channels; k += 2) {
                const uint32_t next = k + 1 < channels ? kvc_bf16_of_float(x[k + 1]) : 0;
                to[k / 2 * rows + i] = kvc_bf16_of_float(x[k]) | next << 16;
            }
        }
    }
}

/* Prepares rows [first, stop) of x, block by block; first is where a block begins. */
void KVC_FN(prepare_rows)(const kvc_matmul_args *args, int64_t first, int64_t stop) {
    const size_t row_bytes = kvc_prepared_row_bytes(args);
    const int packed = kvc_matrix_format_of(args->matrix->format)->packed;
    while (first < stop) {
        const int rows = kvc_block_rows(packed ? KVC_PACKED_ROWS(args->n) : KVC_FLOAT_ROWS, args->n - first);
        unsigned char *to = args->prepared + (size_t)first * row_bytes;
        if (kvc_in_pairs(args))
            put_pairs(args, first, rows);
        else if (!packed)
            put_floats(args, first, rows, args->matrix->format == KVC_MATRIX_BF16 && args->bf16_rows);
        else if (args->digits == 1)
            put_packed(args, first, rows, 1, to);
        else
            put_packed(args, first, rows, 2, to);
        first += rows;
    }
}
