/* kvc_choice.h - attention of the rows of one query and KV head to tokens that they choose, in two stages.
 *
 *   pages       first | those that are ranked                          | the newest
 *   bounds            . . 3 . . . 7 . 2 . . . . 9 . . . . .               page by page, of 4 bits (kvc_bounds.c)
 *   candidates            k       k   k         k                         the pages with the best bounds
 *   scores                .x.x    .x..x..       xx..                      each key of these, exactly
 *   list        all    +   the best top_tokens of them             +      all
 *
 * Rows are the query heads of the KV head. What is ranked is the loss of a page or a token: how far its score lies below the
 * best of a row, for the row that wants it most. Equal losses are taken in text order. So the list is a function of the query,
 * of the tokens that it sees and of their positions, and of the level.
 *
 * Attention takes any list of tokens, ascending (attend_list), or one of tokens whose scores are known (attend_columns).
 */
#ifndef KVC_CHOICE_H
#define KVC_CHOICE_H

#include "kvc_half.h"
#include "kvc_sparse.h"
#include "simd_bounds.h"

/* ---- Which losses are the smallest. */

/* Losses below the limit, and the first so many of those that are equal to it. */
typedef struct cut {
    float limit;
    int64_t ties;
} cut;

/* n is a multiple of KVC_LANES. */
static int64_t count_below(const float *losses, int64_t n, float limit) {
    const f32v limit_v = f32v_set1(limit), one = f32v_set1(1.0f), zero = f32v_zero();
    f32v sums[4] = {zero, zero, zero, zero};
    int64_t i = 0;
    for (; i + 4 * KVC_LANES <= n; i += 4 * KVC_LANES) {
        UNROLL
        for (int s = 0; s < 4; s++)
            sums[s] = f32v_add(sums[s], f32v_pick(f32v_load(losses + i + s * KVC_LANES), limit_v, one, zero));
    }
    for (; i < n; i += KVC_LANES) sums[0] = f32v_add(sums[0], f32v_pick(f32v_load(losses + i), limit_v, one, zero));
    return (int64_t)f32v_sum_of(f32v_add(f32v_add(sums[0], sums[1]), f32v_add(sums[2], sums[3])));
}

/* The cut that takes `count` of the losses, at most as many as are finite: by bisection over the bits of a float, which has the
 * order of numbers that are not negative. */
static cut find_cut(const float *losses, int64_t n, int64_t count) {
    uint32_t low = 0, high = 0x7f800000; /* fewer than `count` are below the first, at least so many below the second */
    int64_t below = 0;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const int64_t here = count_below(losses, n, kvc_float_of_bits(middle));
        if (here == count) return (cut){kvc_float_of_bits(middle), 0};
        if (here < count)
            low = middle, below = here;
        else
            high = middle;
    }
    return (cut){kvc_float_of_bits(low), count - below};
}

/* Indices of the `count` smallest of n losses, ascending. Losses are padded with infinity to whole vectors. */
static int64_t take_least(const float *losses, int64_t n, int64_t count, int32_t *indices) {
    const int64_t padded = (n + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    cut at = count < n ? find_cut(losses, padded, count) : (cut){INFINITY, 0};
    const f32v limit_v = f32v_set1(at.limit), next_v = f32v_set1(kvc_float_of_bits(kvc_float_bits(at.limit) + (at.ties > 0)));
    int64_t taken = 0;
    for (int64_t i = 0; i < padded; i += KVC_LANES) {
        const f32v losses_v = f32v_load(losses + i);
        unsigned lanes = f32v_below(losses_v, limit_v);
        unsigned tied = at.ties ? f32v_below(losses_v, next_v) & ~lanes : 0;
        for (; tied && at.ties; tied &= tied - 1, at.ties--) lanes |= tied & -tied;
        for (; lanes; lanes &= lanes - 1) indices[taken++] = (int32_t)(i + __builtin_ctz(lanes));
    }
    return taken;
}

/* The loss of each of n columns of scores, [row][stride]; padded with infinity. Scores that are not numbers are the worst. */
static void find_losses(const float *scores, int64_t stride, int rows, int64_t n, float *losses) {
    const f32v most_v = f32v_set1(FLT_MAX);
    for (int64_t i = 0; i < n; i += KVC_LANES) f32v_store(losses + i, most_v);
    for (int r = 0; r < rows; r++, scores += stride) {
        f32v best_v = f32v_set1(-FLT_MAX);
        float best = -FLT_MAX;
        int64_t i = 0;
        for (; i + KVC_LANES <= n; i += KVC_LANES) {
            const f32v score_v = f32v_load(scores + i);
            best_v = f32v_pick(best_v, score_v, score_v, best_v);
        }
        best = f32v_max_of(best_v);
        for (; i < n; i++) best = best < scores[i] ? scores[i] : best;
        best_v = f32v_set1(best);
        for (i = 0; i < n; i += KVC_LANES) {
            const f32v old = f32v_load(losses + i), loss_v = f32v_sub(best_v, f32v_load(scores + i));
            f32v_store(losses + i, f32v_pick(loss_v, old, loss_v, old));
        }
    }
    for (int64_t i = n; i < (n + KVC_LANES - 1) / KVC_LANES * KVC_LANES; i++) losses[i] = INFINITY;
}

/* ---- Scores of pages by their bounds. */

static void make_bound_query(const job *j, int head, int64_t row, bound_query *to) {
    float widened[KVC_MAX_HEAD_DIM], largest = 0.0f;
    const float *q = query_row(j, &j->args->queries, head, row, widened), scale = j->args->scale * (float)LOG2E;
    const int dim = j->k_rows.dim;
    int sum = 0, usable = 1;
    for (int d = 0; d < dim; d++) {
        usable &= fabsf(q[d]) <= FLT_MAX;
        largest = fabsf(q[d]) > largest ? fabsf(q[d]) : largest;
    }
    const float most = largest * fabsf(scale);
    usable &= most <= FLT_MAX && most >= 0x1p-100f;
    memset(to->above, 0, sizeof to->above);
    memset(to->below, 0, sizeof to->below);
    for (int d = 0; usable && d < dim; d++) {
        const float x = q[d] * scale * (127.0f / most);
        const int whole = (int)(x < 0.0f ? x - 0.5f : x + 0.5f);
        to->above[d] = (int8_t)(whole > 0 ? whole : 0);
        to->below[d] = (int8_t)(whole < 0 ? whole : 0);
        sum += whole;
    }
    to->scale = usable ? most / 127.0f : 0.0f;
    to->middle = 7.5f * (float)sum;
}

/* The sums of codes times bytes of one page and so many rows (a constant): vectors KVC_LANES apart, whose lanes are to be added,
 * exact as each is below 2^24. */
INLINE void bound_sums(int rows, int dim, const unsigned char *codes, const bound_query *q, f32v *to) {
    i32x16 sums[4];
    UNROLL
    for (int r = 0; r < rows; r++) sums[r] = i32x16_zero();
    for (int d = 0; d < dim; d += KVC_UNIT) {
        const u8x64 both = u8x64_load(codes + d), high = u8x64_and(both, 15), low = u8x64_and(u8x64_shr(both, 4), 15);
        UNROLL
        for (int r = 0; r < rows; r++) sums[r] = i32x16_dot_bytes(i32x16_dot_bytes(sums[r], high, q[r].above + d), low, q[r].below + d);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        f32v parts[16 / KVC_LANES];
        i32x16_to_floats(sums[r], parts);
        for (int v = 1; v < 16 / KVC_LANES; v++) parts[0] = f32v_add(parts[0], parts[v]);
        to[r * KVC_LANES] = parts[0];
    }
}

/* Pages whose bounds are scored together, and where they lie. */
typedef struct bound_pages {
    int count;
    const unsigned char *codes[KVC_LANES];
    float scales[KVC_LANES];
} bound_pages;

INLINE void score_rows(int rows, int dim, const bound_pages *p, const bound_query *q, float *scores, int64_t stride) {
    f32v sums[4 * KVC_LANES];
    for (int i = 0; i < KVC_LANES; i++) bound_sums(rows, dim, p->codes[i], q, sums + i);
    for (int r = 0; r < rows; r++) {
        float some[KVC_LANES];
        const f32v whole = f32v_sub(f32v_sums(sums + r * KVC_LANES), f32v_set1(q[r].middle));
        f32v_store(some, f32v_mul(f32v_mul(whole, f32v_load(p->scales)), f32v_set1(q[r].scale)));
        memcpy(scores + r * stride, some, (size_t)p->count * sizeof(float));
    }
}

enum { BOUNDS_AHEAD = 16 }; /* pages from those that are scored to those that are prefetched */

/* A page of a sequence, from one to the next one: a division for each would take as long as its scores. */
typedef struct page_cursor {
    const kvc_run *run;
    int page, pages; /* of its block */
} page_cursor;

static page_cursor seek_page(const job *j, const kvc_seq *seq, int64_t page) {
    const int pages = j->layout->block_size / KVC_PAGE;
    return (page_cursor){seq->runs + page / pages, (int)(page % pages), pages};
}
INLINE size_t next_page(page_cursor *at) { /* its place among all pages */
    const size_t place = (size_t)at->run->block * (size_t)at->pages + (size_t)at->page;
    if (++at->page == at->pages) at->page = 0, at->run++;
    return place;
}

/* Scores of pages [first, stop): [row][stride]. */
static void score_bounds(const job *j, const kvc_sparse_args *sparse, const kvc_seq *seq, int head, const bound_query *q,
                         int64_t first, int64_t stop, float *scores, int64_t stride) {
    const size_t dim = (size_t)j->k_rows.dim, heads = (size_t)j->layout->num_heads;
    const int64_t last = stop - BOUNDS_AHEAD;
    page_cursor at = seek_page(j, seq, first), ahead = seek_page(j, seq, first + BOUNDS_AHEAD < stop ? first + BOUNDS_AHEAD : first);
    bound_pages p = {.codes = {sparse->bounds.codes}};
    for (int64_t page = first; page < stop; page += KVC_LANES, scores += KVC_LANES) {
        p.count = stop - page < KVC_LANES ? (int)(stop - page) : KVC_LANES;
        for (int i = 0; i < p.count; i++) {
            const size_t row = next_page(&at) * heads + (size_t)head;
            p.codes[i] = sparse->bounds.codes + row * dim;
            p.scales[i] = kvc_float_of_bits((uint32_t)sparse->bounds.scales[row] << 16);
            if (page + i >= last) continue;
            const size_t then = next_page(&ahead) * heads + (size_t)head;
            for (size_t d = 0; d < dim; d += 64) __builtin_prefetch(sparse->bounds.codes + then * dim + d);
            __builtin_prefetch(sparse->bounds.scales + then);
        }
        for (int i = p.count; i < KVC_LANES; i++) p.codes[i] = p.codes[0], p.scales[i] = 0.0f;
        int r = 0;
        for (; r + 4 <= j->rows; r += 4) score_rows(4, (int)dim, &p, q + r, scores + r * stride, stride);
        for (; r < j->rows; r++) score_rows(1, (int)dim, &p, q + r, scores + r * stride, stride);
    }
}

/* ---- Attention over a list of tokens. */

/* Puts a token of a sequence whose blocks are full into a chunk, and with `whole` those behind it up to the end of its page. */
static void list_token(const job *j, const kvc_seq *seq, int64_t token, int whole, chunk *c) {
    const int64_t size = j->layout->block_size;
    const kvc_run run = seq->runs[token / size];
    const cursor at = {&run, 0, (int)(token % size), 0};
    add_piece(j, &at, whole ? KVC_PAGE : 1, c);
}

static void begin_chunk(chunk *c) {
    c->lanes = c->pieces = c->sink = c->even = 0;
    c->segment = 0;
    for (int t = 0; t < KVC_CHUNK; t++) c->held[t] = -1.0f;
}

/* Rows behind the last one repeat it. */
static void end_chunk(const job *j, chunk *c) {
    for (int t = c->lanes; !j->units && c->lanes && t < KVC_POINTERS; t++) c->k[t] = c->k[c->lanes - 1], c->v[t] = c->v[c->lanes - 1];
}

/* Fills a chunk with the next tokens of a list and returns how many. Tokens of one tile are one piece. */
static int64_t list_chunk(const job *j, const kvc_seq *seq, const int32_t *tokens, int64_t count, chunk *c) {
    int64_t i = 0;
    begin_chunk(c);
    while (i < count && c->lanes < KVC_CHUNK) {
        list_token(j, seq, tokens[i], 0, c);
        piece *last = &c->piece[c->pieces - 1];
        last->first = 0;
        const int32_t begin = tokens[i], page = begin / KVC_PAGE;
        do {
            last->count = tokens[i] - begin + 1;
            c->held[last->lane + last->count - 1] = 0.0f;
            i++;
        } while (j->units && i < count && tokens[i] / KVC_PAGE == page);
    }
    c->count = (int)i;
    end_chunk(j, c);
    return i;
}

/* The same of tokens that are columns of scores, 16 of each of `pages`: takes their scores along, as those of the chunk. */
static int64_t column_chunk(const job *j, const kvc_seq *seq, const int32_t *pages, const int32_t *columns, int64_t count, chunk *c) {
    int64_t i = 0;
    begin_chunk(c);
    while (i < count && c->lanes < KVC_CHUNK) {
        const int32_t page = columns[i] / KVC_PAGE;
        const int lane = c->lanes;
        if (!j->units) {
            list_token(j, seq, (int64_t)pages[page] * KVC_PAGE + columns[i] % KVC_PAGE, 0, c);
            c->held[lane] = 0.0f;
            i++;
        } else {
            list_token(j, seq, (int64_t)pages[page] * KVC_PAGE, 1, c);
            for (; i < count && columns[i] / KVC_PAGE == page; i++) c->held[lane + columns[i] % KVC_PAGE] = 0.0f;
        }
        c->piece[c->pieces - 1].first = 0;
    }
    c->count = (int)i;
    end_chunk(j, c);
    return i;
}

static void take_scores(const job *j, const int32_t *columns, int64_t count, const float *scores, int64_t stride) {
    for (int r = 0; r < j->rows; r++) {
        float *to = j->weights + r * KVC_CHUNK;
        const float *from = scores + r * stride;
        for (int64_t i = 0; i < count; i++) {
            if (!j->units) {
                *to++ = from[columns[i]];
                continue;
            }
            const int32_t page = columns[i] / KVC_PAGE;
            memcpy(to, from + page * KVC_PAGE, KVC_PAGE * sizeof(float));
            to += KVC_PAGE;
            while (i + 1 < count && columns[i + 1] / KVC_PAGE == page) i++;
        }
    }
}

/* Attends to the tokens of a list, ascending, with the queries that are packed. */
static void attend_list(const job *j, const kvc_seq *seq, const int32_t *tokens, int64_t count) {
    chunk chunks[2];
    int64_t at = list_chunk(j, seq, tokens, count, &chunks[0]);
    for (int turn = 0; chunks[turn].lanes; turn ^= 1) {
        at += list_chunk(j, seq, tokens + at, count - at, &chunks[turn ^ 1]);
        attend_chunk(j, &chunks[turn], &chunks[turn ^ 1], 0);
    }
}

/* The same of columns of scores. */
static void attend_columns(const job *j, const kvc_seq *seq, const int32_t *pages, const int32_t *columns, int64_t count,
                           const float *scores, int64_t stride) {
    chunk chunks[2];
    const ahead_rows none = {NULL, 0, 0};
    for (int64_t at = 0, then = column_chunk(j, seq, pages, columns, count, &chunks[0]), turn = 0; at < count; turn ^= 1) {
        const chunk *now = &chunks[turn], *next = &chunks[turn ^ 1];
        take_scores(j, columns + at, then - at, scores, stride);
        at = then;
        then += column_chunk(j, seq, pages, columns + at, count - at, &chunks[turn ^ 1]);
        const int lanes = (now->lanes + KVC_DOT_TOKENS - 1) / KVC_DOT_TOKENS * KVC_DOT_TOKENS;
        softmax_rows(j, now, j->item->row, j->rows, lanes, j->segment.largest, j->segment.sum);
        mix_values(j, now, j->item->head, j->rows, lanes, j->segment.acc, none, next);
    }
}

/* ---- The choice. */

typedef struct choice { /* in the scratch of a thread, see kvc_sparse_scratch_floats */
    float *scores, *losses;
    bound_query *q; /* of each row */
    int32_t *pages, *tokens;
} choice;

static choice choice_at(float *free, int rows, int64_t columns) {
    choice c;
    c.q = (bound_query *)free, free += (size_t)rows * (sizeof(bound_query) / sizeof(float));
    c.scores = free, free += rows * columns;
    c.losses = free, free += columns;
    c.pages = (int32_t *)free, free += columns;
    c.tokens = (int32_t *)free;
    return c;
}

/* Scores of all keys of the candidates, [row][stride], 16 columns each. */
static void score_candidates(const job *j, const kvc_seq *seq, int head, const int32_t *pages, int64_t count, float *scores,
                             int64_t stride) {
    enum { PAGES = KVC_CHUNK / KVC_PAGE };
    chunk chunks[2];
    for (int64_t page = 0, turn = 0; page < count + PAGES; page += PAGES, turn ^= 1) {
        chunk *next = &chunks[turn], *now = &chunks[turn ^ 1];
        begin_chunk(next);
        for (int64_t i = page; i < page + PAGES && i < count; i++) list_token(j, seq, (int64_t)pages[i] * KVC_PAGE, 1, next);
        end_chunk(j, next);
        if (!page) continue;
        const ahead_rows none = {NULL, 0, 0};
        score_chunk(j, now, head, 0, j->rows, none, next);
        float *to = scores + (page - PAGES) * KVC_PAGE;
        for (int r = 0; r < j->rows; r++) memcpy(to + r * stride, j->weights + r * KVC_CHUNK, (size_t)now->lanes * sizeof(float));
    }
}

/* Ranks pages and tokens: leaves the candidates' pages and scores, and in `tokens` the columns that are chosen; returns how many.
 * The queries are packed. */
static int64_t choose_columns(const job *j, const kvc_sparse_args *sparse, const kvc_seq *seq, const kvc_sparse_span *of, choice c) {
    const int head = j->item->head;
    const int64_t ranked = of->stop - of->first, stride = sparse->columns;
    int64_t candidates = kvc_num_candidates(ranked, sparse);
    for (int r = 0; r < j->rows; r++) make_bound_query(j, head, j->item->row + r, &c.q[r]);
    score_bounds(j, sparse, seq, head, c.q, of->first, of->stop, c.scores, stride);
    find_losses(c.scores, stride, j->rows, ranked, c.losses);
    candidates = take_least(c.losses, ranked, candidates, c.pages);
    for (int64_t i = 0; i < candidates; i++) c.pages[i] += (int32_t)of->first;
    score_candidates(j, seq, head, c.pages, candidates, c.scores, stride);
    find_losses(c.scores, stride, j->rows, candidates * KVC_PAGE, c.losses);
    return take_least(c.losses, candidates * KVC_PAGE, sparse->top_tokens, c.tokens);
}

/* Attends to the tokens before the pages that are ranked, to those behind them, and to the chosen ones. */
static void attend_some(job *j, const kvc_sparse_args *sparse, const kvc_seq *seq, choice c) {
    const kvc_sparse_span of = kvc_sparse_span_of(seq, j->item->row / j->group);
    const kvc_seq all = {.num_tokens = INT32_MAX, .whole = 1}; /* lanes are masked by the chunks */
    int64_t count = choose_columns(j, sparse, seq, &of, c);
    j->seq = &all;
    begin_segment(j, 0);
    attend_columns(j, seq, c.pages, c.tokens, count, c.scores, sparse->columns);
    count = 0;
    for (int64_t t = of.seen.first; t < of.first * KVC_PAGE; t++) c.tokens[count++] = (int32_t)t;
    for (int64_t t = of.stop * KVC_PAGE; t < of.seen.stop; t++) c.tokens[count++] = (int32_t)t;
    attend_list(j, seq, c.tokens, count);
    end_segment(j, 0);
}

void KVC_OWN(attend_chosen)(const kvc_attend_args *args, const kvc_sparse_args *sparse, const kvc_item *item, void *scratch) {
    job j;
    start(&j, args, item);
    take_scratch(&j, scratch);
    begin_item(&j, j.rows);
    pack_queries(&j, item->head, item->row, j.rows, 0);
    attend_some(&j, sparse, args->seqs + item->seq,
                choice_at((float *)scratch + kvc_thread_scratch_floats(args->layout), j.rows, sparse->columns));
    if (args->residuals) make_whole(&j, j.total, 0, j.rows);
    if (item->residual) {
        read_from(&j, 1, item->residual);
        attend_tokens(&j, 0);
    }
    end_item(j.rows);
    write_rows(&j, j.total, 0, j.rows);
}

void KVC_FN(bound_page)(const kvc_layout *, const unsigned char *, int32_t, int, const kvc_bounds *);

extern const kvc_sparse_kernels KVC_OWN(sparse);
const kvc_sparse_kernels KVC_OWN(sparse) = {.bound_page = KVC_FN(bound_page), .attend_chosen = KVC_OWN(attend_chosen)};

#endif
