/* kvc_attend.c - softmax(q K^T scale) V over runs of slots, without a score matrix.
 *
 * Online softmax (Milakov and Gimelshein, 2018) over chunks of KVC_CHUNK tokens, in powers of two: scores come out
 * of the product already times log2(e). For each row: the largest score so far, the sum of 2^(score - largest), and
 * the accumulator of V, both rescaled by alpha = 2^(old largest - new largest) when a chunk joins.
 *
 * Error against float64 over the same K and V: at most 5e-6 of the largest output, for up to 8k tokens and scores of
 * ordinary size; a score s adds its own float32 rounding, about 2^-22 |s|, to the relative error of its weight.
 */
#include "kvc_kernels.h"
#include "kvc_products.h"
#include "kvc_tiles.h"

#include <math.h>
#include <string.h>

#define LOWEST (-1e30f) /* below every score, yet finite: LOWEST - LOWEST is 0, -inf - LOWEST still -inf */
#define LOG2E 1.4426950408889634

/* Consecutive tokens in consecutive slots of one block. */
typedef struct piece {
    const unsigned char *block;
    int64_t first; /* token of the text */
    int slot, count;
    int lane; /* of the chunk, where the first of them stands */
} piece;

/* Consecutive tokens of the text on at most KVC_CHUNK lanes, all before or all behind the sinks. */
typedef struct chunk {
    int lanes, pieces, sink;
    piece piece[KVC_CHUNK];
    const unsigned char *k[KVC_CHUNK], *v[KVC_CHUNK]; /* f32, f16: rows of head 0 lane by lane, the last one repeated */
} chunk;

typedef struct cursor { /* the next token of a sequence */
    const kvc_run *run;
    int64_t token;
    int slot;
} cursor;

typedef struct job {
    const kvc_attend_args *args;
    const kvc_item *item;
    const kvc_layout *layout;
    const kvc_seq *seq;
    int dim, padded, group, rows;
    int units; /* K and V lie in tiles and meet integers, not floats */
    kvc_rows k_rows, v_rows;
    size_t k_row_bytes, v_row_bytes;
    float *q, *sink_q, *acc;    /* [head][row][padded] */
    float *largest, *sum;       /* [head][row] */
    float *weights, *alpha;     /* [row][KVC_CHUNK], [row] */
    float *panels, *stage;      /* [KVC_CHUNK * padded] each */
    unit_query *unit_q, *unit_sink_q; /* [head][row] */
    unit_weights *unit_w;       /* [row], where panels and stage lie */
} job;

static cursor seek(const kvc_seq *seq, int64_t token) {
    cursor at = {seq->runs, token, 0};
    int64_t first = 0;
    while (first + at.run->stop - at.run->first <= token) {
        first += at.run->stop - at.run->first;
        at.run++;
    }
    at.slot = at.run->first + (int)(token - first);
    return at;
}

/* A piece of tiles takes the 16 lanes of its tile, other pieces as many as they have tokens. */
static void add_piece(const job *j, const cursor *at, int count, chunk *c) {
    const unsigned char *block = j->args->arena + (size_t)at->run->block * j->layout->block_bytes;
    const unsigned char *k = block + (size_t)at->slot * j->k_row_bytes;
    const unsigned char *v = block + (size_t)j->layout->num_heads * j->layout->key_head_bytes;
    v += (size_t)at->slot * j->v_row_bytes;
    const int lane = c->lanes + (j->units ? at->slot % KVC_TILE : 0);
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

/* The next tokens of the item, as many as fit; c->lanes is 0 behind the last. */
static void next_chunk(const job *j, cursor *at, chunk *c) {
    int64_t stop = j->item->token_stop;
    c->lanes = c->pieces = 0;
    c->sink = j->args->sink_queries && at->token < j->seq->sink_tokens;
    if (c->sink && stop > j->seq->sink_tokens) stop = j->seq->sink_tokens;
    while (at->token < stop && c->lanes < KVC_CHUNK) {
        while (at->slot == at->run->stop) at->run++, at->slot = at->run->first;
        int count = at->run->stop - at->slot;
        const int room = j->units ? KVC_TILE - at->slot % KVC_TILE : KVC_CHUNK - c->lanes;
        if (count > room) count = room;
        if (count > stop - at->token) count = (int)(stop - at->token);
        add_piece(j, at, count, c);
        at->slot += count, at->token += count;
    }
    for (int t = c->lanes; !j->units && c->lanes && t < KVC_CHUNK; t++) {
        c->k[t] = c->k[c->lanes - 1];
        c->v[t] = c->v[c->lanes - 1];
    }
}

static void start(job *j, const kvc_attend_args *args, const kvc_item *item, void *scratch) {
    const kvc_layout *layout = args->layout;
    memset(j, 0, sizeof *j);
    j->args = args;
    j->item = item;
    j->layout = layout;
    j->seq = &args->seqs[item->seq];
    j->dim = layout->head_dim;
    j->padded = (int)kvc_padded_dim(layout);
    j->group = args->num_query_heads / layout->num_heads;
    j->rows = (int)(item->row_stop - item->row);
    j->k_rows = kvc_rows_of(layout, KVC_KEYS);
    j->v_rows = kvc_rows_of(layout, KVC_VALUES);
    j->k_row_bytes = kvc_row_bytes(j->k_rows);
    j->v_row_bytes = kvc_row_bytes(j->v_rows);
#if defined(KVC_HAVE_DOTS)
    j->units = j->k_rows.tiled && j->v_rows.tiled && (j->rows <= KVC_UNIT_ROWS || KVC_UNIT_ROWS == KVC_ITEM_ROWS);
#endif
    const int64_t rows = kvc_item_max_rows(layout);
    float *free = scratch;
    j->q = free, free += rows * j->padded;
    j->sink_q = free, free += rows * j->padded;
    j->acc = free, free += rows * j->padded;
    j->unit_q = (unit_query *)free, free += rows * (int64_t)(sizeof(unit_query) / sizeof(float));
    j->unit_sink_q = (unit_query *)free, free += rows * (int64_t)(sizeof(unit_query) / sizeof(float));
    j->unit_w = (unit_weights *)free;
    j->panels = free, free += KVC_CHUNK * j->padded;
    j->stage = free, free += KVC_CHUNK * j->padded;
    j->weights = free, free += KVC_ITEM_ROWS * KVC_CHUNK;
    j->alpha = free, free += KVC_ITEM_ROWS;
    j->largest = free, free += rows;
    j->sum = free;
}

/* Where row r of KV head h lies in queries and out, counted in (query, query head) pairs. */
static size_t pair_index(const job *j, int head, int64_t row) {
    const int64_t query = j->item->first_query + row / j->group;
    return (size_t)(query * j->args->num_query_heads + (int64_t)head * j->group + row % j->group);
}

/* rows of one KV head, scaled, rotated and in digits where K is, to places index and following. */
static void pack_queries(const job *j, int head, int64_t row, int rows, size_t index) {
    const f32v scale_v = f32v_set1((float)(j->args->scale * LOG2E));
    for (int sink = 0; sink <= (j->args->sink_queries != NULL); sink++) {
        const float *queries = sink ? j->args->sink_queries : j->args->queries;
        float *q = (sink ? j->sink_q : j->q) + index * (size_t)j->padded;
        for (int r = 0; r < rows; r++, q += j->padded) {
            const float *from = queries + pair_index(j, head, row + r) * (size_t)j->dim;
            for (int d = 0; d < j->dim; d += KVC_LANES) f32v_store(q + d, f32v_mul(load_dims(from, d, j->dim), scale_v));
            for (int d = j->dim; d < j->padded; d++) q[d] = 0.0f;
            if (j->k_rows.rotated) KVC_FN(hadamard)(q, j->dim);
#if defined(KVC_HAVE_DOTS)
            if (j->units) quantise_query(q, j->dim, (sink ? j->unit_sink_q : j->unit_q) + index + (size_t)r);
#endif
        }
    }
}

/* Tokens that row r of the item sees, counted from the start of the sequence. */
static int64_t visible(const job *j, int64_t row) {
    const int64_t last = j->seq->num_tokens - j->seq->num_queries + row / j->group;
    return last < 0 ? 0 : last + 1;
}

/* One head's rows of the chunk as floats, and pointers to them. Behind the last token: the last one again. */
static void stage_rows(const job *j, const chunk *c, kvc_rows rows, int head, const unsigned char **staged) {
    const size_t k_bytes = j->layout->key_head_bytes, v_bytes = j->layout->value_head_bytes;
    const size_t values = (size_t)j->layout->num_heads * k_bytes + (size_t)head * v_bytes;
    const size_t offset = rows.side == KVC_KEYS ? (size_t)head * k_bytes : values;
    for (int i = 0; rows.bits < 16 && i < c->pieces; i++) {
        const piece *p = &c->piece[i];
        float *to = j->stage + p->lane * j->padded;
        KVC_FN(dequantise_head)(rows, p->block + offset, p->slot, p->count, to, (size_t)j->padded);
    }
    for (int t = 0; t < KVC_CHUNK; t++) {
        float *to = j->stage + (t < c->lanes ? t : c->lanes - 1) * j->padded;
        staged[t] = (const unsigned char *)to;
        if (rows.bits != 16 || t >= c->lanes) continue;
        const uint16_t *from = (const uint16_t *)(rows.side == KVC_KEYS ? c->k[t] + (size_t)head * k_bytes
                                                                        : c->v[t] + (size_t)head * v_bytes);
        for (int d = 0; d < j->dim; d += KVC_LANES) f32v_store(to + d, load_dims_half(from, d, j->dim));
    }
}

/* One function per (format, head_dim) through inlining: 64 and 128 as constants, the rest as a bound. */
#define WITH_DIM(dim, call)            \
    switch (dim) {                     \
    case 64: call(64); break;          \
    case 128: call(128); break;        \
    default: call(dim); break;         \
    }

#if defined(KVC_HAVE_DOTS)
static const unsigned char *tile_of(const job *j, const piece *p, kvc_rows rows, int head) {
    const size_t tile = (size_t)(p->slot / KVC_TILE) * kvc_tile_bytes(rows);
    if (rows.side == KVC_KEYS) return p->block + (size_t)head * j->layout->key_head_bytes + tile;
    const size_t values = (size_t)j->layout->num_heads * j->layout->key_head_bytes;
    return p->block + values + (size_t)head * j->layout->value_head_bytes + tile;
}

static void fetch_tile(const job *j, const piece *p, kvc_rows rows, int head) {
    const unsigned char *tile = tile_of(j, p, rows, head);
    for (size_t b = 0; b < kvc_tile_bytes(rows); b += 64) __builtin_prefetch(tile + b, 0, 2);
}

static int score_tiles(const job *j, const chunk *c, int head, const unit_query *q, int rows) {
    for (int i = 0; i < c->pieces; i++) {
        fetch_tile(j, &c->piece[i], j->v_rows, head);
        const unsigned char *tile = tile_of(j, &c->piece[i], j->k_rows, head);
        unit_dot(j->k_rows.bits, j->dim, rows, q, tile, j->weights + KVC_TILE * i);
    }
    return c->lanes;
}

/* Lanes of a tile that hold no token of the piece have weight 0, but any bytes as scale and minimum: 0 as well. */
static void load_scales(const piece *p, const unsigned char *tile, float *scales, float *minima) {
    const uint16_t *halves = (const uint16_t *)tile;
    for (int t = 0; t < KVC_TILE; t += KVC_LANES) {
        f32v_store(scales + t, f32v_load_half(halves + t));
        f32v_store(minima + t, f32v_load_half(halves + KVC_TILE + t));
    }
    const int first = p->slot % KVC_TILE;
    for (int t = 0; p->count < KVC_TILE && t < KVC_TILE; t++) {
        if (t < first || t >= first + p->count) scales[t] = minima[t] = 0.0f;
    }
}

static void mix_tiles(const job *j, const chunk *c, int head, int rows, float *acc) {
    const unsigned char *tile[KVC_CHUNK / KVC_TILE];
    float scales[KVC_CHUNK], minima[KVC_CHUNK];
    for (int i = 0; i < c->pieces; i++) {
        tile[i] = tile_of(j, &c->piece[i], j->v_rows, head);
        load_scales(&c->piece[i], tile[i], scales + KVC_TILE * i, minima + KVC_TILE * i);
    }
    for (int r = 0; r < rows; r++) {
        quantise_weights(j->v_rows.bits, c->lanes, j->weights + r * KVC_CHUNK, scales, minima, &j->unit_w[r]);
    }
    unit_mix(j->v_rows.bits, j->dim, rows, c->pieces, j->unit_w, tile, j->alpha, acc, j->padded);
}
#endif

/* Scores of the chunk against the rows packed at index, in weights. What stands on lanes without a token has no
 * meaning. Returns the lanes written. */
static int score_chunk(const job *j, const chunk *c, int head, size_t index, int rows, ahead_rows ahead) {
#if defined(KVC_HAVE_DOTS)
    if (j->units) return score_tiles(j, c, head, (c->sink ? j->unit_sink_q : j->unit_q) + index, rows);
#endif
    const float *q = (c->sink ? j->sink_q : j->q) + index * (size_t)j->padded;
    const int few = rows <= KVC_DOT_ROWS, step = few || KVC_PANEL < KVC_DOT_TOKENS ? KVC_DOT_TOKENS : KVC_PANEL;
    const int tokens = (c->lanes + step - 1) / step * step;
    const unsigned char *staged[KVC_CHUNK], *const *k = c->k;
    size_t offset = (size_t)head * j->layout->key_head_bytes;
    const int stage = j->k_rows.bits < 16 || (j->k_rows.bits == 16 && !few);
    if (stage) {
        stage_rows(j, c, j->k_rows, head, staged);
        k = staged, offset = 0;
    }
#define FEW_F32(dim) dot_chunk(KVC_F32, dim, rows, tokens, q, j->padded, k, offset, j->weights, ahead)
#define FEW_F16(dim) dot_chunk(KVC_F16, dim, rows, tokens, q, j->padded, k, offset, j->weights, ahead)
#define MANY(dim)                                   \
    pack_panels(dim, tokens, k, offset, j->panels); \
    panel_chunk(dim, rows, tokens, q, j->padded, j->panels, j->weights)
    if (!few) WITH_DIM(j->dim, MANY)
    else if (stage || j->k_rows.bits == 32) WITH_DIM(j->dim, FEW_F32)
    else WITH_DIM(j->dim, FEW_F16)
#undef FEW_F32
#undef FEW_F16
#undef MANY
    return tokens;
}

/* acc = acc * alpha + weights V. */
static void mix_values(const job *j, const chunk *c, int head, int rows, int tokens, float *acc, ahead_rows ahead) {
#if defined(KVC_HAVE_DOTS)
    if (j->units) {
        mix_tiles(j, c, head, rows, acc);
        return;
    }
#endif
    const int few = rows <= KVC_DOT_ROWS;
    const unsigned char *staged[KVC_CHUNK], *const *v = c->v;
    size_t offset = (size_t)head * j->layout->value_head_bytes;
    const int stage = j->v_rows.bits < 16 || (j->v_rows.bits == 16 && !few);
    if (stage) {
        stage_rows(j, c, j->v_rows, head, staged);
        v = staged, offset = 0;
    }
    if (!few) ahead.rows = NULL;
#define MIX(tile_rows, format, dim) \
    mix_chunk(tile_rows, format, dim, rows, tokens, j->weights, v, offset, j->alpha, acc, j->padded, ahead)
#define FEW_F32(dim) MIX(0, KVC_F32, dim)
#define FEW_F16(dim) MIX(0, KVC_F16, dim)
#define MANY(dim) MIX(KVC_TILE_ROWS, KVC_F32, dim)
    if (!few) WITH_DIM(j->dim, MANY)
    else if (stage || j->v_rows.bits == 32) WITH_DIM(j->dim, FEW_F32)
    else WITH_DIM(j->dim, FEW_F16)
#undef MIX
#undef FEW_F32
#undef FEW_F16
#undef MANY
}

/* -inf on every lane that holds no token, or none that may be seen. */
static void mask_row(const chunk *c, int64_t seen, int lanes, float *w) {
    int lane = 0;
    for (int i = 0; i < c->pieces; i++) {
        const piece *p = &c->piece[i];
        const int64_t rest = seen - p->first;
        for (; lane < p->lane; lane++) w[lane] = -INFINITY;
        lane += rest < 0 ? 0 : rest < p->count ? (int)rest : p->count;
    }
    for (; lane < lanes; lane++) w[lane] = -INFINITY;
}

/* Scores -> weights 2^(score - largest), masked; largest, sum and alpha brought up to date. */
static void softmax_rows(const job *j, const chunk *c, int64_t row, int rows, int tokens, float *largest, float *sum) {
    for (int r = 0; r < rows; r++) {
        float *w = j->weights + r * KVC_CHUNK;
        mask_row(c, visible(j, row + r), tokens, w);
        f32v max_v = f32v_set1(largest[r]);
        for (int t = 0; t < tokens; t += KVC_LANES) max_v = f32v_max(max_v, f32v_load(w + t));
        const float max = f32v_max_of(max_v);
        f32v sum_v = f32v_zero();
        for (int t = 0; t < tokens; t += KVC_LANES) {
            const f32v w_v = f32v_exp2(f32v_sub(f32v_load(w + t), f32v_set1(max)));
            f32v_store(w + t, w_v);
            sum_v = f32v_add(sum_v, w_v);
        }
        float alpha[KVC_LANES];
        f32v_store(alpha, f32v_exp2(f32v_set1(largest[r] - max)));
        j->alpha[r] = alpha[0];
        sum[r] = sum[r] * alpha[0] + f32v_sum_of(sum_v);
        largest[r] = max;
    }
}

/* acc / sum of one (head, row) to its place in out. */
static void write_row(const job *j, int head, int64_t row, const float *acc, float largest, float sum) {
    const size_t pair = pair_index(j, head, row);
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    float *out = j->args->out + pair * (size_t)j->dim;
    for (int d = 0; d < j->dim; d++) out[d] = acc[d] * inverse;
    if (j->v_rows.rotated) KVC_FN(hadamard)(out, j->dim);
    if (j->item->norms) {
        j->item->norms[2 * pair] = largest;
        j->item->norms[2 * pair + 1] = inverse;
    }
}

static void finish(const job *j) {
    const int heads = j->item->head_stop - j->item->head;
    const size_t stride = (size_t)j->padded + KVC_PARTIAL_EXTRA;
    for (int i = 0; i < heads * j->rows; i++) {
        const float *acc = j->acc + (size_t)i * (size_t)j->padded;
        if (j->item->parts == 1) {
            write_row(j, j->item->head + i / j->rows, j->item->row + i % j->rows, acc, j->largest[i], j->sum[i]);
        } else {
            float *partial = j->item->partial + (size_t)i * stride;
            memcpy(partial, acc, (size_t)j->padded * sizeof(float));
            partial[j->padded] = j->largest[i];
            partial[j->padded + 1] = j->sum[i];
        }
    }
}

/* Head h of the item over one chunk. While K is read V is fetched, then the K that is read next. */
static void attend_chunk(const job *j, const chunk *now, const chunk *next, int h) {
    const kvc_item *item = j->item;
    const int head = item->head + h, last = head + 1 == item->head_stop, ahead_head = last ? item->head : head + 1;
    const size_t index = (size_t)(h * j->rows);
    const chunk *then = last ? next : now;
    const size_t k_offset = (size_t)ahead_head * j->layout->key_head_bytes;
    const ahead_rows v = {now->v, (size_t)head * j->layout->value_head_bytes, (int)j->v_row_bytes};
    const ahead_rows k = {then->lanes ? then->k : NULL, k_offset, (int)j->k_row_bytes};
    const int lanes = score_chunk(j, now, head, index, j->rows, v);
#if defined(KVC_HAVE_DOTS)
    for (int i = 0; j->units && i < then->pieces; i++) fetch_tile(j, &then->piece[i], j->k_rows, ahead_head);
#endif
    softmax_rows(j, now, item->row, j->rows, lanes, j->largest + index, j->sum + index);
    mix_values(j, now, head, j->rows, lanes, j->acc + index * (size_t)j->padded, k);
}

void KVC_FN(attend_item)(const kvc_attend_args *args, const kvc_item *item, void *scratch) {
    job j;
    start(&j, args, item, scratch);
    const int heads = item->head_stop - item->head;
    const size_t per_head = (size_t)j.rows * (size_t)j.padded;
    for (int h = 0; h < heads; h++) pack_queries(&j, item->head + h, item->row, j.rows, (size_t)(h * j.rows));
    memset(j.acc, 0, (size_t)heads * per_head * sizeof(float));
    for (int i = 0; i < heads * j.rows; i++) j.largest[i] = LOWEST, j.sum[i] = 0.0f;

    chunk chunks[2];
    chunks[0].lanes = chunks[1].lanes = 0;
    cursor at = {NULL, 0, 0};
    if (item->token < item->token_stop) {
        at = seek(j.seq, item->token);
        next_chunk(&j, &at, &chunks[0]);
    }
    for (int turn = 0; chunks[turn].lanes; turn ^= 1) {
        next_chunk(&j, &at, &chunks[turn ^ 1]);
        for (int h = 0; h < heads; h++) attend_chunk(&j, &chunks[turn], &chunks[turn ^ 1], h);
    }
    finish(&j);
}

void KVC_FN(combine_parts)(const kvc_attend_args *args, const kvc_item *item) {
    job j;
    start(&j, args, item, NULL);
    const int heads = item->head_stop - item->head;
    const size_t stride = (size_t)j.padded + KVC_PARTIAL_EXTRA, part = stride * (size_t)(heads * j.rows);
    for (int i = 0; i < heads * j.rows; i++) {
        const float *first = item->partial + (size_t)i * stride;
        float acc[KVC_MAX_HEAD_DIM] = {0}, largest = LOWEST, sum = 0.0f;
        for (int p = 0; p < item->parts; p++) largest = fmaxf(largest, first[(size_t)p * part + j.padded]);
        for (int p = 0; p < item->parts; p++) {
            const float *from = first + (size_t)p * part, factor = exp2f(from[j.padded] - largest);
            sum += factor * from[j.padded + 1];
            for (int d = 0; d < j.dim; d++) acc[d] += factor * from[d];
        }
        write_row(&j, item->head + i / j.rows, item->row + i % j.rows, acc, largest, sum);
    }
}

/* Weights of one chunk and row block, added over rows; scores as the sequence numbers them. */
static void add_weights(const job *j, const chunk *c, int head, int64_t row, int rows, int lanes, float *scores) {
    for (int r = 0; r < rows; r++) {
        float *w = j->weights + r * KVC_CHUNK;
        const float *norm = j->item->norms + 2 * pair_index(j, head, row + r);
        mask_row(c, visible(j, row + r), lanes, w);
        for (int t = 0; t < lanes; t += KVC_LANES) {
            const f32v power_v = f32v_sub(f32v_load(w + t), f32v_set1(norm[0]));
            f32v_store(w + t, f32v_mul(f32v_exp2(power_v), f32v_set1(norm[1])));
        }
        for (int i = 0; i < c->pieces; i++) {
            const piece *p = &c->piece[i];
            for (int t = 0; t < p->count; t++) scores[p->first + t] += w[p->lane + t];
        }
    }
}

void KVC_FN(score_item)(const kvc_attend_args *args, const kvc_item *item, void *scratch) {
    job j;
    start(&j, args, item, scratch);
    float *scores = args->scores + item->first_score;
    memset(scores + item->token, 0, (size_t)(item->token_stop - item->token) * sizeof(float));
    for (int head = item->head; item->token < item->token_stop && head < item->head_stop; head++) {
        for (int64_t row = item->row; row < item->row_stop; row += KVC_ITEM_ROWS) {
            const int rows = item->row_stop - row < KVC_ITEM_ROWS ? (int)(item->row_stop - row) : KVC_ITEM_ROWS;
            pack_queries(&j, head, row, rows, 0);
            cursor at = seek(j.seq, item->token);
            while (at.token < item->token_stop && at.token < visible(&j, row + rows - 1)) {
                chunk c;
                next_chunk(&j, &at, &c);
                const int lanes = score_chunk(&j, &c, head, 0, rows, (ahead_rows){NULL, 0, 0});
                add_weights(&j, &c, head, row, rows, lanes, scores);
            }
        }
    }
}
