/* kvc_attend.c - softmax(q K^T scale) V over runs of slots, without a score matrix.
 *
 * Online softmax (Milakov and Gimelshein, 2018) over chunks of KVC_CHUNK tokens, in powers of two: the queries are
 * multiplied by log2(e). Each row keeps the largest score so far, the sum of 2^(score - largest), and the accumulator
 * of V. A chunk rescales both sums by alpha = 2^(old largest - new largest). Every segment of the context starts from
 * zero (kvc_segment.h).
 *
 * A row has the same bits in every call. Text positions alone determine where chunks begin (tiles: and the slots of the
 * tokens). Scores and mixed values are sums in an order that does not depend on the number of rows (kvc_products.h), or
 * sums of whole numbers (kvc_tiles.h). A token that a row does not see has score -inf and weight 0. A chunk or segment
 * of such tokens has alpha = 2^0 = 1 and adds 0, so that it may as well be left out.
 *
 * Error against float64 over the same K and V, f32 and f16: at most 5e-6 of the largest output, for up to 8k
 * tokens and scores of ordinary size; a score s adds its own float32 rounding, about 2^-22 |s|, to the
 * relative error of its weight.
 */
#include "kvc_chunk.h"
#include "kvc_functions.h"

#include <math.h>

/* The token at an index from `first` on, as an index into `count` tokens. */
INLINE int clip(int64_t token, int64_t first, int count) {
    return token < first ? 0 : token - first < count ? (int)(token - first) : count;
}

/* Sets every lane without a visible token to -inf. */
static void mask_row(const chunk *c, kvc_span seen, int lanes, float *w) {
    int lane = 0;
    const int64_t begin = c->piece[0].first;
    if (!c->even && seen.first <= begin && seen.stop >= begin + c->count) {
        const f32v none = f32v_set1(-INFINITY);
        for (int t = 0; t < lanes; t += KVC_LANES)
            f32v_store(w + t, f32v_pick(f32v_load(c->held + t), f32v_zero(), none, f32v_load(w + t)));
        return;
    }
    for (int i = 0; i < (c->even ? 1 : c->pieces); i++) {
        const piece *p = &c->piece[i];
        const int count = c->even ? c->count : p->count;
        const int first = clip(seen.first, p->first, count), stop = clip(seen.stop, p->first, count);
        for (; lane < p->lane + first; lane++) w[lane] = -INFINITY;
        if (stop > first) lane = p->lane + stop;
    }
    for (; lane < lanes; lane++) w[lane] = -INFINITY;
}

/* Sets lanes that a query of a tree does not see to -inf, among those of its span. */
NOINLINE void mask_tree(const job *j, const chunk *c, int64_t query, float *w) {
    const kvc_seq *seq = j->seq;
    const int64_t context = seq->num_tokens - seq->num_queries, begin = c->piece[0].first;
    const int64_t first = kvc_window_start(seq, context + seq->depths[query]);
    unsigned char keep[KVC_CHUNK] = {0};
    for (int64_t i = 0; i < c->count && begin + i < context; i++) keep[i] = begin + i >= first;
    for (int64_t a = query; a >= 0 && context + a >= begin; a = seq->parents[a]) {
        if (context + a < begin + c->count) keep[context + a - begin] = context + seq->depths[a] >= first;
    }
    for (int i = 0; i < c->pieces; i++) {
        const piece *p = &c->piece[i];
        for (int t = 0; t < p->count; t++) {
            if (!keep[p->first - begin + t]) w[p->lane + t] = -INFINITY;
        }
    }
}

/* Caps a row of scores in powers of two. */
NOINLINE void cap_row(const job *j, int lanes, float *w) {
    for (int t = 0; t < lanes; t += KVC_LANES) {
        const f32v x = f32v_tanh(f32v_mul(f32v_load(w + t), f32v_set1(j->inverse_cap)));
        f32v_store(w + t, f32v_mul(x, f32v_set1(j->cap)));
    }
}

/* Whether all of some rows see a token on every lane. */
static int see_all(const job *j, const chunk *c, int64_t row, int rows, int lanes) {
    const int64_t begin = c->piece[0].first;
    if (!c->even || c->count != lanes || j->seq->parents) return 0;
    return visible(j, row + rows - 1).first <= begin && visible(j, row).stop >= begin + lanes;
}

/* The scores of a row, capped, and -inf where it sees no token. */
static void finish_scores(const job *j, const chunk *c, int64_t row, int lanes, float *w) {
    if (j->cap > 0.0f) cap_row(j, lanes, w);
    mask_row(c, visible(j, row), lanes, w);
    if (j->seq->parents) mask_tree(j, c, row / j->group, w);
}

/* Turns scores of at most KVC_LANES rows into masked weights 2^(score - largest), and updates their largest, sum and alpha.
 * Each step is done for all rows before the next one: in one row a step waits for the one before. With units (a constant) the
 * weights are multiplied by the scales of V in the same pass (scale_weights). */
INLINE void softmax_few(int units, const job *j, const chunk *c, int64_t row, int rows, int lanes, const v_scales *v,
                        float *weights, float *alpha, float *largest, float *sum, unit_weights *to) {
    const int all = see_all(j, c, row, rows, lanes);
    (void)v, (void)to;
    for (int r = 0; r < rows; r++) {
        float *w = weights + r * KVC_CHUNK;
        if (!all || j->cap > 0.0f) finish_scores(j, c, row + r, lanes, w);
        f32x16 most = f32x16_set1(largest[r]);
        for (int t = 0; t < lanes; t += 16) most = f32x16_max(most, f32x16_load(w + t));
        const float max = f32x16_max_of(most);
        alpha[r] = largest[r] - max;
        largest[r] = max;
    }
    f32v_store(alpha, f32v_exp2(f32v_load(alpha)));
    for (int r = 0; r < rows; r++) {
        float *w = weights + r * KVC_CHUNK;
        const f32v largest_score = f32v_set1(largest[r]);
        f32x16 all_w = f32x16_zero(), largest_u = f32x16_zero(), base = f32x16_zero();
        for (int t = 0; t < lanes; t += 16) {
            UNROLL
            for (int i = 0; i < KVC_VECTORS; i++) {
                const int at = t + i * KVC_LANES;
                const f32v power = f32v_sub(f32v_load(w + at), largest_score);
                f32v w_v = units ? f32v_exp2_short(power) : f32v_exp2(power);
                all_w.v[i] = f32v_add(all_w.v[i], w_v);
                if (units) w_v = scaled_weights(v, at, w_v, &largest_u.v[i], &base.v[i]);
                f32v_store(w + at, w_v);
            }
        }
        sum[r] = sum[r] * alpha[r] + f32x16_sum_of(all_w);
        if (units) end_scaled(lanes, w, largest_u, base, to + r);
    }
}

/* Does that for any number of rows; with units the weights become digits. */
NOINLINE void softmax_rows(const job *j, const chunk *c, int64_t row, int rows, int lanes, const v_scales *v, float *largest,
                         float *sum) {
    for (int r = 0; r < rows; r += KVC_LANES) {
        const int few = rows - r < KVC_LANES ? rows - r : KVC_LANES;
        float *w = j->weights + r * KVC_CHUNK;
        if (j->units) {
            softmax_few(1, j, c, row + r, few, lanes, v, w, j->alpha + r, largest + r, sum + r, j->unit_w + r);
            round_weights(j->v_rows.bits, r < tiled_rows(rows), few, lanes, w, j->unit_w + r);
            continue;
        }
        softmax_few(0, j, c, row + r, few, lanes, v, w, j->alpha + r, largest + r, sum + r, NULL);
    }
}

/* The sum and its logarithm once a score without a value has joined it. Without a token they are the sink's. */
NOINLINE void add_sink(float sink, float largest, float sum, float *inverse, float *lse) {
    if (sum == 0.0f) {
        *lse = sink;
        return;
    }
    const double score = sink * LOG2E, most = score > largest ? score : largest, factor = kvc_exp2(largest - most);
    const double all = sum * factor + kvc_exp2(score - most);
    *inverse = (float)(factor / all);
    *lse = (float)(most * LN2 + kvc_log(all));
}

/* Adds the centre of latent rows, whose first channels are V, to V mixed by weights of this sum. */
static void add_centre_of_values(const job *j, int head, float sum, float *x) {
    const float *centre = j->args->known && j->args->layout->latent ? j->args->known[head].centre : NULL;
    for (int d = 0; centre && d < j->v_rows.dim; d++) x[d] += sum * centre[d];
}

/* Writes acc / sum of one (head, row) to out. Adding 0 turns -0 into 0: its sign may come from a product with the
 * weight 0 of a token that the row does not see. Beside residuals acc and largest are of whole rows already. */
static void write_row(const job *j, int head, int64_t row, const float *acc, float largest, float sum) {
    const kvc_attend_args *args = j->args;
    const size_t pair = pair_index(j, head, row);
    const int dim = j->v_rows.dim, whole = args->residuals != NULL;
    const int is_moved = !whole && sum != 0.0f && (args->lse || args->sinks); /* largest lacks the centre of the keys */
    const float centre = is_moved ? (float)centre_score(j, head, row) : 0.0f;
    float inverse = sum == 0.0f ? 0.0f : 1.0f / sum, lse = -INFINITY;
    if (args->lse && sum != 0.0f) lse = (float)(largest * LN2 + kvc_log(sum));
    if (args->sinks) {
        const size_t heads = (size_t)args->num_query_heads, query = pair / heads;
        const float sink = args->sinks[query * (size_t)args->sink_stride + pair % heads];
        add_sink(sink - centre, largest, sum, &inverse, &lse);
    }
    float *out = args->out + pair * (size_t)dim;
    for (int d = 0; d < dim; d++) out[d] = acc[d] * inverse + 0.0f;
    const int rotated = kvc_rows_of(args->layout, KVC_VALUES).rotated;
    if (rotated && !whole) KVC_UNFUSED(hadamard)(out, dim, rotated);
    if (!whole) add_centre_of_values(j, head, sum * inverse, out);
    if (args->lse) args->lse[pair] = lse + centre;
    if (j->item->norms) {
        j->item->norms[2 * pair] = largest;
        j->item->norms[2 * pair + 1] = inverse;
    }
}

/* Writes rows [first, stop), numbered head by head. */
static void write_rows(const job *j, results total, int first, int stop) {
    for (int i = first; i < stop; i++) {
        write_row(j, j->item->head + i / j->rows, j->item->row + i % j->rows,
                  total.acc + (size_t)i * (size_t)j->v_padded, total.largest[i], total.sum[i]);
    }
}

/* Turns rows [first, stop) of the merged packed segments into what a residual is merged with: V without its rotation, and
 * with the centre of latent rows; scores of keys with their centre. */
static void make_whole(const job *j, results total, int first, int stop) {
    const int rotated = kvc_rows_of(j->args->layout, KVC_VALUES).rotated;
    for (int i = first; i < stop; i++) {
        if (total.sum[i] == 0.0f) continue;
        const int head = j->item->head + i / j->rows;
        float *acc = total.acc + (size_t)i * (size_t)j->v_padded;
        if (rotated) KVC_UNFUSED(hadamard)(acc, j->v_rows.dim, rotated);
        add_centre_of_values(j, head, total.sum[i], acc);
        total.largest[i] += (float)(LOG2E * centre_score(j, head, j->item->row + i % j->rows));
    }
}

/* The results of a segment that an item keeps. */
static results kept_results(const job *j, const kvc_item *item, int64_t segment) {
    const int rows = (item->head_stop - item->head) * (int)(item->row_stop - item->row);
    const int64_t floats = kvc_result_floats(j->layout, rows);
    return results_at(item->results + (segment - item->first_segment) * floats, rows, j->v_padded);
}

static void begin_segment(job *j, int64_t segment) {
    if (j->item->results) j->segment = kept_results(j, j->item, segment);
    if (segment * KVC_SEGMENT < j->item->shared) return; /* it goes on where the shared tokens ended */
    clear_results(j->segment, (j->item->head_stop - j->item->head) * j->rows, j->v_padded);
}

/* Copies the results of one head's rows to the items of their sequences. */
static void give_out(const job *j, int64_t segment) {
    const kvc_item *own = j->item->own;
    size_t row = 0;
    for (int64_t i = 0; i < j->item->members; i++, own += own->parts) {
        const size_t rows = (size_t)own->row_stop, at = (size_t)j->item->head * rows;
        const results to = kept_results(j, own, segment);
        memcpy(to.acc + at * (size_t)j->v_padded, j->segment.acc + row * (size_t)j->v_padded,
               rows * (size_t)j->v_padded * sizeof(float));
        memcpy(to.largest + at, j->segment.largest + row, rows * sizeof(float));
        memcpy(to.sum + at, j->segment.sum + row, rows * sizeof(float));
        row += rows;
        if (j->item->head + 1 == own->head_stop) clear_sums(to, (int)(at + rows), (int)(at + rows));
    }
}

static void end_segment(job *j, int64_t segment) {
    if (j->item->members) give_out(j, segment);
    if (j->item->members || j->item->results) return;
    if (j->merged++) {
        merge_results(j->segment, 0, (j->item->head_stop - j->item->head) * j->rows, j->v_padded, j->total);
        return;
    }
    const results first = j->segment;
    j->segment = j->total, j->total = first;
}

/* Head h of the item over one chunk. Prefetches V while it reads K, then the next K while it reads V. */
static void attend_chunk(const job *j, const chunk *now, const chunk *next, int h) {
    const kvc_item *item = j->item;
    const int head = item->head + h, last = head + 1 == item->head_stop,
              ahead_head = last ? item->head : head + 1;
    const size_t index = (size_t)(h * j->rows);
    const chunk *then = last ? next : now;
    const size_t k_offset = (size_t)ahead_head * j->layout->key_head_bytes;
    const ahead_rows v = {now->v, (size_t)head * j->layout->value_head_bytes, (size_t)j->v_rows.bits / 8};
    const ahead_rows k = {then->lanes ? then->k : NULL, k_offset, (size_t)j->k_rows.bits / 8};
    const int lanes = score_chunk(j, now, head, index, j->rows, v, next);
    v_scales scales;
    if (j->units) load_scales(j, now, head, &scales);
    softmax_rows(j, now, item->row, j->rows, lanes, &scales, j->segment.largest + index, j->segment.sum + index);
    mix_values(j, now, head, j->rows, lanes, j->segment.acc + index * (size_t)j->v_padded, k, next);
}

/* Takes the tiles of the CPU if some of `rows` rows meet codes in them, and gives them back. */
static void begin_item(const job *j, int rows) {
    (void)j, (void)rows;
#if KVC_TILES
    if (tiled_rows(rows)) begin_tiled(j->layout->head_dim);
#endif
}
static void end_item(int rows) {
    (void)rows;
#if KVC_TILES
    if (tiled_rows(rows)) amx_release();
#endif
}

/* Attends over the tokens from one on up to the end of what the job reads. */
NOINLINE void attend_tokens(job *j, int64_t token) {
    if (token >= j->token_stop) return;
    const int heads = j->item->head_stop - j->item->head;
    for (int h = 0; h < heads; h++) pack_queries(j, j->item->head + h, j->item->row, j->rows, (size_t)(h * j->rows));
    chunk chunks[2];
    cursor at = seek(j, token), from = at; /* from: the token that `now` begins with */
    next_chunk(j, &at, &chunks[0]);
    int64_t segment = -1; /* of the chunk before */
    kvc_units held = {0};
    for (int turn = 0; chunks[turn].lanes; turn ^= 1) {
        const chunk *now = &chunks[turn], *next = &chunks[turn ^ 1];
        if (now->segment != segment) begin_segment(j, segment = now->segment), held = hold_segment(j, from);
        from = at;
        next_chunk(j, &at, &chunks[turn ^ 1]);
        for (int h = 0; h < heads; h++) attend_chunk(j, now, next, h);
        if (next->lanes && next->segment == segment) continue;
        release_units(j, &held);
        end_segment(j, segment);
    }
}

void KVC_OWN(attend_item)(const kvc_attend_args *args, const kvc_item *item, void *scratch) {
    job j;
    start(&j, args, item);
    take_scratch(&j, scratch);
    const int rows = (item->head_stop - item->head) * j.rows;
    begin_item(&j, j.rows);
    attend_tokens(&j, item->token);
    if (args->residuals && j.merged) make_whole(&j, j.total, 0, rows);
    if (item->residual && item->part + 1 == item->parts) {
        read_from(&j, 1, item->residual);
        attend_tokens(&j, 0);
    }
    end_item(j.rows);
    if (item->members || item->results) return;
    if (!j.merged) clear_results(j.total, rows, j.v_padded);
    write_rows(&j, j.total, 0, rows);
}

/* The first row of a part's share, a multiple of 16 (whole vectors of maxima and sums). */
static int share_of(int rows, int64_t part, int parts) {
    return part == parts ? rows : (int)((rows + 15) / 16 * part / parts * 16);
}

void KVC_OWN(combine_parts)(const kvc_attend_args *args, const kvc_item *item) {
    job j;
    start(&j, args, item);
    const int rows = (item->head_stop - item->head) * j.rows;
    const int first = share_of(rows, item->part, item->parts), stop = share_of(rows, item->part + 1, item->parts);
    const int64_t floats = kvc_result_floats(j.layout, rows), packed = item->segments - (item->residual > 0);
    const results total = results_at(item->results, rows, j.v_padded);
    for (int64_t s = 1; s < item->segments; s++) {
        if (s == packed) make_whole(&j, total, first, stop);
        merge_results(results_at(item->results + s * floats, rows, j.v_padded), first, stop, j.v_padded, total);
    }
    if (args->residuals && packed == item->segments) make_whole(&j, total, first, stop);
    write_rows(&j, total, first, stop);
}

/* Adds the weights of one chunk, summed over a block of rows, to scores, which are indexed by token. */
static void add_weights(const job *j, const chunk *c, int head, int64_t row, int rows, int lanes,
                        float *scores) {
    for (int r = 0; r < rows; r++) {
        float *w = j->weights + r * KVC_CHUNK;
        const float *norm = j->item->norms + 2 * pair_index(j, head, row + r);
        if (norm[1] != norm[1]) continue; /* NaN: a query that is not finite adds nothing */
        float largest = norm[0];
        if (j->args->residuals && !j->item->residual) largest -= (float)(LOG2E * centre_score(j, head, row + r));
        finish_scores(j, c, row + r, lanes, w);
        for (int t = 0; t < lanes; t += KVC_LANES) {
            const f32v power_v = f32v_sub(f32v_load(w + t), f32v_set1(largest));
            f32v_store(w + t, f32v_mul(f32v_exp2(power_v), f32v_set1(norm[1])));
        }
        for (int i = 0; i < c->pieces; i++) {
            const piece *p = &c->piece[i];
            for (int t = 0; t < p->count; t++) scores[p->first + t] += w[p->lane + t];
        }
    }
}

void KVC_OWN(score_item)(const kvc_attend_args *args, const kvc_item *item, void *scratch) {
    job j;
    start(&j, args, item);
    read_from(&j, (int)item->residual, item->token_stop);
    take_scratch(&j, scratch);
    const int64_t zeros = item->part ? item->token : 0; /* the first part has those that no query sees, too */
    for (int head = 0; head < (args->score_stride ? j.layout->num_heads : 1); head++) {
        memset(args->scores + head * args->score_stride + item->first_score + zeros, 0,
               (size_t)(item->token_stop - zeros) * sizeof(float));
    }
    begin_item(&j, (int)(item->row_stop - item->row));
    for (int head = item->head; item->token < item->token_stop && head < item->head_stop; head++) {
        float *scores = args->scores + head * args->score_stride + item->first_score;
        for (int64_t row = item->row; row < item->row_stop; row += KVC_ITEM_ROWS) {
            const int rows =
                item->row_stop - row < KVC_ITEM_ROWS ? (int)(item->row_stop - row) : KVC_ITEM_ROWS;
            pack_queries(&j, head, row, rows, 0);
            const kvc_span seen = {visible(&j, row).first, visible(&j, row + rows - 1).stop};
            const int64_t stop = seen.stop < item->token_stop ? seen.stop : item->token_stop;
            const int64_t token = seen.first > item->token ? seen.first : item->token;
            if (token >= stop) continue;
            for (cursor at = seek(&j, token); at.token < stop;) {
                chunk c;
                const cursor from = at;
                next_chunk(&j, &at, &c);
                const kvc_units held = hold_chunk(&j, from, &at);
                const int lanes = score_chunk(&j, &c, head, 0, rows, (ahead_rows){NULL, 0, 0}, NULL);
                release_units(&j, &held);
                add_weights(&j, &c, head, row, rows, lanes, scores);
            }
        }
    }
    end_item((int)(item->row_stop - item->row));
}

#include "kvc_choice.h"
#include "kvc_indexing.h"
