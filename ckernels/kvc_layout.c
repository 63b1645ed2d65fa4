/* kvc_layout.c - how many bytes a block takes, and moving stored tokens from slot to slot. */
#include "kvc.h"

#include <string.h>

static size_t head_bytes(kvc_format format, int block_size, int head_dim) {
    return (size_t)block_size * (size_t)head_dim * (format == KVC_F32 ? 4 : 2);
}

int kvc_layout_init(kvc_layout *layout, int block_size, int num_heads, int head_dim, kvc_format key_format,
                    kvc_format value_format, int rotate_keys, int rotate_values) {
    const int whole = block_size >= 1 && block_size <= KVC_MAX_BLOCK_SIZE && num_heads >= 1 && head_dim >= 8 &&
                      head_dim <= KVC_MAX_HEAD_DIM && head_dim % 8 == 0;
    const int plain = key_format <= KVC_F16 && value_format <= KVC_F16 && !rotate_keys && !rotate_values;
    if (!whole || !plain) return -1;
    layout->block_size = block_size;
    layout->num_heads = num_heads;
    layout->head_dim = head_dim;
    layout->key_format = key_format;
    layout->value_format = value_format;
    layout->rotate_keys = rotate_keys;
    layout->rotate_values = rotate_values;
    layout->key_head_bytes = head_bytes(key_format, block_size, head_dim);
    layout->value_head_bytes = head_bytes(value_format, block_size, head_dim);
    const size_t bytes = (size_t)num_heads * (layout->key_head_bytes + layout->value_head_bytes);
    layout->block_bytes = (bytes + 63) / 64 * 64;
    return 0;
}

void kvc_copy_slots(const kvc_layout *layout, unsigned char *arena, int32_t src_block, int src_slot,
                    int32_t dst_block, int dst_slot, int count) {
    const unsigned char *src = arena + (size_t)src_block * layout->block_bytes;
    unsigned char *dst = arena + (size_t)dst_block * layout->block_bytes;
    for (int side = 0; side < 2; side++) {
        const size_t stride = side ? layout->value_head_bytes : layout->key_head_bytes;
        const size_t row_bytes = stride / (size_t)layout->block_size;
        for (int head = 0; head < layout->num_heads; head++, src += stride, dst += stride) {
            memmove(dst + (size_t)dst_slot * row_bytes, src + (size_t)src_slot * row_bytes, (size_t)count * row_bytes);
        }
    }
}
