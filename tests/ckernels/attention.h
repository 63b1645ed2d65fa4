/* attention.h - the attention step: draws sequences and queries, runs every level, compares the scalar level with the twin, and
 * the others with it. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "runs.h"

enum { MOST_SEQS = 3 };

typedef struct question {
    const world *world;
    sequence of[MOST_SEQS];
    kvc_seq seqs[MOST_SEQS];
    int num_seqs, query_heads, threads, offset; /* offset: of the scratch, at any alignment */
    float scale, softcap;
    memory sinks; /* floats: of each head, or by_query of each query and head */
    int64_t queries, tokens;
    memory q, sink_q, tree[MOST_SEQS]; /* floats; tree: parents and depths, or nothing */
    memory firsts[MOST_SEQS];          /* of each query the tokens that it does not see, or nothing */
    memory given[2];                   /* the same queries as a caller has them */
    kvc_tensor rows[2];                /* over those */
    int has_sinks, has_scores, kind, at_end, has_logits, by_head, by_query; /* has_logits: sinks are given */
    world near;         /* of the residuals; no blocks: there are none */
    memory near_arena;
    sequence near_of[MOST_SEQS];
    kvc_seq residuals[MOST_SEQS];
    kvc_head_keys known[4]; /* of each KV head, over `centres` */
    memory centres;
} question;

typedef struct answer {
    const kvc_kernels *kernels;
    const question *question;
    memory out, scores, lse;
} answer;

static void *ask(void *to) {
    answer *a = to;
    const question *q = a->question;
    const kvc_layout *l = &q->world->layout;
    const size_t floats = (size_t)q->queries * (size_t)q->query_heads * (size_t)l->value_head_dim;
    const kvc_seq *residuals = q->near.num_blocks ? q->residuals : NULL;
    const size_t bytes = kvc_attend_scratch_bytes(l, q->seqs, residuals, q->num_seqs, q->query_heads, q->threads);
    a->out = take(floats * sizeof(float), 4, q->at_end);
    a->scores = take((size_t)(q->tokens * (q->by_head ? l->num_heads : 1)) * sizeof(float), 4, q->at_end);
    a->lse = take((size_t)q->queries * (size_t)q->query_heads * sizeof(float), 4, q->at_end);
    memory scratch = take(bytes + (size_t)q->offset, 16, q->at_end);
    const kvc_attend_args args = {.layout = l,
                                  .arena = q->world->arena,
                                  .seqs = q->seqs,
                                  .num_seqs = q->num_seqs,
                                  .num_query_heads = q->query_heads,
                                  .scale = q->scale,
                                  .queries = q->rows[0],
                                  .sink_queries = q->has_sinks ? q->rows[1] : (kvc_tensor){NULL, 0, 0, 0},
                                  .out = a->out.at,
                                  .scores = q->has_scores ? a->scores.at : NULL,
                                  .lse = q->world->lse ? a->lse.at : NULL,
                                  .softcap = q->softcap,
                                  .sinks = q->has_logits ? q->sinks.at : NULL,
                                  .sink_stride = q->by_query ? q->query_heads : 0,
                                  .score_stride = q->by_head ? q->tokens : 0,
                                  .known = q->centres.at ? q->known : NULL,
                                  .residuals = residuals,
                                  .residual_layout = &q->near.layout,
                                  .residual_arena = q->near.arena};
    kvc_attend(a->kernels, &args, (char *)scratch.at + q->offset, q->threads);
    give_back(&scratch);
    return NULL;
}

/* Runs one thread, or several in parallel that must agree. */
static answer ask_level(const kvc_kernels *kernels, const question *q) {
    answer first = {.kernels = kernels, .question = q};
#if defined(CALLERS)
    answer others[CALLERS];
    pthread_t threads[CALLERS];
    for (int i = 1; i < CALLERS; i++) {
        others[i] = first;
        if (pthread_create(&threads[i], NULL, ask, &others[i])) abort();
    }
    ask(&first);
    for (int i = 1; i < CALLERS; i++) {
        pthread_join(threads[i], NULL);
        if (memcmp(first.out.at, others[i].out.at, first.out.size) ||
            (q->has_scores && memcmp(first.scores.at, others[i].scores.at, first.scores.size)) ||
            (q->world->lse && memcmp(first.lse.at, others[i].lse.at, first.lse.size)))
            fail("%s: two threads, two results", kernels->name);
        give_back(&others[i].out), give_back(&others[i].scores), give_back(&others[i].lse);
    }
#else
    ask(&first);
#endif
    return first;
}

/* Parents and depths of a sequence's queries. */
static memory draw_tree(uint64_t *state, kvc_seq *seq) {
    const size_t n = (size_t)seq->num_queries;
    memory tree = take(2 * n * sizeof(int64_t), 8, 1);
    int64_t *parents = tree.at, *depths = parents + n;
    for (int64_t i = 0; i < (int64_t)n; i++) {
        parents[i] = splitmix(state) % 2 ? i - 1 : (int64_t)(splitmix(state) % (uint64_t)(i + 1)) - 1;
        depths[i] = parents[i] < 0 ? 0 : depths[parents[i]] + 1;
    }
    seq->parents = parents, seq->depths = depths;
    return tree;
}

/* Numbers of first tokens that queries do not see, ascending, some of them all that there are. */
static memory draw_firsts(uint64_t *state, kvc_seq *seq) {
    memory drawn = take((size_t)seq->num_queries * sizeof(int64_t), 8, 1);
    int64_t *firsts = drawn.at, first = 0;
    const uint64_t most = (uint64_t)(2 * seq->num_tokens / (seq->num_queries + 1) + 2);
    for (int64_t i = 0; i < seq->num_queries; i++) firsts[i] = first += (int64_t)(splitmix(state) % most);
    seq->firsts = firsts;
    return drawn;
}

/* Windows, text positions, a soft cap, sinks, trees, scores of each head: half of the calls have none of these. */
static void draw_options(const source *s, question *q) {
    uint64_t state = q->world->options + s->at * 977 + (uint64_t)(q->queries * 31 + q->tokens);
    if (splitmix(&state) % 2) return;
    const int64_t windows[] = {0, 1, 2, 15, 16, 17, 33, 64, 130, 511, 1024, INT64_MAX};
    const int64_t window = windows[splitmix(&state) % 12];
    uint64_t beside = state;
    const int chunked = window > 0 && splitmix(&beside) % 2;
    const int whole = splitmix(&state) % 6 == 0, tree = splitmix(&state) % 4 == 0;
    const int64_t ahead = s->at % 3 ? 0 : 1 + (int64_t)(s->at % 200); /* of a symmetric window its size; else any */
    q->by_head = splitmix(&state) % 2;
    for (int i = 0; i < q->num_seqs; i++) {
        q->seqs[i].whole = whole;
        if (!whole) q->seqs[i].window = window, q->seqs[i].chunked = chunked;
        if (!whole && !tree && !chunked && ahead)
            q->seqs[i].ahead = window ? (window < (int64_t)1 << 62 ? window : (int64_t)1 << 62) - 1 : ahead;
        if (!whole && tree && q->seqs[i].num_queries && q->seqs[i].num_queries <= q->seqs[i].num_tokens)
            q->tree[i] = draw_tree(&state, &q->seqs[i]);
        if (!q->seqs[i].parents && q->seqs[i].num_queries && splitmix(&beside) % 3 == 0)
            q->firsts[i] = draw_firsts(&beside, &q->seqs[i]);
        q->seqs[i].start = splitmix(&state) % 3 ? (int64_t)(splitmix(&state) % 3000) : 0;
        if (splitmix(&state) % 2) q->seqs[i].sink_tokens = 0;
    }
    const float caps[] = {0.0f, 0.0f, 0x1p-100f, 0.5f, 20.0f, 0x1p64f};
    q->softcap = caps[splitmix(&state) % 6];
    q->has_logits = splitmix(&state) % 2;
    q->by_query = q->has_logits && splitmix(&state) % 2;
    const int64_t num_sinks = (q->by_query ? q->queries : 1) * q->query_heads;
    q->sinks = take((size_t)num_sinks * sizeof(float), 4, q->at_end);
    float *sinks = q->sinks.at;
    for (int64_t i = 0; i < num_sinks; i++) sinks[i] = 3.0f * gaussian(&state);
    if (num_sinks && splitmix(&state) % 8 == 0) sinks[0] = splitmix(&state) % 2 ? 3e38f : -3e38f;
}

/* Centres of the keys, but of the second head's. */
static void draw_centres(uint64_t *state, question *q) {
    const int dim = q->world->layout.head_dim;
    q->centres = take((size_t)dim * sizeof(float), 4, 1);
    float *centre = q->centres.at;
    for (int d = 0; d < dim; d++) centre[d] = gaussian(state);
    for (int h = 0; h < q->world->layout.num_heads; h++) q->known[h] = (kvc_head_keys){h == 1 ? NULL : centre, NULL};
}

/* Blocks of Gaussian floats for the residuals, of which each sequence has some. */
static void draw_residuals(uint64_t *state, question *q) {
    world *n = &q->near;
    const kvc_layout *l = &q->world->layout;
    const int size = 1 + (int)(splitmix(state) % 20), dims[2] = {l->head_dim, l->value_head_dim};
    const int most = q->world->many && splitmix(state) % 4 == 0 ? 1024 : 90; /* tokens */
    const kvc_format key = splitmix(state) % 2 ? KVC_F16 : KVC_F32, other = splitmix(state) % 2 ? KVC_F16 : KVC_F32;
    const kvc_format value = l->latent ? key : other;
    if (kvc_layout_init(&n->layout, size, l->num_heads, dims[0], dims[1], key, value, 0, 0, l->latent)) fail("no residual");
    n->num_blocks = 1 + most / size;
    n->arena_bytes = (size_t)n->num_blocks * n->layout.block_bytes;
    q->near_arena = take(n->arena_bytes, 64, 1), n->arena = q->near_arena.at;
    const size_t slots = (size_t)(n->num_blocks * size);
    kvc_run *all = malloc((size_t)n->num_blocks * sizeof *all);
    for (int b = 0; b < n->num_blocks; b++) all[b] = (kvc_run){b, 0, (uint16_t)size};
    n->plain = malloc(slots);
    memset(n->plain, 1, slots);
    for (int side = 0; side < 2; side++) {
        n->row[side] = (size_t)(l->num_heads * dims[side]);
        float *x = n->rows[side] = malloc(slots * n->row[side] * sizeof *x);
        for (size_t i = 0; i < slots * n->row[side]; i++) x[i] = gaussian(state);
        const kvc_float_rows rows = {x, (int64_t)n->row[side]}, none = {NULL, 0};
        scalar_level()->write_runs(&n->layout, n->arena, all, n->num_blocks, side ? none : rows, side ? rows : none, NULL);
        scalar_level()->read_runs(&n->layout, n->arena, all, n->num_blocks, side ? NULL : x, side ? x : NULL, n->row[side],
                                  (size_t)dims[side], NULL);
    }
    free(all);
    for (int i = 0; i < q->num_seqs; i++) {
        sequence *of = &q->near_of[i];
        const int blocks = splitmix(state) % 8 ? 1 + (int)(splitmix(state) % (uint64_t)n->num_blocks) : 0;
        const int first_block = (int)(splitmix(state) % (uint64_t)n->num_blocks);
        *of = (sequence){.slots = malloc((size_t)(blocks * size + 1) * sizeof(size_t)), .num_runs = blocks};
        of->runs = take((size_t)blocks * sizeof(kvc_run), 4, 1);
        for (int b = 0; b < blocks; b++) { /* whole blocks, and others cut at either end */
            const int block = (first_block + b) % n->num_blocks, cut = splitmix(state) % 3 == 0;
            const int first = cut ? (int)(splitmix(state) % (uint64_t)size) : 0;
            const int stop = cut ? first + 1 + (int)(splitmix(state) % (uint64_t)(size - first)) : size;
            ((kvc_run *)of->runs.at)[b] = (kvc_run){block, (uint16_t)first, (uint16_t)stop};
            for (int slot = first; slot < stop; slot++) of->slots[of->num_tokens++] = slot_of(n, block, slot);
        }
        q->residuals[i] = (kvc_seq){.runs = of->runs.at, .num_runs = blocks, .num_tokens = of->num_tokens,
                                    .num_queries = q->seqs[i].num_queries, .whole = splitmix(state) % 3 == 0};
        q->tokens += of->num_tokens;
    }
}

/* Queries of any element, token by token or head by head; x becomes what they are as floats. */
static kvc_tensor give_queries(uint64_t *state, const question *q, float *x, memory *given) {
    static const int sizes[] = {4, 2, 2, 8};
    const kvc_element element = splitmix(state) % 2 ? KVC_ELEMENT_F32 : (kvc_element)(splitmix(state) % 4);
    const int dim = q->world->layout.head_dim, size = sizes[element], by_head = splitmix(state) % 2;
    const int64_t row = (int64_t)size * dim, heads = q->query_heads;
    *given = take((size_t)(q->queries * heads * row), (size_t)size, q->at_end);
    const int64_t token_stride = by_head ? row : row * heads, head_stride = by_head ? row * q->queries : row;
    for (int64_t i = 0; i < q->queries * heads * dim; i++) {
        const int64_t at = i / dim / heads * token_stride + i / dim % heads * head_stride + i % dim * size;
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        uint16_t word = (uint16_t)(bits >> 16);
        const double wide = (double)x[i];
        if (element == KVC_ELEMENT_BF16) x[i] = kvc_float_of_bits((uint32_t)word << 16);
        if (element == KVC_ELEMENT_F16) word = kvc_half_of_float(x[i]), x[i] = kvc_float_of_half(word);
        const void *from = size == 2 ? (const void *)&word : size == 4 ? (const void *)&bits : &wide;
        memcpy((char *)given->at + at, from, (size_t)size);
    }
    return (kvc_tensor){given->at, token_stride, head_stride, element};
}

static question draw_question(source *s, const world *w) {
    question q = {.world = w, .num_seqs = draw_between(s, 1, MOST_SEQS)};
    const int dim = w->layout.head_dim, usual = draw(s, 6) > 0;
    q.query_heads = w->layout.num_heads * DRAW_OF(s, 1, 2, 3, 4, 5, 7);
    q.threads = DRAW_OF(s, 1, 2, 3, 4, 8);
    q.offset = draw(s, 2) ? draw(s, 64) : 0;
    q.at_end = draw(s, 2), q.has_sinks = draw(s, 3) == 0, q.has_scores = draw(s, 2);
    q.kind = usual ? GAUSSIAN : draw(s, NUM_KINDS);
    q.scale = usual ? 1.0f / sqrtf((float)dim) : (float)DRAW_OF(s, 0, 1, -1, 8) * 0.125f;
    int64_t room = (int64_t)w->most_floats * 64;
    uint64_t sharing = w->options + s->at * 613; /* of long texts half begin like the one before, and have few queries */
    const int together = w->many && splitmix(&sharing) % 2;
    if (together) q.query_heads = w->layout.num_heads * (1 + (int)(splitmix(&sharing) % 2));
    for (int i = 0; i < q.num_seqs; i++) {
        q.of[i] = draw_runs(s, w, 1);
        if (together && i) begin_as(&sharing, w, &q.of[i - 1], &q.of[i]);
        const int64_t tokens = q.of[i].num_tokens, each = (tokens + 1) * q.query_heads * dim;
        int64_t queries = DRAW_OF(s, 1, 1, 2, 3, 8, 16, 17, 33, 50, 97, 100, 200, 0, -1);
        if (queries < 0) queries = tokens;
        if (together) queries = splitmix(&sharing) % 8 ? 1 + (int64_t)(splitmix(&sharing) % 3) : 0;
        if (queries * each > room) queries = room / each;
        room -= queries * each;
        const int64_t sinks = draw(s, 40);
        const int64_t hidden = tokens % 5 != 3 ? 0 : queries < tokens ? queries : tokens;
        q.seqs[i] = (kvc_seq){.runs = q.of[i].runs.at,
                              .num_runs = q.of[i].num_runs,
                              .num_tokens = tokens,
                              .sink_tokens = together && splitmix(&sharing) % 8 ? 0 : sinks,
                              .num_queries = queries,
                              .hidden_tokens = hidden};
        q.queries += queries, q.tokens += tokens - hidden;
    }
    const size_t floats = (size_t)q.queries * (size_t)q.query_heads * (size_t)dim;
    q.q = take(floats * sizeof(float), 4, q.at_end);
    q.sink_q = take(floats * sizeof(float), 4, q.at_end);
    draw_floats(s, q.kind, q.q.at, floats);
    draw_floats(s, q.kind, q.sink_q.at, floats);
    draw_options(s, &q);
    uint64_t near = w->options + s->at * 419 + (uint64_t)q.tokens;
    if (!q.has_sinks && splitmix(&near) % 3 == 0) draw_residuals(&near, &q);
    if (!q.has_sinks && q.softcap == 0.0f && splitmix(&near) % 3 == 0) draw_centres(&near, &q);
    uint64_t state = w->options + s->at * 131 + (uint64_t)q.queries;
    q.rows[0] = give_queries(&state, &q, q.q.at, &q.given[0]);
    q.rows[1] = give_queries(&state, &q, q.sink_q.at, &q.given[1]);
    return q;
}

static int query_is_ordinary(const float *q, int dim) {
    for (int d = 0; d < dim; d++) {
        if (!(fabsf(q[d]) < ldexpf(1.0f, LARGEST))) return 0;
    }
    return 1;
}

/* The tokens that a query sees, of those that are stored; of a tree, some of them. */
static int64_t stop_seen(const kvc_seq *of, int64_t query) {
    if (of->whole) return of->num_tokens - of->hidden_tokens;
    int64_t seen = of->num_tokens - of->num_queries + query + 1 + of->ahead;
    if (seen > of->num_tokens - of->hidden_tokens) seen = of->num_tokens - of->hidden_tokens;
    return seen < 0 ? 0 : seen;
}
static int64_t first_seen(const kvc_seq *of, int64_t query) {
    const int64_t own = of->num_tokens - of->num_queries + query + 1, stop = stop_seen(of, query);
    const int64_t unseen = of->firsts ? of->firsts[query] : 0;
    if (of->whole) return unseen < stop ? unseen : stop;
    if (of->parents) return 0;
    int64_t first = of->window && own > of->window ? own - of->window : 0;
    if (of->chunked) {
        first = (of->start + own - 1) / of->window * of->window - of->start;
        first = first < 0 ? 0 : first;
    }
    first = first > unseen ? first : unseen;
    return first < stop ? first : stop;
}

/* Whether a query at the place `own` of its text sees a place before it, both counted from the first stored token. */
static int sees_place(const kvc_seq *of, int64_t own, int64_t place) {
    if (of->chunked) return (of->start + own) / of->window == (of->start + place) / of->window;
    return !of->window || own - place < of->window;
}

/* Whether a query of a tree sees a token before its stop. */
static int tree_sees(const kvc_seq *of, int64_t query, int64_t token) {
    const int64_t context = of->num_tokens - of->num_queries, own = context + of->depths[query];
    for (int64_t a = query; a >= 0; a = of->parents[a]) {
        if (context + a == token) return sees_place(of, own, context + of->depths[a]);
    }
    return token < context && sees_place(of, own, token);
}

/* Compares one (query, query head) of the scalar level's answer with the twin; adds its weights to `total` and their errors
 * to `error`. Returns whether the row is ordinary. */
static int expect_row(const question *q, int seq, int64_t query, int64_t first_query, int query_head,
                      const answer *scalar, double *weights, double *total, double *error) {
    const world *w = q->world;
    const int dim = w->layout.head_dim, head = query_head / (q->query_heads / w->layout.num_heads);
    const int v_dim = w->layout.value_head_dim;
    const size_t pair = (size_t)(first_query + query) * (size_t)q->query_heads + (size_t)query_head;
    const size_t at = pair * (size_t)dim;
    const float *row = (const float *)q->q.at + at,
                *sink_row = q->has_sinks ? (const float *)q->sink_q.at + at : NULL;
    if (!query_is_ordinary(row, dim) || (sink_row && !query_is_ordinary(sink_row, dim))) return 0;
    const kvc_seq *of = &q->seqs[seq];
    const float *sinks = q->sinks.at;
    const double sink = q->has_logits ? sinks[q->by_query ? pair : (size_t)query_head] : -INFINITY;
    const kvc_seq *residual = &q->residuals[seq]; /* all 0 without residuals */
    const int64_t all = of->num_tokens + residual->num_tokens, close = stop_seen(residual, query);
    size_t *slots = malloc((2 * (size_t)all + 1) * sizeof *slots), *tokens = slots + all;
    int64_t seen = 0, sink_tokens = 0;
    for (int64_t t = first_seen(of, query); t < stop_seen(of, query); t++) {
        if (of->parents && !tree_sees(of, query, t)) continue;
        slots[seen] = q->of[seq].slots[t], tokens[seen++] = (size_t)t, sink_tokens += t < of->sink_tokens;
    }
    for (int64_t t = 0; t < close; t++) slots[seen] = q->near_of[seq].slots[t], tokens[seen++] = (size_t)(of->num_tokens + t);
    const context c = {w, &q->near, slots, seen, close, q->centres.at ? q->known[head].centre : NULL};
    const row_answer expected = attend_row(&c, head, q->scale, row, sink_row, sink_tokens, q->softcap, sink, weights);
    if (q->by_head) total += head * all, error += head * all;
    for (int64_t t = 0; t < seen; t++) {
        total[tokens[t]] += weights[t];
        error[tokens[t]] += fmin(expm1(2 * expected.score_error) * weights[t], 1.0) + 1e-5 * weights[t] + 1e-7;
    }
    free(slots);
    double squares = 0, largest = 0;
    for (int d = 0; d < v_dim; d++) {
        squares += expected.out[d] * expected.out[d];
        largest = fmax(largest, fabs(expected.out[d]));
    }
    const int is_exact = !kvc_format_of(w->layout.key_format)->quantised &&
                         !kvc_format_of(w->layout.value_format)->quantised;
    const int plain = expected.plain && q->kind == GAUSSIAN && q->scale * sqrtf((float)dim) < 1.1f;
    const float *out = (const float *)scalar->out.at + pair * (size_t)v_dim;
    double off = 0, most = 0;
    for (int d = 0; d < v_dim; d++) {
        const double each = out[d] - expected.out[d];
        off += each * each;
        most = isfinite(each) ? fmax(most, fabs(each)) : INFINITY;
    }
    off = sqrt(off);
    if (!(off <= expected.error)) fail("output %g off, may %g", off, expected.error);
    const float *lse = (const float *)scalar->lse.at + pair;
    if (w->lse && !(seen || q->has_logits ? fabs(*lse - expected.lse) <= expected.lse_error : *lse == -INFINITY))
        fail("lse is %g, not %g, may err %g", *lse, expected.lse, expected.lse_error);
    if (plain && is_exact && most > 5e-6 * largest) fail("output %g of the largest off", most / largest);
    if (plain && !is_exact && off > 0.01 * sqrt(squares)) fail("output %g of the row off", off / sqrt(squares));
    return 1;
}

/* Whether the bits of a row may depend on stored tokens before those that it sees: tiles whose runs have holes between
 * them, or sink queries that end there. */
static int prefix_matters(const question *q, int seq, int64_t first) {
    const kvc_seq *of = &q->seqs[seq];
    const int size = q->world->layout.block_size;
    if (of->sink_tokens > 0 && of->sink_tokens <= first) return 1;
    for (int64_t i = 0; i < of->num_runs; i++) {
        if ((i && of->runs[i].first) || (i + 1 < of->num_runs && of->runs[i].stop != size)) return 1;
    }
    return 0;
}

/* Keeps tokens [first, stop) of a sequence alone: they begin at a later text position. */
static memory keep_tokens(kvc_seq *of, int64_t first, int64_t stop) {
    memory runs = take((size_t)of->num_runs * sizeof *of->runs, 4, 1);
    kvc_run *to = runs.at;
    int64_t token = 0, count = 0;
    for (int64_t i = 0; i < of->num_runs; i++) {
        const kvc_run run = of->runs[i];
        const int64_t from = first > token ? first - token : 0, length = run.stop - run.first;
        const int64_t to_here = stop - token < length ? stop - token : length;
        token += length;
        if (from < to_here)
            to[count++] = (kvc_run){run.block, (uint16_t)(run.first + from), (uint16_t)(run.first + to_here)};
    }
    of->runs = to, of->num_runs = count;
    of->num_tokens = stop - first, of->start += first;
    of->sink_tokens = of->sink_tokens > first ? of->sink_tokens - first : 0;
    return runs;
}

/* One query in a separate call, with another number of threads and maybe without the tokens that it does not see, has
 * the same bits at every level. */
static void expect_same_alone(const question *q, int seq, int64_t query, int64_t first, const answer *answers) {
    const int v_dim = q->world->layout.value_head_dim;
    const size_t heads = (size_t)q->query_heads, row = (size_t)(first + query) * heads;
    question alone = *q;
    kvc_seq *of = &alone.seqs[0];
    *of = q->seqs[seq];
    if (of->parents) return; /* a line of it is a causal call: tests/core */
    if (of->ahead) { /* as a query that sees all of the same tokens */
        of->skipped_tokens = first_seen(of, query), of->hidden_tokens = of->num_tokens - stop_seen(of, query);
        of->window = of->ahead = 0, of->whole = 1, of->firsts = NULL;
    }
    if (!of->whole) of->num_tokens -= of->num_queries - 1 - query;
    if (of->num_tokens <= 0) return;
    if (of->firsts) of->firsts += query;
    const int64_t shown = q->seqs[seq].num_tokens - of->hidden_tokens;
    of->hidden_tokens = of->num_tokens > shown ? of->num_tokens - shown : 0;
    of->num_queries = 1;
    const int64_t unseen = first_seen(of, 0);
    const int64_t own_first = of->firsts ? *of->firsts : 0;
    const int dropped = (q->threads + query) % 2 && unseen < of->num_tokens && !prefix_matters(q, seq, unseen);
    memory runs = keep_tokens(of, dropped ? unseen : 0, of->num_tokens), near_runs = {0};
    if (of->firsts) /* as many skipped tokens */
        of->skipped_tokens = !dropped ? own_first : own_first > unseen ? own_first - unseen : 0, of->firsts = NULL;
    if (q->near.num_blocks) { /* of which it reads the tokens that it sees */
        kvc_seq *near = &alone.residuals[0];
        *near = q->residuals[seq];
        near_runs = keep_tokens(near, 0, stop_seen(near, query));
        near->start = 0, near->num_queries = 1, near->whole = query % 2 && near->num_tokens;
    }
    if (of->hidden_tokens > of->num_tokens) of->hidden_tokens = of->num_tokens;
    alone.num_seqs = 1, alone.queries = 1, alone.tokens = of->num_tokens - of->hidden_tokens;
    alone.threads = q->threads % 3 + 1, alone.has_scores = alone.by_head = 0;
    for (int i = 0; i < 2; i++) alone.rows[i].data += (first + query) * q->rows[i].token_stride;
    if (q->by_query) alone.sinks.at = (float *)q->sinks.at + row;
    for (int level = 0; level < num_levels(); level++) {
        answer again = {.kernels = level_at(level), .question = &alone};
        ask(&again);
        const float *out = (const float *)answers[level].out.at + row * (size_t)v_dim;
        const float *lse = (const float *)answers[level].lse.at + row;
        if (!same_bits(again.out.at, out, (int64_t)heads * v_dim) || (q->world->lse && !same_bits(again.lse.at, lse, (int64_t)heads)))
            fail("%s: query %d has other bits alone%s", again.kernels->name, (int)query,
                 dropped ? ", without the tokens before its window" : "");
        give_back(&again.out), give_back(&again.scores), give_back(&again.lse);
    }
    give_back(&runs);
    if (q->near.num_blocks) give_back(&near_runs);
}

static void expect_sequence(const question *q, int seq, int64_t first_query, int64_t first_score,
                            const answer *answers) {
    const answer *scalar = &answers[num_levels() - 1];
    const kvc_seq *of = &q->seqs[seq];
    const sequence *tokens = &q->of[seq];
    for (int64_t t = 0; t < of->num_tokens; t++) {
        const int size = q->world->layout.block_size, slot = (int)(tokens->slots[t] % (size_t)size);
        if (!slot_is_ordinary(q->world, (int)(tokens->slots[t] / (size_t)size), slot)) return;
    }
    const int parts = q->by_head ? q->world->layout.num_heads : 1; /* of scores */
    const int64_t all = of->num_tokens + q->residuals[seq].num_tokens;
    double *space = calloc((size_t)((2 * parts + 1) * all) + 1, sizeof *space);
    double *weights = space, *total = space + all, *error = total + parts * all;
    int ordinary = 1;
    for (int64_t query = 0; query < of->num_queries; query++) {
        for (int head = 0; head < q->query_heads; head++)
            ordinary &= expect_row(q, seq, query, first_query, head, scalar, weights, total, error);
    }
    for (int64_t i = 0; ordinary && i < 3 && i < of->num_queries; i++)
        expect_same_alone(q, seq, of->num_queries - 1 - i * (of->num_queries - 1) / 2, first_query, answers);
    for (int64_t i = 0; q->has_scores && ordinary && i < parts * all; i++) {
        const int64_t part = i / all, t = i % all, shown = of->num_tokens - of->hidden_tokens;
        if (t >= shown && t < of->num_tokens) continue;
        const int64_t at = part * q->tokens + first_score + (t < shown ? t : t - of->hidden_tokens);
        const float score = ((const float *)scalar->scores.at)[at];
        if (!(fabs(score - total[i]) <= error[i]))
            fail("weight of token %d is %g, not %g, may err %g", (int)t, score, total[i], error[i]);
    }
    free(space);
}

/* A level gives the bits of the scalar one. */
static void expect_answer(const answer *mine, const answer *scalar) {
    const world *w = mine->question->world;
    const char *key = kvc_format_of(w->layout.key_format)->name, *value = kvc_format_of(w->layout.value_format)->name;
    char kernel[48];
#define EXPECT(part, is_asked)                                                                                  \
    if (is_asked) {                                                                                             \
        snprintf(kernel, sizeof kernel, "attend %s %s, %s", key, value, #part);                                 \
        expect_bits(kernel, mine->kernels, mine->part.at, scalar->part.at, (int64_t)(mine->part.size / sizeof(float))); \
    }
    EXPECT(out, 1)
    EXPECT(lse, w->lse)
    EXPECT(scores, mine->question->has_scores)
#undef EXPECT
}

static void step_attend(source *s, world *w) {
    question q = draw_question(s, w);
    answer answers[KVC_MOST_LEVELS + 1];
    for (int level = 0; level < num_levels(); level++) answers[level] = ask_level(level_at(level), &q);
    for (int level = 0; level < num_levels(); level++) expect_answer(&answers[level], &answers[num_levels() - 1]);
    int64_t first_query = 0, first_score = 0;
    for (int i = 0; i < q.num_seqs; i++) {
        expect_sequence(&q, i, first_query, first_score, answers);
        first_query += q.seqs[i].num_queries;
        first_score += q.seqs[i].num_tokens - q.seqs[i].hidden_tokens + q.residuals[i].num_tokens;
    }
    for (int level = 0; level < num_levels(); level++)
        give_back(&answers[level].out), give_back(&answers[level].scores), give_back(&answers[level].lse);
    for (int i = 0; i < q.num_seqs; i++) {
        drop_runs(&q.of[i]);
        if (q.seqs[i].parents) give_back(&q.tree[i]);
        if (q.seqs[i].firsts) give_back(&q.firsts[i]);
        if (q.near.num_blocks) drop_runs(&q.near_of[i]);
    }
    if (q.near.num_blocks) {
        give_back(&q.near_arena);
        free(q.near.plain), free(q.near.rows[0]), free(q.near.rows[1]);
    }
    if (q.centres.at) give_back(&q.centres);
    give_back(&q.q), give_back(&q.sink_q), give_back(&q.given[0]), give_back(&q.given[1]);
    if (q.sinks.at) give_back(&q.sinks);
}

#endif
