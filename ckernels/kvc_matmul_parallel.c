/* kvc_matmul_parallel.c - a product on several threads: rows are prepared, then panels are divided among the threads. */
#include "kvc.h"
#include "kvc_matrix.h"
#include "kvc_threads.h"

enum {
    ROWS_PER_ITEM = 12,       /* to prepare: whole blocks, since blocks of 8 are in calls of at most 8 rows alone */
    BYTES_PER_ITEM = 1 << 16, /* of the matrix; less is read faster than another thread begins */
    ITEMS_PER_THREAD = 4,     /* so that a thread that the system delays leaves its share to the others */
    FINE_ITEMS = 16,          /* per thread, for many rows and packed weights: threads end at nearly the same time. Not for
                               * floats, which read all rows from memory once for each item. */
    MANY_ROWS = 64,
    /* Of one thread: what it reads from memory, and multiplies; within a factor of three of what was measured, from AVX2
     * to AVX-512 and from f32 to 4 bits. */
    BYTES_PER_NS = 12,
    MACS_PER_NS = 64,
};

typedef struct call {
    const kvc_kernels *kernels;
    const kvc_matmul_args *args;
    int64_t items;
} call;

/* From `prepared` to the floats of the first thread, which begin at a cache line if it does. */
static size_t prepared_bytes(const kvc_matmul_args *args) {
    return ((size_t)args->n * kvc_prepared_row_bytes(args) + 63) / 64 * 64;
}

/* The most panels that one tile reads together. */
static int64_t panels_per_step(const kvc_matmul_args *args) {
    return kvc_matrix_format_of(args->matrix->format)->packed ? 2 : 4;
}

static void prepare_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const int64_t first = index * ROWS_PER_ITEM, stop = first + ROWS_PER_ITEM;
    (void)thread;
    c->kernels->prepare_rows(c->args, first, stop < c->args->n ? stop : c->args->n);
}

static void multiply_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const int64_t panels = c->args->matrix->panels, step = panels_per_step(c->args);
    const int64_t steps = (panels + step - 1) / step;
    const int64_t first = steps * index / c->items * step, stop = steps * (index + 1) / c->items * step;
    c->kernels->multiply_panels(c->args, first, stop < panels ? stop : panels,
                                (float *)(void *)(c->args->prepared + prepared_bytes(c->args)) +
                                    (size_t)thread * kvc_thread_floats(c->args));
}

size_t kvc_matmul_scratch_bytes(const kvc_matmul_args *args, int num_threads) {
    const size_t floats = (size_t)num_threads * kvc_thread_floats(args) * sizeof(float);
    return floats ? prepared_bytes(args) + floats : (size_t)args->n * kvc_prepared_row_bytes(args);
}

/* A number of items that are of one size, and as many for each thread: between half of `items` and all, if there is one. */
static int64_t even_items(int64_t items, int64_t steps, int num_threads) {
    for (int64_t even = items / num_threads * num_threads; 2 * even >= items && even > 0; even -= num_threads) {
        if (steps % even == 0) return even;
    }
    return items;
}

/* The time of a product on one thread. */
static int64_t ns_of(const kvc_matmul_args *args) {
    const kvc_matrix *m = args->matrix;
    const int64_t reading = (int64_t)m->panel_bytes * m->panels / BYTES_PER_NS;
    const int64_t multiplying = args->n * m->rows * m->columns / MACS_PER_NS;
    return reading > multiplying ? reading : multiplying;
}

void kvc_matmul(const kvc_kernels *kernels, const kvc_matmul_args *args, int num_threads) {
    num_threads = kvc_threads_worth(ns_of(args), num_threads);
    const int64_t blocks = (args->n + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
    const int64_t step = panels_per_step(args), steps = (args->matrix->panels + step - 1) / step;
    const int64_t weight = args->n < 4 ? 1 : args->n / 4; /* from 4 rows on a byte takes longer than its reading */
    const int64_t worth = (int64_t)args->matrix->panel_bytes * args->matrix->panels / BYTES_PER_ITEM * weight;
    const int fine = args->n >= MANY_ROWS && kvc_matrix_format_of(args->matrix->format)->packed;
    int64_t items = (int64_t)num_threads * (fine ? FINE_ITEMS : ITEMS_PER_THREAD);
    if (items > worth) items = worth > 1 ? worth : 1;
    if (items > steps) items = steps;
    items = even_items(items, steps, num_threads);
    if (num_threads == 1) items = 1;
    call c = {kernels, args, items};
    kvc_run_items(blocks, items == 1 ? 1 : num_threads, prepare_item, &c);
    kvc_run_items(items, num_threads, multiply_item, &c);
}
