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
 *
 *   Codes of 6, 5 and 3 bits lie in two parts, first the low 4 or 2 bits, then the others:
 *
 *     q6   low four bits of U0, U1 as q4 | of U2, U3 | high two bits of U0-U3 as q2
 *     q5   low four bits of U0, U1 as q4 | .. | of U6, U7 | fifth bits: U7 << 7 | ... | U1 << 1 | U0
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
    int rotated; /* channels of each rotated part of a row; 0: none is */
    int dim;
    kvc_side side;
} kvc_rows;

static inline kvc_rows kvc_rows_of(const kvc_layout *layout, kvc_side side) {
    const kvc_format format = side == KVC_KEYS ? layout->key_format : layout->value_format;
    const int rotate = side == KVC_KEYS ? layout->rotate_keys : layout->rotate_values;
    const int bits = kvc_format_of(format)->bits, quantised = kvc_format_of(format)->quantised;
    const int dim = side == KVC_KEYS ? layout->head_dim : layout->value_head_dim;
    const int dims = layout->latent ? layout->head_dim | layout->value_head_dim : dim; /* whose divisors both sides share */
    const int tiled = quantised && layout->block_size % KVC_TILE == 0 && dims % 32 == 0;
    const int rotated = rotate ? dims & -dims : 0; /* the largest power of two that divides them */
    return (kvc_rows){format, bits, quantised, tiled, rotated, dim, side};
}

static inline size_t kvc_row_bytes(kvc_rows rows) {
    return (size_t)(rows.dim * rows.bits / 8) + (rows.quantised ? 4 : 0);
}

static inline size_t kvc_tile_bytes(kvc_rows rows) { return KVC_TILE * kvc_row_bytes(rows); }

/* The bytes of a block before V of its first head. */
static inline size_t kvc_values_at(const kvc_layout *layout) {
    return layout->latent ? 0 : (size_t)layout->num_heads * layout->key_head_bytes;
}

/* The bits of the first part of a code; the second part has the others. */
INLINE int kvc_low_bits(int bits) { return bits == 6 || bits == 5 ? 4 : bits == 3 ? 2 : bits; }

/* The units that share bytes, and their bytes; those of the first parts. */
INLINE int kvc_units_together(int bits) {
    return 8 / (kvc_low_bits(bits) < bits ? bits - kvc_low_bits(bits) : bits);
}
INLINE int kvc_bytes_together(int bits) { return kvc_units_together(bits) * bits / 8 * KVC_UNIT; }
INLINE int kvc_low_bytes(int bits) { return kvc_units_together(bits) * kvc_low_bits(bits) / 8 * KVC_UNIT; }

/* Where the first part of unit n is among those that share bytes, and its lowest bit there. */
INLINE int kvc_low_at(int bits, int n) { return n * kvc_low_bits(bits) / 8 * KVC_UNIT; }
INLINE int kvc_low_shift(int bits, int n) { return n * kvc_low_bits(bits) % 8; }

/* Unpacks and packs the codes of one tile, unit by unit: head_dim / 4 units. bits is constant. The loops run over 64
 * bytes from advancing pointers: an index that might wrap around (-fwrapv, which Python builds with) prevents
 * vectorisation. */
INLINE void kvc_unpack_parts(int bits, int dim, const unsigned char *restrict packed,
                             unsigned char *restrict units) {
    const unsigned char *end = units + dim * KVC_TILE;
    const int low = kvc_low_bits(bits), high = bits - low, together = kvc_units_together(bits);
    for (; units < end; packed += kvc_bytes_together(bits)) {
        const unsigned char *second = packed + kvc_low_bytes(bits);
        _Pragma("GCC unroll 8") /* which makes shifts constant */
        for (int n = 0; n < together; n++, units += KVC_UNIT) {
            const unsigned char *first = packed + kvc_low_at(bits, n);
            const int shift = kvc_low_shift(bits, n);
            for (int i = 0; i < KVC_UNIT; i++) units[i] = first[i] >> shift & ((1 << low) - 1);
            if (low == bits) continue;
            for (int i = 0; i < KVC_UNIT; i++) units[i] |= (second[i] >> n * high & ((1 << high) - 1)) << low;
        }
    }
}

/* Packs `width` bits, from bit `from` on, of 8 / width units into 64 bytes. */
INLINE void kvc_pack_part(int width, int from, const unsigned char *restrict units,
                          unsigned char *restrict packed) {
    for (int i = 0; i < KVC_UNIT; i++) {
        int byte = 0;
        for (int n = 0; n < 8 / width; n++) {
            const int part = units[n * KVC_UNIT + i] & ((1 << width) - 1) << from, left = n * width - from;
            byte |= left < 0 ? part >> -left : part << left;
        }
        packed[i] = (unsigned char)byte;
    }
}

INLINE void kvc_pack_parts(int bits, int dim, const unsigned char *restrict units,
                           unsigned char *restrict packed) {
    const unsigned char *end = units + dim * KVC_TILE;
    const int low = kvc_low_bits(bits), together = kvc_units_together(bits);
    if (bits == 8) { /* the loop below takes four times as long */
        memcpy(packed, units, (size_t)(dim * KVC_TILE));
        return;
    }
    for (; units < end; units += together * KVC_UNIT) {
        for (int n = 0; n < together; n += 8 / low, packed += KVC_UNIT)
            kvc_pack_part(low, 0, units + n * KVC_UNIT, packed);
        if (low < bits) {
            kvc_pack_part(bits - low, low, units, packed);
            packed += KVC_UNIT;
        }
    }
}

static inline void kvc_unpack_units(int bits, int dim, const unsigned char *restrict packed,
                                    unsigned char *restrict units) {
#define KVC_UNPACK(symbol, name, bits, ...) \
    case bits: kvc_unpack_parts(bits, dim, packed, units); break;
    switch (bits) { KVC_QUANTISED_FORMATS(KVC_UNPACK) }
#undef KVC_UNPACK
}

static inline void kvc_pack_units(int bits, int dim, const unsigned char *restrict units,
                                  unsigned char *restrict packed) {
#define KVC_PACK(symbol, name, bits, ...) \
    case bits: kvc_pack_parts(bits, dim, units, packed); break;
    switch (bits) { KVC_QUANTISED_FORMATS(KVC_PACK) }
#undef KVC_PACK
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

/* The units of V that have the codes of those of K: dim channels of 16 tokens. */
static inline void kvc_turn_units(int dim, const unsigned char *restrict keys, unsigned char *restrict values) {
    for (int d = 0; d < dim; d += 16, keys += 4 * KVC_UNIT, values += 4 * KVC_UNIT) {
        for (int i = 0; i < 16; i++) { /* four channels of four tokens */
            const unsigned char *from = keys + 16 * i;
            unsigned char *to = values + i % 4 * KVC_UNIT + i / 4 * 16;
            for (int c = 0; c < 4; c++) {
                for (int t = 0; t < 4; t++) to[4 * c + t] = from[4 * t + c];
            }
        }
    }
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
/* A number of `bits` bits in each byte of a word. */
static inline uint32_t kvc_get_four(const unsigned char *word, int shift, int bits) {
    uint32_t w;
    memcpy(&w, word, sizeof w);
    return w >> shift & ((1u << bits) - 1) * 0x01010101u;
}
/* Reads the codes of one token; for one or two tokens this is faster than unpacking the tile. Those of K lie in fours. */
static inline void kvc_get_tile_codes(kvc_rows rows, const unsigned char *packed, int t,
                                      unsigned char *codes) {
    const int bits = rows.bits, low = kvc_low_bits(bits), together = kvc_units_together(bits);
    for (int unit = 0; rows.side == KVC_KEYS && unit < rows.dim / 4; unit++) {
        const unsigned char *at = packed + 4 * t + unit / together * kvc_bytes_together(bits);
        const int n = unit % together;
        uint32_t four = kvc_get_four(at + kvc_low_at(bits, n), kvc_low_shift(bits, n), low);
        if (low < bits) four |= kvc_get_four(at + kvc_low_bytes(bits), n * (bits - low), bits - low) << low;
        memcpy(codes + 4 * unit, &four, sizeof four);
    }
    for (int d = 0; rows.side == KVC_VALUES && d < rows.dim; d++) {
        const int unit = kvc_code_unit(rows.side, d, t);
        const unsigned char *at = packed + kvc_code_byte(rows.side, d, t);
        const int n = unit % together;
        at += unit / together * kvc_bytes_together(bits);
        int code = kvc_get_bits(at + kvc_low_at(bits, n), kvc_low_shift(bits, n), low);
        if (low < bits) code |= kvc_get_bits(at + kvc_low_bytes(bits), n * (bits - low), bits - low) << low;
        codes[d] = (unsigned char)code;
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
    const int bits = rows.bits, low = kvc_low_bits(bits), high = bits - low, per_line = 8 / low,
              together = kvc_units_together(bits);
    for (int d = 0; rows.side == KVC_KEYS && d < rows.dim; d += 4 * together) {
        for (int n = 0; n < together; n += per_line, packed += KVC_UNIT)
            kvc_put_fours(packed + 4 * t, per_line, low, codes + d + 4 * n, 0);
        if (high) {
            kvc_put_fours(packed + 4 * t, together, high, codes + d, low);
            packed += KVC_UNIT;
        }
    }
    for (int d = 0; rows.side == KVC_VALUES && d < rows.dim; d += 16) {
        const int unit = kvc_code_unit(KVC_VALUES, d, t), byte = t % 4 * 8, n = unit % together;
        unsigned char *at = packed + unit / together * kvc_bytes_together(bits);
        kvc_put_words(at + kvc_low_at(bits, n), byte + kvc_low_shift(bits, n), low, codes + d, 0);
        if (high) kvc_put_words(at + kvc_low_bytes(bits), byte + n * high, high, codes + d, low);
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
