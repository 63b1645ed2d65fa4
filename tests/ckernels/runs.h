/* runs.h - the levels of this CPU, the report of a failure, and random runs of slots for a sequence. */
#ifndef RUNS_H
#define RUNS_H

#include "draw.h"
#include "memory.h"
#include "twin.h"

#include <stdarg.h>

#if defined(CALLERS)
#include <pthread.h>
#endif

static char subject[128]; /* what is checked; only for the message */

static void say(const char *what, ...) {
    va_list list;
    va_start(list, what);
    vsnprintf(subject, sizeof subject, what, list);
    va_end(list);
}

static void fail(const char *what, ...) {
    va_list list;
    va_start(list, what);
    fprintf(stderr, "FAILED: ");
    vfprintf(stderr, what, list);
    fprintf(stderr, " (%s)\n", subject);
    va_end(list);
    abort();
}

/* A level with the bits of another one has its functions but for products, rows made ready for them, and attention. */
static void expect_table(const kvc_kernels *kernels) {
    kvc_kernels twin = *kvc_find_level(kernels->bits);
    twin.multiply_packed = kernels->multiply_packed, twin.multiply_bf16 = kernels->multiply_bf16;
    twin.prepare_rows = kernels->prepare_rows;
    twin.attend_item = kernels->attend_item, twin.combine_parts = kernels->combine_parts, twin.score_item = kernels->score_item;
    twin.attend_chosen = kernels->attend_chosen;
    const size_t first = offsetof(kvc_kernels, write_runs); /* before it: names, which may lie apart, and padding */
    if (memcmp((char *)&twin + first, (const char *)kernels + first, sizeof twin - first))
        fail("the table of %s is not that of %s", kernels->name, kernels->bits);
}

/* Queried once: in a virtual machine, CPUID takes longer than a small case. */
static const kvc_kernels *levels[KVC_MOST_LEVELS];

static int num_levels(void) {
    static int count;
    if (!count) {
        count = kvc_num_levels();
        for (int i = 0; i < count; i++) expect_table(levels[i] = kvc_level(i));
    }
    return count;
}
static const kvc_kernels *level_at(int index) { return levels[index]; }
static const kvc_kernels *scalar_level(void) { return levels[num_levels() - 1]; } /* always the last */

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Compares floats bit for bit, but for NaNs: any NaN is the same as any other. */
static int have_same_bits(memory x, memory y) {
    const float *a = x.at, *b = y.at;
    for (size_t i = 0; i < x.size / sizeof *a; i++) {
        if (memcmp(a + i, b + i, sizeof *a) && !(isnan(a[i]) && isnan(b[i]))) return 0;
    }
    return 1;
}

typedef struct sequence {
    memory runs;
    int64_t num_runs, num_tokens;
    size_t *slots; /* of each token */
} sequence;

/* Blocks in random order, each at most once, and of each some pieces of its slots. */
static sequence draw_runs(source *s, const world *w, int empty_too) {
    const int size = w->layout.block_size, style = w->many ? 3 * draw(s, 2) : draw(s, 4);
    const int blocks = w->many ? w->num_blocks : draw_between(s, empty_too ? 0 : 1, w->num_blocks);
    kvc_run *runs = malloc((size_t)(w->num_blocks * size + 1) * sizeof *runs);
    sequence q = {.slots = malloc((size_t)(w->num_blocks * size + 1) * sizeof(size_t))};
    int *order = malloc((size_t)w->num_blocks * sizeof *order);
    for (int i = 0; i < w->num_blocks; i++) order[i] = i;
    for (int i = 0; i < blocks; i++) {
        const int other = i + draw(s, w->num_blocks - i), block = order[other];
        order[other] = order[i], order[i] = block;
        int first = style < 2 ? 0 : draw(s, size), stop = style == 0 ? size : draw_between(s, first, size);
        while (first < size && (stop > first || empty_too)) {
            runs[q.num_runs++] = (kvc_run){block, (uint16_t)first, (uint16_t)stop};
            for (int slot = first; slot < stop; slot++) q.slots[q.num_tokens++] = slot_of(w, block, slot);
            if (style < 3) break;
            first = stop + draw_between(s, 1, 9); /* a hole */
            if (first < size) stop = draw_between(s, first, size);
        }
    }
    q.runs = take((size_t)q.num_runs * sizeof *runs, 4, 1);
    memcpy(q.runs.at, runs, (size_t)q.num_runs * sizeof *runs);
    free(runs), free(order);
    return q;
}

/* A sequence begins with runs of another one, and goes on with some of its own: such sequences are read together. */
static void begin_as(uint64_t *state, const world *w, const sequence *other, sequence *q) {
    const int size = w->layout.block_size;
    const int64_t both = other->num_runs - (int64_t)(splitmix(state) % 3 ? splitmix(state) % 4 : splitmix(state) % 70);
    const int64_t first = both > 0 ? both : 0, own = least((size_t)q->num_runs, splitmix(state) % 6);
    sequence new = {.num_runs = first + own, .slots = malloc(((size_t)((first + own) * size) + 1) * sizeof(size_t))};
    new.runs = take((size_t)new.num_runs * sizeof(kvc_run), 4, 1);
    kvc_run *runs = new.runs.at;
    if (first) memcpy(runs, other->runs.at, (size_t)first * sizeof *runs);
    if (own) memcpy(runs + first, q->runs.at, (size_t)own * sizeof *runs);
    for (int64_t i = 0; i < new.num_runs; i++) {
        for (int slot = runs[i].first; slot < runs[i].stop; slot++)
            new.slots[new.num_tokens++] = slot_of(w, runs[i].block, slot);
    }
    give_back(&q->runs), free(q->slots);
    *q = new;
}

static void drop_runs(sequence *q) { give_back(&q->runs), free(q->slots); }

#endif
