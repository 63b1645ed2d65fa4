/* sparse.h - attention to tokens that queries choose: summaries and output of every level, those of the scalar one beside a twin
 * in plain C.
 *
 *   whole numbers   f32: estimates are exact, so the twin chooses the same pages, of equal ones the first; it attends in float64
 *   listed          some calls list the tokens of each KV head: the twin attends to these
 *   any bytes       any format: the call ends and stays inside its memory
 *   all levels      give the summaries and the output of the scalar one
 *   one query       alone, with another number of threads: the same bits
 */
#ifndef SPARSE_H
#define SPARSE_H

#include "kvc_sparse.h"
#include "runs.h"

enum { MOST_TEXTS = 3 };

typedef struct sparse_question {
    kvc_layout layout;
    memory arena, runs[MOST_TEXTS], q, lists; /* lists: (queries, KV heads, listed), where not 0 */
    memory sinks, centres, near_arena;        /* sinks of each head; of the residuals one block per text, or nothing */
    kvc_head_keys known[2];
    kvc_layout near;
    kvc_run near_runs[MOST_TEXTS];
    float softcap;
    kvc_seq seqs[MOST_TEXTS];
    int num_blocks, num_seqs, query_heads;
    int64_t queries, top_tokens, listed;
    float scale;
} sparse_question;

/* The summaries of all pages, as exactly as many bytes as kernels may touch. */
typedef struct summary_memory {
    memory made, codes, scales;
} summary_memory;

static summary_memory take_summaries(const sparse_question *q) {
    const size_t pages = (size_t)(q->num_blocks * (q->layout.block_size / KVC_PAGE)), rows = pages * (size_t)q->layout.num_heads;
    summary_memory b = {take(pages, 1, 1), take(rows * (size_t)q->layout.head_dim + 63, 1, 1), take(rows * 2, 2, 1)};
    memset(b.made.at, 0, pages);
    return b;
}
static kvc_summaries summaries_in(const summary_memory *b) { return (kvc_summaries){b->made.at, b->codes.at, b->scales.at}; }
static void give_summaries(summary_memory *b) { give_back(&b->made), give_back(&b->codes), give_back(&b->scales); }

/* Attends with sequences [first, ...) of a question whose queries begin at a row: outputs, then the logarithms of their sums. */
static memory ask_sparse(const kvc_kernels *kernels, const sparse_question *q, const kvc_seq *seqs, int count, int64_t row,
                         int64_t queries, const summary_memory *b, int threads, int first) {
    const int64_t dim = q->layout.head_dim, bytes = 4 * dim * q->query_heads;
    const int64_t floats = queries * q->query_heads * q->layout.value_head_dim;
    memory out = take((size_t)(floats + queries * q->query_heads) * sizeof(float), 4, 1);
    kvc_seq residuals[MOST_TEXTS];
    for (int i = 0; i < count; i++)
        residuals[i] = (kvc_seq){.runs = &q->near_runs[first + i], .num_runs = 1, .num_tokens = q->near_runs[first + i].stop,
                                 .num_queries = seqs[i].num_queries};
    const kvc_attend_args args = {.layout = &q->layout,
                                  .arena = q->arena.at,
                                  .seqs = seqs,
                                  .num_seqs = count,
                                  .num_query_heads = q->query_heads,
                                  .scale = q->scale,
                                  .queries = {(unsigned char *)q->q.at + row * bytes, bytes, 4 * dim, KVC_ELEMENT_F32},
                                  .out = out.at,
                                  .lse = (float *)out.at + floats,
                                  .softcap = q->softcap,
                                  .sinks = q->sinks.at,
                                  .known = q->centres.at ? q->known : NULL,
                                  .residuals = q->near_arena.at ? residuals : NULL,
                                  .residual_layout = &q->near,
                                  .residual_arena = q->near_arena.at};
    kvc_sparse_args sparse = {.summaries = summaries_in(b), .top_tokens = q->top_tokens};
    const int32_t *lists = q->lists.at;
    if (q->listed) sparse = (kvc_sparse_args){.listed = lists + row * q->layout.num_heads * q->listed, .num_listed = q->listed};
    memory scratch = take(kvc_sparse_scratch_bytes(&args, &sparse, threads), 16, 1);
    kvc_attend_sparse(kernels, &args, &sparse, scratch.at, threads);
    give_back(&scratch);
    return out;
}

/* ---- The twin of whole numbers. */

typedef struct ranked {
    float loss;
    int64_t index;
} ranked;

static int by_loss(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->loss != y->loss) return x->loss < y->loss ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}
static int by_index(const void *a, const void *b) { return ((const ranked *)a)->index < ((const ranked *)b)->index ? -1 : 1; }

/* The first `count` of n by loss, by index; scores are [row][n]. */
static int64_t best_of(const float *scores, int rows, int64_t n, int64_t count, ranked *to) {
    for (int64_t i = 0; i < n; i++) to[i] = (ranked){INFINITY, i};
    for (int r = 0; r < rows; r++) {
        float best = -INFINITY;
        for (int64_t i = 0; i < n; i++) best = fmaxf(best, scores[r * n + i]);
        for (int64_t i = 0; i < n; i++) to[i].loss = fminf(to[i].loss, best - scores[r * n + i]);
    }
    qsort(to, (size_t)n, sizeof *to, by_loss);
    if (count > n) count = n;
    qsort(to, (size_t)count, sizeof *to, by_index);
    return count;
}

static const float *key_at(const sparse_question *q, const kvc_seq *seq, int64_t token, int head) {
    const kvc_run run = seq->runs[token / q->layout.block_size];
    const unsigned char *block = (unsigned char *)q->arena.at + (size_t)run.block * q->layout.block_bytes;
    return (const float *)(const void *)(block + (size_t)head * q->layout.key_head_bytes) +
           token % q->layout.block_size * q->layout.head_dim;
}

static float estimate_of(const sparse_question *q, const kvc_seq *seq, int64_t page, int head, const float *query) {
    const int dim = q->layout.head_dim;
    const float factor = q->scale * 1.4426950408889634f;
    float means[KVC_MAX_HEAD_DIM], variances[KVC_MAX_HEAD_DIM], largest = 0.0f, widest = 0.0f, most = 0.0f;
    for (int d = 0; d < dim; d++) { /* all of it exact */
        means[d] = variances[d] = 0.0f;
        for (int t = 0; t < KVC_PAGE; t++) means[d] += key_at(q, seq, page * KVC_PAGE + t, head)[d] / KVC_PAGE;
        for (int t = 0; t < KVC_PAGE; t++) {
            const float away = key_at(q, seq, page * KVC_PAGE + t, head)[d] - means[d];
            variances[d] += away * away / KVC_PAGE;
        }
        largest = fmaxf(largest, fabsf(means[d])), widest = fmaxf(widest, variances[d]), most = fmaxf(most, fabsf(query[d]));
    }
    most *= fabsf(factor);
    if (!(most > 0.0f)) return NAN; /* a row that wants none */
    const float scale = kvc_float_of_bits((kvc_float_bits(largest / 15.5f) + 0x7fffff) >> 23 << 23), step = scale > 0 ? 1.0f / scale : 0;
    const float wide = kvc_float_of_bits((kvc_float_bits(widest / 7.0f) + 0x7fffff) >> 23 << 23), inverse = wide > 0 ? 1.0f / wide : 0;
    int64_t sum = 0, all = 0, spread = 0;
    for (int d = 0; d < dim; d++) {
        const float x = query[d] * factor * (127.0f / most);
        const int whole = (int)(x < 0.0f ? x - 0.5f : x + 0.5f), square = (int)(x * x / 127.0f + 0.5f);
        const int mean = (int)(means[d] * step + 16.0f), variance = (int)(variances[d] * inverse + 0.5f);
        sum += (int64_t)whole * (mean < 31 ? mean : 31), all += whole;
        spread += (int64_t)square * (variance < 7 ? variance : 7);
    }
    const float mean = ((float)sum - 15.5f * (float)all) * scale * (most / 127.0f);
    return mean + sqrtf((float)spread * wide) * (KVC_SPARSE_DEVIATIONS * 0.088735651f * most);
}

/* The tokens of one query and KV head, ascending; returns how many. `row`: of the query in the call. */
static int64_t choose_twin(const sparse_question *q, const kvc_seq *seq, int64_t row, int head, const float *query, int64_t seen,
                           int64_t *list) {
    const int dim = q->layout.head_dim, group = q->query_heads / q->layout.num_heads;
    const int64_t stop = seen < KVC_SPARSE_NEWEST ? 0 : (seen - KVC_SPARSE_NEWEST) / KVC_PAGE, pages = stop - 1;
    const int32_t *listed = (const int32_t *)q->lists.at + (row * q->layout.num_heads + head) * q->listed;
    int64_t count = 0;
    for (; count < q->listed && listed[count] >= 0; count++) list[count] = listed[count];
    if (q->listed) return count;
    if (pages < 1 || pages * KVC_PAGE / KVC_SPARSE_LEAST < q->top_tokens) {
        for (; count < seen; count++) list[count] = count;
        return count;
    }
    float *scores = calloc((size_t)(group * pages), sizeof *scores);
    ranked *best = malloc((size_t)pages * sizeof *best);
    for (int r = 0; r < group; r++)
        for (int64_t p = 0; p < pages; p++) scores[r * pages + p] = estimate_of(q, seq, p + 1, head, query + r * dim);
    const int64_t chosen = best_of(scores, group, pages, (int64_t)ceil(1.75 * (double)q->top_tokens / KVC_PAGE), best);
    for (; count < KVC_PAGE; count++) list[count] = count;
    for (int64_t i = 0; i < chosen * KVC_PAGE; i++) list[count++] = (best[i / KVC_PAGE].index + 1) * KVC_PAGE + i % KVC_PAGE;
    for (int64_t t = stop * KVC_PAGE; t < seen; t++) list[count++] = t;
    free(scores), free(best);
    return count;
}

static void expect_chosen(const sparse_question *q, const memory *scalar) {
    const int dim = q->layout.head_dim, group = q->query_heads / q->layout.num_heads, size = q->layout.block_size;
    int64_t row = 0;
    for (int s = 0; s < q->num_seqs; s++) {
        const kvc_seq *seq = &q->seqs[s];
        int64_t *list = malloc((size_t)(seq->num_tokens + 1) * sizeof *list);
        for (int64_t j = 0; j < seq->num_queries; j++, row++) {
            for (int h = 0; h < q->query_heads; h++) {
                const int head = h / group;
                const float *query = (const float *)q->q.at + (row * q->query_heads + h) * dim, *first = query - h % group * dim;
                const int64_t count = choose_twin(q, seq, row, head, first, seq->num_tokens - seq->num_queries + j + 1, list);
                double out[KVC_MAX_HEAD_DIM] = {0}, all = count ? 0 : 1, most = -INFINITY, largest = 1;
                for (int64_t i = 0; i < 2 * count; i++) {
                    const float *key = key_at(q, seq, list[i % count], head);
                    const kvc_run run = seq->runs[list[i % count] / size];
                    const unsigned char *values = (unsigned char *)q->arena.at + (size_t)run.block * q->layout.block_bytes +
                                                  kvc_values_at(&q->layout) + (size_t)head * q->layout.value_head_bytes;
                    const float *value = (const float *)(const void *)values + list[i % count] % size * q->layout.value_head_dim;
                    double score = 0;
                    for (int d = 0; d < dim; d++) score += (double)query[d] * key[d];
                    if (i < count) {
                        most = fmax(most, score);
                        continue;
                    }
                    all += exp2(score - most);
                    for (int d = 0; d < q->layout.value_head_dim; d++) out[d] += exp2(score - most) * value[d];
                }
                const float *got = (const float *)scalar->at + (row * q->query_heads + h) * q->layout.value_head_dim;
                for (int d = 0; d < q->layout.value_head_dim; d++) {
                    largest = fmax(largest, fabs(out[d] / all));
                    if (!(fabs(got[d] - out[d] / all) <= 1e-4 * largest))
                        fail("sparse query %d, head %d is %g, not %g", (int)j, h, got[d], out[d] / all);
                }
            }
        }
        free(list);
    }
}

/* ---- The step. */

/* Lists of tokens that each query sees: ascending, with gaps, then -1. */
static void draw_lists(source *s, sparse_question *q) {
    q->listed = draw_between(s, 1, 200);
    q->lists = take((size_t)(q->queries * q->layout.num_heads * q->listed) * sizeof(int32_t), 4, 1);
    int32_t *to = q->lists.at;
    for (int i = 0; i < q->num_seqs; i++) {
        for (int64_t j = 0; j < q->seqs[i].num_queries * q->layout.num_heads; j++) {
            const int64_t seen = q->seqs[i].num_tokens - q->seqs[i].num_queries + j / q->layout.num_heads + 1;
            const int gap = DRAW_OF(s, 1, 1, 2, 30);
            int64_t token = draw(s, gap);
            for (int64_t n = 0; n < q->listed; n++, token += 1 + draw(s, gap)) *to++ = token < seen ? (int32_t)token : -1;
        }
    }
}

/* Soft caps, sinks, centres, hidden tokens, residuals: half of the calls have some. */
static void draw_sparse_options(source *s, sparse_question *q) {
    const int of_key = q->layout.num_heads * q->layout.head_dim, which = draw(s, 32);
    uint64_t state = (uint64_t)draw(s, 65536);
    if (which < 16 && which & 1) q->softcap = (float)DRAW_OF(s, 1, 20, 1000);
    if (which & 2) {
        q->sinks = take((size_t)q->query_heads * sizeof(float), 4, 1);
        draw_floats(s, draw(s, NUM_KINDS), q->sinks.at, (size_t)q->query_heads);
    }
    if (which & 4 && q->softcap == 0.0f) {
        q->centres = take((size_t)of_key * sizeof(float), 4, 1);
        for (int i = 0; i < of_key; i++) ((float *)q->centres.at)[i] = gaussian(&state);
        for (int h = 0; h < q->layout.num_heads; h++)
            q->known[h] = (kvc_head_keys){(float *)q->centres.at + h * q->layout.head_dim, NULL};
    }
    for (int i = 0; which & 8 && !q->listed && i < q->num_seqs; i++)
        q->seqs[i].hidden_tokens = (int64_t)(splitmix(&state) % 3) * q->seqs[i].num_queries / 2;
    if (!(which & 16)) return;
    const int size = draw_between(s, 1, 70);
    if (kvc_layout_init(&q->near, size, q->layout.num_heads, q->layout.head_dim, q->layout.value_head_dim, KVC_F32, KVC_F32, 0, 0, 0))
        fail("no residual");
    q->near_arena = take(MOST_TEXTS * q->near.block_bytes, 64, 1);
    for (size_t i = 0; i < q->near_arena.size / 4; i++) ((float *)q->near_arena.at)[i] = gaussian(&state);
    for (int i = 0; i < MOST_TEXTS; i++) q->near_runs[i] = (kvc_run){i, 0, (uint16_t)(splitmix(&state) % (uint64_t)(size + 1))};
}

static float whole_number(source *s, int most) { return (float)(draw(s, 2 * most + 1) - most); }

/* Whole numbers in f32, with a scale that makes scores whole too, or any bytes in any format. */
static sparse_question draw_sparse(source *s, int whole) {
    sparse_question q = {.num_seqs = draw_between(s, 1, MOST_TEXTS), .top_tokens = DRAW_OF(s, 1, 15, 16, 17, 33, 64, 70)};
    const int size = DRAW_OF(s, 16, 32, 48, 256), dim = DRAW_OF(s, 8, 32, 64, 72), heads = draw_between(s, 1, 2);
    const kvc_format key = whole ? KVC_F32 : (kvc_format)draw(s, KVC_NUM_FORMATS);
    const kvc_format value = whole ? KVC_F32 : (kvc_format)draw(s, KVC_NUM_FORMATS);
    const int turns = !whole && (dim & (dim - 1)) == 0 && kvc_format_of(key)->quantised && draw(s, 2);
    if (kvc_layout_init(&q.layout, size, heads, dim, DRAW_OF(s, 8, 32, 64), key, value, turns, 0, 0)) fail("refused sparse");
    q.query_heads = heads * DRAW_OF(s, 1, 2, 4, 9);
    q.scale = whole ? 0.6931471805599453f : (float)DRAW_OF(s, -1, 0, 1, 3) * 0.125f;
    q.num_blocks = 2 + 400 / size;
    q.arena = take((size_t)q.num_blocks * q.layout.block_bytes, 64, 1);
    if (whole)
        for (size_t i = 0; i < q.arena.size / 4; i++) ((float *)q.arena.at)[i] = whole_number(s, 3);
    else
        for (size_t i = 0; i < q.arena.size; i++) ((unsigned char *)q.arena.at)[i] = (unsigned char)draw_byte(s);
    for (int i = 0; i < q.num_seqs; i++) {
        const int64_t tokens = draw_between(s, 1, (q.num_blocks - 1) * size), most = DRAW_OF(s, 1, 1, 3, 40);
        q.runs[i] = take((size_t)((tokens + size - 1) / size) * sizeof(kvc_run), 4, 1);
        q.seqs[i] = (kvc_seq){.runs = q.runs[i].at, .num_tokens = tokens, .num_queries = most < tokens ? most : tokens};
        const int first = draw(s, q.num_blocks);
        for (int64_t t = 0; t < tokens; t += size)
            ((kvc_run *)q.runs[i].at)[q.seqs[i].num_runs++] = (kvc_run){
                (int32_t)((first + t / size) % q.num_blocks), 0, (uint16_t)(tokens - t < size ? tokens - t : size)};
        q.queries += q.seqs[i].num_queries;
    }
    q.q = take((size_t)(q.queries * q.query_heads * dim) * sizeof(float), 4, 1);
    if (whole)
        for (size_t i = 0; i < q.q.size / 4; i++) ((float *)q.q.at)[i] = whole_number(s, 2);
    else
        draw_floats(s, draw(s, NUM_KINDS), q.q.at, q.q.size / 4);
    if (draw(s, 4) == 3) draw_lists(s, &q);
    if (!whole && draw(s, 2)) draw_sparse_options(s, &q);
    return q;
}

/* Summaries of a level, as numbers, are those of the scalar one. */
static void expect_summaries(const kvc_kernels *kernels, const summary_memory *a, const summary_memory *b, const sparse_question *q) {
    const unsigned char *made = a->made.at;
    const size_t heads = (size_t)q->layout.num_heads, dim = (size_t)q->layout.head_dim;
    float got[KVC_MAX_HEAD_DIM + 1], want[KVC_MAX_HEAD_DIM + 1];
    if (memcmp(a->made.at, b->made.at, a->made.size)) fail("%s: summaries of other pages", kernels->name);
    for (size_t page = 0; page < a->made.size; page++) {
        for (size_t row = page * heads; made[page] && row < (page + 1) * heads; row++) {
            for (size_t d = 0; d < dim; d++)
                got[d] = ((unsigned char *)a->codes.at)[row * dim + d], want[d] = ((unsigned char *)b->codes.at)[row * dim + d];
            got[dim] = ((uint16_t *)a->scales.at)[row], want[dim] = ((uint16_t *)b->scales.at)[row];
            expect_bits("summaries", kernels, got, want, (int64_t)dim + 1);
        }
    }
}

static void step_sparse(source *s) {
    const int whole = draw(s, 2);
    sparse_question q = draw_sparse(s, whole);
    memory answers[KVC_MOST_LEVELS + 1];
    summary_memory summaries[KVC_MOST_LEVELS + 1];
    say("sparse, %d blocks of %d, %d of %d heads, dim %d, top %d, listed %d, whole %d", q.num_blocks, q.layout.block_size,
        q.query_heads, q.layout.num_heads, q.layout.head_dim, (int)q.top_tokens, (int)q.listed, whole);
    const int last_level = num_levels() - 1, threads = DRAW_OF(s, 1, 2, 3, 8); /* of any bytes bits depend on what items are read */
    const char *kernel = q.listed ? "attend listed" : whole ? "attend chosen" : "attend chosen, any bytes";
    for (int level = last_level; level >= 0; level--) {
        summaries[level] = take_summaries(&q);
        answers[level] = ask_sparse(level_at(level), &q, q.seqs, q.num_seqs, 0, q.queries, &summaries[level], threads, 0);
        expect_summaries(level_at(level), &summaries[level], &summaries[last_level], &q);
        expect_bits(kernel, level_at(level), answers[level].at, answers[last_level].at,
                    (int64_t)(answers[level].size / sizeof(float)));
    }
    if (whole) expect_chosen(&q, &answers[last_level]);
    int64_t row = 0;
    for (int i = 0; i < q.num_seqs; row += q.seqs[i].num_queries, i++) {
        kvc_seq alone = q.seqs[i]; /* the last query */
        const int64_t last = row + alone.num_queries - 1, floats = q.query_heads * (int64_t)q.layout.value_head_dim;
        alone.num_queries = 1;
        for (int level = 0; level < num_levels(); level++) {
            summary_memory fresh = take_summaries(&q);
            memory again = ask_sparse(level_at(level), &q, &alone, 1, last, 1, i ? &fresh : &summaries[level], 1, i);
            const float *out = answers[level].at, *lse = out + q.queries * floats + last * q.query_heads;
            if (!same_bits(again.at, out + last * floats, floats) || !same_bits((float *)again.at + floats, lse, q.query_heads)) fail("%s: a sparse query has other bits alone", level_at(level)->name);
            give_back(&again), give_summaries(&fresh);
        }
    }
    for (int level = 0; level < num_levels(); level++) give_back(&answers[level]), give_summaries(&summaries[level]);
    for (int i = 0; i < q.num_seqs; i++) give_back(&q.runs[i]);
    give_back(&q.arena), give_back(&q.q);
    if (q.listed) give_back(&q.lists);
    memory *const more[] = {&q.sinks, &q.centres, &q.near_arena};
    for (int i = 0; i < 3; i++) {
        if (more[i]->at) give_back(more[i]);
    }
}

#endif
