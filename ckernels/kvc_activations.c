/* kvc_activations.c - blocks of rows of x as the products read them (kvc_matrix.h). */
#include <math.h>
#include <string.h>

#include "kvc_half.h"
#include "kvc_matrix.h"
#include "kvc_simd.h"

enum {
    GROUP_VECTORS = KVC_GROUP / KVC_LANES,
    MOST_ROWS = 16,    /* of a block */
    MOST_GROUPS = 128, /* of rows, at a time; a multiple of KVC_LANES */
};

/* Whether the numbers of a row of such a block lie side by side: that of a single row, and a tiled one. */
INLINE int lie_together(int rows) { return rows == 1 || rows == KVC_TILED_ROWS; }

/* One row of a block in one group. */
typedef struct row_group {
    const float *x;         /* KVC_GROUP channels */
    unsigned char *numbers; /* where the first four of them go; the next four follow those of the other rows, or these */
    unsigned char *behind;  /* where the scale goes; the other floats follow those of the other rows */
} row_group;

/* The largest magnitude of each of KVC_LANES of them, NaN if one is. */
INLINE f32v largest_of(const row_group *at) {
    f32v largest[KVC_LANES];
    for (int i = 0; i < KVC_LANES; i++) {
        largest[i] = f32v_abs(f32v_load(at[i].x));
        UNROLL
        for (int v = 1; v < GROUP_VECTORS; v++)
            largest[i] = f32v_larger(largest[i], f32v_abs(f32v_load(at[i].x + v * KVC_LANES)));
    }
    return f32v_maxima(largest);
}

/* Puts the numbers of KVC_LANES of them, and into `sums` those of both halves of the channels. */
INLINE void put_numbers(const row_group *at, const float *steps, float most, int rows, int digits, f32v sums[2]) {
    f32v sum[2][KVC_LANES];
    unsigned char bytes[KVC_LANES][2 * KVC_GROUP]; /* of the high digits, then of the low ones */
    ROLLED
    for (int i = 0; i < KVC_LANES; i++) {
        f32v number[GROUP_VECTORS], above[GROUP_VECTORS];
        sum[0][i] = sum[1][i] = f32v_zero();
        UNROLL
        for (int v = 0; v < GROUP_VECTORS; v++) {
            number[v] = f32v_round(f32v_mul(f32v_load(at[i].x + v * KVC_LANES), f32v_set1(steps[i])));
            number[v] = f32v_max(number[v], f32v_set1(-most)); /* instead of NaN */
            f32v *half = &sum[2 * v >= GROUP_VECTORS][i];
            *half = f32v_add(*half, number[v]);
            above[v] = f32v_round(f32v_mul(number[v], f32v_set1(1.0f / 128.0f)));
            if (digits == 2) number[v] = f32v_fma(above[v], f32v_set1(-128.0f), number[v]);
        }
        f32v_store_signed32(bytes[i] + (digits - 1) * KVC_GROUP, number);
        if (digits == 2) f32v_store_signed32(bytes[i], above);
    }
    ROLLED
    for (int i = 0; i < KVC_LANES; i++) {
        if (lie_together(rows)) {
            for (int digit = 0; digit < digits; digit++)
                memcpy(at[i].numbers + digit * rows * KVC_GROUP, bytes[i] + digit * KVC_GROUP, KVC_GROUP);
            continue;
        }
        UNROLL
        for (int unit = 0; unit < KVC_GROUP * digits / 4; unit++)
            memcpy(at[i].numbers + unit * rows * 4, bytes[i] + 4 * unit, 4);
    }
    sums[0] = f32v_sums(sum[0]), sums[1] = f32v_sums(sum[1]); /* exact: below 2^24 */
}

/* Puts correction `part` of KVC_LANES of them. With one digit and no minima the i32 correction is computed as a float: the bits
 * of 1.5 * 2^23 are KVC_SUM_START, and those of a float near it that is larger by 1 are larger by 1. */
INLINE void put_corrections(const row_group *at, f32v scale, f32v sum, int part, int rows, int digits,
                            const kvc_matrix_format_info *info, int zero) {
    float corrections[KVC_LANES];
    const int as_float = info->has_minima || digits == 1;
    const f32v shift = f32v_fma(f32v_set1((float)-zero), sum, f32v_set1(digits == 1 ? 0x1.8p23f : 0.0f)); /* exact */
    f32v_store(corrections, info->has_minima ? f32v_mul(scale, sum) : shift);
    ROLLED
    for (int i = 0; i < KVC_LANES; i++) {
        const int32_t whole = as_float ? 0 : (int32_t)corrections[i];
        memcpy(at[i].behind + 4 * rows * (1 + part), as_float ? (const void *)&corrections[i] : &whole, 4);
    }
}

/* Puts the scales, corrections and `less` of KVC_LANES of them behind the numbers. */
INLINE void put_behind(const row_group *at, f32v scale, const f32v halves[2], int rows, int digits,
                       const kvc_matrix_format_info *info, int zero) {
    float scales[KVC_LANES], less[KVC_LANES];
    const int parts = kvc_scales_per_group(info);
    const f32v own = f32v_mul(scale, f32v_set1(kvc_scale_factor(info)));
    f32v_store(scales, own);
    f32v_store(less, f32v_mul(own, f32v_set1(-0x1.8p23f)));
    for (int part = 0; part < parts; part++) {
        const f32v sum = parts == 2 ? halves[part] : f32v_add(halves[0], halves[1]);
        put_corrections(at, own, sum, part, rows, digits, info, zero);
    }
    ROLLED
    for (int i = 0; i < KVC_LANES; i++) {
        memcpy(at[i].behind, &scales[i], 4);
        if (digits == 1) memcpy(at[i].behind + 4 * rows * (1 + parts), &less[i], 4);
    }
}

/* Puts n of them, a multiple of KVC_LANES. Steps come first: so the processor divides for some while it looks for the
 * largest of others. With a value that is not finite the scale is NaN. With one digit the scale has 22 bits. */
INLINE void put_groups(const row_group *at, int n, int rows, int digits, const kvc_matrix_format_info *info) {
    const float most = digits == 1 ? 127.0f : 127.0f * 128.0f;
    const f32v most_v = f32v_set1(most), infinity = f32v_set1(INFINITY);
    const f32v limit = f32v_set1(digits == 1 ? KVC_LARGEST : INFINITY);
    /* Levels whose dot products take signed weights subtract 128 from bytes themselves (u8x64_weights). */
    const int zero = info->zero == 128 && !KVC_UNSIGNED_WEIGHTS ? 0 : info->zero;
    float steps[MOST_GROUPS], scales[MOST_GROUPS];
    for (int i = 0; i < n; i += KVC_LANES) {
        const f32v largest = largest_of(at + i);
        f32v_store(steps + i, f32v_pick(largest, f32v_set1(0x1p-100f), f32v_zero(), f32v_div(most_v, largest)));
        f32v_store(scales + i, f32v_pick(largest, limit, f32v_div(largest, most_v), f32v_set1(NAN)));
    }
    for (int i = 0; i < n && digits == 1; i++) scales[i] = kvc_float_of_bits(kvc_float_bits(scales[i]) & ~3u);
    for (int i = 0; i < n; i += KVC_LANES) {
        const f32v scale = f32v_load(scales + i);
        f32v halves[2];
        put_numbers(at + i, steps + i, most, rows, digits, halves);
        for (int half = 0; half < 2; half++) halves[half] = f32v_pick(scale, infinity, halves[half], f32v_zero());
        put_behind(at + i, scale, halves, rows, digits, info, zero);
    }
}

INLINE void put_packed(const kvc_matmul_args *args, int64_t first, int rows, int digits, unsigned char *to) {
    static const float zeros[KVC_GROUP];
    const kvc_matrix *matrix = args->matrix;
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    const int64_t whole = matrix->columns / KVC_GROUP, left = matrix->columns % KVC_GROUP;
    const float *x = args->x + first * matrix->columns;
    float last[MOST_ROWS][KVC_GROUP]; /* the channels of a group that has fewer */
    for (int i = 0; i < rows && left; i++) {
        memset(last[i], 0, sizeof last[i]);
        memcpy(last[i], x + i * matrix->columns + whole * KVC_GROUP, (size_t)left * sizeof(float));
    }
    row_group at[MOST_GROUPS];
    int n = 0;
    for (int64_t g = 0; g < matrix->groups; g++) {
        unsigned char *behind = to + (size_t)(KVC_GROUP * digits * rows);
        const float *own = g < whole ? x + g * KVC_GROUP : g == whole && left ? last[0] : zeros;
        const int64_t stride = g < whole ? matrix->columns : g == whole && left ? KVC_GROUP : 0;
        for (int i = 0; i < rows; i++, own += stride) {
            at[n++] = (row_group){own, to + (lie_together(rows) ? KVC_GROUP : 4) * i, behind + 4 * i};
            if (n == MOST_GROUPS) put_groups(at, n, rows, digits, info), n = 0;
        }
        to = behind + kvc_behind_numbers(info, digits) * (size_t)rows;
    }
    for (; n % KVC_LANES; n++) at[n] = at[n - 1];
    put_groups(at, n, rows, digits, info);
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

/* `side` channels of a row side by side. The block has room for more rows where it is a tile: those are zeros. */
INLINE void put_words(const kvc_matmul_args *args, int64_t first, int rows, int room, int side) {
    const int64_t columns = args->matrix->columns;
    for (int64_t block = 0; block < columns; block += KVC_CHANNEL_BLOCK) {
        const int64_t left = columns - block, channels = left < KVC_CHANNEL_BLOCK ? left : KVC_CHANNEL_BLOCK;
        const int64_t filled = (channels + side - 1) / side * side;
        const float *x = args->x + first * columns + block;
        uint16_t *to = (uint16_t *)(void *)args->prepared + block * kvc_prepared_rows(args) + first * filled;
        for (int i = 0; i < room; i++, x += columns, to += side) {
            const int64_t existing = i < rows ? channels : 0;
            int64_t k = 0;
            for (; k + side <= existing; k += side) {
                for (int j = 0; j < side; j++) to[k * room + j] = kvc_bf16_of_float(x[k + j]);
            }
            for (; k < filled; k += side) {
                for (int j = 0; j < side; j++) to[k * room + j] = k + j < existing ? kvc_bf16_of_float(x[k + j]) : 0;
            }
        }
    }
}

/* Prepares rows [first, stop) of x, block by block; first is where a block begins. */
void KVC_OWN(prepare_rows)(const kvc_matmul_args *args, int64_t first, int64_t stop) {
    const size_t row_bytes = kvc_prepared_row_bytes(args);
    const int packed = kvc_in_codes(args), words = kvc_word_channels(args);
    while (first < stop) {
        const int tiled = first < args->tiled || words == KVC_TILE_CHANNELS;
        const int64_t left = args->n - first, room = kvc_prepared_rows(args) - first;
        const int rows = tiled    ? kvc_block_rows(KVC_TILED_ROWS, left)
                         : packed ? kvc_packed_block_rows(KVC_PACKED_ROWS(args->n), args->digits, left)
                                  : kvc_block_rows(KVC_FLOAT_ROWS, left);
        unsigned char *to = args->prepared + (size_t)first * row_bytes;
        if (words == KVC_TILE_CHANNELS)
            put_words(args, first, rows, room < KVC_TILED_ROWS ? (int)room : KVC_TILED_ROWS, KVC_TILE_CHANNELS);
        else if (words == 4)
            put_words(args, first, rows, rows, 4);
        else if (words)
            put_words(args, first, rows, rows, 2);
        else if (!packed)
            put_floats(args, first, rows, args->bf16_rows != KVC_BF16_FLOATS);
        else if (args->digits == 1)
            put_packed(args, first, rows, 1, to);
        else
            put_packed(args, first, rows, 2, to);
        first += rows;
    }
}
