/* kvc.h - the contract between the kernels and their callers.
 *
 * Pure C11: no Python, no allocation, no globals. Every function is total on validated input: the caller
 * (kvcache/_kernels.pyx and _store.pyx) checks shapes, ranges and finiteness once, the kernels never.
 *
 * WHERE A TOKEN'S KV LIES
 *
 *   arena of one layer     block 0 | block 1 | ...            each layout.block_bytes long, 64-byte aligned
 *   one block              K of head 0 | K of head 1 | ... | V of head 0 | V of head 1 | ... | padding
 *   one head of K or V     f32, f16: [slot][dim]              quantised: see the tile drawing in kvc_quant.c
 *   a sequence             runs: (block, first slot, stop slot), the tokens in the order of the text
 */
#ifndef KVC_H
#define KVC_H

#include <stddef.h>
#include <stdint.h>

typedef enum kvc_format { KVC_F32 = 0, KVC_F16, KVC_Q8, KVC_Q4, KVC_Q3, KVC_Q2 } kvc_format;

/* Consecutive tokens of a sequence in slots [first, stop) of one block. */
typedef struct kvc_run {
    int32_t block;
    uint16_t first;
    uint16_t stop;
} kvc_run;

/* How the bytes of one block of one layer lie; fixed for the life of an arena. */
typedef struct kvc_layout {
    int32_t block_size; /* slots (tokens) per block, 1 to 256 */
    int32_t num_heads;  /* KV heads */
    int32_t head_dim;   /* a multiple of 8, at most 256 */
    kvc_format key_format;
    kvc_format value_format;
    int32_t rotate_keys;   /* 1: rows are stored under a Hadamard rotation of the head */
    int32_t rotate_values;
    size_t key_head_bytes;   /* one KV head's K of one block */
    size_t value_head_bytes; /* one KV head's V of one block */
    size_t block_bytes;      /* all heads, K and V, rounded up to 64 */
} kvc_layout;

/* One sequence of an attention call. Query j of num_queries stands on token num_tokens - num_queries + j
 * and sees every token up to its own. The first sink_tokens tokens meet the sink queries. */
typedef struct kvc_seq {
    const kvc_run *runs;
    int64_t num_runs;
    int64_t num_tokens;
    int64_t sink_tokens;
    int64_t num_queries;
} kvc_seq;

#endif
