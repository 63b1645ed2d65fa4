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
    fflush(stdout), fprintf(stderr, "FAILED: ");
    vfprintf(stderr, what, list);
    fprintf(stderr, " (%s)\n", subject);
    va_end(list);
    abort();
}

/* A level that is another one but for some functions has all the others: products, rows made ready for them, and attention are
 * its own. */
static void expect_table(const kvc_kernels *kernels) {
    kvc_kernels twin = *kvc_find_level(kernels->base);
    twin.multiply_packed = kernels->multiply_packed, twin.multiply_bf16 = kernels->multiply_bf16;
    twin.prepare_rows = kernels->prepare_rows;
    twin.attend_item = kernels->attend_item, twin.combine_parts = kernels->combine_parts, twin.score_item = kernels->score_item;
    twin.attend_chosen = kernels->attend_chosen;
    twin.index_scores = kernels->index_scores, twin.choose_tokens = kernels->choose_tokens;
    const size_t first = offsetof(kvc_kernels, write_runs); /* before it: names, which may lie apart, and padding */
    if (memcmp((char *)&twin + first, (const char *)kernels + first, sizeof twin - first))
        fail("the table of %s is not that of %s", kernels->name, kernels->base);
}

/* Queried once: in a virtual machine, CPUID takes longer than a small case. The last one is the scalar level, without instructions
 * for fma; before it is that level with them, if the CPU has them. */
static const kvc_kernels *levels[KVC_MOST_LEVELS + 1];
extern const kvc_kernels kvc_kernels_scalar;

static int num_levels(void) {
    static int count;
    if (!count) {
        count = kvc_num_levels();
        for (int i = 0; i < count; i++) expect_table(levels[i] = kvc_level(i));
        if (levels[count - 1] != &kvc_kernels_scalar) levels[count++] = &kvc_kernels_scalar;
    }
    return count;
}
static const kvc_kernels *level_at(int index) { return levels[index]; }
static const kvc_kernels *scalar_level(void) { return num_levels(), &kvc_kernels_scalar; }

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* The first of n floats that has other bits, or -1. Any NaN is the same as any other. */
static int64_t first_other(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (memcmp(a + i, b + i, sizeof *a) && !(isnan(a[i]) && isnan(b[i]))) return i;
    }
    return -1;
}
static int same_bits(const float *a, const float *b, int64_t n) { return first_other(a, b, n) < 0; }

/* Comparisons of a level with the scalar one, by kernel. With KVC_GO_ON=1 a difference ends nothing: main.c prints them all. */
typedef struct comparison {
    char kernel[48];
    const char *level;
    long done, other;
} comparison;
static comparison comparisons[2048];
static int num_comparisons;

static comparison *comparison_of(const char *kernel, const char *level) {
    int i = 0;
    while (i < num_comparisons && (strcmp(comparisons[i].kernel, kernel) || comparisons[i].level != level)) i++;
    if (i == (int)(sizeof comparisons / sizeof *comparisons)) fail("too many kernels");
    if (i == num_comparisons) {
        snprintf(comparisons[i].kernel, sizeof comparisons[i].kernel, "%s", kernel);
        comparisons[num_comparisons++].level = level;
    }
    return &comparisons[i];
}

void print_comparisons(void);
void print_comparisons(void) {
    for (int i = 0; i < num_comparisons; i++) {
        const comparison *c = &comparisons[i];
        if (c->other) printf("%-40s %-8s %ld of %ld differ\n", c->kernel, c->level, c->other, c->done);
    }
}

/* A level gives the bits of the scalar one. */
static void expect_bits(const char *kernel, const kvc_kernels *level, const float *got, const float *want, int64_t n) {
    static int go_on = -1;
    const int64_t at = first_other(got, want, n);
    comparison *c = comparison_of(kernel, level->name);
    if (go_on < 0) go_on = getenv("KVC_GO_ON") != NULL;
    c->done++;
    if (at < 0) return;
    if (!go_on) fail("%s at %s: number %lld of %lld is %a, not %a", kernel, level->name, (long long)at, (long long)n, got[at], want[at]);
    if (!c->other++)
        printf("%s at %s: number %lld of %lld is %a, not %a (%s)\n", kernel, level->name, (long long)at, (long long)n, got[at],
               want[at], subject);
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
