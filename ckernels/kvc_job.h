/* kvc_job.h - the state of one item: its scratch, its queries, and its tokens chunk by chunk. */
#ifndef KVC_JOB_H
#define KVC_JOB_H

#include "kvc_attend.h"
#include "kvc_kernels.h"
#include "kvc_segment.h"
#include "kvc_spill.h"
#include "kvc_tiles.h"

#define LOG2E 1.4426950408889634
#define LN2 0.6931471805599453

/* Consecutive tokens in consecutive slots of one block. */
typedef struct piece {
    const unsigned char *block;
    int64_t first; /* token of the text */
    int slot, count;
    int lane; /* the lane of the chunk that holds the first token */
} piece;

/* Consecutive tokens of one segment on at most KVC_CHUNK lanes, either all sinks or none. */
typedef struct chunk {
    int lanes, pieces, sink;
    int even; /* 1: token piece[0].first + i is on lane piece[0].lane + i */
    int count; /* tokens */
    float held[KVC_CHUNK]; /* unless it is even: 0 of lanes with a token, -1 of the others */
    int64_t segment;
    piece piece[KVC_CHUNK];
    const unsigned char *k[KVC_POINTERS],
        *v[KVC_POINTERS]; /* of head 0: with units the tile of each piece; else rows lane by lane, the first and the last
                           * one repeated */
} chunk;

typedef struct cursor { /* the next token of a sequence */
    const kvc_run *run;
    int64_t token;
    int slot;
    int skipped; /* lanes, or pieces of tiles, of its chunk before this token that nobody reads */
} cursor;

typedef struct job {
    const kvc_attend_args *args;
    const kvc_item *item;
    int group, rows;
    int padded, v_padded; /* floats of a row of q, and of an accumulator: kvc_padded_dim */
    /* Which tokens are read: those of the sequence, or of its residual (read_from). */
    const kvc_seq *seq;
    const kvc_layout *layout;
    const unsigned char *arena;
    int64_t first_segment; /* the segment of text position 0 */
    int64_t token_stop;
    int units; /* 1: K and V are tiled, and products are integer */
    kvc_rows k_rows, v_rows;
    size_t k_row_bytes, v_row_bytes;
    float *q, *sink_q;                /* [head][row][padded] */
    results segment, total;           /* of the current segment, and of those before it; [head][row][v_padded] */
    int merged;                       /* segments merged into total */
    float cap, inverse_cap;           /* of scores in powers of two; 0: none */
    float *weights, *alpha;           /* [row][KVC_CHUNK], [row] */
    float *panels, *stage;            /* room for KVC_CHUNK rows of K, of which one panel is used; and of either */
    unit_query *unit_q, *unit_sink_q; /* [head][row] */
    unit_weights *unit_w;             /* [row], in the memory of panels and stage */
    unsigned char *turned;            /* of latent rows: the tiles of V of a chunk */
    kvc_spill *spill;                 /* where blocks that are not in memory lie; NULL: all are */
} job;

/* Whether the runs fill their blocks, but for the slots before the first token and behind the last one. They do if all
 * slots in between count as many as the tokens, since no run has more than the slots of its block. */
static int fills_blocks(const kvc_seq *seq, int64_t size) {
    const kvc_run *last = seq->runs + seq->num_runs - 1;
    return seq->num_runs * size == seq->runs->first + seq->num_tokens + size - last->stop;
}

/* The run and slot of a token, from the nearer end if they are not known from its index. */
static cursor find_token(const kvc_seq *seq, int64_t size, int64_t token) {
    cursor at = {seq->runs, token, 0, 0};
    int64_t first = 0;
    if (fills_blocks(seq, size)) {
        first = (seq->runs->first + token) / size;
        at.run += first;
        at.slot = (int)(seq->runs->first + token - first * size);
        return at;
    }
    if (token > seq->num_tokens / 2) {
        at.run += seq->num_runs, first = seq->num_tokens;
        do at.run--, first -= at.run->stop - at.run->first;
        while (first > token);
    } else {
        for (; first + at.run->stop - at.run->first <= token; at.run++) first += at.run->stop - at.run->first;
    }
    at.slot = at.run->first + (int)(token - first);
    return at;
}

/* Tiles before a slot, where slots are counted from the start of any block on; slot + a few blocks is positive. */
static int64_t tiles_before(int64_t slot, int64_t size) {
    return slot / size * ((size + KVC_TILE - 1) / KVC_TILE) + slot % size / KVC_TILE;
}

/* Pieces of tiles from the one that begins `count` tokens before the cursor up to the one that the cursor is in. Tokens
 * before the first stored one count as if they filled the slots before it. */
static int64_t pieces_before(const kvc_seq *seq, int64_t size, const cursor *at, int64_t count) {
    const int64_t ahead = KVC_SEGMENT * size; /* whole blocks: all slots become positive */
    int64_t pieces = 0, slot = at->slot;
    const kvc_run *run = at->run;
    if (!fills_blocks(seq, size) && count > slot - run->first) {
        pieces = slot / KVC_TILE - run->first / KVC_TILE;
        count -= slot - run->first, slot = run->first;
        while (run > seq->runs) {
            run--;
            const int64_t first = count < run->stop - run->first ? run->stop - count : run->first;
            if (run->stop == first) continue; /* it has no token, and so no slot */
            pieces += (run->stop - 1) / KVC_TILE - first / KVC_TILE + 1;
            count -= run->stop - first, slot = first;
            if (!count) return pieces;
        }
    }
    return pieces + tiles_before(slot + ahead, size) - tiles_before(slot + ahead - count, size);
}

/* The cursor of the first token that is read. */
static cursor seek(const job *j, int64_t token) {
    const kvc_seq *seq = j->seq;
    const int64_t size = j->layout->block_size, position = seq->start + token, sinks = seq->start + seq->sink_tokens;
    cursor at = find_token(seq, size, token);
    int64_t count = position % KVC_SEGMENT; /* tokens since chunks began to be counted */
    if (seq->sink_tokens && sinks <= position && position - sinks < count) count = position - sinks;
    at.skipped = (int)(j->units ? pieces_before(seq, size, &at, count) % (KVC_CHUNK / KVC_TILE) : count % KVC_CHUNK);
    return at;
}

/* A piece of a tile takes the 16 lanes of the tile, any other piece one lane per token. */
static void add_piece(const job *j, const cursor *at, int count, chunk *c) {
    const unsigned char *block = j->arena + (size_t)at->run->block * j->layout->block_bytes;
    const int row = j->units ? at->slot / KVC_TILE * KVC_TILE : at->slot; /* which a tile begins with */
    const unsigned char *k = block + (size_t)row * j->k_row_bytes;
    const unsigned char *v = block + kvc_values_at(j->layout) + (size_t)row * j->v_row_bytes;
    const int lane = c->lanes + at->slot - row;
    if (j->units) c->k[c->pieces] = k, c->v[c->pieces] = v;
    c->piece[c->pieces++] = (piece){block, at->token, at->slot, count, lane};
    if (j->units) {
        c->lanes += KVC_TILE;
        return;
    }
    for (int t = 0; t < count; t++, k += j->k_row_bytes, v += j->v_row_bytes) {
        c->k[c->lanes + t] = k;
        c->v[c->lanes + t] = v;
    }
    c->lanes += count;
}

static void mark_gaps(chunk *c) {
    for (int lane = 0; lane < c->lanes; lane++) c->held[lane] = -1.0f;
    for (int i = 0; i < c->pieces; i++) {
        for (int t = 0; t < c->piece[i].count; t++) c->held[c->piece[i].lane + t] = 0.0f;
    }
}

/* Fills a chunk with the next tokens of the item; c->lanes is 0 after the last one. Where chunks begin depends on text
 * positions, and for tiles on runs of the same segment; where the item begins and ends only decides which of a chunk's
 * lanes are left out. That does not matter, since lanes that a row does not see add 0: a sum has one part per lane of a
 * vector, so a chunk may be shortened by whole vectors. */
static void next_chunk(const job *j, cursor *at, chunk *c) {
    const int64_t sinks = j->seq->sink_tokens, first = at->token;
    const int64_t segment = kvc_segment_of(j->seq, first), segment_stop = (segment + 1) * KVC_SEGMENT - j->seq->start;
    c->segment = j->first_segment + segment;
    int64_t stop = j->token_stop < segment_stop ? j->token_stop : segment_stop;
    const int most = j->units ? KVC_CHUNK - at->skipped * KVC_TILE : KVC_CHUNK - at->skipped / 16 * 16;
    const int lead = j->units ? 0 : at->skipped % 16;
    c->lanes = lead, c->pieces = 0, c->even = 1;
    c->sink = j->args->sink_queries.data && at->token < sinks;
    if (at->token < sinks && stop > sinks) stop = sinks;
    while (at->token < stop && c->lanes < most) {
        while (at->slot == at->run->stop) at->run++, at->slot = at->run->first;
        int count = at->run->stop - at->slot;
        const int room = j->units ? KVC_TILE - at->slot % KVC_TILE : most - c->lanes;
        if (count > room) count = room;
        if (count > stop - at->token) count = (int)(stop - at->token);
        add_piece(j, at, count, c);
        const piece *last = &c->piece[c->pieces - 1];
        c->even &= last->lane - c->piece[0].lane == at->token - first;
        at->slot += count, at->token += count;
    }
    c->count = (int)(at->token - first);
    at->skipped = 0;
    if (!c->even) mark_gaps(c);
    if (!c->count) c->lanes = 0;
    for (int t = 0; t < lead && c->lanes; t++) c->k[t] = c->k[lead], c->v[t] = c->v[lead];
    for (int t = c->lanes; !j->units && c->lanes && t < KVC_POINTERS; t++) {
        c->k[t] = c->k[c->lanes - 1];
        c->v[t] = c->v[c->lanes - 1];
    }
}

/* ---- Blocks that may lie in a file: they are held while their tokens are read. */

/* Runs from one on that have the tokens up to `stop`; `token` is the first one of the first run. */
static kvc_units units_of(const job *j, const kvc_run *run, int64_t *token, int64_t stop) {
    kvc_units units = {.runs = run, .divisor = 1, .layer = j->args->spill_layer};
    for (; *token < stop; run++, units.count++) *token += run->stop - run->first;
    return units;
}

/* Holds the blocks from a token on up to the end of its segment, and begins to read those of the next one. */
static kvc_units hold_segment(const job *j, cursor at) {
    if (!j->spill) return (kvc_units){0};
    while (at.slot == at.run->stop) at.run++, at.slot = at.run->first;
    int64_t token = at.token - (at.slot - at.run->first), stop = (kvc_segment_of(j->seq, at.token) + 1) * KVC_SEGMENT - j->seq->start;
    const int64_t then = stop + KVC_SEGMENT;
    const kvc_units units = units_of(j, at.run, &token, stop < j->token_stop ? stop : j->token_stop);
    kvc_hold(j->spill, &units, KVC_TO_READ);
    const kvc_units ahead = units_of(j, at.run + units.count, &token, then < j->token_stop ? then : j->token_stop);
    if (ahead.count) kvc_hold_ahead(j->spill, &ahead);
    return units;
}

/* Holds the blocks of a chunk, between the cursors of before and after it. */
static kvc_units hold_chunk(const job *j, cursor before, const cursor *after) {
    if (!j->spill) return (kvc_units){0};
    while (before.slot == before.run->stop) before.run++, before.slot = before.run->first;
    const kvc_units units = {.runs = before.run, .count = after->run - before.run + 1, .divisor = 1, .layer = j->args->spill_layer};
    kvc_hold(j->spill, &units, KVC_TO_READ);
    return units;
}

static void release_units(const job *j, const kvc_units *units) {
    if (j->spill) kvc_release(j->spill, units, KVC_TO_READ);
}

/* Reads tokens up to `token_stop` from now on: those of the sequence, or of its residual, whose segment is the last one. */
static void read_from(job *j, int residual, int64_t token_stop) {
    const kvc_attend_args *args = j->args;
    const kvc_layout *layout = residual ? args->residual_layout : args->layout;
    j->seq = (residual ? args->residuals : args->seqs) + j->item->seq;
    j->layout = layout;
    j->arena = residual ? args->residual_arena : args->arena;
    j->spill = residual ? NULL : args->spill;
    j->first_segment = residual ? j->item->first_segment + j->item->segments - 1 : 0;
    j->token_stop = token_stop;
    j->k_rows = kvc_rows_of(layout, KVC_KEYS);
    j->v_rows = kvc_rows_of(layout, KVC_VALUES);
    j->k_row_bytes = kvc_row_bytes(j->k_rows);
    j->v_row_bytes = kvc_row_bytes(layout->latent ? j->k_rows : j->v_rows);
    j->units = j->k_rows.tiled && j->v_rows.tiled;
}

static void start(job *j, const kvc_attend_args *args, const kvc_item *item) {
    const kvc_layout *layout = args->layout;
    memset(j, 0, sizeof *j);
    j->args = args;
    j->item = item;
    j->padded = (int)kvc_padded_dim(layout->head_dim);
    j->v_padded = (int)kvc_padded_dim(layout->value_head_dim);
    j->group = args->num_query_heads / layout->num_heads;
    j->rows = (int)(item->row_stop - item->row);
    if (args->softcap > 0.0f) {
        j->cap = args->softcap * (float)LOG2E;
        j->inverse_cap = 1.0f / j->cap;
    }
    read_from(j, 0, item->token_stop);
}

/* Divides the thread's scratch; combine_parts needs none. */
static void take_scratch(job *j, void *scratch) {
    const int64_t rows = kvc_item_max_rows(j->layout);
    float *free = scratch;
    j->q = free, free += rows * j->padded;
    j->sink_q = free, free += rows * j->padded;
    j->segment = results_at(free, rows, j->v_padded), free += kvc_result_floats(j->layout, rows);
    j->total = results_at(free, rows, j->v_padded), free += kvc_result_floats(j->layout, rows);
    j->unit_q = (unit_query *)free, free += rows * (int64_t)(sizeof(unit_query) / sizeof(float));
    j->unit_sink_q = (unit_query *)free, free += rows * (int64_t)(sizeof(unit_query) / sizeof(float));
    j->unit_w = (unit_weights *)free;
    j->panels = free, free += KVC_CHUNK * j->padded;
    j->stage = free, free += KVC_CHUNK * (j->padded > j->v_padded ? j->padded : j->v_padded);
    j->weights = free, free += KVC_ITEM_ROWS * KVC_CHUNK;
    j->alpha = free, free += KVC_ITEM_ROWS;
    j->turned = (unsigned char *)(((uintptr_t)free + 63) / 64 * 64);
}

/* The index of a row of a KV head in out, in (query, query head) pairs. */
static size_t pair_index(const job *j, int head, int64_t row) {
    const int64_t query = j->item->first_query + row / j->group;
    return (size_t)(query * j->args->num_query_heads + (int64_t)head * j->group + row % j->group);
}

/* A row of queries as floats: where it lies, or widened to q. */
static const float *query_row(const job *j, const kvc_tensor *queries, int head, int64_t row, float *q) {
    kvc_tensor one = *queries;
    const int64_t query = j->item->first_query + row / j->group;
    one.data += ((int64_t)head * j->group + row % j->group) * one.head_stride + query * one.token_stride;
    if (one.element == KVC_ELEMENT_F32) return (const float *)one.data;
    KVC_UNFUSED(gather_rows)(&one, 0, 1, 1, j->k_rows.dim, q);
    return q;
}

/* Puts each 16 channels of a query into the order in which panels have them (kvc_lane): a panel reads two side by side, which
 * takes less time than two that are 8 apart. */
static void order_lanes(int padded, float *q) {
    for (float *end = q + padded; q < end; q += 16) {
        float lanes[16];
        memcpy(lanes, q, sizeof lanes);
        UNROLL
        for (int i = 0; i < 16; i++) q[i] = lanes[kvc_lane(i)];
    }
}

/* Copies rows of one KV head to index and following: scaled, and rotated and split into digits if K is. */
static void pack_queries(const job *j, int head, int64_t row, int rows, size_t index) {
    const f32v scale_v = f32v_set1((float)(j->args->scale * LOG2E));
    const int dim = j->k_rows.dim;
    for (int sink = 0; sink <= (j->args->sink_queries.data != NULL); sink++) {
        const kvc_tensor *queries = sink ? &j->args->sink_queries : &j->args->queries;
        float *q = (sink ? j->sink_q : j->q) + index * (size_t)j->padded;
        for (int r = 0; r < rows; r++, q += j->padded) {
            const float *from = query_row(j, queries, head, row + r, q);
            for (int d = 0; d < dim; d += KVC_LANES) {
                const f32v x = load_dims(from, d, dim), none = f32v_sub(x, x); /* 0, or NaN where x is infinite */
                f32v_store(q + d, f32v_fma(x, scale_v, none));
            }
            for (int d = dim; d < j->padded; d++) q[d] = 0.0f;
            if (j->k_rows.rotated) KVC_UNFUSED(hadamard)(q, dim, j->k_rows.rotated);
            if (rows > KVC_DOT_ROWS && !j->units) order_lanes(j->padded, q);
            if (j->units)
                quantise_query(j->k_rows.bits, q, dim, r < tiled_rows(rows),
                               (sink ? j->unit_sink_q : j->unit_q) + index + (size_t)r);
        }
    }
}

/* What the centre of a head's stored keys would add to each score of a row, in natural logarithms. */
static double centre_score(const job *j, int head, int64_t row) {
    const float *centre = j->args->known ? j->args->known[head].centre : NULL;
    if (!centre) return 0.0;
    float widened[KVC_MAX_HEAD_DIM];
    const float *q = query_row(j, &j->args->queries, head, row, widened);
    double sums[4] = {0.0, 0.0, 0.0, 0.0}; /* four, so that no addition waits for the one before */
    for (int d = 0; d < j->k_rows.dim; d++) sums[d % 4] += (double)q[d] * centre[d];
    return (double)j->args->scale * ((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* Tokens that row r of the item sees. */
static kvc_span visible(const job *j, int64_t row) { return kvc_seen(j->seq, row / j->group); }

#endif
