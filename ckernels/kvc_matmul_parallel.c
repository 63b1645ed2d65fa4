/* kvc_matmul_parallel.c - a product on several threads: rows are prepared, then panels are divided among the threads. */
#include "kvc.h"
#include "kvc_matrix.h"
#include "kvc_threads.h"

enum {
    ROWS_PER_ITEM = 12,       /* to prepare: whole blocks, since blocks of 8 are in calls of at most 8 rows alone; where some
                               * are tiled, KVC_TILED_ROWS: the others fill less than one item */
    BYTES_PER_ITEM = 1 << 16, /* of the matrix; less is read faster than another thread begins */
    ITEMS_PER_THREAD = 4,     /* so that a thread that the system delays leaves its share to the others */
    FINE_ITEMS = 16,          /* per thread, for many rows and packed weights: threads end at nearly the same time. Not for
                               * floats, which read all rows from memory once for each item. */
    MANY_ROWS = 64,
    READING_ROWS = 4, /* from these on, a byte's products take longer than its reading */
};

typedef struct call {
    const kvc_kernels *kernels;
    const kvc_matmul_args *args;
    int64_t items;
} call;

/* From `prepared` to the floats of the first thread, which begin at a cache line if it does. */
static size_t prepared_bytes(const kvc_matmul_args *args) {
    return ((size_t)kvc_prepared_rows(args) * kvc_prepared_row_bytes(args) + 63) / 64 * 64;
}

/* The most panels that one tile reads together. */
static int64_t panels_per_step(const kvc_matmul_args *args) {
    return kvc_in_codes(args) ? 2 : 4;
}

static int64_t rows_per_item(const kvc_matmul_args *args) {
    return args->tiled || kvc_word_channels(args) == KVC_TILE_CHANNELS ? KVC_TILED_ROWS : ROWS_PER_ITEM;
}

static void prepare_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const int64_t rows = rows_per_item(c->args), first = index * rows, stop = first + rows;
    (void)thread;
    c->kernels->prepare_rows(c->args, first, stop < c->args->n ? stop : c->args->n);
}

static void multiply_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const int64_t panels = c->args->matrix->panels, step = panels_per_step(c->args);
    const int64_t steps = (panels + step - 1) / step;
    const int64_t first = steps * index / c->items * step, stop = steps * (index + 1) / c->items * step;
    kvc_multiply_panels(c->kernels, c->args, first, stop < panels ? stop : panels,
                        (float *)(void *)(c->args->prepared + prepared_bytes(c->args)) +
                            (size_t)thread * kvc_thread_floats(c->args));
}

size_t kvc_matmul_scratch_bytes(const kvc_matmul_args *args, int num_threads) {
    const size_t floats = (size_t)num_threads * kvc_thread_floats(args) * sizeof(float);
    return floats ? prepared_bytes(args) + floats : (size_t)kvc_prepared_rows(args) * kvc_prepared_row_bytes(args);
}

/* A number of items that are of one size, and as many for each thread: between half of `items` and all, if there is one. */
static int64_t even_items(int64_t items, int64_t steps, int num_threads) {
    for (int64_t even = items / num_threads * num_threads; 2 * even >= items && even > 0; even -= num_threads) {
        if (steps % even == 0) return even;
    }
    return items;
}

/* The call itself, but for its rows in tiles. */
static kvc_matmul_args with_tiles(const kvc_kernels *kernels, const kvc_matmul_args *args) {
    kvc_matmul_args own = *args;
    own.tiled = kernels->tiles && kvc_in_codes(args) ? args->n / KVC_TILED_ROWS * KVC_TILED_ROWS : 0;
    return own;
}

void kvc_matmul(const kvc_kernels *kernels, const kvc_matmul_args *args, int num_threads) {
    if (args->n >= KVC_TILED_ROWS && kvc_in_codes(args)) kernels = kvc_permitted(kernels);
    const kvc_matmul_args own = with_tiles(kernels, args);
    const kvc_matrix *m = args->matrix;
    const int64_t rows = kvc_rounds(args) && args->n < READING_ROWS ? READING_ROWS : args->n; /* to change weights takes as long */
    const kvc_work work = rows < READING_ROWS ? KVC_READING : KVC_MULTIPLYING;
    const int64_t bytes = (int64_t)m->panel_bytes * m->panels;
    const int64_t units = work == KVC_READING ? bytes : rows * m->rows * m->columns;
    num_threads = kvc_threads_worth(work, units, num_threads);
    const int64_t blocks = (args->n + rows_per_item(&own) - 1) / rows_per_item(&own);
    const int64_t step = panels_per_step(args), steps = (m->panels + step - 1) / step;
    const int64_t worth = bytes / BYTES_PER_ITEM * (work == KVC_READING ? 1 : rows / READING_ROWS);
    const int fine = args->n >= MANY_ROWS && kvc_in_codes(args);
    int64_t items = (int64_t)num_threads * (fine ? FINE_ITEMS : ITEMS_PER_THREAD);
    if (items > worth) items = worth > 1 ? worth : 1;
    if (items > steps) items = steps;
    items = even_items(items, steps, num_threads);
    if (num_threads == 1) items = 1;
    call c = {kernels, &own, items};
    kvc_run_items(blocks, items == 1 ? 1 : num_threads, prepare_item, &c);
    kvc_run_work(work, units, items, num_threads, multiply_item, &c);
}
