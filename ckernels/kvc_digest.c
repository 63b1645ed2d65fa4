/* kvc_digest.c - NH, the universal hash that shortens a value 32 times before its MAC (kvcache/tiers/values.py).
 *
 * Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: Fast and Secure Message Authentication", CRYPTO 1999, with words of
 * 32 bits and the Toeplitz extension to four passes. Of the 256 words m of 1024 bytes, with the key k, pass p is
 *
 *     sum over i < 128 of (m[2i] + k[2p + 2i] mod 2^32) * (m[2i + 1] + k[2p + 2i + 1] mod 2^32)    mod 2^64
 *
 * Two messages of one length have the same four sums with a probability of at most 2^-128 over the keys. The last bytes
 * are filled up with zeros to 64; all levels give the same bits.
 */
#include <string.h>

#include "kvc_simd.h"

enum { STEP = 64, CHUNK = 1024 }; /* bytes; a step has 16 words */

/* n bytes -> 4 sums for each 1024 or part of them. The key has 262 words. */
void KVC_UNFUSED(digest)(int64_t n, const unsigned char *data, const uint32_t *key, uint64_t *out) {
    unsigned char last[STEP];
    for (int64_t at = 0; at < n; at += CHUNK, out += 4) {
        const int64_t stop = n - at < CHUNK ? n : at + CHUNK;
        const uint32_t *k = key;
        u64x8 a = u64x8_zero(), b = a, c = a, d = a;
        for (int64_t i = at; i < stop; i += STEP, k += STEP / 4) {
            const unsigned char *step = data + i;
            if (stop - i < STEP) {
                memset(last, 0, STEP);
                memcpy(last, step, (size_t)(stop - i));
                step = last;
            }
            const u8x64 m = u8x64_load(step);
            a = u64x8_add_products(a, m, k);
            b = u64x8_add_products(b, m, k + 2);
            c = u64x8_add_products(c, m, k + 4);
            d = u64x8_add_products(d, m, k + 6);
        }
        out[0] = u64x8_sum_of(a), out[1] = u64x8_sum_of(b), out[2] = u64x8_sum_of(c), out[3] = u64x8_sum_of(d);
    }
}
