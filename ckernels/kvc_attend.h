/* kvc_attend.h - the sizes that the plan (kvc_parallel.c) and the kernels (kvc_attend.c) share. */
#ifndef KVC_ATTEND_H
#define KVC_ATTEND_H

#include "kvc.h"

enum {
    KVC_CHUNK =
        128, /* tokens whose scores are held at once; 256 are no faster and prefetch too far ahead */
    KVC_SEGMENT = 1024, /* text positions of a segment (kvc_segment.h) */
    KVC_DOT_TOKENS = 16, /* tokens that all rows read before the next ones: 8 KB, in the L1 cache */
    KVC_NEAR_VALUES = 4, /* distance in tokens at which the mixing product prefetches into the L1 cache */
    KVC_POINTERS = KVC_CHUNK + KVC_DOT_TOKENS, /* rows of a chunk, and those behind it that products prefetch */
    KVC_DOT_ROWS = 8, /* up to this many rows, dot products are faster than packing K into panels */
    KVC_FEW_ROWS =
        16, /* up to this many rows, one item takes all heads, block by block in memory order */
    KVC_ITEM_ROWS =
        96, /* most rows of an item: a multiple of every tile; q and accumulators 96 KB at head_dim 128 */
};
_Static_assert(KVC_SEGMENT % KVC_CHUNK == 0, "a segment is whole chunks");

/* Floats of a row of q (head_dim) or of an accumulator (value_head_dim). */
static inline int64_t kvc_padded_dim(int dim) { return (dim + 15) / 16 * 16; }

/* The tokens that a query sees, counted from the first stored one: all those of [first, stop), or of a tree some of
 * them. Neither end is smaller for a later query. */
typedef struct kvc_span {
    int64_t first, stop;
} kvc_span;

/* The first token that the window of a query lets it see, which itself is the token `own`; both counted from the first stored one. */
static inline int64_t kvc_window_start(const kvc_seq *seq, int64_t own) {
    if (!seq->window) return 0;
    const int64_t before = seq->chunked ? (seq->start + own) % seq->window : seq->window - 1;
    return own > before ? own - before : 0;
}

static inline kvc_span kvc_seen(const kvc_seq *seq, int64_t query) {
    const int64_t own = seq->num_tokens - seq->num_queries + query + 1;
    const int64_t shown = seq->num_tokens - seq->hidden_tokens;
    const int64_t own_first = seq->firsts ? seq->firsts[query] : 0;
    const int64_t skipped = seq->skipped_tokens > own_first ? seq->skipped_tokens : own_first;
    if (seq->whole) return (kvc_span){skipped < shown ? skipped : shown, shown};
    const int64_t end = own + seq->ahead, stop = end < 0 ? 0 : end < shown ? end : shown;
    const int64_t begun = kvc_window_start(seq, own - 1 - (seq->parents ? query : 0)); /* in a tree, of the first queries */
    const int64_t first = begun > skipped ? begun : skipped;
    return (kvc_span){first < stop ? first : stop, stop};
}

/* The segment of a token: of its text position, so that it is the same however many tokens before it are stored. */
static inline int64_t kvc_segment_of(const kvc_seq *seq, int64_t token) { return (seq->start + token) / KVC_SEGMENT; }

static inline int64_t kvc_num_segments(const kvc_seq *seq, kvc_span seen) {
    if (seen.first >= seen.stop) return 0;
    return kvc_segment_of(seq, seen.stop - 1) - kvc_segment_of(seq, seen.first) + 1;
}

/* Floats of one segment's results for `rows` rows: accumulators, maxima, sums; a multiple of 16. */
static inline int64_t kvc_result_floats(const kvc_layout *layout, int64_t rows) {
    return rows * kvc_padded_dim(layout->value_head_dim) + 2 * ((rows + 15) / 16 * 16);
}

/* A query row in digits, or in whole numbers of 16 bits (kvc_tiles.h). */
typedef struct unit_query {
    union {
        struct {
            int8_t high[KVC_MAX_HEAD_DIM], low[KVC_MAX_HEAD_DIM];
        };
        int16_t whole[KVC_MAX_HEAD_DIM];
    };
    float scale, sum, centre; /* the step; the sum of q; what the centre of codes adds (kvc_tiles.h) */
    int32_t start;            /* of sums of products with unsigned codes */
    float unused[12];         /* up to a whole cache line, as below */
} unit_query;

/* The weights of one row and chunk, likewise. */
typedef struct unit_weights {
    union {
        struct {
            int8_t high[KVC_CHUNK], low[KVC_CHUNK];
        };
        int16_t whole[KVC_CHUNK];
    };
    float scale, base; /* base: the term of every channel, from the minima and the bias of signed codes */
    float rounded;     /* the sum of the numbers, exact */
    float unused[13];
} unit_weights;
/* Scales of V of the lanes of a chunk, and the values in the middle of the codes' range. */
typedef struct v_scales {
    float scales[KVC_CHUNK], middles[KVC_CHUNK];
} v_scales;
_Static_assert(sizeof(unit_query) % 64 == 0 && sizeof(unit_weights) % 64 == 0, "64 digits lie in one line");

/* Most (head, row) pairs of one item. */
static inline int64_t kvc_item_max_rows(const kvc_layout *layout) {
    const int64_t few = (int64_t)layout->num_heads * KVC_FEW_ROWS;
    return few > KVC_ITEM_ROWS ? few : KVC_ITEM_ROWS;
}

/* One thread's scratch in floats. For every (head, row): q, sink q, both in digits, the results of the current segment
 * and of those before it. For one head: the scores of a chunk and their factors; K panels and staged rows, or weights
 * in digits; the tiles of V of latent rows. */
static inline int64_t kvc_thread_scratch_floats(const kvc_layout *layout) {
    const int64_t key_dim = kvc_padded_dim(layout->head_dim), value_dim = kvc_padded_dim(layout->value_head_dim);
    const int64_t rows = kvc_item_max_rows(layout), staged_dim = key_dim > value_dim ? key_dim : value_dim;
    return rows * (2 * key_dim + 2 * (int64_t)(sizeof(unit_query) / sizeof(float))) +
           2 * kvc_result_floats(layout, rows) + KVC_ITEM_ROWS * (KVC_CHUNK + 1) +
           KVC_CHUNK * (key_dim + staged_dim) + (layout->latent ? KVC_CHUNK * (value_dim / 4 + 1) + 16 : 0) + 64;
}

_Static_assert(KVC_ITEM_ROWS * sizeof(unit_weights) <= 2 * KVC_CHUNK * 32 * sizeof(float),
               "weights in digits fit into the memory of panels and staged rows, from head_dim 32 on");

#endif
