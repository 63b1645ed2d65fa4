/* kvc_sparse.h - the contract of sparse attention, where a query attends to some of the tokens that it sees, and its sizes.
 *
 * A page is 16 tokens whose text positions begin with a multiple of 16. A query that sees tokens up to position p attends to
 * the first page, to those from the page of position p - 63 on, and of the pages in between to those that it chooses, others for
 * each KV head (kvc_choice.h): they hold 1.75 times top_tokens tokens. If all of them have fewer than
 * KVC_SPARSE_LEAST times top_tokens, it attends to all, as without: a choice would take longer.
 */
#ifndef KVC_SPARSE_H
#define KVC_SPARSE_H

#include "kvc_attend.h"

enum { KVC_PAGE = 16, KVC_SPARSE_NEWEST = 64, KVC_SPARSE_LEAST = 4 };

/* The standard deviations of a page's scores between their mean and the estimate of the largest one: of 16 numbers that are
 * normally distributed the largest lies 1.77 above the mean. */
#define KVC_SPARSE_DEVIATIONS 2.0f

/* Summaries of the keys of each page of one layer's arena: per channel their mean in 5 bits and their variance in 3. They are
 * those of the stored keys, without rotation and centre, and serve to rank pages alone. Codes may be read up to 63 bytes
 * behind the last row. */
typedef struct kvc_summaries {
    unsigned char *made;  /* (blocks, pages of a block): 1 where the next two are those of the stored keys */
    unsigned char *codes; /* (blocks, pages of a block, num_heads, head_dim): the mean in the lower bits */
    uint16_t *scales;     /* (blocks, pages of a block, num_heads): exponents of both scales (kvc_summaries.c), variances << 8 */
} kvc_summaries;

typedef struct kvc_sparse_args {
    kvc_summaries summaries;
    int64_t top_tokens; /* at least 1 */
    int64_t columns;    /* kvc_attend_sparse sets it: kvc_ranked_columns */
    /* NULL, or (total queries, KV heads, num_listed): the tokens that each KV head attends to, ascending and seen by the query, then
     * numbers below 0. Nothing is chosen then, and all before is 0. */
    const int32_t *listed;
    int64_t num_listed;
    /* NULL, or (total queries, KV heads, chosen_stride): pages to attend to, then -1, where blocks may lie in a file. With `choosing`
     * 1 they are written, and read ahead; else attended to. */
    int32_t *chosen;
    int64_t chosen_stride;
    int32_t choosing;
    int64_t all_up_to; /* of a call with lists: a query that sees at most this many tokens attends to all of them; -1: none does */
} kvc_sparse_args;

/* kvc_sparse_parallel.c: kvc_attend where queries attend to some tokens. Sequences start at position 0, see all tokens but
 * skipped and hidden ones, and have each page in one block: block_size is a multiple of KVC_PAGE, all runs but the last fill their
 * blocks, and they have fewer than 2^31 tokens. There are no scores and no sink queries, and without lists at most KVC_ITEM_ROWS
 * query heads for each KV head. Makes the summaries that are missing. */
size_t kvc_sparse_scratch_bytes(const kvc_attend_args *, const kvc_sparse_args *, int num_threads);
void kvc_attend_sparse(const kvc_kernels *, const kvc_attend_args *, const kvc_sparse_args *, void *scratch, int num_threads);

/* What a query of a sparse call sees, and of it the pages that are ranked. */
typedef struct kvc_sparse_span {
    kvc_span seen;
    int64_t first, stop;
} kvc_sparse_span;

static inline kvc_sparse_span kvc_sparse_span_of(const kvc_seq *seq, int64_t query) {
    kvc_sparse_span s = {kvc_seen(seq, query), 1, 0};
    if (s.seen.first > KVC_PAGE) s.first = (s.seen.first + KVC_PAGE - 1) / KVC_PAGE;
    if (s.seen.stop > KVC_SPARSE_NEWEST) s.stop = (s.seen.stop - KVC_SPARSE_NEWEST) / KVC_PAGE;
    return s;
}

/* Whether a query attends to some tokens; if not, it has too few to choose from. */
static inline int kvc_is_sparse(const kvc_seq *seq, const kvc_sparse_args *sparse, int64_t query) {
    const kvc_sparse_span s = kvc_sparse_span_of(seq, query);
    if (sparse->listed) return s.seen.stop > sparse->all_up_to;
    return (s.stop - s.first) * KVC_PAGE / KVC_SPARSE_LEAST >= sparse->top_tokens;
}

/* The first query that does not attend to all; those before it see fewer tokens. */
static inline int64_t kvc_first_sparse(const kvc_seq *seq, const kvc_sparse_args *sparse) {
    int64_t first = 0, stop = seq->num_queries;
    while (first < stop) {
        const int64_t middle = first + (stop - first) / 2;
        if (kvc_is_sparse(seq, sparse, middle))
            stop = middle;
        else
            first = middle + 1;
    }
    return first;
}

/* Pages that a KV head chooses; fewer than are ranked. */
static inline int64_t kvc_num_chosen(const kvc_sparse_args *sparse) { return (7 * sparse->top_tokens + 4 * KVC_PAGE - 1) / (4 * KVC_PAGE); }

/* Pages that one query of a call ranks at most, in whole chunks; 0: no query chooses. */
static inline int64_t kvc_ranked_columns(const kvc_attend_args *args, const kvc_sparse_args *sparse) {
    int64_t most = 0;
    for (int64_t i = 0; i < args->num_seqs && !sparse->listed; i++) {
        const kvc_seq *seq = args->seqs + i;
        if (kvc_first_sparse(seq, sparse) == seq->num_queries) continue;
        const kvc_sparse_span of = kvc_sparse_span_of(seq, seq->num_queries - 1);
        if (most < of.stop - of.first) most = of.stop - of.first;
    }
    return (most + KVC_CHUNK - 1) / KVC_CHUNK * KVC_CHUNK;
}

/* A row of q in bytes, whole units of 64, that meets the means, and its squares / 127, that meet the variances. */
typedef struct summary_query {
    int8_t q[KVC_MAX_HEAD_DIM + 64], squares[KVC_MAX_HEAD_DIM + 64];
    float scale, middle, spread; /* the step; 15.5 times the sum of q; the factor of a root of sums */
    float unused[13];            /* up to a whole cache line */
} summary_query;
_Static_assert(sizeof(summary_query) % 64 == 0, "64 bytes lie in one line");

/* One thread's scratch of a sparse call in floats, behind that of a dense one: for each row the query in bytes and estimates, then
 * losses, and the pages to attend to: those before the ranked ones, the chosen ones, and the newest. */
static inline int64_t kvc_sparse_scratch_floats(const kvc_attend_args *args, const kvc_sparse_args *sparse) {
    const int64_t rows = args->num_query_heads / args->layout->num_heads, query = (int64_t)(sizeof(summary_query) / sizeof(float));
    return rows * (query + sparse->columns) + 2 * sparse->columns + KVC_SPARSE_NEWEST / KVC_PAGE + 3 + 16;
}

#endif
