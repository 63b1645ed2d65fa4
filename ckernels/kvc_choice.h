/* kvc_choice.h - attention of the rows of one query and KV head to pages that they choose, or to tokens that are listed.
 *
 *   pages       first | those that are ranked                | the newest
 *   estimates           . . 3 . . . 7 . 2 . . . . 9 . . .          of the largest score in a page, by its summary (kvc_summaries.c)
 *   attended    all         k       k   k         k            all
 *
 * Rows are the query heads of the KV head. Pages are ranked by their loss: how far the estimate lies below the best one of a row,
 * for the row that wants the page most. A row of zeros, or one that is not finite, wants none. Equal losses are taken in text order.
 * So what is chosen is a function of the query, of the tokens that it sees and of their positions.
 *
 * All keys of a chosen page are scored, and all its tokens attended. A second choice, of tokens by these scores, would read as many
 * pages of V but for a few: the best tokens lie in nearly all pages that are worth a look.
 *
 * The estimate of the largest score in a page is  q . mean + KVC_SPARSE_DEVIATIONS sqrt(sum of q_d^2 variance_d):  the keys of a
 * page are taken for independent in each channel. Bounds of channels (Quest, Tang et al., 2024, section 3.3), which no key has in
 * all channels at once, lead to fewer of the facts that a text has planted in it (bench/pages/sparse.md).
 */
#ifndef KVC_CHOICE_H
#define KVC_CHOICE_H

#include "kvc_half.h"
#include "kvc_sparse.h"

/* ---- Which losses are the smallest. */

/* Losses below the limit, and the first `ties` of those that are equal to it, which are below the next one. */
typedef struct cut {
    float limit, next;
    int64_t ties;
} cut;

/* n is a multiple of KVC_LANES. */
static int64_t count_below(const float *losses, int64_t n, float limit) {
    enum { EXACT = 1 << 20 }; /* losses whose ones a float sums up exactly */
    const f32v limit_v = f32v_set1(limit), one = f32v_set1(1.0f), zero = f32v_zero();
    int64_t count = 0;
    for (int64_t i = 0; i < n;) {
        const int64_t stop = n - i < EXACT ? n : i + EXACT;
        f32v sums[4] = {zero, zero, zero, zero};
        for (; i + 4 * KVC_LANES <= stop; i += 4 * KVC_LANES) {
            UNROLL
            for (int s = 0; s < 4; s++)
                sums[s] = f32v_add(sums[s], f32v_pick(f32v_load(losses + i + s * KVC_LANES), limit_v, one, zero));
        }
        for (; i < stop; i += KVC_LANES) sums[0] = f32v_add(sums[0], f32v_pick(f32v_load(losses + i), limit_v, one, zero));
        count += (int64_t)f32v_sum_of(f32v_add(f32v_add(sums[0], sums[1]), f32v_add(sums[2], sums[3])));
    }
    return count;
}

/* The cut that takes `count` of n losses, none of which is above `most`; those behind are infinite, up to whole vectors. It is
 * found by the bits of a float, which have the order of numbers that are not negative. A probe is where a straight line would reach
 * the count; after one that leaves more than half of the losses in between, the middle of the bits. */
static cut find_cut(const float *losses, int64_t n, int64_t count, float most) {
    uint32_t low = 0, high = kvc_float_bits(most) + 1; /* fewer than `count` are below the first, at least `count` below the second */
    int64_t below = 0, all = (n + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    const int64_t padded = all;
    if (count >= n) return (cut){INFINITY, INFINITY, 0};
    for (int in_line = 1; high - low > 1;) {
        uint32_t probe = low + (high - low) / 2;
        const float from = kvc_float_of_bits(low), to = kvc_float_of_bits(high - 1);
        if (in_line) probe = kvc_float_bits(from + (to - from) * ((float)(count - below) / (float)(all - below)));
        probe = probe <= low ? low + 1 : probe >= high ? high - 1 : probe;
        const float limit = kvc_float_of_bits(probe);
        const int64_t here = count_below(losses, padded, limit), between = all - below;
        if (here == count) return (cut){limit, limit, 0};
        if (here < count)
            low = probe, below = here;
        else
            high = probe, all = here;
        in_line = !in_line || all - below <= between / 2;
    }
    return (cut){kvc_float_of_bits(low), kvc_float_of_bits(high), count - below};
}

/* The losses of a vector that a cut takes: one bit for each. */
INLINE unsigned taken_of(cut *at, f32v losses) {
    unsigned lanes = f32v_below(losses, f32v_set1(at->limit));
    unsigned tied = at->ties ? f32v_below(losses, f32v_set1(at->next)) & ~lanes : 0;
    for (; tied && at->ties; tied &= tied - 1, at->ties--) lanes |= tied & -tied;
    return lanes;
}

/* Indices of the `count` smallest of n losses, ascending. */
static int64_t list_least(const float *losses, int64_t n, int64_t count, float most, int32_t *indices) {
    cut at = find_cut(losses, n, count, most);
    int64_t taken = 0;
    for (int64_t i = 0; i < n; i += KVC_LANES) {
        for (unsigned lanes = taken_of(&at, f32v_load(losses + i)); lanes; lanes &= lanes - 1)
            indices[taken++] = (int32_t)(i + __builtin_ctz(lanes));
    }
    return taken;
}

/* The largest of n numbers, of which there may be none. */
static float best_of(const float *x, int64_t n) {
    f32v best_v = f32v_set1(-FLT_MAX);
    int64_t i = 0;
    for (; i + KVC_LANES <= n; i += KVC_LANES) best_v = f32v_pick(best_v, f32v_load(x + i), f32v_load(x + i), best_v);
    float best = f32v_max_of(best_v);
    for (; i < n; i++) best = best < x[i] ? x[i] : best;
    return best + 0.0f; /* not -0: no loss is one either */
}

/* The loss of each of n columns of scores, [row][stride], up to whole vectors of which there are scores; infinite behind n. Returns a
 * number that no other one is above. Scores that are not numbers are the worst. */
static float find_losses(const float *scores, int64_t stride, int rows, int64_t n, float *losses) {
    float best[KVC_ITEM_ROWS];
    f32v most_v = f32v_zero();
    int64_t i = 0;
    for (int r = 0; r < rows; r++) best[r] = best_of(scores + r * stride, n);
    for (; i < n; i += KVC_LANES) {
        f32v loss_v = f32v_set1(FLT_MAX);
        for (int r = 0; r < rows; r++) {
            const f32v other_v = f32v_sub(f32v_set1(best[r]), f32v_load(scores + r * stride + i));
            loss_v = f32v_pick(other_v, loss_v, other_v, loss_v);
        }
        f32v_store(losses + i, loss_v);
        most_v = f32v_max(most_v, loss_v);
    }
    for (int64_t t = n; t < i; t++) losses[t] = INFINITY;
    return f32v_max_of(most_v);
}

/* ---- Scores of pages by their summaries. */

/* Half away from 0. */
static int rounded(float x) { return (int)(x < 0.0f ? x - 0.5f : x + 0.5f); }

static void make_summary_query(const job *j, int head, int64_t row, summary_query *to) {
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
    memset(to->q, 0, sizeof to->q);
    memset(to->squares, 0, sizeof to->squares);
    for (int d = 0; usable && d < dim; d++) {
        const float x = q[d] * scale * (127.0f / most);
        const int own = rounded(x);
        to->q[d] = (int8_t)own;
        to->squares[d] = (int8_t)rounded(x * x / 127.0f);
        sum += own;
    }
    to->scale = usable ? most / 127.0f : NAN; /* the worst scores: the other rows choose */
    to->middle = 15.5f * (float)sum;
    to->spread = usable ? KVC_SPARSE_DEVIATIONS * 0.088735651f * most : 0.0f;
}

enum { SUMMARY_PAGES = 16 }; /* pages whose summaries are scored together */

typedef struct summary_pages {
    const unsigned char *codes[SUMMARY_PAGES];
    float scales[SUMMARY_PAGES], variances[SUMMARY_PAGES];
} summary_pages;

/* Sums of rows (a constant) over a page: the products of its means with q, and of its variances with the squares of q. */
INLINE void sum_page(int rows, int dim, const unsigned char *codes, const summary_query *q, i32x16 *means, i32x16 *variances) {
    for (int d = 0; d < dim; d += KVC_UNIT) {
        const u8x64 both = u8x64_load(codes + d), mean = u8x64_and(both, 31), variance = u8x64_and(u8x64_shr(both, 5), 7);
        UNROLL
        for (int r = 0; r < rows; r++) {
            means[r] = i32x16_dot_bytes(means[r], mean, u8x64_load((const unsigned char *)q[r].q + d));
            variances[r] = i32x16_dot_bytes(variances[r], variance, u8x64_load((const unsigned char *)q[r].squares + d));
        }
    }
}

/* Estimates of `rows` rows (a constant), 1 to 4. The sums are exact, each below 2^24. */
INLINE void score_rows(int rows, int dim, const summary_pages *p, const summary_query *q, float *scores, int64_t stride) {
    float variances[4 * SUMMARY_PAGES]; /* [row][page] */
    for (int i = 0; i < SUMMARY_PAGES; i += 2) {
        i32x16 sums[16]; /* [means of two pages, variances of them][row] */
        float whole[16]; /* [row][those four] */
        UNROLL
        for (int n = 0; n < 16; n++) sums[n] = i32x16_zero();
        UNROLL
        for (int n = 0; n < 2; n++) sum_page(rows, dim, p->codes[i + n], q, sums + 4 * n, sums + 8 + 4 * n);
        i32x16_store_sums(sums, whole);
        UNROLL
        for (int r = 0; r < rows; r++) {
            memcpy(scores + r * stride + i, whole + 4 * r, 2 * sizeof(float));
            memcpy(variances + r * SUMMARY_PAGES + i, whole + 4 * r + 2, 2 * sizeof(float));
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        float *own = scores + r * stride;
        for (int i = 0; i < SUMMARY_PAGES; i += KVC_LANES) {
            const f32v from_middle = f32v_sub(f32v_load(own + i), f32v_set1(q[r].middle));
            const f32v mean = f32v_mul(f32v_mul(from_middle, f32v_load(p->scales + i)), f32v_set1(q[r].scale));
            const f32v variance = f32v_mul(f32v_load(variances + r * SUMMARY_PAGES + i), f32v_load(p->variances + i));
            f32v_store(own + i, f32v_add(mean, f32v_mul(f32v_sqrt(variance), f32v_set1(q[r].spread))));
        }
    }
}

enum { SUMMARIES_AHEAD = 32 }; /* pages from those that are scored to those that are prefetched */

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

/* Estimates of pages [first, stop): [row][stride], and numbers up to a multiple of SUMMARY_PAGES. */
static void score_summaries(const job *j, const kvc_sparse_args *sparse, const kvc_seq *seq, int head, const summary_query *q,
                         int64_t first, int64_t stop, float *scores, int64_t stride) {
    const size_t dim = (size_t)j->k_rows.dim, heads = (size_t)j->layout->num_heads;
    const int64_t last = stop - SUMMARIES_AHEAD;
    page_cursor at = seek_page(j, seq, first), ahead = seek_page(j, seq, first + SUMMARIES_AHEAD < stop ? first + SUMMARIES_AHEAD : first);
    for (int64_t page = first; page < stop; page += SUMMARY_PAGES, scores += SUMMARY_PAGES) {
        const int count = stop - page < SUMMARY_PAGES ? (int)(stop - page) : SUMMARY_PAGES;
        summary_pages p;
        for (int i = 0; i < count; i++) {
            const size_t row = next_page(&at) * heads + (size_t)head;
            p.codes[i] = sparse->summaries.codes + row * dim;
            p.scales[i] = kvc_float_of_bits((uint32_t)(sparse->summaries.scales[row] & 255) << 23);
            p.variances[i] = kvc_float_of_bits((uint32_t)(sparse->summaries.scales[row] >> 8) << 23);
            if (page + i >= last) continue;
            const size_t then = next_page(&ahead) * heads + (size_t)head;
            for (size_t d = 0; d < dim; d += 64) __builtin_prefetch(sparse->summaries.codes + then * dim + d);
            __builtin_prefetch(sparse->summaries.scales + then);
        }
        for (int i = count; i < SUMMARY_PAGES; i++) p.codes[i] = p.codes[0], p.scales[i] = p.variances[i] = 0.0f;
        int r = 0;
#define SCORE_ROWS(n) \
    for (; r + (n) <= j->rows; r += (n)) score_rows(n, (int)dim, &p, q + r, scores + r * stride, stride);
        SCORE_ROWS(4)
        SCORE_ROWS(3)
        SCORE_ROWS(2)
        SCORE_ROWS(1)
#undef SCORE_ROWS
    }
}

/* ---- Attention over a list of tokens. */

/* Puts tokens of one page into a chunk; blocks of the sequence are full. */
static void list_tokens(const job *j, const kvc_seq *seq, int64_t token, int count, chunk *c) {
    const uint32_t size = (uint32_t)j->layout->block_size, block = (uint32_t)token / size;
    const cursor at = {seq->runs + block, 0, (int)((uint32_t)token - block * size), 0};
    add_piece(j, &at, count, c);
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
static int64_t list_chunk(const job *j, const kvc_seq *seq, const kvc_span *seen, const int32_t *tokens, int64_t count, chunk *c) {
    int64_t i = 0;
    (void)seen;
    begin_chunk(c);
    while (i < count && c->lanes < KVC_CHUNK) {
        list_tokens(j, seq, tokens[i], 1, c);
        piece *last = &c->piece[c->pieces - 1];
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

/* The same of pages: of their tokens those that are seen. */
static int64_t page_chunk(const job *j, const kvc_seq *seq, const kvc_span *seen, const int32_t *pages, int64_t count, chunk *c) {
    int64_t i = 0;
    c->lanes = c->pieces = c->sink = c->count = 0;
    c->segment = 0;
    for (; i < count && c->lanes <= KVC_CHUNK - KVC_PAGE; i++) {
        const int64_t page = (int64_t)pages[i] * KVC_PAGE, first = page < seen->first ? seen->first : page;
        const int64_t stop = page + KVC_PAGE < seen->stop ? page + KVC_PAGE : seen->stop;
        list_tokens(j, seq, first, (int)(stop - first), c);
        c->count += (int)(stop - first);
    }
    c->even = c->count == c->lanes;
    if (!c->even) mark_gaps(c);
    end_chunk(j, c);
    return i;
}

typedef int64_t fill_chunk(const job *, const kvc_seq *, const kvc_span *seen, const int32_t *list, int64_t count, chunk *);

/* Attends to the tokens or pages of a list, ascending, with the queries that are packed. A block has `of_block` of them. */
INLINE void attend_list(job *j, const kvc_seq *seq, const kvc_span *seen, fill_chunk *fill, const int32_t *list, int64_t count,
                        int of_block) {
    const kvc_seq all = {.num_tokens = INT32_MAX, .whole = 1}; /* chunks mask their lanes */
    const kvc_units units = {seq->runs, list, count, of_block, j->args->spill_layer};
    chunk chunks[2];
    if (j->spill) kvc_hold(j->spill, &units, KVC_TO_READ);
    int64_t at = fill(j, seq, seen, list, count, &chunks[0]);
    j->seq = &all;
    begin_segment(j, 0);
    for (int turn = 0; chunks[turn].lanes; turn ^= 1) {
        at += fill(j, seq, seen, list + at, count - at, &chunks[turn ^ 1]);
        attend_chunk(j, &chunks[turn], &chunks[turn ^ 1], 0);
    }
    release_units(j, &units);
    end_segment(j, 0);
}

/* ---- The choice. */

typedef struct choice { /* in the scratch of a thread, see kvc_sparse_scratch_floats */
    float *scores, *losses;
    summary_query *q; /* of each row */
    int32_t *pages;
} choice;

static choice choice_at(float *free, int rows, int64_t columns) {
    choice c;
    c.q = (summary_query *)(((uintptr_t)free + 63) / 64 * 64), free = (float *)(c.q + rows);
    c.scores = free, free += rows * columns;
    c.losses = free, free += columns;
    c.pages = (int32_t *)free;
    return c;
}

/* Writes the pages that the rows choose, in text order; returns how many. */
static int64_t choose_pages(const job *j, const kvc_sparse_args *sparse, const kvc_seq *seq, const kvc_sparse_span *of, choice c,
                            int32_t *pages) {
    const int head = j->item->head;
    const int64_t ranked = of->stop - of->first, stride = sparse->columns;
    for (int r = 0; r < j->rows; r++) make_summary_query(j, head, j->item->row + r, &c.q[r]);
    score_summaries(j, sparse, seq, head, c.q, of->first, of->stop, c.scores, stride);
    const float most = find_losses(c.scores, stride, j->rows, ranked, c.losses);
    const int64_t count = list_least(c.losses, ranked, kvc_num_chosen(sparse), most, pages);
    for (int64_t i = 0; i < count; i++) pages[i] += (int32_t)of->first;
    return count;
}

/* Lists the pages before those that are ranked, the chosen ones, and those behind; returns how many. */
static int64_t list_pages(const job *j, const kvc_sparse_args *sparse, const kvc_seq *seq, choice c, int32_t *pages) {
    const kvc_sparse_span of = kvc_sparse_span_of(seq, j->item->row / j->group);
    int64_t count = 0;
    for (int64_t page = of.seen.first / KVC_PAGE; page < of.first; page++) pages[count++] = (int32_t)page;
    count += choose_pages(j, sparse, seq, &of, c, pages + count);
    for (int64_t page = of.stop; page * KVC_PAGE < of.seen.stop; page++) pages[count++] = (int32_t)page;
    return count;
}

/* The list of an item in those of the call; NULL: there are none. */
static int32_t *kept_list(const job *j, const kvc_sparse_args *sparse) {
    const int64_t query = j->item->first_query + j->item->row / j->group;
    return sparse->chosen ? sparse->chosen + (query * j->layout->num_heads + j->item->head) * sparse->chosen_stride : NULL;
}

/* Lists the pages that an item will attend to, and begins to read those that are not in memory. */
static void choose_ahead(const job *j, const kvc_sparse_args *sparse, const kvc_seq *seq, choice c) {
    int32_t *kept = kept_list(j, sparse);
    const int64_t count = list_pages(j, sparse, seq, c, kept);
    const kvc_units units = {seq->runs, kept, count, j->layout->block_size / KVC_PAGE, j->args->spill_layer};
    kept[count] = -1;
    if (j->spill) kvc_hold_ahead(j->spill, &units);
}

/* Attends to the pages that were listed, or that the item lists now. */
static void attend_some(job *j, const kvc_sparse_args *sparse, const kvc_seq *seq, choice c) {
    const kvc_span seen = kvc_seen(seq, j->item->row / j->group);
    int32_t *kept = kept_list(j, sparse);
    int64_t count = 0;
    while (kept && kept[count] >= 0) count++;
    if (!kept) count = list_pages(j, sparse, seq, c, c.pages);
    attend_list(j, seq, &seen, page_chunk, kept ? kept : c.pages, count, j->layout->block_size / KVC_PAGE);
}

/* Attends to the tokens that the call lists. */
static void attend_listed(job *j, const kvc_sparse_args *sparse, const kvc_seq *seq) {
    const int64_t query = j->item->first_query + j->item->row / j->group;
    const int32_t *tokens = sparse->listed + (query * j->layout->num_heads + j->item->head) * sparse->num_listed;
    int64_t count = 0;
    while (count < sparse->num_listed && tokens[count] >= 0) count++;
    attend_list(j, seq, NULL, list_chunk, tokens, count, j->layout->block_size);
}

void KVC_OWN(attend_chosen)(const kvc_attend_args *args, const kvc_sparse_args *sparse, const kvc_item *item, void *scratch) {
    job j;
    start(&j, args, item);
    if (sparse->listed && args->layout->latent) j.units = 0; /* a tile would have few of the tokens, and 16 cost as much as one */
    take_scratch(&j, scratch);
    float *own = (float *)scratch + kvc_thread_scratch_floats(args->layout);
    if (sparse->choosing) {
        choose_ahead(&j, sparse, args->seqs + item->seq, choice_at(own, j.rows, sparse->columns));
        return;
    }
    begin_item(&j, j.rows);
    pack_queries(&j, item->head, item->row, j.rows, 0);
    if (sparse->listed)
        attend_listed(&j, sparse, args->seqs + item->seq);
    else
        attend_some(&j, sparse, args->seqs + item->seq, choice_at(own, j.rows, sparse->columns));
    if (args->residuals) make_whole(&j, j.total, 0, j.rows);
    if (item->residual) {
        read_from(&j, 1, item->residual);
        attend_tokens(&j, 0);
    }
    end_item(j.rows);
    write_rows(&j, j.total, 0, j.rows);
}

#endif
