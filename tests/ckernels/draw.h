/* draw.h - makes the choices of a case from the bytes of an input, then from a generator seeded by all bytes. */
#ifndef DRAW_H
#define DRAW_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct source {
    const uint8_t *data;
    size_t size, at;
    uint64_t state;
} source;

static inline uint64_t splitmix(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline source source_of(const uint8_t *data, size_t size) {
    source s = {data, size, 0, size};
    for (size_t i = 0; i < size; i++) s.state = (s.state ^ data[i]) * 0x100000001b3u;
    return s;
}

static inline uint32_t draw_byte(source *s) {
    return s->at < s->size ? s->data[s->at++] : (uint32_t)(splitmix(&s->state) >> 56);
}
/* 0 to count - 1, count at most 65536. */
static inline int draw(source *s, int count) {
    uint32_t x = draw_byte(s);
    if (count > 256) x = x << 8 | draw_byte(s);
    return (int)(x % (uint32_t)count);
}
static inline int draw_between(source *s, int low, int high) { return low + draw(s, high - low + 1); }
#define DRAW_OF(s, ...) \
    (((const int[]){__VA_ARGS__})[draw(s, (int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)))])

static inline float gaussian(uint64_t *state) { /* approximately: a sum of uniforms */
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += (float)(splitmix(state) >> 40) * 0x1p-24f;
    return sum;
}

/* Kinds of float rows. Error bounds were measured on GAUSSIAN; ANY_BITS covers all floats. ENDS are GAUSSIAN but for a few. */
enum { GAUSSIAN, WIDE, OUTLIERS, CONSTANT, EDGES, ANY_BITS, ENDS, NUM_KINDS };

static inline void draw_floats(source *s, int kind, float *x, size_t n) {
    static const float edges[] = {0.0f,  -0.0f,  65504.0f,  -65504.0f, 65519.996f, 0x1p-24f, 0x1p-25f,
                                  1e-8f, -6e-5f, 0x1p-126f, 0x1p-149f, 1.0f,       -1.0f,    0x1.ffcp-15f};
    static const float ends[] = {INFINITY, -INFINITY, NAN, -NAN, 0x1.fffffep127f, -0x1.fffffep127f, 0x1p64f, 0x1p100f};
    uint64_t state = (uint64_t)draw(s, 65536);
    const uint64_t apart = (uint64_t)1 << state % 12, end = state / 12 % 16; /* one end, or all of them */
    const float constant = gaussian(&state) * (float)(draw(s, 4) ? 1 : 60000);
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = splitmix(&state);
        switch (kind) {
        case GAUSSIAN: x[i] = gaussian(&state); break;
        case WIDE: x[i] = gaussian(&state) * (float)((uint64_t)1 << bits % 40) * 0x1p-26f; break;
        case OUTLIERS: x[i] = gaussian(&state) * (bits % 61 ? 1.0f : 3000.0f); break;
        case CONSTANT: x[i] = constant; break;
        case ENDS: x[i] = bits % (7 * apart) ? gaussian(&state) : ends[(end < 8 ? end : bits >> 32) % 8]; break;
        case EDGES: x[i] = edges[bits % (sizeof edges / sizeof *edges)]; break;
        default: { /* bits of the input, then of the generator */
            uint32_t word = (uint32_t)(bits >> 32);
            if (s->at + 4 <= s->size) memcpy(&word, s->data + s->at, 4), s->at += 4;
            memcpy(x + i, &word, 4);
        }
        }
    }
}

#endif
