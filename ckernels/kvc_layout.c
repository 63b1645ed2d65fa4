/* kvc_layout.c - the size of a block, and copying and clearing of slots. */
#include "kvc_quant.h"

static int is_supported(int dim, int latent) {
    return dim >= 8 && dim <= (latent ? KVC_MAX_HEAD_DIM : KVC_MOST_CHANNELS) && dim % 8 == 0;
}

/* Quantised rows can be rotated if their length is a power of two; latent ones by parts of at least 16 channels. */
static int can_rotate(kvc_format format, int dim, int latent) {
    return kvc_format_of(format)->quantised && (latent ? dim % 16 == 0 : (dim & (dim - 1)) == 0);
}

int kvc_layout_init(kvc_layout *layout, int block_size, int num_heads, int head_dim, int value_head_dim,
                    kvc_format key_format, kvc_format value_format, int rotate_keys, int rotate_values, int latent) {
    const int whole = block_size >= 1 && block_size <= KVC_MAX_BLOCK_SIZE && num_heads >= 1 &&
                      is_supported(head_dim, latent) && is_supported(value_head_dim, latent);
    const int known = (unsigned)key_format < KVC_NUM_FORMATS && (unsigned)value_format < KVC_NUM_FORMATS;
    if (!whole || !known) return -1;
    if (rotate_keys && !can_rotate(key_format, head_dim, latent)) return -1;
    if (rotate_values && !can_rotate(value_format, value_head_dim, latent)) return -1;
    const int alike = key_format == value_format && !rotate_keys == !rotate_values;
    if (latent && (num_heads != 1 || value_head_dim > head_dim || !alike)) return -1;
    layout->block_size = block_size;
    layout->num_heads = num_heads;
    layout->head_dim = head_dim;
    layout->value_head_dim = value_head_dim;
    layout->key_format = key_format;
    layout->value_format = value_format;
    layout->rotate_keys = rotate_keys != 0;
    layout->rotate_values = rotate_values != 0;
    layout->latent = latent != 0;
    const size_t k_bytes = (size_t)block_size * kvc_row_bytes(kvc_rows_of(layout, KVC_KEYS));
    const size_t v_bytes = (size_t)block_size * kvc_row_bytes(kvc_rows_of(layout, KVC_VALUES));
    layout->key_head_bytes = (k_bytes + 3) / 4 * 4; /* keeps floats behind rows of odd size aligned */
    layout->value_head_bytes = latent ? 0 : (v_bytes + 3) / 4 * 4;
    const size_t bytes = (size_t)num_heads * (layout->key_head_bytes + layout->value_head_bytes);
    layout->block_bytes = (bytes + 63) / 64 * 64;
    return 0;
}

static void copy_tile_slot(kvc_rows rows, unsigned char *dst_head, int dst_slot,
                           const unsigned char *src_head, int src_slot) {
    const unsigned char *src = src_head + (size_t)(src_slot / KVC_TILE) * kvc_tile_bytes(rows);
    unsigned char *dst = dst_head + (size_t)(dst_slot / KVC_TILE) * kvc_tile_bytes(rows);
    const int from = src_slot % KVC_TILE, to = dst_slot % KVC_TILE;
    unsigned char codes[KVC_MAX_HEAD_DIM];
    memcpy(dst + 2 * to, src + 2 * from, 2);
    memcpy(dst + 2 * (KVC_TILE + to), src + 2 * (KVC_TILE + from), 2);
    kvc_get_tile_codes(rows, src + KVC_TILE_HEADER, from, codes);
    kvc_put_tile_codes(rows, codes, to, dst + KVC_TILE_HEADER);
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

void kvc_copy_slots(const kvc_layout *layout, const unsigned char *src_arena, int32_t src_block, int src_slot,
                    unsigned char *dst_arena, int32_t dst_block, int dst_slot, int count) {
    const unsigned char *src = src_arena + (size_t)src_block * layout->block_bytes;
    unsigned char *dst = dst_arena + (size_t)dst_block * layout->block_bytes;
    if (src == dst && src_slot == dst_slot) return; /* memcpy must not be given one place twice */
    for (int side = KVC_KEYS; side <= (layout->latent ? KVC_KEYS : KVC_VALUES); side++) {
        const kvc_rows rows = kvc_rows_of(layout, (kvc_side)side);
        const size_t stride = side == KVC_KEYS ? layout->key_head_bytes : layout->value_head_bytes;
        for (int head = 0; head < layout->num_heads; head++, src += stride, dst += stride) {
            copy_head(rows, dst, dst_slot, src, src_slot, count);
        }
    }
}

/* Sets scale and minimum to 0, which makes the row zero whatever its codes. */
static void clear_head(kvc_rows rows, unsigned char *head, int slot, int count) {
    const size_t row = kvc_row_bytes(rows);
    if (!rows.tiled) {
        memset(head + (size_t)slot * row, 0, (size_t)count * row);
        return;
    }
    for (int i = slot; i < slot + count; i++) {
        unsigned char *tile = head + (size_t)(i / KVC_TILE) * kvc_tile_bytes(rows);
        memset(tile + 2 * (i % KVC_TILE), 0, 2);
        memset(tile + 2 * (KVC_TILE + i % KVC_TILE), 0, 2);
    }
}

void kvc_clear_slots(const kvc_layout *layout, unsigned char *arena, int32_t block, int slot, int count) {
    unsigned char *head = arena + (size_t)block * layout->block_bytes;
    for (int side = KVC_KEYS; side <= (layout->latent ? KVC_KEYS : KVC_VALUES); side++) {
        const kvc_rows rows = kvc_rows_of(layout, (kvc_side)side);
        const size_t stride = side == KVC_KEYS ? layout->key_head_bytes : layout->value_head_bytes;
        for (int i = 0; i < layout->num_heads; i++, head += stride) clear_head(rows, head, slot, count);
    }
}
