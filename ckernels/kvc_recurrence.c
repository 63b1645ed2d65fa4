/* kvc_recurrence.c - layers that keep a state: convolutions over the last rows, and matrices that decay and grow. */
#include "kvc_row.h"

enum { VECTORS = KVC_STATE_COLUMNS / KVC_LANES }; /* of a row of a block */
/* Vectors of a row that go through the tokens together. A sum waits for the row before, as long as two vectors take: four keep
 * the units busy, where there are registers for them and for a broadcast each of key, query, next key and decay. */
enum { TOGETHER = VECTORS == 2 ? 2 : 4 };
enum { MET_ROWS = 128 }; /* rows of a state whose keys, times their decays, are computed together: a multiple of all lanes */

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

/* decays (n, channels) = e^(bound * sigmoid(rate * (x + bias))), where bound is not positive. Rows of x are x_stride floats
 * apart; bias and rate (channels). */
void KVC_FN(bounded_decays)(int64_t n, int64_t channels, const float *x, int64_t x_stride, const float *bias, const float *rate,
                            float bound, float *decays) {
    const f32v most = f32v_set1(bound);
    for (int64_t i = 0; i < n; i++, x += x_stride, decays += channels) {
        for (int64_t c = 0; c < channels; c += KVC_LANES) {
            const int64_t left = channels - c;
            const f32v slope = f32v_mul(f32v_add(load_some(x + c, left), load_some(bias + c, left)), load_some(rate + c, left));
            const f32v power = f32v_mul(gated(most, slope), f32v_set1(1.442695041f));
            store_some(decays + c, left, f32v_exp2(f32v_min(f32v_set1(126.0f), power)));
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

/* met (count) = keys * decays: what the rows of a state meet before they decay. */
INLINE void meet(int64_t count, const float *keys, const float *decays, float *met) {
    for (int64_t i = 0; i < count; i += KVC_LANES) /* whole vectors of `met` */
        f32v_store(met + i, f32v_mul(load_some(keys + i, count - i), load_some(decays + i, count - i)));
}

/* One token: S = decay * S + key (outer) added; sums += query @ S; seen += next @ S, if the rule needs it (next is not NULL),
 * by channel (next * next_decays) @ S. The number of vectors, whether there is a `next` and whether each row has a decay of its
 * own are constants. */
INLINE void advance(int vectors, int looks, int by_channel, float *state, int64_t size, const float *key, const float *query,
                    const float *next, const float *decays, const float *next_decays, const f32v *added, f32v *sums, f32v *seen) {
    float met[MET_ROWS];
    const f32v factor = f32v_set1(decays[0]);
    for (int64_t first = 0; first < size; first += by_channel ? MET_ROWS : size) {
        const int64_t stop = by_channel && size - first > MET_ROWS ? first + MET_ROWS : size;
        if (looks && by_channel) meet(stop - first, next + first, next_decays + first, met);
        const float *looked = looks && by_channel ? met : next + first;
        for (int64_t i = first; i < stop; i++) {
            const f32v k = f32v_set1(key[i]), q = f32v_set1(query[i]), following = looks ? f32v_set1(looked[i - first]) : k;
            const f32v decay = by_channel ? f32v_set1(decays[i]) : factor;
            f32v s[TOGETHER]; /* all loads before the stores: blocks may be 4096 bytes apart, where CPUs take one for the other */
            UNROLL
            for (int j = 0; j < vectors; j++) s[j] = f32v_load(place(state, size, i, j));
            UNROLL
            for (int j = 0; j < vectors; j++) {
                s[j] = f32v_fma(added[j], k, f32v_mul(s[j], decay));
                sums[j] = f32v_fma(s[j], q, sums[j]);
                if (looks) seen[j] = f32v_fma(s[j], following, seen[j]);
            }
            UNROLL
            for (int j = 0; j < vectors; j++) f32v_store(place(state, size, i, j), s[j]);
        }
    }
}

/* seen += key @ S, by channel (key * decays) @ S, in the order of `advance`. */
INLINE void look(int vectors, int by_channel, float *state, int64_t size, const float *key, const float *decays, f32v *seen) {
    float met[MET_ROWS];
    for (int64_t first = 0; first < size; first += MET_ROWS) {
        const int64_t count = size - first > MET_ROWS ? MET_ROWS : size - first;
        if (by_channel) meet(count, key + first, decays + first, met);
        for (int64_t i = 0; i < count; i++) {
            const f32v k = f32v_set1(by_channel ? met[i] : key[first + i]);
            UNROLL
            for (int j = 0; j < vectors; j++) seen[j] = f32v_fma(f32v_load(place(state, size, first + i, j)), k, seen[j]);
        }
    }
}

/* Rows of one text through some blocks of a head. The delta rule sums key @ S of the next token while it writes S of this one,
 * so it reads S once per token; the first token's sum is in the same order. */
INLINE void scan_blocks(int blocks, int delta, int by_channel, const kvc_scan *a, int64_t text, int64_t head, int64_t block) {
    const int vectors = blocks * VECTORS;
    const int64_t start = a->texts.starts[text], n = a->texts.starts[text + 1] - start, size = a->size;
    const int64_t group = a->tiled ? head % a->groups : head / (a->heads / a->groups);
    const int64_t padded = (a->dim + KVC_STATE_COLUMNS - 1) / KVC_STATE_COLUMNS * KVC_STATE_COLUMNS;
    const int64_t column = block * KVC_STATE_COLUMNS, width = by_channel ? size : 1, step_over = a->heads * width;
    float *state = a->texts.states + a->texts.index[text] * a->texts.slot_floats + head * size * padded + column * size;
    const float *key = a->keys + start * a->key_stride + group * size;
    const float *query = a->queries + start * a->key_stride + group * size;
    const float *decays = a->decays + (start * a->heads + head) * width;
    f32v seen[TOGETHER], sums[TOGETHER], added[TOGETHER];
    for (int j = 0; j < vectors; j++) seen[j] = f32v_zero();
    if (delta && n) look(vectors, by_channel, state, size, key, decays, seen);
    for (int64_t t = 0; t < n; t++, key += a->key_stride, query += a->key_stride, decays += step_over) {
        const int64_t at = (start + t) * a->heads + head;
        const float *value = a->values + (start + t) * a->value_stride + head * a->dim + column;
        const f32v decay = f32v_set1(decays[0]), step = f32v_set1(a->steps[at]);
        for (int j = 0; j < vectors; j++) {
            const f32v v = load_left(value + j * KVC_LANES, a->dim - column - j * KVC_LANES);
            added[j] = f32v_mul(delta ? f32v_sub(v, by_channel ? seen[j] : f32v_mul(seen[j], decay)) : v, step);
            sums[j] = delta ? f32v_zero() : f32v_mul(v, f32v_set1(a->skip[head]));
            seen[j] = f32v_zero();
        }
        if (delta && t + 1 < n)
            advance(vectors, 1, by_channel, state, size, key, query, key + a->key_stride, decays, decays + step_over, added, sums,
                    seen);
        else
            advance(vectors, 0, by_channel, state, size, key, query, key, decays, decays, added, sums, seen);
        float *out = a->out + at * a->dim + column;
        for (int j = 0; j < vectors; j++) {
            const int64_t left = a->dim - column - j * KVC_LANES;
            if (left > 0) store_some(out + j * KVC_LANES, left, sums[j]);
        }
    }
}

/* Rows of one text through `blocks` blocks of a head, a constant. */
INLINE void scan_some(int blocks, const kvc_scan *a, int64_t text, int64_t head, int64_t block) {
    if (a->by_channel)
        scan_blocks(blocks, 1, 1, a, text, head, block);
    else if (!a->skip)
        scan_blocks(blocks, 1, 0, a, text, head, block);
    else
        scan_blocks(blocks, 0, 0, a, text, head, block);
}

/* Rows of one text through blocks [block, block + blocks) of a head, at most KVC_STATE_BLOCKS of them. */
void KVC_FN(scan)(const kvc_scan *a, int64_t text, int64_t head, int64_t block, int blocks) {
    enum { MOST = TOGETHER / VECTORS };
    const int64_t stop = block + blocks;
    for (; MOST == 4 && stop - block >= 4; block += 4) scan_some(MOST, a, text, head, block);
    for (; MOST >= 2 && stop - block >= 2; block += 2) scan_some(MOST < 2 ? MOST : 2, a, text, head, block);
    for (; block < stop; block++) scan_some(1, a, text, head, block);
}
