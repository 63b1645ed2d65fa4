/* kvc_checksum.h - a sum that finds bytes that are not those that were written. */
#ifndef KVC_CHECKSUM_H
#define KVC_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A sum of all bytes, in which each bit changes about half of its bits; another one for each seed. */
static inline uint32_t kvc_checksum(const unsigned char *data, size_t n, uint64_t seed) {
    const uint64_t factor = 0x9e3779b97f4a7c15u;
    uint64_t sums[4] = {seed * factor, 1, 2, 3}, word[4];
    size_t i = 0;
    for (; i + sizeof word <= n; i += sizeof word) {
        memcpy(word, data + i, sizeof word);
        for (int k = 0; k < 4; k++) {
            sums[k] = (sums[k] ^ word[k]) * factor;
            sums[k] ^= sums[k] >> 29;
        }
    }
    for (int k = 0; i < n; i++, k = (k + 1) % 4) sums[k] = (sums[k] ^ data[i]) * factor;
    uint64_t all = n;
    for (int k = 0; k < 4; k++) all = (all ^ sums[k] ^ sums[k] >> 32) * factor;
    return (uint32_t)(all >> 32);
}

#endif
