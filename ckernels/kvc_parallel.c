/* kvc_parallel.c - divides an attention call into items for the threads.
 *
 *   sequence -> units: (all heads, few rows) for decode, else (one head, at most KVC_ITEM_ROWS rows; fewer if the threads
 *               would not end at the same time)
 *   Tokens that no row of a unit sees, before its windows, belong to none and cost nothing.
 *   unit     -> parts of the context, in whole segments, if a unit exceeds a thread's fair share; if there are
 *               too few segments, a unit of few rows has fewer heads. A residual is the last segment.
 *
 * Neighbouring sequences of few rows that begin with the same blocks read these together, so that K and V are unpacked once
 * for all of them. Such a set has a unit of each head over the shared tokens. Its results of each segment become those of
 * the sequences, which go on from there: in the middle of a segment, if the shared tokens end in it.
 *
 * No two items write to the same memory. The division changes no bit of the result (kvc_segment.h).
 * Scratch: [items][norms][results of segments][one piece per thread].
 */
#include "kvc_attend.h"
#include "kvc_quant.h"
#include "kvc_threads.h"

#include <string.h>

enum {
    PIECES_PER_THREAD = 4,     /* so that threads that start late or run slowly still finish together */
    UNIT_ROWS = 8,             /* rows of a unit of one head are a multiple of that */
    MIN_UNIT_ROWS = 20,        /* minimum rows of such a unit, on average, that are divided for the threads' sake */
    MIN_PIECE_WORK = 1 << 11,  /* minimum key-row products of an item: fewer do not pay for its start */
    MIN_SCORE_TOKENS = 256,    /* minimum tokens of an item of scores */
    MIN_SHARED_WORK = 1 << 12, /* minimum key-row products (3 to 11 ns each) of a call that is divided for the threads */
    MOST_SHARED_HEADS = 2,   /* most query heads of a KV head where sequences are read together; with more it gains little */
    MIN_SHARED_TOKENS = 256, /* minimum tokens that sequences read together */
    SHARED_PER_THREAD = 3,   /* minimum pieces of a group's shared work per thread: with fewer, it becomes several sets */
};

typedef struct plan {
    const kvc_layout *layout;
    const kvc_seq *seqs, *residuals;
    int64_t num_seqs;
    int32_t num_query_heads, num_threads;
    int64_t fair_share; /* key-row products of one piece */
    int64_t work;       /* of the whole call */
    int64_t num_items, num_shared_items, num_score_items, result_floats, total_queries;
} plan;

typedef struct unit { /* rows and heads that share their tokens */
    int64_t seq, first_query; /* the first sequence, and its first query */
    int64_t members;          /* of a set, over its shared tokens: the number of sequences; 0: the unit is of one sequence */
    int64_t shared;           /* of one sequence: its tokens that the units of its set read */
    int64_t row, row_stop, first_segment, segments;
    kvc_span seen;
    int64_t residual;         /* tokens of the residual that its rows see */
    int32_t head, head_stop, parts;
} unit;

typedef struct walk { /* over the units of a call */
    int64_t seq, first_query, index; /* the next unit: its sequence, and its index among those of the sequence */
    int64_t units;                   /* of that sequence, known from index 0 on */
    int64_t group_stop, group_shared, members; /* the sequences up to there share tokens; `members` of them are a set */
    int64_t set_stop, shared, head; /* the set, its shared tokens (0: one sequence alone), and the next head over these */
} walk;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t seq_rows(const plan *p, const kvc_seq *seq) {
    return seq->num_queries * (p->num_query_heads / p->layout->num_heads);
}

static int64_t num_pieces(const plan *p, int64_t work) {
    return p->fair_share ? ceil_div(work, p->fair_share) : 1;
}

/* Whether the first tokens of a sequence may be read together with those of others: all its rows see them. */
static int may_share(const plan *p, const kvc_seq *seq) {
    const int64_t rows = seq_rows(p, seq);
    return rows > 0 && rows <= KVC_FEW_ROWS && !seq->start && !seq->window && !seq->sink_tokens &&
           !seq->skipped_tokens && !seq->parents && !seq->firsts;
}

/* The first tokens that two sequences read together: whole chunks in whole blocks, and less than either sees. */
static int64_t num_shared(const plan *p, const kvc_seq *a, const kvc_seq *b) {
    const int64_t size = p->layout->block_size;
    int64_t blocks = 0;
    if (p->num_query_heads > MOST_SHARED_HEADS * p->layout->num_heads || size % KVC_TILE) return 0;
    if (!may_share(p, a) || !may_share(p, b)) return 0;
    for (; blocks < a->num_runs && blocks < b->num_runs; blocks++) {
        const kvc_run x = a->runs[blocks], y = b->runs[blocks];
        if (x.block != y.block || x.first || y.first || x.stop != size || y.stop != size) break;
    }
    int64_t tokens = blocks * size;
    if (kvc_seen(a, 0).stop <= tokens) tokens = kvc_seen(a, 0).stop - 1;
    if (kvc_seen(b, 0).stop <= tokens) tokens = kvc_seen(b, 0).stop - 1;
    tokens = tokens / KVC_CHUNK * KVC_CHUNK;
    return tokens < MIN_SHARED_TOKENS ? 0 : tokens;
}

/* Finds the next group, of the sequences from at->seq on that share as many tokens as the first two; maybe one alone. */
static void begin_group(const plan *p, walk *at) {
    const kvc_seq *first = p->seqs + at->seq;
    at->group_stop = at->seq + 1;
    at->group_shared = at->group_stop < p->num_seqs ? num_shared(p, first, first + 1) : 0;
    if (!at->group_shared) return;
    do at->group_stop++;
    while (at->group_stop < p->num_seqs && num_shared(p, first, p->seqs + at->group_stop) >= at->group_shared);
    const int64_t units = p->layout->num_heads * ceil_div(at->group_shared, KVC_SEGMENT);
    const int64_t sets = p->num_threads > 1 ? ceil_div(p->num_threads * SHARED_PER_THREAD, units) : 1;
    at->members = ceil_div(at->group_stop - at->seq, sets);
    if (at->members < 2) at->members = 2;
}

/* Finds the next set: some sequences of the group. */
static void begin_set(const plan *p, walk *at) {
    if (at->seq >= at->group_stop) begin_group(p, at);
    int64_t rows = 0;
    for (at->set_stop = at->seq; at->set_stop < at->group_stop && at->set_stop - at->seq < at->members; at->set_stop++) {
        rows += seq_rows(p, p->seqs + at->set_stop);
        if (rows > KVC_ITEM_ROWS) break;
    }
    if (at->set_stop < at->seq + 2) at->set_stop = at->seq + 1;
    at->shared = at->set_stop > at->seq + 1 ? at->group_shared : 0;
    at->head = at->index = 0;
}

/* What any query from `first` to `last` sees: every token of the span is seen by one of them. */
static kvc_span seen_by(const kvc_seq *seq, int64_t first, int64_t last) {
    return (kvc_span){kvc_seen(seq, first).first, kvc_seen(seq, last).stop};
}

/* Tokens of the residual that a sequence's queries up to `last` see. */
static int64_t residual_of(const plan *p, const kvc_seq *seq, int64_t last) {
    return p->residuals ? kvc_seen(p->residuals + (seq - p->seqs), last).stop : 0;
}

/* The number of units for few rows: one with all heads, unless the context has too few segments for the threads. */
static int64_t num_head_groups(const plan *p, const kvc_seq *seq) {
    const int64_t last = seq->num_queries - 1, residual = residual_of(p, seq, last);
    const kvc_span seen = seen_by(seq, 0, last);
    const int64_t segments = kvc_num_segments(seq, seen) + (residual > 0);
    const int64_t pieces = num_pieces(p, (seen.stop - seen.first + residual) * seq_rows(p, seq) * p->layout->num_heads);
    if (pieces <= segments || !segments) return 1;
    const int64_t groups = ceil_div(pieces, segments);
    return groups < p->layout->num_heads ? groups : p->layout->num_heads;
}

/* Rows of each of the `units` of one head; the last one may have fewer. */
static int64_t rows_of_unit(int64_t rows, int64_t units) {
    return ceil_div(ceil_div(rows, units), UNIT_ROWS) * UNIT_ROWS;
}

/* Units of one head: as few as an item can have the rows of; more where the threads would not end at the same time, as two
 * threads with three heads. */
static int64_t num_units_of_head(const plan *p, const kvc_seq *seq) {
    const int64_t rows = seq_rows(p, seq), heads = p->layout->num_heads;
    const kvc_span seen = seen_by(seq, 0, seq->num_queries - 1);
    const int64_t tokens = seen.stop - seen.first + residual_of(p, seq, seq->num_queries - 1);
    const int64_t parts = tokens < KVC_SEGMENT ? 1 : tokens / KVC_SEGMENT;
    int64_t blocks = ceil_div(rows, KVC_ITEM_ROWS);
    while (heads * blocks * parts % p->num_threads && num_pieces(p, tokens * rows / blocks) > parts &&
           rows >= (blocks + 1) * MIN_UNIT_ROWS)
        blocks++;
    return ceil_div(rows, rows_of_unit(rows, blocks));
}

static int64_t num_units(const plan *p, const kvc_seq *seq) {
    const int64_t rows = seq_rows(p, seq);
    if (rows <= KVC_FEW_ROWS) return rows > 0 ? num_head_groups(p, seq) : 0;
    return num_units_of_head(p, seq) * p->layout->num_heads;
}

static int64_t unit_work(const unit *u) {
    return (u->seen.stop - u->seen.first + u->residual) * (u->row_stop - u->row) * (u->head_stop - u->head);
}

/* The number of parts of a unit: of its segments from the first one on that it reads. */
static void divide(const plan *p, const kvc_seq *seq, unit *u) {
    const int64_t pieces = num_pieces(p, unit_work(u)), segments = kvc_num_segments(seq, u->seen) + (u->residual > 0);
    const int64_t parts = pieces < segments ? pieces : segments;
    u->parts = parts < 1 ? 1 : (int32_t)parts;
}

/* One head's rows of a set over the shared tokens. */
static unit shared_unit(const plan *p, const walk *at) {
    unit u = {at->seq, at->first_query, .members = at->set_stop - at->seq, .seen = {0, at->shared}};
    u.head = (int32_t)at->head, u.head_stop = u.head + 1;
    for (int64_t s = at->seq; s < at->set_stop; s++) u.row_stop += seq_rows(p, p->seqs + s);
    u.segments = kvc_num_segments(p->seqs + at->seq, u.seen);
    divide(p, p->seqs + at->seq, &u);
    return u;
}

static unit unit_at(const plan *p, const walk *at) {
    const kvc_seq *seq = p->seqs + at->seq;
    const int64_t rows = seq_rows(p, seq), group = p->num_query_heads / p->layout->num_heads, index = at->index;
    unit u = {at->seq, at->first_query, .row_stop = rows, .shared = at->shared};
    if (rows > KVC_FEW_ROWS) { /* neighbouring items share a head's K and V; the last rows see most and come first */
        const int64_t blocks = at->units / p->layout->num_heads, most = rows_of_unit(rows, blocks);
        u.head = (int32_t)(index / blocks), u.head_stop = u.head + 1;
        u.row = (blocks - 1 - index % blocks) * most;
        u.row_stop = u.row + most < rows ? u.row + most : rows;
    } else {
        u.head = (int32_t)(p->layout->num_heads * index / at->units);
        u.head_stop = (int32_t)(p->layout->num_heads * (index + 1) / at->units);
    }
    u.seen = seen_by(seq, u.row / group, (u.row_stop - 1) / group);
    u.residual = residual_of(p, seq, (u.row_stop - 1) / group);
    u.first_segment = kvc_segment_of(seq, u.seen.first);
    u.segments = kvc_num_segments(seq, u.seen) + (u.residual > 0);
    if (u.shared) u.seen.first = u.shared;
    divide(p, seq, &u);
    return u;
}

/* The next unit; those over the shared tokens of a set come before those of its sequences. Returns 0 behind the last. */
static int next_unit(const plan *p, walk *at, unit *u) {
    for (; at->seq < p->num_seqs; at->first_query += p->seqs[at->seq].num_queries, at->seq++, at->index = 0) {
        if (at->seq >= at->set_stop) begin_set(p, at);
        if (at->shared && at->head < p->layout->num_heads) {
            *u = shared_unit(p, at);
            at->head++;
            return 1;
        }
        if (at->index == 0) at->units = at->shared ? 1 : num_units(p, p->seqs + at->seq);
        if (at->index < at->units) {
            *u = unit_at(p, at);
            at->index++;
            return 1;
        }
    }
    return 0;
}

/* Whether the results of a unit's segments are kept, and combined at the end. */
static int keeps_results(const unit *u) { return !u->members && (u->parts > 1 || u->shared); }

/* Tokens that have scores, all those that are shown; the first of them that any query sees. */
static int64_t num_scores(const kvc_seq *seq) { return seq->num_tokens - seq->hidden_tokens; }
static int64_t first_scored(const kvc_seq *seq) { return seq->num_queries ? kvc_seen(seq, 0).first : 0; }

static int64_t num_score_parts(const kvc_seq *seq, int num_threads) {
    const int64_t seen = num_scores(seq) - first_scored(seq);
    const int64_t share = ceil_div(seen, (int64_t)num_threads * PIECES_PER_THREAD);
    const int64_t tokens = share < MIN_SCORE_TOKENS ? MIN_SCORE_TOKENS : share;
    return seen ? ceil_div(seen, tokens) : num_scores(seq) > 0;
}

/* Floats of the results of all segments of a unit in parts. */
static int64_t unit_floats(const plan *p, const unit *u) {
    return u->segments * kvc_result_floats(p->layout, (u->row_stop - u->row) * (u->head_stop - u->head));
}

static plan make_plan(const kvc_layout *layout, const kvc_seq *seqs, const kvc_seq *residuals, int64_t num_seqs,
                      int num_query_heads, int num_threads) {
    plan p = {layout, seqs, residuals, num_seqs, num_query_heads, num_threads, 0, 0, 0, 0, 0, 0, 0};
    unit u;
    for (int64_t s = 0; s < num_seqs; s++) {
        p.total_queries += seqs[s].num_queries;
        p.num_score_items += num_score_parts(&seqs[s], num_threads);
        if (residuals) p.num_score_items += num_score_parts(&residuals[s], num_threads);
    }
    for (walk at = {0}; next_unit(&p, &at, &u);) p.work += unit_work(&u);
    if (num_threads > 1 && p.work >= MIN_SHARED_WORK) { /* otherwise units are not divided */
        p.fair_share = 1 + p.work / ((int64_t)num_threads * PIECES_PER_THREAD);
        if (p.fair_share < MIN_PIECE_WORK) p.fair_share = MIN_PIECE_WORK;
    }
    for (walk at = {0}; next_unit(&p, &at, &u);) {
        p.num_items += u.parts;
        if (u.members) p.num_shared_items += u.parts;
        if (keeps_results(&u)) p.result_floats += unit_floats(&p, &u);
    }
    return p;
}

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

static size_t items_bytes(const plan *p) {
    const int64_t most = p->num_items > p->num_score_items ? p->num_items : p->num_score_items;
    return align64((size_t)most * sizeof(kvc_item));
}
static size_t norms_bytes(const plan *p) {
    return align64((size_t)p->total_queries * (size_t)p->num_query_heads * 2 * sizeof(float));
}
static size_t results_bytes(const plan *p) { return align64((size_t)p->result_floats * sizeof(float)); }
static size_t thread_bytes(const plan *p) {
    return align64((size_t)kvc_thread_scratch_floats(p->layout) * sizeof(float));
}

size_t kvc_attend_scratch_bytes(const kvc_layout *layout, const kvc_seq *seqs, const kvc_seq *residuals,
                                int64_t num_seqs, int num_query_heads, int num_threads) {
    const plan p = make_plan(layout, seqs, residuals, num_seqs, num_query_heads, num_threads);
    return 64 + items_bytes(&p) + norms_bytes(&p) + results_bytes(&p) +
           (size_t)num_threads * thread_bytes(&p);
}

/* The first token of a part's segments; it may lie before all tokens or behind them. */
static int64_t segment_start(const kvc_seq *seq, const unit *u, int32_t part) {
    const int64_t first = u->shared / KVC_SEGMENT; /* of the segments, the first one that is read */
    return (u->first_segment + first + (u->segments - first) * part / u->parts) * KVC_SEGMENT - seq->start;
}

/* Items over shared tokens come first. */
static void list_items(const plan *p, kvc_item *items, float *norms, float *results) {
    kvc_item *shared = items, *own = items + p->num_shared_items;
    unit u;
    for (walk at = {0}; next_unit(p, &at, &u);) {
        const kvc_seq *seq = &p->seqs[u.seq];
        for (int32_t part = 0; part < u.parts; part++) {
            const int64_t first = segment_start(seq, &u, part), stop = segment_start(seq, &u, part + 1);
            kvc_item *item = u.members ? shared++ : own++;
            *item = (kvc_item){
                .seq = u.seq,
                .first_query = u.first_query,
                .row = u.row,
                .row_stop = u.row_stop,
                .token = first > u.seen.first ? first : u.seen.first,
                .token_stop = stop < u.seen.stop ? stop : u.seen.stop,
                .first_segment = u.first_segment,
                .segments = u.segments,
                .residual = u.residual,
                .head = u.head,
                .head_stop = u.head_stop,
                .part = part,
                .parts = u.parts,
                .members = u.members,
                .shared = u.shared,
                .own = u.members ? own : NULL, /* the next one that is listed is of the first member */
                .results = keeps_results(&u) ? results : NULL,
                .norms = norms,
            };
        }
        if (keeps_results(&u)) results += unit_floats(p, &u);
    }
}

static void list_score_items(const plan *p, kvc_item *items, float *norms, int num_threads) {
    int64_t first_query = 0, first_score = 0;
    for (int64_t s = 0; s < p->num_seqs; s++) {
        for (int residual = 0; residual <= (p->residuals != NULL); residual++) {
            const kvc_seq *seq = residual ? &p->residuals[s] : &p->seqs[s];
            const int64_t parts = num_score_parts(seq, num_threads);
            const int64_t first = first_scored(seq), seen = num_scores(seq) - first;
            for (int64_t part = 0; part < parts; part++, items++) {
                *items = (kvc_item){.seq = s,
                                    .first_query = first_query,
                                    .first_score = first_score,
                                    .row_stop = seq_rows(p, seq),
                                    .residual = residual,
                                    .head_stop = p->layout->num_heads,
                                    .parts = 1,
                                    .norms = norms};
                items->token = first + seen * part / parts;
                items->token_stop = first + seen * (part + 1) / parts;
                items->part = (int32_t)part;
            }
            first_score += num_scores(seq);
        }
        first_query += p->seqs[s].num_queries;
    }
}

/* A divided attention call; its steps, attend (shared tokens before others), combine and score, run item by item. */
typedef struct call {
    const kvc_kernels *kernels;
    const kvc_attend_args *args;
    plan plan;
    kvc_item *items;
    float *norms;
    unsigned char *own; /* one piece per thread */
    size_t own_bytes;
    int64_t first; /* item of this step */
} call;

static void attend_at(void *context, int64_t i, int thread) {
    const call *c = context;
    c->kernels->attend_item(c->args, &c->items[c->first + i], c->own + (size_t)thread * c->own_bytes);
}

static void combine_at(void *context, int64_t i, int thread) {
    const call *c = context;
    (void)thread;
    if (c->items[i].results) c->kernels->combine_parts(c->args, &c->items[i]);
}

static void score_at(void *context, int64_t i, int thread) {
    const call *c = context;
    c->kernels->score_item(c->args, &c->items[i], c->own + (size_t)thread * c->own_bytes);
}

void kvc_attend(const kvc_kernels *kernels, const kvc_attend_args *args, void *scratch, int num_threads) {
    call c = {.kernels = kvc_permitted(kernels), .args = args};
    c.plan = make_plan(args->layout, args->seqs, args->residuals, args->num_seqs, args->num_query_heads, num_threads);
    unsigned char *base = (unsigned char *)align64((size_t)scratch);
    c.items = (kvc_item *)base;
    c.norms = (float *)(base + items_bytes(&c.plan));
    float *results = (float *)((unsigned char *)c.norms + norms_bytes(&c.plan));
    c.own = (unsigned char *)results + results_bytes(&c.plan);
    c.own_bytes = thread_bytes(&c.plan);
    list_items(&c.plan, c.items, args->scores ? c.norms : NULL, results);
    const int64_t channels = args->layout->head_dim + args->layout->value_head_dim;
    const int threads = kvc_threads_worth(KVC_ATTENDING, c.plan.work * channels, num_threads);
    if (c.plan.num_shared_items) kvc_run_items(c.plan.num_shared_items, threads, attend_at, &c);
    c.first = c.plan.num_shared_items;
    if (c.first)
        kvc_run_items(c.plan.num_items - c.first, threads, attend_at, &c);
    else
        kvc_run_work(KVC_ATTENDING, c.plan.work * channels, c.plan.num_items, threads, attend_at, &c);
    if (c.plan.result_floats) kvc_run_items(c.plan.num_items, threads, combine_at, &c);
    if (!args->scores) return;
    list_score_items(&c.plan, c.items, c.norms, num_threads);
    kvc_run_items(c.plan.num_score_items, threads, score_at, &c);
}
