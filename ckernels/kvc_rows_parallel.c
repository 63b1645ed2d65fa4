/* kvc_rows_parallel.c - writes rows to their blocks on several threads. Runs are divided where the next run is of another
 * block, so no two threads write to the same tile. */
#include "kvc.h"
#include "kvc_threads.h"

enum {
    ITEMS_PER_THREAD = 2,
    VALUES_PER_ITEM = 1 << 11, /* some 4 us of work if their tiles are in the cache, several times that if they are not */
};

typedef struct call {
    const kvc_kernels *kernels;
    const kvc_layout *layout;
    unsigned char *arena;
    const kvc_run *runs;
    int64_t num_runs, num_tokens, items;
    kvc_float_rows keys, values;
    const kvc_head_keys *known;
} call;

/* Where an item begins: its first run, and the tokens of the runs before it. */
typedef struct place {
    int64_t run, token;
} place;

static place begin_of(const call *c, int64_t item) {
    const int64_t least = c->num_tokens * item / c->items;
    place p = {0, 0};
    while (p.run < c->num_runs && (p.token < least || (p.run && c->runs[p.run].block == c->runs[p.run - 1].block))) {
        p.token += c->runs[p.run].stop - c->runs[p.run].first;
        p.run++;
    }
    return p;
}

static kvc_float_rows from_token(kvc_float_rows rows, int64_t token) {
    if (rows.data) rows.data += token * rows.stride;
    return rows;
}

static void write_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const place first = begin_of(c, index), stop = begin_of(c, index + 1);
    (void)thread;
    c->kernels->write_runs(c->layout, c->arena, c->runs + first.run, stop.run - first.run, from_token(c->keys, first.token),
                           from_token(c->values, first.token), c->known);
}

void kvc_write_runs(const kvc_kernels *kernels, const kvc_layout *layout, unsigned char *arena, const kvc_run *runs,
                    int64_t num_runs, kvc_float_rows keys, kvc_float_rows values, const kvc_head_keys *known,
                    int num_threads) {
    call c = {kernels, layout, arena, runs, num_runs, 0, 1, keys, values, known};
    for (int64_t i = 0; i < num_runs; i++) c.num_tokens += runs[i].stop - runs[i].first;
    const int64_t written = c.num_tokens * layout->num_heads * (layout->head_dim + layout->value_head_dim);
    num_threads = kvc_threads_worth(KVC_WRITING, written, num_threads);
    if (num_threads > 1 && written >= 2 * VALUES_PER_ITEM) {
        c.items = written / VALUES_PER_ITEM;
        if (c.items > (int64_t)num_threads * ITEMS_PER_THREAD) c.items = (int64_t)num_threads * ITEMS_PER_THREAD;
    }
    kvc_run_work(KVC_WRITING, written, c.items, num_threads, write_item, &c);
}
