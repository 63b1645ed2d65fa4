/* kvc_indexer.h - the contract of an indexer, which chooses the tokens that a layer's queries attend to (DeepSeek-V3.2, "DeepSeek
 * Sparse Attention", section 2.1).
 *
 *   score of token t    sum over heads h of  weight_h * max(0, q_h . k_t)        in order of the heads, each a fused product and sum
 *   chosen              of the tokens that the query sees the `most` with the largest scores; of equal ones the first
 *
 * Keys are rows of one KV head (latent rows without a part that turns) in blocks of their own layout. A score that is not a number
 * is the worst.
 */
#ifndef KVC_INDEXER_H
#define KVC_INDEXER_H

#include "kvc_attend.h"

/* Beside kvc_attend_args, of which the layout and arena are those of the keys, and out, scores, lse and sinks are not used. */
typedef struct kvc_index_args {
    const float *weights; /* (total queries, num_query_heads) */
    int64_t most;         /* tokens that a query chooses, at least 1 */
    int32_t *chosen;      /* (total queries, most), written: ascending; all tokens, then -1, for a query that sees fewer */
} kvc_index_args;

/* kvc_indexer_parallel.c: writes the choice of all queries on several threads; scratch at any alignment. */
size_t kvc_index_scratch_bytes(const kvc_attend_args *, const kvc_index_args *, int num_threads);
void kvc_index_tokens(const kvc_kernels *, const kvc_attend_args *, const kvc_index_args *, void *scratch, int num_threads);

#endif
