/* kvc_sparse_parallel.c - divides an attention call to some of the tokens (kvc_choice.h) among the threads.
 *
 *   queries that have too few tokens to choose from     kvc_attend, for each stretch of neighbouring sequences with some
 *   summaries of pages that none was made of               in pieces of neighbouring pages
 *   the others                                          one item for each KV head of each query, with lists for a share of its heads
 *
 * In a sequence the first kind comes first. Where it has both, kvc_attend has all its queries, and the rest is written over:
 * that is one chunk of a text.
 * Where blocks may lie in a file, few of these items choose first, all of them, so that what they lack is read meanwhile.
 *
 * Scratch: [sizes of kvc_attend] or [missing pages] or [one piece per thread] [lists of pages].
 */
#include "kvc_sparse.h"
#include "kvc_spill.h"
#include "kvc_threads.h"

enum { PAGES_OF_ITEM = 8, MOST_MISSING = 4096, MOST_LISTED = 1 << 18 /* pages in lists of a call that chooses first */ };

/* A page of a block without summaries. */
typedef struct missing_page {
    int32_t block, page;
} missing_page;

typedef struct call {
    const kvc_kernels *kernels;
    const kvc_attend_args *args;
    kvc_sparse_args sparse;
    missing_page *missing;
    int64_t num_missing;
    int64_t shares;     /* of the query heads of a KV head */
    unsigned char *own; /* one piece per thread */
    size_t own_bytes;
} call;

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

/* One thread's scratch; 0 where all queries attend to all. Sets the columns. */
static size_t thread_bytes(const kvc_attend_args *args, kvc_sparse_args *sparse) {
    sparse->columns = kvc_ranked_columns(args, sparse);
    if (!sparse->columns && !sparse->listed) return 0;
    const int64_t floats = kvc_thread_scratch_floats(args->layout) + kvc_sparse_scratch_floats(args, sparse);
    return align64((size_t)floats * sizeof(float));
}

/* Lists of pages that a call may have: one of each query and KV head. */
static int64_t num_lists(const kvc_attend_args *args) {
    int64_t queries = 0;
    for (int64_t i = 0; i < args->num_seqs; i++) queries += args->seqs[i].num_queries;
    return queries * args->layout->num_heads;
}

/* Entries of one list; 0: items choose where they attend. */
static int64_t list_stride(const kvc_attend_args *args, const kvc_sparse_args *sparse) {
    if (!args->spill || sparse->listed) return 0;
    const int64_t stride = KVC_SPARSE_NEWEST / KVC_PAGE + 3 + kvc_num_chosen(sparse) + KVC_CHUNK;
    return num_lists(args) * stride <= MOST_LISTED ? stride : 0;
}
static size_t lists_bytes(const kvc_attend_args *args, const kvc_sparse_args *sparse) {
    return align64((size_t)(num_lists(args) * list_stride(args, sparse)) * sizeof(int32_t));
}

/* The next sequences, from `from` on, that have queries of the first kind: returns the first one, and *stop. */
static int64_t next_dense(const kvc_attend_args *args, const kvc_sparse_args *sparse, int64_t from, int64_t *stop) {
    while (from < args->num_seqs && !kvc_first_sparse(args->seqs + from, sparse)) from++;
    for (*stop = from; *stop < args->num_seqs && kvc_first_sparse(args->seqs + *stop, sparse);) ++*stop;
    return from;
}

/* The call of sequences [first, stop), whose queries begin with `query`. */
static kvc_attend_args part_of(const kvc_attend_args *args, int64_t first, int64_t stop, int64_t query) {
    const int64_t pairs = query * args->num_query_heads;
    kvc_attend_args part = *args;
    part.seqs += first, part.num_seqs = stop - first;
    if (part.residuals) part.residuals += first;
    part.queries.data += query * part.queries.token_stride;
    part.out += pairs * args->layout->value_head_dim;
    if (part.lse) part.lse += pairs;
    if (part.sinks) part.sinks += query * part.sink_stride;
    return part;
}

size_t kvc_sparse_scratch_bytes(const kvc_attend_args *args, const kvc_sparse_args *sparse, int num_threads) {
    kvc_sparse_args own = *sparse;
    size_t most = (size_t)num_threads * thread_bytes(args, &own) + lists_bytes(args, sparse), missing = MOST_MISSING * sizeof(missing_page);
    if (most < missing) most = missing;
    for (int64_t first = 0, stop; (first = next_dense(args, sparse, first, &stop)) < args->num_seqs; first = stop) {
        const kvc_seq *residuals = args->residuals ? args->residuals + first : NULL;
        const size_t bytes = kvc_attend_scratch_bytes(args->layout, args->seqs + first, residuals, stop - first,
                                                      args->num_query_heads, num_threads);
        if (most < bytes) most = bytes;
    }
    return most + 64;
}

static void summarise_pages(void *context, int64_t index, int thread) {
    const call *c = context;
    const int64_t first = index * PAGES_OF_ITEM, stop = first + PAGES_OF_ITEM < c->num_missing ? first + PAGES_OF_ITEM : c->num_missing;
    kvc_run runs[PAGES_OF_ITEM];
    const kvc_units units = {.runs = runs, .count = stop - first, .divisor = 1, .layer = c->args->spill_layer};
    (void)thread;
    for (int64_t i = first; i < stop; i++) runs[i - first] = (kvc_run){c->missing[i].block, 0, 0};
    const int64_t faults = c->args->spill ? kvc_hold(c->args->spill, &units, KVC_TO_READ) : 0;
    for (int64_t i = first; i < stop; i++) {
        const missing_page *m = &c->missing[i];
        c->kernels->summarise_page(c->args->layout, c->args->arena, m->block, m->page, &c->sparse.summaries);
        if (faults) c->sparse.summaries.made[m->block * (c->args->layout->block_size / KVC_PAGE) + m->page] = 0;
    }
    if (c->args->spill) kvc_release(c->args->spill, &units, KVC_TO_READ);
}

static void make_missing(call *c, int threads) {
    kvc_run_items((c->num_missing + PAGES_OF_ITEM - 1) / PAGES_OF_ITEM, threads, summarise_pages, c);
    c->num_missing = 0;
}

/* Makes the summaries that the queries of a sequence need. */
static void make_summaries(call *c, const kvc_seq *seq, int threads) {
    const int64_t pages = c->args->layout->block_size / KVC_PAGE;
    const kvc_sparse_span of = kvc_sparse_span_of(seq, seq->num_queries - 1);
    for (int64_t page = of.first; page < of.stop; page++) {
        const int32_t block = seq->runs[page / pages].block;
        unsigned char *made = &c->sparse.summaries.made[block * pages + page % pages];
        if (*made) continue;
        *made = 1;
        c->missing[c->num_missing++] = (missing_page){block, (int32_t)(page % pages)};
        if (c->num_missing == MOST_MISSING) make_missing(c, threads);
    }
}

/* A share of the heads of one KV head of one query that does not attend to all. */
static void attend_at(void *context, int64_t index, int thread) {
    const call *c = context;
    const kvc_attend_args *args = c->args;
    const int64_t heads = args->layout->num_heads, group = args->num_query_heads / heads;
    const int64_t share = index % c->shares, pair = index / c->shares;
    int64_t query = pair / heads, first_query = 0, seq = 0, dense;
    for (;; seq++) {
        dense = kvc_first_sparse(args->seqs + seq, &c->sparse);
        if (query < args->seqs[seq].num_queries - dense) break;
        query -= args->seqs[seq].num_queries - dense;
        first_query += args->seqs[seq].num_queries;
    }
    query += dense;
    kvc_item item = {.seq = seq, .first_query = first_query, .row = query * group + group * share / c->shares, .parts = 1};
    item.row_stop = query * group + group * (share + 1) / c->shares;
    item.residual = args->residuals ? kvc_seen(args->residuals + seq, query).stop : 0;
    item.segments = 1 + (item.residual > 0);
    item.head = (int32_t)(pair % heads), item.head_stop = item.head + 1;
    c->kernels->attend_chosen(args, &c->sparse, &item, c->own + (size_t)thread * c->own_bytes);
}

/* Shares of the query heads of a KV head: lists are of all of them, so that they may be divided; enough for all threads, of 16 heads
 * and more. */
static int64_t shares_of(const call *c, int64_t pairs, int threads) {
    const int64_t group = c->args->num_query_heads / c->args->layout->num_heads, least = (group + KVC_ITEM_ROWS - 1) / KVC_ITEM_ROWS;
    const int64_t wanted = (threads + pairs - 1) / pairs, most = group / 16;
    if (!c->sparse.listed) return 1;
    return wanted <= least || most <= least ? least : wanted < most ? wanted : most;
}

void kvc_attend_sparse(const kvc_kernels *kernels, const kvc_attend_args *args, const kvc_sparse_args *sparse, void *scratch,
                       int num_threads) {
    unsigned char *base = (unsigned char *)align64((size_t)scratch);
    call c = {.kernels = kvc_permitted(kernels), .args = args, .sparse = *sparse, .missing = (missing_page *)(void *)base};
    int64_t query = 0, seq = 0, choosing = 0;
    for (int64_t first = 0, stop; (first = next_dense(args, sparse, first, &stop)) < args->num_seqs; first = stop) {
        for (; seq < first; seq++) query += args->seqs[seq].num_queries;
        const kvc_attend_args part = part_of(args, first, stop, query);
        kvc_attend(kernels, &part, scratch, num_threads);
    }
    for (seq = 0; seq < args->num_seqs; seq++) {
        const int64_t count = args->seqs[seq].num_queries - kvc_first_sparse(args->seqs + seq, sparse);
        if (count && !sparse->listed) make_summaries(&c, args->seqs + seq, num_threads);
        choosing += count;
    }
    if (c.num_missing) make_missing(&c, num_threads);
    c.own = base, c.own_bytes = thread_bytes(args, &c.sparse);
    if (!choosing) return;
    choosing *= args->layout->num_heads;
    c.shares = shares_of(&c, choosing, num_threads);
    if ((c.sparse.chosen_stride = list_stride(args, sparse)) > 0) {
        c.sparse.chosen = (int32_t *)(void *)(base + (size_t)num_threads * c.own_bytes);
        c.sparse.choosing = 1;
        kvc_run_items(choosing, num_threads, attend_at, &c);
        c.sparse.choosing = 0;
    }
    kvc_run_items(choosing * c.shares, num_threads, attend_at, &c);
}
