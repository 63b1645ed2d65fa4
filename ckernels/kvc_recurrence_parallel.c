/* kvc_recurrence_parallel.c - layers with a state (kvc_recurrence.c) on several threads: texts, heads and blocks of columns, or
 * texts and channels, are divided among them. */
#include "kvc.h"
#include "kvc_threads.h"

enum { CHANNELS_PER_ITEM = 128 };

typedef struct convolution_call {
    const kvc_kernels *kernels;
    const kvc_convolution *args;
} convolution_call;

typedef struct scan_call {
    const kvc_kernels *kernels;
    const kvc_scan *args;
} scan_call;

static void convolution_item(void *context, int64_t index, int thread) {
    const convolution_call *c = context;
    const int64_t channels = c->args->channels, parts = (channels + CHANNELS_PER_ITEM - 1) / CHANNELS_PER_ITEM;
    const int64_t first = index % parts * CHANNELS_PER_ITEM, stop = first + CHANNELS_PER_ITEM;
    (void)thread;
    c->kernels->convolve(c->args, index / parts, first, stop < channels ? stop : channels);
}

void kvc_convolve(const kvc_kernels *kernels, const kvc_convolution *args, int num_threads) {
    convolution_call c = {kernels, args};
    const int64_t rows = args->texts.starts[args->texts.count], channels = args->channels;
    const int64_t items = args->texts.count * ((channels + CHANNELS_PER_ITEM - 1) / CHANNELS_PER_ITEM);
    const int64_t values = rows * channels * args->taps;
    kvc_run_work(KVC_SCANNING, values, items, kvc_threads_worth(KVC_SCANNING, values, num_threads), convolution_item, &c);
}

static int64_t blocks_of(const kvc_scan *a) { return (a->dim + KVC_STATE_COLUMNS - 1) / KVC_STATE_COLUMNS; }
static int64_t parts_of(const kvc_scan *a) { return (blocks_of(a) + KVC_STATE_BLOCKS - 1) / KVC_STATE_BLOCKS; }

static void scan_item(void *context, int64_t index, int thread) {
    const scan_call *c = context;
    const int64_t parts = parts_of(c->args), block = index % parts * KVC_STATE_BLOCKS, head = index / parts % c->args->heads;
    const int64_t left = blocks_of(c->args) - block;
    (void)thread;
    c->kernels->scan(c->args, index / parts / c->args->heads, head, block, left < KVC_STATE_BLOCKS ? (int)left : KVC_STATE_BLOCKS);
}

void kvc_scan_texts(const kvc_kernels *kernels, const kvc_scan *args, int num_threads) {
    scan_call c = {kernels, args};
    const int64_t rows = args->texts.starts[args->texts.count], values = rows * args->heads * args->size * args->dim;
    const int threads = kvc_threads_worth(KVC_SCANNING, values, num_threads);
    kvc_run_work(KVC_SCANNING, values, args->texts.count * args->heads * parts_of(args), threads, scan_item, &c);
}
