/* recurrence.h - layers with a state at every level (kvc_recurrence.c): within their memory and with the bits of the scalar level
 * for any bits; the same bits in two pieces, on several threads and beside another text; of ordinary rows near double.
 */
#ifndef RECURRENCE_H
#define RECURRENCE_H

#include "layers.h"

typedef struct recurrent {
    kvc_convolution c;
    kvc_scan s;
    int which, ordinary;
    int64_t n, floats; /* of a text's state */
} recurrent;

enum { CONVOLUTION, SCAN };

static void run_recurrent(const kvc_kernels *k, recurrent *r, kvc_texts texts, int64_t first, float *out, int threads) {
    kvc_convolution c = r->c;
    kvc_scan s = r->s;
    c.texts = s.texts = texts;
    c.x += first * c.x_stride, c.out = s.out = out;
    s.keys += first * s.key_stride, s.queries += first * s.key_stride, s.values += first * s.value_stride;
    s.decays += first * s.heads * (s.by_channel ? s.size : 1), s.steps += first * s.heads;
    if (r->which == CONVOLUTION)
        kvc_convolve(k, &c, threads);
    else
        kvc_scan_texts(k, &s, threads);
}

static void expect_convolved(const kvc_kernels *k, const kvc_convolution *c, int64_t n, const float *out) {
    for (int64_t i = 0; i < n; i++) {
        for (int64_t d = 0; d < c->channels; d++) {
            double sum = c->bias ? c->bias[d] : 0, size = fabs(sum);
            for (int64_t j = 0; j < c->taps; j++) {
                const int64_t row = i - (c->taps - 1) + j;
                const double part = row < 0 ? 0 : (double)c->weight[j * c->channels + d] * c->x[row * c->x_stride + d];
                sum += part, size += fabs(part);
            }
            if (!c->silu) expect_near_double(k, "convolve", out[i * c->channels + d], sum, 0x1p-20 * size + 0x1p-140);
        }
    }
}

/* One head, column by column. */
static void expect_scanned(const kvc_kernels *k, const kvc_scan *a, int64_t n, const float *out) {
    double *state = calloc((size_t)a->size, sizeof *state);
    for (int64_t h = 0; h < a->heads; h++) {
        const int64_t group = a->tiled ? h % a->groups : h / (a->heads / a->groups);
        for (int64_t d = 0; d < a->dim; d++) {
            double largest = 1;
            memset(state, 0, (size_t)a->size * sizeof *state);
            for (int64_t t = 0; t < n; t++) {
                const float *key = a->keys + t * a->key_stride + group * a->size;
                const float *query = a->queries + t * a->key_stride + group * a->size;
                const double value = a->values[t * a->value_stride + h * a->dim + d];
                const float *decay = a->decays + (t * a->heads + h) * (a->by_channel ? a->size : 1);
                double seen = 0, sum = a->skip ? a->skip[h] * value : 0;
                for (int64_t i = 0; i < a->size; i++) seen += key[i] * state[i] * decay[a->by_channel ? i : 0];
                const double added = a->steps[t * a->heads + h] * (a->skip ? value : value - seen);
                for (int64_t i = 0; i < a->size; i++) {
                    state[i] = state[i] * decay[a->by_channel ? i : 0] + key[i] * added;
                    sum += query[i] * state[i];
                    largest = fmax(largest, fabs(query[i] * state[i]) + fabs(state[i]));
                }
                largest = fmax(largest, fabs(value) + fabs(seen));
                const double allowed = 0x1p-20 * largest * (double)(a->size + 1) * (double)(t + 2);
                expect_near_double(k, "scan", out[(t * a->heads + h) * a->dim + d], sum, allowed);
            }
        }
    }
    free(state);
}

static void try_recurrent(source *s, recurrent *r, int64_t width) {
    const int64_t n = r->n, cut = draw_between(s, 0, (int)n), zero = 0, one = 1;
    const int64_t both[] = {0, n, n}, slots[] = {2, 0}, whole[] = {0, n}, left[] = {0, cut}, right[] = {0, n - cut};
    const size_t bytes = (size_t)r->floats * sizeof(float);
    const char *kernel = r->which == SCAN ? "scan" : r->c.silu ? "convolve, silu" : "convolve";
    memory want = take((size_t)(n * width) * sizeof(float), 4, 1), left_behind = take(bytes, 4, 1);
    memset(left_behind.at, 0, bytes);
    run_recurrent(scalar_level(), r, (kvc_texts){1, whole, &zero, left_behind.at, r->floats}, 0, want.at, 1);
    for (int level = 0; level < num_levels(); level++) {
        const kvc_kernels *k = level_at(level);
        memory out = take((size_t)(n * width) * sizeof(float), 4, 1), again = take((size_t)(n * width) * sizeof(float), 4, 1);
        memory state = take(bytes, 4, 1), many = take(3 * bytes, 4, 0);
        memset(state.at, 0, bytes), memset(many.at, 0, 3 * bytes);
        run_recurrent(k, r, (kvc_texts){1, whole, &zero, state.at, r->floats}, 0, out.at, 1);
        expect_bits(kernel, k, out.at, want.at, n * width);
        expect_bits(kernel, k, state.at, left_behind.at, r->floats);
        const int beside_double = r->ordinary && k == scalar_level();
        if (beside_double && r->which == CONVOLUTION) expect_convolved(k, &r->c, n, out.at);
        if (beside_double && r->which == SCAN) expect_scanned(k, &r->s, n, out.at);
        run_recurrent(k, r, (kvc_texts){1, left, &one, many.at, r->floats}, 0, again.at, 3);
        run_recurrent(k, r, (kvc_texts){1, right, &one, many.at, r->floats}, cut, (float *)again.at + cut * width, 2);
        if (!same_bits(again.at, out.at, n * width) || !same_bits((float *)many.at + r->floats, state.at, r->floats))
            fail("%s: other bits in two pieces, cut at %d", k->name, (int)cut);
        run_recurrent(k, r, (kvc_texts){2, both, slots, many.at, r->floats}, 0, again.at, 4);
        if (!same_bits(again.at, out.at, n * width) || !same_bits((float *)many.at + 2 * r->floats, state.at, r->floats))
            fail("%s: other bits beside an empty text", k->name);
        give_back(&out), give_back(&again), give_back(&state), give_back(&many);
    }
    give_back(&want), give_back(&left_behind);
}

static void step_recurrence(source *s) {
    recurrent r = {.which = draw(s, 2), .ordinary = draw(s, 3) > 0, .n = draw_between(s, 1, 6)};
    const int by_channel = draw(s, 2);
    const int kind = r.ordinary ? GAUSSIAN : draw(s, NUM_KINDS), at_end = draw(s, 2), silu = draw(s, 2), biased = draw(s, 2);
    const int64_t channels = DRAW_OF(s, 1, 7, 16, 33, 130), taps = draw_between(s, 1, 5);
    const int64_t groups = draw_between(s, 1, 3), heads = groups * draw_between(s, 1, 2);
    const int64_t size = DRAW_OF(s, 1, 3, 16, 20, 129), dim = DRAW_OF(s, 1, 8, 16, 17, 31, 32, 33, 48, 80);
    const int64_t stride = (r.which == SCAN ? heads * dim : channels) + draw(s, 5), keys = groups * size + draw(s, 5);
    const int64_t decay_size = by_channel ? size : 1;
    const size_t sizes[] = {(size_t)(r.n * stride), (size_t)(r.n * keys), (size_t)(r.n * keys), (size_t)(r.n * heads * decay_size),
                            (size_t)(r.n * heads), (size_t)(taps * channels), (size_t)channels, (size_t)heads};
    memory parts[8];
    for (int i = 0; i < 8; i++) {
        parts[i] = take(sizes[i] * sizeof(float), 4, at_end);
        draw_floats(s, kind, parts[i].at, sizes[i]);
    }
    float *x = parts[0].at, *key = parts[1].at, *query = parts[2].at, *decays = parts[3].at, *steps = parts[4].at;
    for (size_t i = 0; r.ordinary && i < sizes[3]; i++) decays[i] = fminf(fabsf(decays[i]), 1);
    for (size_t i = 0; r.ordinary && i < sizes[4]; i++) steps[i] = fminf(fabsf(steps[i]), 1);
    for (size_t i = 0; r.ordinary && i < sizes[1]; i++) key[i] /= 4 * sqrtf((float)size);
    r.c = (kvc_convolution){.channels = channels, .taps = taps, .x_stride = stride, .x = x, .weight = parts[5].at,
                            .bias = biased ? parts[6].at : NULL, .silu = silu};
    r.s = (kvc_scan){.heads = heads, .groups = groups, .size = size, .dim = dim, .keys = key, .queries = query, .values = x,
                     .key_stride = keys, .value_stride = stride, .decays = decays, .steps = steps,
                     .skip = biased && !by_channel ? parts[7].at : NULL, .tiled = silu, .by_channel = by_channel};
    r.floats = r.which == SCAN ? heads * size * ((dim + 15) / 16 * 16) : channels * (taps - 1);
    say("%s of %d rows", r.which == SCAN ? "a scan" : "a convolution", (int)r.n);
    try_recurrent(s, &r, r.which == SCAN ? heads * dim : channels);
    const size_t count = sizes[4];
    memory want = take(2 * count * sizeof(float), 4, at_end);
    for (int level = num_levels() - 1; level >= 0; level--) {
        memory both = take(2 * count * sizeof(float), 4, at_end); /* steps, decays */
        float *to = level_at(level) == scalar_level() ? want.at : both.at;
        level_at(level)->decays(r.n, heads, decays, heads, parts[7].at, parts[7].at, 0.0f, 8.0f, to, to + count);
        expect_bits("decays", level_at(level), to, want.at, 2 * (int64_t)count);
        give_back(&both);
    }
    memory bounded = take(count * sizeof(float), 4, at_end);
    for (int level = num_levels() - 1; level >= 0; level--) {
        const kvc_kernels *k = level_at(level);
        memory left = take(count * sizeof(float), 4, at_end);
        float *to = k == scalar_level() ? bounded.at : left.at;
        k->bounded_decays(r.n, heads, decays, heads, parts[7].at, steps, -5.0f, to);
        expect_bits("bounded_decays", k, to, bounded.at, (int64_t)count);
        give_back(&left);
    }
    for (size_t i = 0; r.ordinary && i < count; i++) {
        const double input = (double)decays[i] + ((float *)parts[7].at)[i % (size_t)heads], step = log1p(exp(input));
        const double expected = fmin(step, 8);
        expect_near_double(scalar_level(), "decays", ((float *)want.at)[i], expected, (6 + fmax(-input, 0)) * 0x1p-23 * expected);
    }
    for (size_t i = 0; r.ordinary && i < count; i++) {
        const float input = (decays[i] + ((float *)parts[7].at)[i % (size_t)heads]) * steps[i % (size_t)heads];
        const double expected = exp(-5 / (1 + exp(-(double)input)));
        expect_near_double(scalar_level(), "bounded_decays", ((float *)bounded.at)[i], expected, 0x1p-19 * expected);
    }
    give_back(&want), give_back(&bounded);
    for (int i = 0; i < 8; i++) give_back(&parts[i]);
}

#endif
