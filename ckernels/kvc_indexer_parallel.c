/* kvc_indexer_parallel.c - divides the choice of an indexer (kvc_indexer.h) among the threads.
 *
 *   queries that see few tokens      choose all of them
 *   the others, a batch at a time    one item for each part of the tokens of each query: scores; then one for each query: its choice
 *
 * Scratch: [scores of a batch] [one piece per thread].
 */
#include "kvc_indexer.h"
#include "kvc_threads.h"

enum { PART_TOKENS = 4096, MOST_SCORES = 1 << 21, MOST_QUERIES = 256 };

/* A query of the batch. */
typedef struct indexed {
    int64_t seq, first_query, query, tokens;
} indexed;

typedef struct call {
    const kvc_kernels *kernels;
    const kvc_attend_args *args;
    const kvc_index_args *index;
    float *scores; /* (queries of a batch, stride) */
    int64_t stride, parts;
    unsigned char *own; /* one piece per thread */
    size_t own_bytes;
    indexed batch[MOST_QUERIES];
    int64_t count;
} call;

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

/* The most tokens that a query sees, in whole parts. */
static int64_t stride_of(const kvc_attend_args *args) {
    int64_t most = 0;
    for (int64_t i = 0; i < args->num_seqs; i++)
        if (most < args->seqs[i].num_tokens) most = args->seqs[i].num_tokens;
    return (most + PART_TOKENS - 1) / PART_TOKENS * PART_TOKENS;
}

/* Queries whose scores are there at once. */
static int64_t batch_of(int64_t stride) {
    const int64_t count = stride ? MOST_SCORES / stride : 1;
    return count < 1 ? 1 : count > MOST_QUERIES ? MOST_QUERIES : count;
}

static size_t thread_bytes(const kvc_layout *layout) { return align64((size_t)kvc_thread_scratch_floats(layout) * sizeof(float)); }

size_t kvc_index_scratch_bytes(const kvc_attend_args *args, const kvc_index_args *index, int num_threads) {
    const int64_t stride = stride_of(args);
    (void)index;
    return align64((size_t)(stride * batch_of(stride)) * sizeof(float)) + (size_t)num_threads * thread_bytes(args->layout) + 64;
}

static void score_at(void *context, int64_t i, int thread) {
    const call *c = context;
    const indexed *of = &c->batch[i / c->parts];
    const int64_t token = i % c->parts * PART_TOKENS, heads = c->args->num_query_heads;
    if (token >= of->tokens) return;
    kvc_item item = {.seq = of->seq, .first_query = of->first_query, .row = of->query * heads, .row_stop = (of->query + 1) * heads,
                     .token = token, .parts = 1, .segments = 1, .head_stop = 1};
    item.token_stop = of->tokens - token < PART_TOKENS ? of->tokens : token + PART_TOKENS;
    c->kernels->index_scores(c->args, c->index->weights, &item, c->scores + i / c->parts * c->stride,
                             c->own + (size_t)thread * c->own_bytes);
}

static void choose_at(void *context, int64_t i, int thread) {
    const call *c = context;
    const indexed *of = &c->batch[i];
    (void)thread;
    c->kernels->choose_tokens(c->scores + i * c->stride, of->tokens, c->index->most,
                              c->index->chosen + (of->first_query + of->query) * c->index->most);
}

static void run_batch(call *c, int threads) {
    int64_t most = 0;
    for (int64_t i = 0; i < c->count; i++)
        if (most < c->batch[i].tokens) most = c->batch[i].tokens;
    c->parts = (most + PART_TOKENS - 1) / PART_TOKENS;
    kvc_run_items(c->count * c->parts, threads, score_at, c);
    kvc_run_items(c->count, threads, choose_at, c);
    c->count = 0;
}

void kvc_index_tokens(const kvc_kernels *kernels, const kvc_attend_args *args, const kvc_index_args *index, void *scratch,
                      int num_threads) {
    call c = {.kernels = kvc_permitted(kernels), .args = args, .index = index, .stride = stride_of(args)};
    const int64_t together = batch_of(c.stride);
    c.scores = (float *)align64((size_t)scratch);
    c.own = (unsigned char *)c.scores + align64((size_t)(c.stride * together) * sizeof(float));
    c.own_bytes = thread_bytes(args->layout);
    int64_t first = 0;
    for (int64_t s = 0; s < args->num_seqs; first += args->seqs[s].num_queries, s++) {
        for (int64_t query = 0; query < args->seqs[s].num_queries; query++) {
            const int64_t tokens = kvc_seen(&args->seqs[s], query).stop;
            if (tokens <= index->most) {
                int32_t *chosen = index->chosen + (first + query) * index->most;
                for (int64_t i = 0; i < index->most; i++) chosen[i] = i < tokens ? (int32_t)i : -1;
                continue;
            }
            c.batch[c.count++] = (indexed){s, first, query, tokens};
            if (c.count == together) run_batch(&c, num_threads);
        }
    }
    if (c.count) run_batch(&c, num_threads);
}
