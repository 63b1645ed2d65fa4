/* kvc_recurrence.c - layers that keep a state: convolutions over the last rows, and matrices that decay and grow. */
#include "kvc_row.h"

enum { VECTORS = KVC_STATE_COLUMNS / KVC_LANES }; /* of a row of a block */

/* A vector of which `left` values exist; none where left <= 0. */
INLINE f32v load_left(const float *x, int64_t left) { return left > 0 ? load_some(x, left) : f32v_zero(); }

/* steps (n, heads) = softplus(x + bias), from `least` to `most`; decays = e^(steps * rate), where rate is not positive. Rows of
 * x are x_stride floats apart; bias and rate (heads). */
void KVC_FN(decays)(int64_t n, int64_t heads, const float *x, int64_t x_stride, const float *bias, const float *rate,
                    float least, float most, float *steps, float *decays) {
    const f32v low = f32v_set1(least), high = f32v_set1(most);
    for (int64_t i = 0; i < n; i++, x += x_stride, steps += heads, decays += heads) {
        for (int64_t h = 0; h < heads; h += KVC_LANES) {
            const int64_t left = heads - h;
            const f32v step = softplus(f32v_add(load_some(x + h, left), load_some(bias + h, left)));
            const f32v held = f32v_max(low, f32v_min(high, step));
            const f32v power = f32v_mul(f32v_mul(held, load_some(rate + h, left)), f32v_set1(1.442695041f));
            store_some(steps + h, left, held);
            store_some(decays + h, left, f32v_exp2(f32v_min(f32v_set1(126.0f), power)));
        }
    }
}

/* Channels [first, stop) of one text (kvc_recurrence.h). */
void KVC_FN(convolve)(const kvc_convolution *c, int64_t text, int64_t first, int64_t stop) {
    const kvc_texts *texts = &c->texts;
    const int64_t start = texts->starts[text], n = texts->starts[text + 1] - start, before = c->taps - 1;
    const float *x = c->x + start * c->x_stride;
    float *state = texts->states + texts->index[text] * texts->slot_floats;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t d = first; d < stop; d += KVC_LANES) {
            const int64_t left = stop - d;
            f32v sum = c->bias ? load_some(c->bias + d, left) : f32v_zero();
            for (int64_t j = 0; j < c->taps; j++) {
                const int64_t row = i - before + j;
                const float *in = row < 0 ? state + (row + before) * c->channels : x + row * c->x_stride;
                sum = f32v_fma(load_some(c->weight + j * c->channels + d, left), load_some(in + d, left), sum);
            }
            store_some(c->out + (start + i) * c->channels + d, left, c->silu ? gated(sum, sum) : sum);
        }
    }
    for (int64_t i = 0; i < before; i++) { /* ascending: what is read lies behind what is written */
        const int64_t row = n - before + i;
        const float *in = row < 0 ? state + (row + before) * c->channels : x + row * c->x_stride;
        memmove(state + i * c->channels + first, in + first, (size_t)(stop - first) * sizeof(float));
    }
}

/* Where vector j of a row of some blocks is. */
INLINE float *place(float *state, int64_t size, int64_t row, int j) {
    return state + (j / VECTORS) * size * KVC_STATE_COLUMNS + row * KVC_STATE_COLUMNS + j % VECTORS * KVC_LANES;
}

/* One token: S = decay * S + key (outer) added; sums += query @ S; seen += next @ S, if the rule needs it (next is not NULL).
 * The number of vectors and whether there is a `next` are constants. */
INLINE void advance(int vectors, int looks, float *state, int64_t size, const float *key, const float *query,
                    const float *next, float decay, const f32v *added, f32v *sums, f32v *seen) {
    const f32v factor = f32v_set1(decay);
    for (int64_t i = 0; i < size; i++) {
        const f32v k = f32v_set1(key[i]), q = f32v_set1(query[i]), following = looks ? f32v_set1(next[i]) : k;
        f32v s[2 * VECTORS]; /* all loads before the stores: the blocks may be 4096 bytes apart, where CPUs take one for the other */
        UNROLL
        for (int j = 0; j < vectors; j++) s[j] = f32v_load(place(state, size, i, j));
        UNROLL
        for (int j = 0; j < vectors; j++) {
            s[j] = f32v_fma(added[j], k, f32v_mul(s[j], factor));
            sums[j] = f32v_fma(s[j], q, sums[j]);
            if (looks) seen[j] = f32v_fma(s[j], following, seen[j]);
        }
        UNROLL
        for (int j = 0; j < vectors; j++) f32v_store(place(state, size, i, j), s[j]);
    }
}

/* Rows of one text through some blocks of a head. The delta rule sums key @ S of the next token while it writes S of this one,
 * so it reads S once per token; the first token's sum is in the same order. */
INLINE void scan_blocks(int blocks, int delta, const kvc_scan *a, int64_t text, int64_t head, int64_t block) {
    const int vectors = blocks * VECTORS;
    const int64_t start = a->texts.starts[text], n = a->texts.starts[text + 1] - start, size = a->size;
    const int64_t group = a->tiled ? head % a->groups : head / (a->heads / a->groups);
    const int64_t padded = (a->dim + KVC_STATE_COLUMNS - 1) / KVC_STATE_COLUMNS * KVC_STATE_COLUMNS;
    const int64_t column = block * KVC_STATE_COLUMNS;
    float *state = a->texts.states + a->texts.index[text] * a->texts.slot_floats + head * size * padded + column * size;
    const float *key = a->keys + start * a->key_stride + group * size;
    const float *query = a->queries + start * a->key_stride + group * size;
    f32v seen[2 * VECTORS], sums[2 * VECTORS], added[2 * VECTORS];
    for (int j = 0; j < vectors; j++) seen[j] = f32v_zero();
    for (int64_t i = 0; delta && n && i < size; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) seen[j] = f32v_fma(f32v_load(place(state, size, i, j)), f32v_set1(key[i]), seen[j]);
    }
    for (int64_t t = 0; t < n; t++, key += a->key_stride, query += a->key_stride) {
        const int64_t at = (start + t) * a->heads + head;
        const float *value = a->values + (start + t) * a->value_stride + head * a->dim + column;
        const f32v decay = f32v_set1(a->decays[at]), step = f32v_set1(a->steps[at]);
        for (int j = 0; j < vectors; j++) {
            const f32v v = load_left(value + j * KVC_LANES, a->dim - column - j * KVC_LANES);
            added[j] = f32v_mul(delta ? f32v_sub(v, f32v_mul(seen[j], decay)) : v, step);
            sums[j] = delta ? f32v_zero() : f32v_mul(v, f32v_set1(a->skip[head]));
            seen[j] = f32v_zero();
        }
        if (delta && t + 1 < n)
            advance(vectors, 1, state, size, key, query, key + a->key_stride, a->decays[at], added, sums, seen);
        else
            advance(vectors, 0, state, size, key, query, key, a->decays[at], added, sums, seen);
        float *out = a->out + at * a->dim + column;
        for (int j = 0; j < vectors; j++) {
            const int64_t left = a->dim - column - j * KVC_LANES;
            if (left > 0) store_some(out + j * KVC_LANES, left, sums[j]);
        }
    }
}

/* Rows of one text through blocks [block, block + blocks) of a head, one or two of them. */
void KVC_FN(scan)(const kvc_scan *a, int64_t text, int64_t head, int64_t block, int blocks) {
    const int together = VECTORS == 1 ? blocks : 1; /* two blocks of several vectors each do not fit the registers */
    for (const int64_t stop = block + blocks; block < stop; block += together) {
        if (!a->skip && together == 2)
            scan_blocks(2, 1, a, text, head, block);
        else if (!a->skip)
            scan_blocks(1, 1, a, text, head, block);
        else if (together == 2)
            scan_blocks(2, 0, a, text, head, block);
        else
            scan_blocks(1, 0, a, text, head, block);
    }
}
