/* kvc_quant.h - the layout of quantised rows in a block, and packing of their codes.
 *
 * A row of one head is  minimum + scale * code,  with codes of exactly `bits` bits, and scale >= 0 and minimum in f16.
 *
 * Its head_dim is that of K or that of V, and each side has its own layout.
 *
 * TILES, if block_size is a multiple of 16 and head_dim of 32: 16 tokens of one head, 64-byte aligned.
 *
 *   | 16 scales f16 | 16 minima f16 | codes: head_dim * 16 * bits / 8 bytes |
 *
 *   Codes come in units of 64, so that one 64-byte load feeds integer dot products of 4 bytes per lane:
 *
 *     K  unit g          channels 4g .. 4g+3 of all 16 tokens             byte 4 * token + channel % 4
 *     V  unit 4 cb + tg  tokens 4tg .. 4tg+3 of channels 16cb .. 16cb+15  byte 4 * (channel % 16) + token % 4
 *
 *     K unit 0   | t0: c0 c1 c2 c3 | t1: c0 c1 c2 c3 | ... | t15: c0 c1 c2 c3 |   one 32-bit lane per token
 *     V unit 0   | c0: t0 t1 t2 t3 | c1: t0 t1 t2 t3 | ... | c15: t0 t1 t2 t3 |   one 32-bit lane per channel
 *
 *   Neighbouring units share bytes; U0 is unit 0, and so on:
 *
 *     q8   64 bytes of U0 | U1 | ...
 *     q4   64 bytes of (U1 << 4 | U0) | (U3 << 4 | U2) | ...
 *     q2   64 bytes of (U3 << 6 | U2 << 4 | U1 << 2 | U0) | ...
 *     q3   low two bits of U0-U3 as q2 | of U4-U7 | third bits: U7 << 7 | ... | U1 << 1 | U0
 *
 * ROWS, for all other sizes, slot by slot and unaligned:
 *
 *   | scale f16 | minimum f16 | codes, the first in the lowest bits |
 *
 * In both layouts a row takes head_dim * bits / 8 + 4 bytes per head.
 */
#ifndef KVC_QUANT_H
#define KVC_QUANT_H

#include "kvc.h"

#include <string.h>

enum { KVC_TILE = 16, KVC_UNIT = 64, KVC_TILE_HEADER = 2 * KVC_TILE * 2 };
_Static_assert(KVC_TILE_HEADER == KVC_UNIT, "scales and minima fill one unit, so units stay 64-byte aligned");

typedef enum kvc_side { KVC_KEYS, KVC_VALUES } kvc_side;

/* One side of a layout: the format and order of its rows. */
typedef struct kvc_rows {
    kvc_format format;
    int bits, quantised; /* of the format */
    int tiled;
    int rotated;
    int dim;
    kvc_side side;
} kvc_rows;

static inline kvc_rows kvc_rows_of(const kvc_layout *layout, kvc_side side) {
    const kvc_format format = side == KVC_KEYS ? layout->key_format : layout->value_format;
    const int rotated = side == KVC_KEYS ? layout->rotate_keys : layout->rotate_values;
    const int bits = kvc_format_of(format)->bits, quantised = kvc_format_of(format)->quantised;
    const int dim = side == KVC_KEYS ? layout->head_dim : layout->value_head_dim;
    const int tiled = quantised && layout->block_size % KVC_TILE == 0 && dim % 32 == 0;
    return (kvc_rows){format, bits, quantised, tiled, rotated, dim, side};
}

static inline size_t kvc_row_bytes(kvc_rows rows) {
    return (size_t)(rows.dim * rows.bits / 8) + (rows.quantised ? 4 : 0);
}

static inline size_t kvc_tile_bytes(kvc_rows rows) { return KVC_TILE * kvc_row_bytes(rows); }

/* Unpacks the codes of one tile to bytes, unit by unit: head_dim / 4 units. The loops run over 64 bytes from advancing
 * pointers: an index that might wrap around (-fwrapv, which Python builds with) prevents vectorisation. */
static inline void kvc_unpack_units(int bits, int dim, const unsigned char *restrict packed,
                                    unsigned char *restrict units) {
    const unsigned char *end = units + dim * KVC_TILE;
    if (bits == 8) {
        memcpy(units, packed, (size_t)(dim * KVC_TILE));
    } else if (bits == 4) {
        for (; units < end; units += 2 * KVC_UNIT, packed += KVC_UNIT) {
            for (int i = 0; i < KVC_UNIT; i++)
                units[i] = packed[i] & 15, units[KVC_UNIT + i] = packed[i] >> 4;
        }
    } else if (bits == 2) {
        for (; units < end; packed += KVC_UNIT) {
            for (int n = 0; n < 4; n++, units += KVC_UNIT) {
                for (int i = 0; i < KVC_UNIT; i++) units[i] = packed[i] >> 2 * n & 3;
            }
        }
    } else {
        for (; units < end; packed += 3 * KVC_UNIT) {
            const unsigned char *high = packed + 2 * KVC_UNIT;
            for (int n = 0; n < 8; n++, units += KVC_UNIT) {
                const unsigned char *low = packed + n / 4 * KVC_UNIT;
                for (int i = 0; i < KVC_UNIT; i++)
                    units[i] = (unsigned char)((low[i] >> n % 4 * 2 & 3) | (high[i] >> n & 1) << 2);
            }
        }
    }
}

/* Packs the low 2 bits of each of 4 units into 64 bytes. */
static inline void kvc_pack_twos(const unsigned char *restrict units, unsigned char *restrict packed) {
    for (int i = 0; i < KVC_UNIT; i++) {
        packed[i] = (unsigned char)((units[i] & 3) | (units[KVC_UNIT + i] & 3) << 2 |
                                    (units[2 * KVC_UNIT + i] & 3) << 4 | units[3 * KVC_UNIT + i] << 6);
    }
}

/* Packs the third bit of each of 8 units into 64 bytes. */
static inline void kvc_pack_thirds(const unsigned char *restrict units, unsigned char *restrict packed) {
    for (int i = 0; i < KVC_UNIT; i++) {
        const unsigned char *u = units + i;
        packed[i] = (unsigned char)((u[0] & 4) >> 2 | (u[KVC_UNIT] & 4) >> 1 | (u[2 * KVC_UNIT] & 4) |
                                    (u[3 * KVC_UNIT] & 4) << 1 | (u[4 * KVC_UNIT] & 4) << 2 |
                                    (u[5 * KVC_UNIT] & 4) << 3 | (u[6 * KVC_UNIT] & 4) << 4 |
                                    (u[7 * KVC_UNIT] & 4) << 5);
    }
}

static inline void kvc_pack_units(int bits, int dim, const unsigned char *restrict units,
                                  unsigned char *restrict packed) {
    const unsigned char *end = units + dim * KVC_TILE;
    if (bits == 8) {
        memcpy(packed, units, (size_t)(dim * KVC_TILE));
    } else if (bits == 4) {
        for (; units < end; units += 2 * KVC_UNIT, packed += KVC_UNIT) {
            for (int i = 0; i < KVC_UNIT; i++)
                packed[i] = (unsigned char)(units[i] | units[KVC_UNIT + i] << 4);
        }
    } else if (bits == 2) {
        for (; units < end; units += 4 * KVC_UNIT, packed += KVC_UNIT) kvc_pack_twos(units, packed);
    } else {
        for (; units < end; units += 8 * KVC_UNIT, packed += 3 * KVC_UNIT) {
            kvc_pack_twos(units, packed);
            kvc_pack_twos(units + 4 * KVC_UNIT, packed + KVC_UNIT);
            kvc_pack_thirds(units, packed + 2 * KVC_UNIT);
        }
    }
}

/* Extracts the codes of token t, head_dim bytes, from units. */
static inline void kvc_codes_of_units(kvc_side side, int dim, const unsigned char *units, int t,
                                      unsigned char *codes) {
    if (side == KVC_KEYS) {
        for (int g = 0; g < dim / 4; g++) memcpy(codes + 4 * g, units + g * KVC_UNIT + 4 * t, 4);
    } else {
        const int blocks = dim / 16 < KVC_MAX_HEAD_DIM / 16 ? dim / 16 : KVC_MAX_HEAD_DIM / 16;
        for (int cb = 0; cb < blocks; cb++) { /* the bound avoids a warning of gcc about a 17th block */
            const unsigned char *unit = units + (4 * cb + t / 4) * KVC_UNIT + t % 4;
            for (int c = 0; c < 16; c++) codes[16 * cb + c] = unit[4 * c];
        }
    }
}

/* Arranges the codes of 16 tokens, given as [channel][token], as units. */
static inline void kvc_units_of_codes(kvc_side side, int dim, const unsigned char *codes,
                                      unsigned char *restrict units) {
    if (side == KVC_KEYS) {
        for (int d = 0; d < dim; d += 4, units += KVC_UNIT) {
            const unsigned char *c0 = codes + d * KVC_TILE, *c1 = c0 + KVC_TILE, *c2 = c1 + KVC_TILE,
                                *c3 = c2 + KVC_TILE;
            uint32_t fours[KVC_TILE]; /* little-endian, as the whole layout */
            for (int t = 0; t < KVC_TILE; t++)
                fours[t] = c0[t] | (uint32_t)c1[t] << 8 | (uint32_t)c2[t] << 16 | (uint32_t)c3[t] << 24;
            memcpy(units, fours, sizeof fours);
        }
        return;
    }
    for (int d = 0; d < dim; d += 16, units += 4 * KVC_UNIT) {
        for (int c = 0; c < 16; c++) {
            for (int tg = 0; tg < 4; tg++)
                memcpy(units + tg * KVC_UNIT + 4 * c, codes + (d + c) * KVC_TILE + 4 * tg, 4);
        }
    }
}

/* The unit of code d of token t, and its byte in the unit. */
static inline int kvc_code_unit(kvc_side side, int d, int t) {
    return side == KVC_KEYS ? d / 4 : d / 16 * 4 + t / 4;
}
static inline int kvc_code_byte(kvc_side side, int d, int t) {
    return side == KVC_KEYS ? 4 * t + d % 4 : 4 * (d % 16) + t % 4;
}

/* Stores the codes of row `row` as those of token t. */
static inline void kvc_codes_into_units(kvc_side side, int dim, const unsigned char *codes, int row, int t,
                                        unsigned char *units) {
    for (int d = 0; d < dim; d++)
        units[kvc_code_unit(side, d, t) * KVC_UNIT + kvc_code_byte(side, d, t)] = codes[d * KVC_TILE + row];
}

static inline int kvc_get_bits(const unsigned char *byte, int shift, int bits) {
    return *byte >> shift & ((1 << bits) - 1);
}
/* Reads the codes of one token; for one or two tokens this is faster than unpacking the tile. */
static inline void kvc_get_tile_codes(kvc_rows rows, const unsigned char *packed, int t,
                                      unsigned char *codes) {
    for (int d = 0; d < rows.dim; d++) {
        const int unit = kvc_code_unit(rows.side, d, t);
        const unsigned char *at = packed + kvc_code_byte(rows.side, d, t);
        if (rows.bits == 3) {
            at += unit / 8 * 3 * KVC_UNIT;
            codes[d] = (unsigned char)(kvc_get_bits(at + unit % 8 / 4 * KVC_UNIT, unit % 4 * 2, 2) |
                                       kvc_get_bits(at + 2 * KVC_UNIT, unit % 8, 1) << 2);
        } else {
            const int together = 8 / rows.bits;
            at += unit / together * KVC_UNIT;
            codes[d] = (unsigned char)kvc_get_bits(at, unit % together * rows.bits, rows.bits);
        }
    }
}

/* Stores `bits` bits of each of 16 codes, from bit `from` on, in 16 words at bit `shift`. */
static inline void kvc_put_words(unsigned char *packed, int shift, int bits, const unsigned char *codes,
                                 int from) {
    const uint32_t ones = (1u << bits) - 1, others = ~(ones << shift);
    uint32_t words[16];
    memcpy(words, packed, sizeof words);
    for (int c = 0; c < 16; c++) words[c] = (words[c] & others) | (codes[c] >> from & ones) << shift;
    memcpy(packed, words, sizeof words);
}

/* Stores `bits` bits, from bit `from` on, of 4 codes of each of n units side by side. */
static inline void kvc_put_fours(unsigned char *packed, int n, int bits, const unsigned char *codes,
                                 int from) {
    const uint32_t ones = ((1u << bits) - 1) * 0x01010101u;
    uint32_t all = 0, four;
    for (int u = 0; u < n; u++) {
        memcpy(&four, codes + 4 * u, 4);
        all |= (four >> from & ones) << u * bits;
    }
    memcpy(packed, &all, 4);
}

/* Writes the codes of one token: its 4 bytes of each unit (K) or its bits of each word (V). All other bits are kept. */
static inline void kvc_put_tile_codes(kvc_rows rows, const unsigned char *codes, int t,
                                      unsigned char *packed) {
    const int bits = rows.bits, together = bits == 3 ? 4 : 8 / bits,
              group = 4 * together; /* codes of 64 bytes */
    for (int d = 0; rows.side == KVC_KEYS && d < rows.dim; d += group, packed += KVC_UNIT) {
        kvc_put_fours(packed + 4 * t, together, bits == 3 ? 2 : bits, codes + d, 0);
        if (bits == 3 && d % 32 == 16) {
            packed += KVC_UNIT;
            kvc_put_fours(packed + 4 * t, 8, 1, codes + d - 16, 2);
        }
    }
    for (int d = 0; rows.side == KVC_VALUES && d < rows.dim; d += 16) {
        const int unit = kvc_code_unit(KVC_VALUES, d, t), byte = t % 4 * 8;
        if (bits == 3) {
            unsigned char *at = packed + unit / 8 * 3 * KVC_UNIT;
            kvc_put_words(at + unit % 8 / 4 * KVC_UNIT, byte + unit % 4 * 2, 2, codes + d, 0);
            kvc_put_words(at + 2 * KVC_UNIT, byte + unit % 8, 1, codes + d, 2);
        } else {
            kvc_put_words(packed + unit / together * KVC_UNIT, byte + unit % together * bits, bits, codes + d,
                          0);
        }
    }
}

/* Unpacks an untiled row: the first code is in the lowest bits, 8 codes take `bits` bytes. */
static inline void kvc_unpack_row(int bits, int dim, const unsigned char *packed, unsigned char *codes) {
    for (int d = 0; d < dim; d += 8, packed += bits, codes += 8) {
        uint64_t word = 0;
        memcpy(&word, packed, (size_t)bits);
        for (int i = 0; i < 8; i++) codes[i] = (unsigned char)(word >> i * bits & ((1u << bits) - 1));
    }
}

static inline void kvc_pack_row(int bits, int dim, const unsigned char *codes, unsigned char *packed) {
    for (int d = 0; d < dim; d += 8, packed += bits, codes += 8) {
        uint64_t word = 0;
        for (int i = 0; i < 8; i++) word |= (uint64_t)codes[i] << i * bits;
        memcpy(packed, &word, (size_t)bits);
    }
}

#endif
