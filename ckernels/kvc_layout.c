/* kvc_layout.c - how many bytes a block takes, and moving stored tokens from slot to slot. */
#include "kvc_quant.h"

int kvc_layout_init(kvc_layout *layout, int block_size, int num_heads, int head_dim, kvc_format key_format,
                    kvc_format value_format, int rotate_keys, int rotate_values) {
    const int whole = block_size >= 1 && block_size <= KVC_MAX_BLOCK_SIZE && num_heads >= 1 &&
                      head_dim >= 8 && head_dim <= KVC_MAX_HEAD_DIM && head_dim % 8 == 0;
    const int known = (unsigned)key_format <= KVC_Q2 && (unsigned)value_format <= KVC_Q2;
    if (!whole || !known) return -1;
    const int power_of_two = (head_dim & (head_dim - 1)) == 0;
    if (rotate_keys && (key_format < KVC_Q8 || !power_of_two)) return -1;
    if (rotate_values && (value_format < KVC_Q8 || !power_of_two)) return -1;
    layout->block_size = block_size;
    layout->num_heads = num_heads;
    layout->head_dim = head_dim;
    layout->key_format = key_format;
    layout->value_format = value_format;
    layout->rotate_keys = rotate_keys != 0;
    layout->rotate_values = rotate_values != 0;
    const size_t k_bytes = (size_t)block_size * kvc_row_bytes(kvc_rows_of(layout, KVC_KEYS));
    const size_t v_bytes = (size_t)block_size * kvc_row_bytes(kvc_rows_of(layout, KVC_VALUES));
    layout->key_head_bytes = (k_bytes + 3) / 4 * 4; /* so that floats behind odd rows stay aligned */
    layout->value_head_bytes = (v_bytes + 3) / 4 * 4;
    const size_t bytes = (size_t)num_heads * (layout->key_head_bytes + layout->value_head_bytes);
    layout->block_bytes = (bytes + 63) / 64 * 64;
    return 0;
}

/* One code of a tile; codes of 3 bits are two low bits and one of another unit (kvc_quant.h draws them). */
static int tile_code(int bits, const unsigned char *packed, int unit, int byte) {
    if (bits == 8) return packed[unit * KVC_UNIT + byte];
    if (bits == 4) return packed[unit / 2 * KVC_UNIT + byte] >> unit % 2 * 4 & 15;
    if (bits == 2) return packed[unit / 4 * KVC_UNIT + byte] >> unit % 4 * 2 & 3;
    const unsigned char *eight = packed + unit / 8 * 3 * KVC_UNIT;
    const int low = eight[unit % 8 / 4 * KVC_UNIT + byte] >> unit % 4 * 2 & 3,
              high = eight[2 * KVC_UNIT + byte] >> unit % 8;
    return low | (high & 1) << 2;
}

static void put_bits(unsigned char *byte, int shift, int bits, int value) {
    const int mask = ((1 << bits) - 1) << shift;
    *byte = (unsigned char)((*byte & ~mask) | value << shift);
}

static void put_tile_code(int bits, unsigned char *packed, int unit, int byte, int code) {
    unsigned char *eight = packed + unit / 8 * 3 * KVC_UNIT;
    if (bits == 8) packed[unit * KVC_UNIT + byte] = (unsigned char)code;
    if (bits == 4) put_bits(packed + unit / 2 * KVC_UNIT + byte, unit % 2 * 4, 4, code);
    if (bits == 2) put_bits(packed + unit / 4 * KVC_UNIT + byte, unit % 4 * 2, 2, code);
    if (bits == 3) put_bits(eight + unit % 8 / 4 * KVC_UNIT + byte, unit % 4 * 2, 2, code & 3);
    if (bits == 3) put_bits(eight + 2 * KVC_UNIT + byte, unit % 8, 1, code >> 2);
}

static void copy_tile_slot(kvc_rows rows, unsigned char *dst_head, int dst_slot,
                           const unsigned char *src_head, int src_slot) {
    const unsigned char *src = src_head + (size_t)(src_slot / KVC_TILE) * kvc_tile_bytes(rows);
    unsigned char *dst = dst_head + (size_t)(dst_slot / KVC_TILE) * kvc_tile_bytes(rows);
    const int from = src_slot % KVC_TILE, to = dst_slot % KVC_TILE;
    memcpy(dst + 2 * to, src + 2 * from, 2);
    memcpy(dst + 2 * (KVC_TILE + to), src + 2 * (KVC_TILE + from), 2);
    for (int d = 0; d < rows.dim; d++) {
        const int keys = rows.side == KVC_KEYS;
        const int src_unit = keys ? d / 4 : d / 16 * 4 + from / 4,
                  src_byte = keys ? 4 * from + d % 4 : d % 16 * 4 + from % 4;
        const int dst_unit = keys ? d / 4 : d / 16 * 4 + to / 4,
                  dst_byte = keys ? 4 * to + d % 4 : d % 16 * 4 + to % 4;
        const int code = tile_code(rows.bits, src + KVC_TILE_HEADER, src_unit, src_byte);
        put_tile_code(rows.bits, dst + KVC_TILE_HEADER, dst_unit, dst_byte, code);
    }
}

static void copy_head(kvc_rows rows, unsigned char *dst, int dst_slot, const unsigned char *src, int src_slot,
                      int count) {
    const size_t row = kvc_row_bytes(rows);
    if (!rows.tiled) {
        memmove(dst + (size_t)dst_slot * row, src + (size_t)src_slot * row, (size_t)count * row);
        return;
    }
    const int whole = src_slot % KVC_TILE == 0 && dst_slot % KVC_TILE == 0 ? count / KVC_TILE * KVC_TILE : 0;
    const int backwards = dst == src && dst_slot > src_slot;
    if (whole && !backwards)
        memmove(dst + (size_t)dst_slot * row, src + (size_t)src_slot * row, (size_t)whole * row);
    for (int i = backwards ? 0 : whole; i < count; i++) {
        const int at = backwards ? count - 1 - i : i;
        copy_tile_slot(rows, dst, dst_slot + at, src, src_slot + at);
    }
}

void kvc_copy_slots(const kvc_layout *layout, unsigned char *arena, int32_t src_block, int src_slot,
                    int32_t dst_block, int dst_slot, int count) {
    unsigned char *src = arena + (size_t)src_block * layout->block_bytes;
    unsigned char *dst = arena + (size_t)dst_block * layout->block_bytes;
    for (int side = KVC_KEYS; side <= KVC_VALUES; side++) {
        const kvc_rows rows = kvc_rows_of(layout, (kvc_side)side);
        const size_t stride = side == KVC_KEYS ? layout->key_head_bytes : layout->value_head_bytes;
        for (int head = 0; head < layout->num_heads; head++, src += stride, dst += stride) {
            copy_head(rows, dst, dst_slot, src, src_slot, count);
        }
    }
}
