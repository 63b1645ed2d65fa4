/* kvc.h - the contract between the kernels and their callers.
 *
 * Pure C11, little-endian: no Python, no allocation, no globals. No function fails on valid arguments. The kernels
 * check nothing: the caller (kvcache/kernels/kernels.pyx and store.pyx) checks shapes, ranges and finiteness once.
 *
 * MEMORY LAYOUT OF K AND V
 *
 *   arena of one layer     block 0 | block 1 | ...            each layout.block_bytes long, 64-byte aligned
 *   one block              K of head 0 | K of head 1 | ... | V of head 0 | V of head 1 | ... | padding
 *   one head of K or V     float formats: [slot][dim]         quantised: see the tile drawing in kvc_quant.h
 *   latent rows            one head, and no V: V of a token is the first channels of its K
 *   a sequence             runs: (block, first slot, stop slot), the tokens in text order
 */
#ifndef KVC_H
#define KVC_H

#include <stddef.h>
#include <stdint.h>

#include "kvc_formats.h"
#include "kvc_matrix.h"
#include "kvc_recurrence.h"

/* Always inlined: what a caller gives as constants is constant inside. */
#define INLINE static inline __attribute__((always_inline))

/* The version of BITS.md: results of one version have the same bits at every level. It grows with each change of them. */
enum { KVC_BITS = 2 };

/* KVC_MAX_HEAD_DIM: of latent rows, those of DeepSeek V3; of others KVC_MOST_CHANNELS. */
enum { KVC_MAX_BLOCK_SIZE = 256, KVC_MAX_HEAD_DIM = 576, KVC_MOST_CHANNELS = 512 };

/* Consecutive tokens of a sequence in slots [first, stop) of one block. */
typedef struct kvc_run {
    int32_t block;
    uint16_t first;
    uint16_t stop;
} kvc_run;

/* The layout of one block of one layer; it never changes for an arena. */
typedef struct kvc_layout {
    int32_t block_size; /* slots (tokens) per block, 1 to 256 */
    int32_t num_heads;  /* KV heads */
    int32_t head_dim;   /* of K and of queries: a multiple of 8, at most KVC_MOST_CHANNELS, of latent rows KVC_MAX_HEAD_DIM */
    int32_t value_head_dim; /* of V and of the output, within the same limits */
    kvc_format key_format;
    kvc_format value_format;
    int32_t rotate_keys; /* 1: rows are stored under a Hadamard rotation of the head */
    int32_t rotate_values;
    int32_t latent; /* 1: V is the first value_head_dim channels of K, of one head; formats and rotations are equal */
    size_t key_head_bytes;   /* one KV head's K of one block */
    size_t value_head_bytes; /* one KV head's V of one block; 0 where K has it */
    size_t block_bytes;      /* all heads, K and V, rounded up to 64 */
} kvc_layout;

/* What is known of the keys of one KV head before any is written. A centre is subtracted from keys before they are
 * stored and added to those that are read, except to slots that were never written. A factor steers the rounding of
 * quantised keys (kvc_feedback.h). */
typedef struct kvc_head_keys {
    const float *centre; /* (head_dim), or NULL */
    const float *factor; /* (head_dim, head_dim), of which the part above the diagonal is read; or NULL */
} kvc_head_keys;

/* Rows of K, V or queries as a caller has them, (tokens, heads, dim): the channels of a head lie together. */
typedef enum kvc_element { KVC_ELEMENT_F32, KVC_ELEMENT_F16, KVC_ELEMENT_BF16, KVC_ELEMENT_F64 } kvc_element;
typedef struct kvc_tensor {
    const unsigned char *data;         /* aligned for its elements, as the strides are */
    int64_t token_stride, head_stride; /* bytes, of any sign */
    kvc_element element;
} kvc_tensor;

/* One sequence of an attention call. Query j of num_queries has the position of token num_tokens - num_queries + j. It
 * sees the tokens up to that position, except the last hidden_tokens of the sequence, which no query sees. Scores of
 * the first sink_tokens tokens use the sink queries. */
typedef struct kvc_seq {
    const kvc_run *runs;
    int64_t num_runs;
    int64_t num_tokens; /* the sum of the runs */
    int64_t sink_tokens;
    int64_t num_queries;
    int64_t hidden_tokens; /* 0 to num_tokens */
    int64_t skipped_tokens; /* the number of first tokens that no query sees either; any number from 0 on */
    int64_t start;         /* the text position of the first token, 0 to 2^62; the others follow it */
    int64_t window;        /* a query at position p sees positions from p - window + 1 on; 0: from the first token on */
    int64_t ahead;         /* a query also sees this many tokens after its own, 0 to 2^62; 0 of a tree */
    int32_t chunked;       /* 1: from the last multiple of window on that is at most p; 0 without a window */
    int32_t whole;         /* 1: every query sees all tokens but the hidden ones; there is neither window nor tree then */
    /* NULL, or a tree of num_queries each: the parent of each query, of those before it, or -1, and its number of
     * ancestors. Query j sees its own token, those of its ancestors, and those before the queries'; its position is that
     * of the token after these, plus its number of ancestors. */
    const int64_t *parents, *depths;
    const int64_t *firsts; /* NULL, or of each query the number of first tokens that it does not see, ascending; NULL of a tree */
} kvc_seq;

struct kvc_spill;

/* The arguments of one attention call. Rows of queries and out: sequence by sequence, as in seqs. Queries are widened
 * where an item reads them, doubles rounded.
 *
 * A context may have a residual, tokens in another layout: those that a text keeps in f16 beside packed ones. Queries see
 * the tokens of seqs[i] and those of residuals[i], which come last in the sum; scores are in this order too.
 *
 * The bits of a row of out and lse depend on its query, the scale, softcap and sink, the tokens that the query sees and
 * their text positions, the position that ends the sink tokens, and the layouts. They do not depend on other queries and
 * sequences of the call, on tokens that the query does not see (whether they are stored or not), on the number of threads,
 * or on the level (BITS.md). If K and V are both tiled (kvc_quant.h), they also depend on how these tokens are divided into
 * runs, but not on the blocks' ids; and if runs with holes between them lie before the first of these tokens in its
 * segment, on those runs. scores are sums over queries and do not depend on the number of threads. */
typedef struct kvc_attend_args {
    const kvc_layout *layout;
    const unsigned char *arena; /* of one layer */
    const kvc_seq *seqs;
    int64_t num_seqs;
    int32_t num_query_heads; /* a multiple of layout->num_heads; query head i reads KV head i / group */
    float scale;
    kvc_tensor queries;        /* (total_queries, num_query_heads, head_dim) */
    kvc_tensor sink_queries;   /* the same shape; its data is NULL if there are none */
    float *out;                /* (total_queries, num_query_heads, value_head_dim) */
    float *scores; /* (total seen tokens), or NULL: each token's weight, summed over queries and query heads */
    float *lse;    /* (total_queries, num_query_heads), or NULL: ln of the sum of exp(score); -inf of none */
    float softcap; /* c > 0: a score s becomes c tanh(s / c); 0: none */
    const float *sinks; /* (num_query_heads), or NULL: a score of each head that joins the sum and has no value */
    int64_t sink_stride; /* 0, or num_query_heads: each query has sinks of its own, (total_queries, num_query_heads) */
    int64_t score_stride; /* 0, or floats from one KV head's scores to the next one's: these are of its query heads */
    const kvc_head_keys *known; /* NULL, or (num_heads): keys in `arena` lack these centres; lse and sinks are of whole keys */
    /* NULL, or (num_seqs): as many queries as in seqs[i], at most KVC_SEGMENT tokens (kvc_attend.h), without start, window,
     * tree, sink or skipped tokens. There are no sink queries then. */
    const kvc_seq *residuals;
    const kvc_layout *residual_layout; /* of the same heads and channels, not rotated, without centres */
    const unsigned char *residual_arena;
    struct kvc_spill *spill; /* NULL, or where blocks of `arena` lie while they are not in memory (kvc_spill.h) */
    int32_t spill_layer;     /* the layer of these blocks there */
} kvc_attend_args;

/* A part of that call that runs on one thread. A row is a (query, query head of the group) pair of one KV head,
 * numbered query * group + head in group. */
typedef struct kvc_item {
    int64_t seq;
    int64_t first_query; /* of the sequence, in queries and out */
    int64_t first_score; /* of the sequence, in scores */
    int64_t row, row_stop;
    int64_t token, token_stop;
    int64_t first_segment, segments; /* of all tokens that these rows see; the last one is that of the residual, if any */
    int64_t residual; /* tokens of the residual that these rows see, read by the last part; of scores: 1: they are of these */
    int32_t head, head_stop; /* KV heads */
    int32_t part, parts; /* of the context, in whole segments */
    int64_t members; /* the number of sequences, from `seq` on, that share the first tokens, which the item reads; 0: of one */
    int64_t shared;  /* tokens of this sequence that an item with members reads; their results are in `results` */
    const struct kvc_item *own; /* the other items of the members, in order; each member has `parts` of them; or NULL */
    float *results; /* NULL, or the results of each segment of the context (kvc_segment.h), which combine_parts merges */
    float *norms;   /* NULL, or (total_queries, num_query_heads, 2): maximum and 1/sum, of log2 scores */
} kvc_item;

/* Float rows (tokens, heads, channels of one side): heads and channels lie together. */
typedef struct kvc_float_rows {
    const float *data; /* NULL: no rows */
    int64_t stride;    /* floats from token to token */
} kvc_float_rows;

struct kvc_summaries;
struct kvc_sparse_args;

/* What a gate becomes before it multiplies: its sigmoid, gate * sigmoid(gate), ln(1 + e^gate). */
enum { KVC_GATE_SIGMOID, KVC_GATE_SILU, KVC_GATE_SOFTPLUS };

/* The kernels of one SIMD level. Immutable; `name` is the compiled level, not the requested one. */
typedef struct kvc_kernels {
    const char *name;
    const char *base; /* the name of the level whose functions it has but for a few: of amx avx512, of avxvnni avx2, of i8mm neon, of
                       * another one itself. All levels give the same bits but for products of rows in bf16 (BITS.md). */
    int tiles;        /* 1: it multiplies tiles, which the system has to permit */
    /* Rows, as many as the runs have slots, into these; NULL: not written, as values of latent rows never are. Of each
     * head what is known of its keys, or NULL. */
    void (*write_runs)(const kvc_layout *, unsigned char *arena, const kvc_run *, int64_t num_runs, kvc_float_rows keys,
                       kvc_float_rows values, const kvc_head_keys *);
    /* Tokens [first, first + count) of a tensor as float rows (count, heads, dim); doubles are rounded. */
    void (*gather_rows)(const kvc_tensor *, int64_t first, int64_t count, int heads, int dim, float *rows);
    /* The inverse of write_runs: slots of the runs into float rows, strides in floats apart. */
    void (*read_runs)(const kvc_layout *, const unsigned char *arena, const kvc_run *, int64_t num_runs,
                      float *keys, float *values, size_t token_stride, size_t head_stride, const kvc_head_keys *);
    /* Index of the first value that is not finite or that the format cannot hold (kvc_formats.h), or -1. */
    int64_t (*check_representable)(const float *, int64_t n, kvc_format);
    /* Attention of one item, with one thread's scratch. Relative error: f32 and f16 5e-6 (kvc_attend.c), quantised
     * formats below 1 % against float attention over the stored values (kvc_tiles.h). */
    void (*attend_item)(const kvc_attend_args *, const kvc_item *, void *scratch);
    /* Merges the results of all segments of a split context into out, lse and norms, for this part's share of rows. */
    void (*combine_parts)(const kvc_attend_args *, const kvc_item *);
    /* Writes scores of tokens [token, token_stop): their weights, summed over all rows and heads, by means of norms. */
    void (*score_item)(const kvc_attend_args *, const kvc_item *, void *scratch);
    /* Products with weights (kvc_matrix.h): rows of floats as codes; rows of x made ready; panels times those rows, by kind:
     * of floats; of packed weights; of rows of bf16 in tiles or quads, NULL where the level has neither. */
    void (*quantise_weights)(kvc_matrix_format, int64_t count, int64_t columns, const float *x, unsigned char *codes,
                             uint16_t *scales, uint16_t *minima);
    void (*prepare_rows)(const kvc_matmul_args *, int64_t first, int64_t stop);
    void (*multiply_floats)(const kvc_matmul_args *, int64_t panel, int64_t panel_stop, float *scratch);
    void (*multiply_packed)(const kvc_matmul_args *, int64_t panel, int64_t panel_stop, float *scratch);
    void (*multiply_bf16)(const kvc_matmul_args *, int64_t panel, int64_t panel_stop, float *scratch);
    /* kvc_network.c */
    void (*rms_norm)(int64_t n, int64_t heads, int64_t dim, const float *x, int64_t x_stride, const float *weight,
                     float eps, float *out);
    void (*layer_norm)(int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *weight, const float *bias,
                       float eps, float *out);
    void (*thin)(int64_t n, int64_t dim, float *x, int64_t x_stride, float factor);
    void (*mix)(int64_t n, int64_t outs, int64_t ins, int64_t dim, const float *shares, const float *x, const float *base,
                float *out);
    void (*swiglu)(int64_t n, int64_t dim, const float *x, float *out);
    void (*geglu)(int64_t n, int64_t dim, const float *x, float *out);
    void (*gelu)(int64_t n, int64_t dim, const float *x, float *out);
    void (*xielu)(int64_t n, int64_t dim, const float *x, float positive, float negative, float beta, float eps, float *out);
    void (*clamped_swiglu)(int64_t n, int64_t dim, const float *x, float alpha, float limit, float *out);
    void (*softcap)(int64_t n, const float *x, float cap, float *out);
    void (*rotate)(int64_t n, int64_t heads, int64_t dim, int64_t turned, const float *x, int64_t x_stride,
                   const float *cos, const float *sin, float *out);
    void (*gate)(int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *gates, int64_t gate_stride, int kind,
                 float *out);
    /* kvc_shares.c: 2^40 * 2^((x - most) * factor) as whole numbers, to out unless it is NULL; returns their sum. */
    uint64_t (*shares)(int64_t n, const float *x, float most, float factor, uint64_t *out);
    /* kvc_recurrence.c: one text, some of its channels or of its columns; the sizes of steps, and what they leave. */
    void (*convolve)(const kvc_convolution *, int64_t text, int64_t first, int64_t stop);
    void (*scan)(const kvc_scan *, int64_t text, int64_t head, int64_t block, int blocks);
    void (*decays)(int64_t n, int64_t heads, const float *x, int64_t x_stride, const float *bias, const float *rate,
                   float least, float most, float *steps, float *decays);
    void (*bounded_decays)(int64_t n, int64_t channels, const float *x, int64_t x_stride, const float *bias,
                           const float *rate, float bound, float *decays);
    /* kvc_digest.c: 4 sums for each 1024 of n bytes, or part of them, under a key of 262 words. */
    void (*digest)(int64_t n, const unsigned char *data, const uint32_t *key, uint64_t *out);
    /* kvc_sparse.h: the summaries of a page of a block, which is full, but for `made`; attention of the rows of one query and KV
     * head, which choose their tokens, with one thread's scratch. */
    void (*summarise_page)(const kvc_layout *, const unsigned char *arena, int32_t block, int page, const struct kvc_summaries *);
    void (*attend_chosen)(const kvc_attend_args *, const struct kvc_sparse_args *, const kvc_item *, void *scratch);
    /* kvc_indexer.h: the scores of tokens [token, token_stop) for the query of an item, into an array of all its tokens; the choice by
     * scores of n tokens, which are written over up to whole vectors, of fewer than n. */
    void (*index_scores)(const kvc_attend_args *, const float *weights, const kvc_item *, float *scores, void *scratch);
    void (*choose_tokens)(float *scores, int64_t n, int64_t count, int32_t *chosen);
} kvc_kernels;

/* The results of panels [panel, panel_stop) for all prepared rows; scratch: kvc_thread_floats. */
static inline void kvc_multiply_panels(const kvc_kernels *kernels, const kvc_matmul_args *args, int64_t panel, int64_t panel_stop,
                                       float *scratch) {
    if (kvc_in_codes(args))
        kernels->multiply_packed(args, panel, panel_stop, scratch);
    else if (kvc_in_order(args))
        kernels->multiply_bf16(args, panel, panel_stop, scratch);
    else
        kernels->multiply_floats(args, panel, panel_stop, scratch);
}

/* kvc_dispatch.c: the levels that this build has and this CPU can run, best first. */
enum { KVC_MOST_LEVELS = 8 };
const char *kvc_best_level(void);                /* of this CPU, also where the build has left it out */
int kvc_num_levels(void);                        /* at least 1 */
const kvc_kernels *kvc_level(int index);         /* 0 is the best */
const kvc_kernels *kvc_find_level(const char *); /* by name, or NULL */
/* The level itself, or the one that gives the same bits where it needs what the system refuses to this process. */
const kvc_kernels *kvc_permitted(const kvc_kernels *);
/* The fastest way of a level on this CPU to multiply rows rounded to bf16: never KVC_BF16_FLOATS. Where that is KVC_BF16_TILES the
 * system has permitted them; a later answer may differ: a caller that needs the same bits keeps the first. */
kvc_bf16_rows kvc_bf16_rows_of(const kvc_kernels *);

/* kvc_layout.c */
int kvc_layout_init(kvc_layout *, int block_size, int num_heads, int head_dim, int value_head_dim,
                    kvc_format key_format, kvc_format value_format, int rotate_keys, int rotate_values, int latent);
/* Copies stored codes, bit for bit, within an arena or between arenas of one layout. Within one block the ranges may
 * overlap; a copy onto itself does nothing. */
void kvc_copy_slots(const kvc_layout *, const unsigned char *src_arena, int32_t src_block, int src_slot,
                    unsigned char *dst_arena, int32_t dst_block, int dst_slot, int count);
/* Sets slots [slot, slot + count) of a block to rows of zeros. */
void kvc_clear_slots(const kvc_layout *, unsigned char *arena, int32_t block, int slot, int count);

/* kvc_parallel.c: attention on several threads; scratch has kvc_attend_scratch_bytes at any alignment. */
size_t kvc_attend_scratch_bytes(const kvc_layout *, const kvc_seq *, const kvc_seq *residuals, int64_t num_seqs,
                                int num_query_heads, int num_threads);
void kvc_attend(const kvc_kernels *, const kvc_attend_args *, void *scratch, int num_threads);

/* kvc_rows_parallel.c: write_runs on several threads. With more than one, runs of one block follow one another. */
void kvc_write_runs(const kvc_kernels *, const kvc_layout *, unsigned char *arena, const kvc_run *, int64_t num_runs,
                    kvc_float_rows keys, kvc_float_rows values, const kvc_head_keys *, int num_threads);

/* kvc_matmul_parallel.c: the product on several threads. */
size_t kvc_matmul_scratch_bytes(const kvc_matmul_args *, int num_threads); /* at `prepared` */
void kvc_matmul(const kvc_kernels *, const kvc_matmul_args *, int num_threads);

/* kvc_network_parallel.c: the functions of kvc_network.c on several threads. */
void kvc_rms_norm(const kvc_kernels *, int64_t n, int64_t heads, int64_t dim, const float *x, int64_t x_stride,
                  const float *weight, float eps, float *out, int num_threads);
void kvc_layer_norm(const kvc_kernels *, int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *weight,
                    const float *bias, float eps, float *out, int num_threads);
void kvc_thin(const kvc_kernels *, int64_t n, int64_t dim, float *x, int64_t x_stride, float factor, int num_threads);
void kvc_mix(const kvc_kernels *, int64_t n, int64_t outs, int64_t ins, int64_t dim, const float *shares, const float *x,
             const float *base, float *out, int num_threads);
void kvc_swiglu(const kvc_kernels *, int64_t n, int64_t dim, const float *x, float *out, int num_threads);
void kvc_geglu(const kvc_kernels *, int64_t n, int64_t dim, const float *x, float *out, int num_threads);
void kvc_gelu(const kvc_kernels *, int64_t n, int64_t dim, const float *x, float *out, int num_threads);
void kvc_xielu(const kvc_kernels *, int64_t n, int64_t dim, const float *x, float positive, float negative, float beta,
               float eps, float *out, int num_threads);
void kvc_clamped_swiglu(const kvc_kernels *, int64_t n, int64_t dim, const float *x, float alpha, float limit, float *out,
                        int num_threads);
void kvc_rotate(const kvc_kernels *, int64_t n, int64_t heads, int64_t dim, int64_t turned, const float *x,
                int64_t x_stride, const float *cos, const float *sin, float *out, int num_threads);
void kvc_gate(const kvc_kernels *, int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *gates,
              int64_t gate_stride, int kind, float *out, int num_threads);

/* kvc_recurrence_parallel.c: convolve and scan for all texts, channels, heads and columns, on several threads. */
void kvc_convolve(const kvc_kernels *, const kvc_convolution *, int num_threads);
void kvc_scan_texts(const kvc_kernels *, const kvc_scan *, int num_threads);

#endif
