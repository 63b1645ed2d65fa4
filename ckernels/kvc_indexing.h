/* kvc_indexing.h - the scores that an indexer gives to tokens, and the choice by them (kvc_indexer.h). */
#ifndef KVC_INDEXING_H
#define KVC_INDEXING_H

/* Adds the heads of a block of rows to the scores of a chunk's tokens, one after another. The first block begins with 0. */
static void add_heads(const job *j, const chunk *c, const float *weights, int rows, int lanes, int first, float *scores) {
    float sums[KVC_CHUNK] = {0};
    for (int i = 0; !first && i < c->pieces; i++)
        memcpy(sums + c->piece[i].lane, scores + c->piece[i].first, (size_t)c->piece[i].count * sizeof(float));
    for (int t = 0; t < lanes; t += KVC_LANES) {
        f32v sum_v = f32v_load(sums + t);
        for (int r = 0; r < rows; r++)
            sum_v = f32v_fma(f32v_max(f32v_zero(), f32v_load(j->weights + r * KVC_CHUNK + t)), f32v_set1(weights[r]), sum_v);
        f32v_store(sums + t, sum_v);
    }
    for (int i = 0; i < c->pieces; i++)
        memcpy(scores + c->piece[i].first, sums + c->piece[i].lane, (size_t)c->piece[i].count * sizeof(float));
}

void KVC_OWN(index_scores)(const kvc_attend_args *args, const float *weights, const kvc_item *item, float *scores, void *scratch) {
    job j;
    start(&j, args, item);
    take_scratch(&j, scratch);
    const float *own = weights + (item->first_query * args->num_query_heads + item->row);
    begin_item(&j, j.rows);
    for (int64_t row = item->row; row < item->row_stop; row += KVC_ITEM_ROWS) {
        const int rows = item->row_stop - row < KVC_ITEM_ROWS ? (int)(item->row_stop - row) : KVC_ITEM_ROWS;
        pack_queries(&j, 0, row, rows, 0);
        for (cursor at = seek(&j, item->token); at.token < item->token_stop;) {
            chunk c;
            const cursor from = at;
            next_chunk(&j, &at, &c);
            const kvc_units held = hold_chunk(&j, from, &at);
            const int lanes = score_chunk(&j, &c, 0, 0, rows, (ahead_rows){NULL, 0, 0}, NULL);
            release_units(&j, &held);
            add_heads(&j, &c, own + (row - item->row), rows, lanes, row == item->row, scores);
        }
    }
    end_item(j.rows);
}

/* Turns scores into losses, of which the bits have the reverse order of the scores; those behind n are infinite. If `count` scores are
 * above 0, the others are not told apart; if not, those above are not: 0, then 1 for a score of 0, then the others by their size. */
static void losses_of_scores(float *scores, int64_t n, int64_t count) {
    const uint32_t most = kvc_float_bits(FLT_MAX);
    int64_t above = 0;
    for (int64_t i = 0; i < n; i++) above += scores[i] > 0.0f;
    const int enough = above >= count;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t size = kvc_float_bits(scores[i]) & 0x7fffffff;
        const uint32_t of_above = !enough ? 0 : size < most ? most - size : 0, of_other = enough || size > most - 2 ? most : size + 2;
        const uint32_t of_zero = enough ? most : 1;
        scores[i] = kvc_float_of_bits(scores[i] > 0.0f ? of_above : scores[i] == 0.0f ? of_zero : of_other); /* NaN: the worst */
    }
    for (int64_t i = n; i % KVC_LANES; i++) scores[i] = INFINITY;
}

void KVC_OWN(choose_tokens)(float *scores, int64_t n, int64_t count, int32_t *chosen) {
    losses_of_scores(scores, n, count);
    list_least(scores, n, count, FLT_MAX, chosen);
}

#endif
