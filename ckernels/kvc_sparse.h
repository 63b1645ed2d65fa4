/* kvc_sparse.h - the contract of sparse attention, where a query attends to some of the tokens that it sees, and its sizes.
 *
 * A page is 16 tokens whose text positions begin with a multiple of 16. A query that sees tokens up to position p attends to
 * the first page, to those from the page of position p - 63 on, and of the pages in between to top_tokens tokens, others for
 * each KV head (kvc_choice.h). If these pages have no more than KVC_SPARSE_LEAST times as many, it attends to all, as without:
 * a choice would take longer.
 */
#ifndef KVC_SPARSE_H
#define KVC_SPARSE_H

#include "kvc_attend.h"

enum { KVC_PAGE = 16, KVC_SPARSE_NEWEST = 64, KVC_SPARSE_LEAST = 4 };

/* Bounds of the keys of each page of one layer's arena: per channel the smallest and the largest, as codes of 4 bits. They are
 * those of the stored keys, without rotation and centre, and serve to rank pages alone. Codes may be read up to 63 bytes
 * behind the last row. */
typedef struct kvc_bounds {
    unsigned char *made;  /* (blocks, pages of a block): 1 where the next two are those of the stored keys */
    unsigned char *codes; /* (blocks, pages of a block, num_heads, head_dim): the largest in the lower bits */
    uint16_t *scales;     /* (blocks, pages of a block, num_heads), bf16: a code c is (c - 7.5) * scale */
} kvc_bounds;

typedef struct kvc_sparse_args {
    kvc_bounds bounds;
    int64_t top_tokens; /* at least 1 */
    int64_t candidates; /* keys that are scored for each chosen one, at least 1 */
    int64_t columns;    /* kvc_attend_sparse sets it: kvc_ranked_columns */
} kvc_sparse_args;

/* The functions of one SIMD level. */
typedef struct kvc_sparse_kernels {
    /* Makes the bounds of a page of a block, which is full; leaves `made`. */
    void (*bound_page)(const kvc_layout *, const unsigned char *arena, int32_t block, int page, const kvc_bounds *);
    /* Attention of the rows of one query and KV head, which choose their tokens; with one thread's scratch. */
    void (*attend_chosen)(const kvc_attend_args *, const kvc_sparse_args *, const kvc_item *, void *scratch);
} kvc_sparse_kernels;

/* kvc_sparse_parallel.c: those of the level of a table. */
const kvc_sparse_kernels *kvc_sparse_of(const kvc_kernels *);
/* kvc_attend where queries attend to some tokens. Sequences start at position 0, see all tokens but skipped and hidden ones, and
 * have each page in one block: block_size is a multiple of KVC_PAGE, all runs but the last fill their blocks, and they have fewer
 * than 2^31 tokens. There are no scores and no sink queries, and at most KVC_ITEM_ROWS query heads for each KV head. Makes the
 * bounds that are missing. */
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

/* The first query that chooses; those before it, which see fewer tokens, have too few to choose from. */
static inline int64_t kvc_first_sparse(const kvc_seq *seq, int64_t top_tokens) {
    int64_t first = 0, stop = seq->num_queries;
    while (first < stop) {
        const int64_t middle = first + (stop - first) / 2;
        const kvc_sparse_span s = kvc_sparse_span_of(seq, middle);
        if ((s.stop - s.first) * KVC_PAGE / KVC_SPARSE_LEAST >= top_tokens)
            stop = middle;
        else
            first = middle + 1;
    }
    return first;
}

/* Pages whose keys are scored, of so many that are ranked. */
static inline int64_t kvc_num_candidates(int64_t ranked, const kvc_sparse_args *sparse) {
    if (sparse->top_tokens / KVC_PAGE >= ranked / sparse->candidates) return ranked;
    return (sparse->candidates * sparse->top_tokens + KVC_PAGE - 1) / KVC_PAGE;
}

/* Columns that one query of a call ranks at a time, pages or tokens, in whole chunks; 0: no query chooses. And the most tokens
 * that it sees beside those that it ranks. */
static inline int64_t kvc_ranked_columns(const kvc_attend_args *args, const kvc_sparse_args *sparse, int64_t *beside) {
    int64_t most = 0;
    *beside = 0;
    for (int64_t i = 0; i < args->num_seqs; i++) {
        const kvc_seq *seq = args->seqs + i;
        if (kvc_first_sparse(seq, sparse->top_tokens) == seq->num_queries) continue;
        const kvc_sparse_span of = kvc_sparse_span_of(seq, seq->num_queries - 1);
        const int64_t ranked = of.stop - of.first, scored = kvc_num_candidates(ranked, sparse) * KVC_PAGE;
        if (most < scored || most < ranked) most = scored > ranked ? scored : ranked;
        if (*beside < of.first * KVC_PAGE + KVC_SPARSE_NEWEST + KVC_PAGE) *beside = of.first * KVC_PAGE + KVC_SPARSE_NEWEST + KVC_PAGE;
    }
    return (most + KVC_CHUNK - 1) / KVC_CHUNK * KVC_CHUNK;
}

/* A row of q in bytes, for bounds: those above 0 and those below, whole units of 64. */
typedef struct bound_query {
    int8_t above[KVC_MAX_HEAD_DIM + 64], below[KVC_MAX_HEAD_DIM + 64];
    float scale, middle; /* the step; 7.5 times the sum of all */
} bound_query;

/* One thread's scratch of a sparse call in floats, behind that of a dense one: for each row the query in bytes and scores, then
 * losses, chosen pages, and the list of tokens. */
static inline int64_t kvc_sparse_scratch_floats(const kvc_attend_args *args, const kvc_sparse_args *sparse, int64_t beside) {
    const int64_t rows = args->num_query_heads / args->layout->num_heads, query = (int64_t)(sizeof(bound_query) / sizeof(float));
    return rows * (query + sparse->columns) + 2 * sparse->columns + sparse->top_tokens + beside;
}

#endif
