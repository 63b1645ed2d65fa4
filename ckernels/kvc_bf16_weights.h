/* kvc_bf16_weights.h - weights of any format as bf16, for products with x in bf16 (kvc_matrix.h).
 *
 * A weight is the float that the matrix reads as (kvc_matrix_get_row), rounded half to even. A block of channels is changed once for
 * all rows of a chunk. A group of a panel becomes floats, then what the instructions of the product take: `put` of rounded_panels.
 */
#ifndef KVC_BF16_WEIGHTS_H
#define KVC_BF16_WEIGHTS_H

#include "kvc_half.h"
#include "kvc_matmul_blocks.h"
#include "kvc_packed.h"

enum { GROUP_WEIGHTS = KVC_GROUP * KVC_PANEL };

/* Group `group` of a panel, from the begin of a block of channels on: [channel][16]. Packed ones have all of their channels. */
typedef void group_fn(kvc_table, const unsigned char *data, int64_t group, int channels, float *to);

INLINE void read_packed(kvc_matrix_format format, kvc_table numbers, const unsigned char *data, int64_t group, float *to) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(format);
    const int together = kvc_groups_per_record(info), parts = kvc_scales_per_group(info), inside = (int)(group % together);
    const unsigned char *record = data + (size_t)(group / together) * kvc_record_bytes(info);
    const unsigned char *codes = record + kvc_header_bytes(info) + (size_t)inside * kvc_group_code_bytes(info);
    const u8x64 table = u8x64_table(kvc_table_of(numbers));
    const int units = GROUP_UNITS / parts;
    UNROLL
    for (int part = 0; part < parts; part++) {
        f32v scales[KVC_VECTORS], minima[KVC_VECTORS];
        UNROLL
        for (int v = 0; v < KVC_VECTORS; v++) {
            scales[v] = scales_times(info, record, inside * parts + part, v, kvc_scale_factor(info));
            minima[v] = info->has_minima ? minima_of(info, record, inside * parts + part, v) : f32v_zero();
        }
        UNROLL
        for (int u = 0; u < units; u++) {
            const int unit = part * units + u;
            const u8x64 found = unit_of(codes, info->bits, unit), own = info->table ? u8x64_lookup(table, found) : found;
            UNROLL
            for (int n = 0; n < 4; n++) {
                f32v weights[KVC_VECTORS];
                u8x64_floats(own, info->zero, n, weights);
                UNROLL
                for (int v = 0; v < KVC_VECTORS; v++) {
                    weights[v] = f32v_mul(scales[v], weights[v]);
                    if (info->has_minima) weights[v] = f32v_add(minima[v], weights[v]);
                    f32v_store(to + (4 * unit + n) * KVC_PANEL + v * KVC_LANES, weights[v]);
                }
            }
        }
    }
}

#define READ(format)                                                                                                     \
    NOINLINE void read_##format(kvc_table numbers, const unsigned char *data, int64_t group, int channels, float *to) {  \
        (void)channels;                                                                                                  \
        read_packed(KVC_MATRIX_##format, numbers, data, group, to);                                                      \
    }
PACKED_FORMATS(READ)

#define READ_FLOATS(format, type, load)                                                                                  \
    NOINLINE void read_##format(kvc_table numbers, const unsigned char *data, int64_t group, int channels, float *to) {  \
        const type *from = (const type *)(const void *)data + group * GROUP_WEIGHTS;                                     \
        (void)numbers;                                                                                                   \
        for (int at = 0; at < channels * KVC_PANEL; at += KVC_LANES) f32v_store(to + at, load(from + at));               \
    }
READ_FLOATS(F32, float, f32v_load)
READ_FLOATS(F16, uint16_t, f32v_load_half)

#define READ_LINE(format) [KVC_MATRIX_##format] = read_##format,
static group_fn *const read_group[KVC_NUM_MATRIX_FORMATS] = {
    PACKED_FORMATS(READ_LINE) READ_LINE(F32) READ_LINE(F16)[KVC_MATRIX_IQ3_S] = read_IQ4_XS,
    [KVC_MATRIX_IQ3_XXS] = read_IQ4_XS,
};

/* Panels of a block of channels, `bytes` for each weight: whole groups, zeros behind the last channel. */
INLINE block rounded_panels(kvc_matrix_format format, block weights, int64_t panels, size_t ahead, size_t bytes,
                            void (*put)(const float *group, void *to), float *to) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(format);
    const int64_t groups = (weights.channels + KVC_GROUP - 1) / KVC_GROUP;
    const size_t read = info->packed ? kvc_record_bytes(info) / (size_t)kvc_groups_per_record(info)
                                     : (size_t)(GROUP_WEIGHTS * info->bits / 8);
    unsigned char *at = (unsigned char *)to;
    for (int64_t p = 0; p < panels; p++) {
        const unsigned char *from = weights.data + (size_t)p * weights.stride;
        for (int64_t g = 0; g < groups; g++, at += GROUP_WEIGHTS * bytes) {
            _Alignas(64) float group[GROUP_WEIGHTS];
            const int64_t left = weights.channels - g * KVC_GROUP;
            const int channels = left < KVC_GROUP ? (int)left : KVC_GROUP;
            for (size_t line = 0; line < read; line += 64) __builtin_prefetch(from + (size_t)g * read + ahead + line, 0, 2);
            read_group[format](info->table, from, g, channels, group);
            memset(group + channels * KVC_PANEL, 0, (size_t)((KVC_GROUP - channels) * KVC_PANEL) * sizeof *group);
            put(group, at);
        }
    }
    return (block){(const unsigned char *)to, (size_t)groups * GROUP_WEIGHTS * bytes, weights.channels};
}

INLINE void put_words(const float *group, void *to) {
    uint16_t *words = to;
    for (int i = 0; i < GROUP_WEIGHTS; i++) words[i] = kvc_bf16_of_float(group[i]);
}

#endif
