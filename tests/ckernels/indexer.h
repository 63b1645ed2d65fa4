/* indexer.h - the choice of an indexer, and attention to the latent rows that it lists: those of every level are those of the scalar
 * one, and these of a twin in plain C.
 *
 *   whole numbers   f32: scores are exact, so that the twin chooses the same tokens, of equal ones the first
 *   any bytes       any format, weights and queries: the calls end and stay inside their memory
 *   all levels      give the lists and the output of the scalar one
 *   one query       alone, with another number of threads: the same list and bits
 */
#ifndef INDEXER_H
#define INDEXER_H

#include "kvc_indexer.h"
#include "sparse.h"

typedef struct indexer_question {
    kvc_layout keys, rows; /* of the indexer, and of the layer whose tokens it chooses; blocks have the same numbers */
    memory key_arena, row_arena, runs[MOST_TEXTS], q, weights, row_q;
    kvc_seq seqs[MOST_TEXTS];
    int num_blocks, num_seqs, heads, query_heads;
    int64_t queries, most, all_up_to;
} indexer_question;

typedef struct indexer_answer {
    memory chosen, out;
} indexer_answer;

static indexer_answer ask_indexer(const kvc_kernels *kernels, const indexer_question *q, const kvc_seq *seqs, int count, int64_t row,
                                  int64_t queries, int threads) {
    const int64_t dim = q->keys.head_dim, width = q->rows.head_dim;
    indexer_answer a = {take((size_t)(queries * q->most) * sizeof(int32_t), 4, 1),
                        take((size_t)(queries * q->query_heads * q->rows.value_head_dim) * sizeof(float), 4, 1)};
    kvc_attend_args args = {.layout = &q->keys,
                            .arena = q->key_arena.at,
                            .seqs = seqs,
                            .num_seqs = count,
                            .num_query_heads = q->heads,
                            .scale = 0.6931471805599453f,
                            .queries = {(unsigned char *)q->q.at + row * q->heads * dim * 4, q->heads * dim * 4, dim * 4,
                                        KVC_ELEMENT_F32}};
    const kvc_index_args index = {(const float *)q->weights.at + row * q->heads, q->most, a.chosen.at};
    memory scratch = take(kvc_index_scratch_bytes(&args, &index, threads), 16, 1);
    kvc_index_tokens(kernels, &args, &index, scratch.at, threads);
    give_back(&scratch);
    args.layout = &q->rows, args.arena = q->row_arena.at, args.num_query_heads = q->query_heads, args.out = a.out.at;
    args.queries = (kvc_tensor){(unsigned char *)q->row_q.at + row * q->query_heads * width * 4, q->query_heads * width * 4, width * 4,
                                KVC_ELEMENT_F32};
    const kvc_sparse_args sparse = {.listed = a.chosen.at, .num_listed = q->most, .all_up_to = q->all_up_to};
    scratch = take(kvc_sparse_scratch_bytes(&args, &sparse, threads), 16, 1);
    kvc_attend_sparse(kernels, &args, &sparse, scratch.at, threads);
    give_back(&scratch);
    return a;
}

/* A row of f32 of a sequence, of one head. */
static const float *row_at(const kvc_layout *layout, const memory *arena, const kvc_seq *seq, int64_t token) {
    const unsigned char *block = (unsigned char *)arena->at + (size_t)seq->runs[token / layout->block_size].block * layout->block_bytes;
    return (const float *)(const void *)block + token % layout->block_size * layout->head_dim;
}

static void expect_list(const indexer_question *q, const kvc_seq *seq, int64_t row, int64_t seen, const int32_t *got) {
    const int dim = q->keys.head_dim;
    ranked *best = malloc((size_t)seen * sizeof *best);
    for (int64_t t = 0; t < seen; t++) {
        double score = 0;
        for (int h = 0; h < q->heads; h++) {
            double product = 0;
            for (int d = 0; d < dim; d++)
                product += (double)((float *)q->q.at)[(row * q->heads + h) * dim + d] * row_at(&q->keys, &q->key_arena, seq, t)[d];
            if (product > 0) score += product * ((float *)q->weights.at)[row * q->heads + h];
        }
        best[t] = (ranked){(float)-score, t};
    }
    const int64_t count = q->most < seen ? q->most : seen;
    qsort(best, (size_t)seen, sizeof *best, by_loss);
    qsort(best, (size_t)count, sizeof *best, by_index);
    for (int64_t i = 0; i < q->most; i++)
        if (got[i] != (i < count ? best[i].index : -1))
            fail("token %d of the list of query %d is %d, not %d", (int)i, (int)row, got[i], i < count ? (int)best[i].index : -1);
    free(best);
}

static void expect_output(const indexer_question *q, const kvc_seq *seq, int64_t row, const int32_t *list, const float *got) {
    const int width = q->rows.head_dim, value = q->rows.value_head_dim;
    for (int h = 0; h < q->query_heads; h++, got += value) {
        const float *query = (float *)q->row_q.at + (row * q->query_heads + h) * width;
        double out[KVC_MAX_HEAD_DIM] = {0}, all = 0, most = -INFINITY, largest = 1;
        for (int64_t i = 0; i < 2 * q->most; i++) {
            const int32_t token = list[i % q->most];
            if (token < 0) continue;
            const float *key = row_at(&q->rows, &q->row_arena, seq, token);
            double score = 0;
            for (int d = 0; d < width; d++) score += (double)query[d] * key[d];
            if (i < q->most) {
                most = fmax(most, score);
                continue;
            }
            all += exp2(score - most);
            for (int d = 0; d < value; d++) out[d] += exp2(score - most) * key[d];
        }
        for (int d = 0; d < value; d++) {
            largest = fmax(largest, fabs(out[d] / all));
            if (!(fabs(got[d] - out[d] / all) <= 1e-4 * largest)) fail("listed row %d, head %d is %g, not %g", (int)row, h, got[d], out[d] / all);
        }
    }
}

static void draw_numbers(source *s, int whole, int most, int kind, memory *m, int64_t count) {
    *m = take((size_t)count * sizeof(float), 4, 1);
    for (int64_t i = 0; whole && i < count; i++) ((float *)m->at)[i] = whole_number(s, most);
    if (!whole) draw_floats(s, kind, m->at, (size_t)count);
}

static void draw_blocks(source *s, int whole, int num_blocks, const kvc_layout *layout, memory *arena) {
    *arena = take((size_t)num_blocks * layout->block_bytes, 64, 1);
    for (size_t i = 0; whole && i < arena->size / 4; i++) ((float *)arena->at)[i] = whole_number(s, 3);
    for (size_t i = 0; !whole && i < arena->size; i++) ((unsigned char *)arena->at)[i] = (unsigned char)draw_byte(s);
}

static indexer_question draw_indexer(source *s, int whole) {
    indexer_question q = {.num_seqs = draw_between(s, 1, MOST_TEXTS), .most = DRAW_OF(s, 1, 2, 15, 16, 60, 200)};
    const int size = DRAW_OF(s, 16, 32, 48, 256), dim = DRAW_OF(s, 8, 32, 64, 72), latent = DRAW_OF(s, 8, 32, 64, 96);
    const kvc_format format = whole ? KVC_F32 : (kvc_format)draw(s, KVC_NUM_FORMATS), other = (kvc_format)draw(s, KVC_NUM_FORMATS);
    const int turned = DRAW_OF(s, 0, 8, 32), turns = kvc_format_of(format)->quantised && dim % 16 == 0 && draw(s, 2);
    const kvc_format kind = whole ? KVC_F32 : other;
    if (kvc_layout_init(&q.keys, size, 1, dim, dim, format, format, turns, turns, 1) ||
        kvc_layout_init(&q.rows, size, 1, latent + turned, latent, kind, kind, 0, 0, 1))
        fail("refused an indexer");
    q.heads = DRAW_OF(s, 1, 3, 8, 9, 64, 97), q.query_heads = DRAW_OF(s, 1, 4, 20, 128);
    q.all_up_to = draw(s, 2) ? q.most : -1;
    q.num_blocks = 2 + 300 / size;
    draw_blocks(s, whole, q.num_blocks, &q.keys, &q.key_arena);
    draw_blocks(s, whole, q.num_blocks, &q.rows, &q.row_arena);
    for (int i = 0; i < q.num_seqs; i++) {
        const int64_t tokens = draw_between(s, 1, (q.num_blocks - 1) * size), most = DRAW_OF(s, 1, 1, 3, 12);
        q.runs[i] = take((size_t)((tokens + size - 1) / size) * sizeof(kvc_run), 4, 1);
        q.seqs[i] = (kvc_seq){.runs = q.runs[i].at, .num_tokens = tokens, .num_queries = most < tokens ? most : tokens};
        const int first = draw(s, q.num_blocks);
        for (int64_t t = 0; t < tokens; t += size)
            ((kvc_run *)q.runs[i].at)[q.seqs[i].num_runs++] = (kvc_run){
                (int32_t)((first + t / size) % q.num_blocks), 0, (uint16_t)(tokens - t < size ? tokens - t : size)};
        q.queries += q.seqs[i].num_queries;
    }
    const int floats = draw(s, NUM_KINDS);
    draw_numbers(s, whole, 2, floats, &q.q, q.queries * q.heads * dim);
    draw_numbers(s, whole, 3, floats, &q.weights, q.queries * q.heads);
    draw_numbers(s, whole, 1, floats, &q.row_q, q.queries * q.query_heads * q.rows.head_dim);
    return q;
}

static void step_indexer(source *s) {
    const int whole = draw(s, 2);
    indexer_question q = draw_indexer(s, whole);
    indexer_answer answers[KVC_MOST_LEVELS + 1];
    say("indexer, %d blocks of %d, %d heads of %d, most %d of %d queries, %d heads of %d rows", q.num_blocks, q.keys.block_size, q.heads,
        q.keys.head_dim, (int)q.most, (int)q.queries, q.query_heads, q.rows.head_dim);
    const int last_level = num_levels() - 1, threads = DRAW_OF(s, 1, 2, 3, 8);
    for (int level = last_level; level >= 0; level--) {
        answers[level] = ask_indexer(level_at(level), &q, q.seqs, q.num_seqs, 0, q.queries, threads);
        expect_bits("choose tokens", level_at(level), answers[level].chosen.at, answers[last_level].chosen.at, q.queries * q.most);
        expect_bits("attend listed rows", level_at(level), answers[level].out.at, answers[last_level].out.at,
                    (int64_t)(answers[level].out.size / sizeof(float)));
    }
    const int32_t *lists = answers[last_level].chosen.at;
    const float *out = answers[last_level].out.at;
    const int64_t floats = q.query_heads * (int64_t)q.rows.value_head_dim;
    int64_t row = 0;
    for (int i = 0; i < q.num_seqs; i++) {
        kvc_seq alone = q.seqs[i]; /* the last query */
        for (int64_t j = 0; j < q.seqs[i].num_queries; j++, row++) {
            const int64_t seen = alone.num_tokens - q.seqs[i].num_queries + j + 1;
            if (whole) expect_list(&q, &q.seqs[i], row, seen, lists + row * q.most);
            if (whole) expect_output(&q, &q.seqs[i], row, lists + row * q.most, out + row * floats);
        }
        alone.num_queries = 1;
        indexer_answer again = ask_indexer(level_at(draw(s, num_levels())), &q, &alone, 1, row - 1, 1, 1);
        if (memcmp(again.chosen.at, lists + (row - 1) * q.most, again.chosen.size)) fail("a query chooses other tokens alone");
        if (!same_bits(again.out.at, out + (row - 1) * floats, floats)) fail("a listed query has other bits alone");
        give_back(&again.chosen), give_back(&again.out);
    }
    for (int level = 0; level < num_levels(); level++) give_back(&answers[level].chosen), give_back(&answers[level].out);
    for (int i = 0; i < q.num_seqs; i++) give_back(&q.runs[i]);
    memory *const more[] = {&q.key_arena, &q.row_arena, &q.q, &q.weights, &q.row_q};
    for (int i = 0; i < 5; i++) give_back(more[i]);
}

#endif
