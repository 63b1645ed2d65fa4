/* case.c - one input of the fuzzer: a world of blocks, and writes, copies, clears, reads and attention in it.
 *
 * The bytes choose sizes that callers would let through and data that nobody has checked: blocks start out as any bytes,
 * as a hostile saved file may bring them, queries are any bits. After every step, at every level of this CPU:
 *
 *   stored bytes     equal at all levels, and only those of the slots that were named have changed
 *   rows read        equal bit for bit to the twin's (twin.h); what was written, within the format's error
 *   attention        within the error of twin.h where slots and queries are ordinary: finite, then, too. Elsewhere it
 *                    may be anything, but ends, stays inside its memory, and leaves other sequences alone
 *   Gaussian data    5e-6 of the largest output in f32 and f16, 1 % of the row quantised, as the kernels promise
 *
 * Memory is exact (memory.h). With -DCALLERS=n, n threads make each attention call at once and must agree bit for bit.
 */
#include "draw.h"
#include "memory.h"
#include "twin.h"

#include <stdarg.h>

#if defined(CALLERS)
#include <pthread.h>
enum {
    MANY_TOKENS = 1
}; /* what kvc_parallel.c takes several threads for: 2^14 products of a key and a row */
#else
enum { MANY_TOKENS = 0 };
#endif

enum { MOST_SEQS = 3 };

static const world *failing; /* for the message alone */

static void fail(const char *what, ...) {
    const kvc_layout *l = &failing->layout;
    va_list list;
    va_start(list, what);
    fprintf(stderr, "FAILED: ");
    vfprintf(stderr, what, list);
    fprintf(stderr, " (blocks %d of %d, heads %d, dim %d, formats %d %d, rotated %d %d)\n",
            failing->num_blocks, l->block_size, l->num_heads, l->head_dim, l->key_format, l->value_format,
            l->rotate_keys, l->rotate_values);
    va_end(list);
    abort();
}

/* Asked for once: in a virtual machine, asking a CPU what it is takes longer than a small case. */
static const kvc_kernels *levels[4];

static int num_levels(void) {
    static int count;
    if (!count) {
        count = kvc_num_levels();
        for (int i = 0; i < count; i++) levels[i] = kvc_level(i);
    }
    return count;
}
static const kvc_kernels *level_at(int index) { return levels[index]; }
static const kvc_kernels *scalar_level(void) { return levels[num_levels() - 1]; } /* the last, always */

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* ---- Layouts. */

/* A shape that no caller has checked is refused or has these properties. */
static void try_any_shape(source *s) {
    int x[7];
    for (int i = 0; i < 7; i++) {
        uint32_t bits = draw_byte(s) << 24 | draw_byte(s) << 16 | draw_byte(s) << 8 | draw_byte(s);
        x[i] = draw(s, 2) ? (int)bits : draw(s, 300) - 20;
    }
    kvc_layout l;
    if (kvc_layout_init(&l, x[0], x[1], x[2], (kvc_format)x[3], (kvc_format)x[4], x[5], x[6])) return;
    const size_t row = (size_t)l.head_dim * (size_t)kvc_format_bits(l.key_format) / 8;
    if (l.block_size < 1 || l.block_size > KVC_MAX_BLOCK_SIZE || l.head_dim < 8 || l.head_dim % 8 ||
        l.head_dim > KVC_MAX_HEAD_DIM || l.num_heads < 1 || l.key_format > KVC_Q2 ||
        l.value_format > KVC_Q2 || l.block_bytes % 64 || l.key_head_bytes < row * (size_t)l.block_size ||
        l.block_bytes < (size_t)l.num_heads * (l.key_head_bytes + l.value_head_bytes))
        fail("a layout of %d, %d, %d, %d, %d", x[0], x[1], x[2], x[3], x[4]);
}

static void draw_layout(source *s, world *w) {
    const int size = DRAW_OF(s, 16, 16, 32, 1, 2, 5, 15, 17, 33, 48, 64, 255, 256, 0);
    const int dim = MANY_TOKENS ? DRAW_OF(s, 8, 32, 32)
                                : DRAW_OF(s, 64, 128, 32, 8, 16, 24, 40, 72, 96, 120, 136, 160, 248, 256, 0);
    const int key = draw(s, 6), value = draw(s, 3) ? key : draw(s, 6), rotated = draw(s, 4);
    const int block_size = size ? size : draw_between(s, 1, 256),
              head_dim = dim ? dim : 8 * draw_between(s, 1, 32);
    const int can = (head_dim & (head_dim - 1)) == 0;
    int heads = draw_between(s, 1, 4);
    w->most_floats = 1 << DRAW_OF(s, 10, 11, 12, 12, 13, 15); /* small cases are many cases */
    if (MANY_TOKENS) w->most_floats = 1 << 15, heads = 1 + heads % 2;
    while (heads > 1 && heads * head_dim * block_size > w->most_floats) heads--;
    const int refused =
        kvc_layout_init(&w->layout, block_size, heads, head_dim, (kvc_format)key, (kvc_format)value,
                        can && key >= KVC_Q8 && (rotated & 1), can && value >= KVC_Q8 && (rotated & 2));
    if (refused) fail("refused %d, %d, %d, %d, %d", block_size, heads, head_dim, key, value);
    w->row = (size_t)heads * (size_t)head_dim;
    const int room = w->most_floats / (int)(w->row * (size_t)block_size);
    w->num_blocks = MANY_TOKENS ? 1 + 1024 / block_size : draw_between(s, 1, 1 + (room < 40 ? room : 40));
    w->arena_bytes = (size_t)w->num_blocks * w->layout.block_bytes;
}

/* ---- The twin: rows read by the scalar level, which the steps below move about themselves. */

static void read_whole(const kvc_kernels *kernels, const world *w, const unsigned char *arena,
                       float *const rows[2]) {
    kvc_run *runs = malloc((size_t)w->num_blocks * sizeof *runs);
    for (int b = 0; b < w->num_blocks; b++) runs[b] = (kvc_run){b, 0, (uint16_t)w->layout.block_size};
    kernels->read_runs(&w->layout, arena, runs, w->num_blocks, rows[0], rows[1]);
    free(runs);
}

static void expect_rows(const world *w, const char *after) {
    const size_t floats = (size_t)(w->num_blocks * w->layout.block_size) * w->row;
    for (int level = 0; level < num_levels(); level++) {
        memory keys = take(floats * sizeof(float), 4, 1), values = take(floats * sizeof(float), 4, 1);
        float *const rows[2] = {keys.at, values.at};
        read_whole(level_at(level), w, w->arena, rows);
        for (int side = 0; side < 2; side++) {
            for (size_t i = 0; i < floats; i++) {
                const float got = rows[side][i], expected = w->rows[side][i];
                if (memcmp(&got, &expected, sizeof got) && !(isnan(got) && isnan(expected)))
                    fail("%s: after %s, %s %zu is %a, not %a", level_at(level)->name, after, side ? "V" : "K",
                         i, got, expected);
            }
        }
        give_back(&keys), give_back(&values);
    }
}

/* ---- Runs. */

typedef struct sequence {
    memory runs;
    int64_t num_runs, num_tokens;
    size_t *slots; /* of each token */
} sequence;

/* Blocks in any order, each at most once; of each, pieces of its slots. */
static sequence draw_runs(source *s, const world *w, int empty_too) {
    const int size = w->layout.block_size, style = MANY_TOKENS ? 3 * draw(s, 2) : draw(s, 4);
    const int blocks = MANY_TOKENS ? w->num_blocks : draw_between(s, empty_too ? 0 : 1, w->num_blocks);
    kvc_run *runs = malloc((size_t)(w->num_blocks * size + 1) * sizeof *runs);
    sequence q = {.slots = malloc((size_t)(w->num_blocks * size + 1) * sizeof(size_t))};
    int *order = malloc((size_t)w->num_blocks * sizeof *order);
    for (int i = 0; i < w->num_blocks; i++) order[i] = i;
    for (int i = 0; i < blocks; i++) {
        const int other = i + draw(s, w->num_blocks - i), block = order[other];
        order[other] = order[i], order[i] = block;
        int first = style < 2 ? 0 : draw(s, size), stop = style == 0 ? size : draw_between(s, first, size);
        while (first < size && (stop > first || empty_too)) {
            runs[q.num_runs++] = (kvc_run){block, (uint16_t)first, (uint16_t)stop};
            for (int slot = first; slot < stop; slot++) q.slots[q.num_tokens++] = slot_of(w, block, slot);
            if (style < 3) break;
            first = stop + draw_between(s, 1, 9); /* a hole */
            if (first < size) stop = draw_between(s, first, size);
        }
    }
    q.runs = take((size_t)q.num_runs * sizeof *runs, 4, 1);
    memcpy(q.runs.at, runs, (size_t)q.num_runs * sizeof *runs);
    free(runs), free(order);
    return q;
}

static void drop_runs(sequence *q) { give_back(&q->runs), free(q->slots); }

/* ---- Steps that store. */

/* x H / dim, as a rotated row is stored; straight from the definition of the matrix. */
static void rotate(const float *x, int dim, double *y) {
    for (int i = 0; i < dim; i++) {
        y[i] = 0;
        for (int j = 0; j < dim; j++) y[i] += (__builtin_popcount((unsigned)(i & j)) % 2 ? -1.0 : 1.0) * x[j];
        y[i] /= dim;
    }
}

static double spacing(double x) { return fmax(ldexp(1.0, ilogb(fmax(fabs(x), 0x1p-30)) - 10), 0x1p-24); }

/* The root of the mean squared error that kvc_quant.c allows a row; f16 errs half a spacing at most. */
static double allowed_error(const kvc_rows rows, const float *x) {
    double y[KVC_MAX_HEAD_DIM], lowest = INFINITY, highest = -INFINITY;
    if (rows.bits == 32) return 0;
    for (int d = 0; d < rows.dim; d++) y[d] = x[d];
    if (rows.rotated) rotate(x, rows.dim, y);
    for (int d = 0; d < rows.dim; d++) lowest = fmin(lowest, y[d]), highest = fmax(highest, y[d]);
    const double largest = fmax(fabs(lowest), fabs(highest));
    if (rows.bits == 16) return spacing(largest) / 2;
    const double range = highest - lowest + spacing(lowest) / 2;
    const double scale = range / ((1 << rows.bits) - 1) * (1 + 0x1p-10) + 0x1p-24;
    const double stored = fmax(scale / 2, spacing(lowest) / 2) + scale / 64 + 0x1p-21 * largest;
    return stored * (rows.rotated ? sqrt(rows.dim) : 1);
}

static void expect_written(const world *w, const sequence *q, kvc_side side, const float *written) {
    const kvc_rows rows = kvc_rows_of(&w->layout, side);
    for (int64_t t = 0; t < q->num_tokens; t++) {
        for (size_t at = 0; at < w->row; at += (size_t)rows.dim) {
            const float *x = written + (size_t)t * w->row + at,
                        *got = w->rows[side] + q->slots[t] * w->row + at;
            double squares = 0;
            for (int d = 0; d < rows.dim; d++) squares += ((double)got[d] - x[d]) * ((double)got[d] - x[d]);
            const double error = sqrt(squares / rows.dim), allowed = allowed_error(rows, x);
            if (!(error <= allowed)) fail("%s errs %g, may %g", side ? "V" : "K", error, allowed);
        }
    }
}

/* What a format cannot hold is found where it is, at every level; zero then stands there. */
static void make_representable(source *s, float *x, size_t n, kvc_format format) {
    const float limit = format == KVC_F32 ? INFINITY : 65520.0f;
    size_t bad = 0;
    for (int found = 0; bad < n; found++) {
        while (bad < n && fabsf(x[bad]) < limit) bad++;
        const int64_t expected = bad < n ? (int64_t)bad : -1;
        for (int level = 0; found < 3 && level < num_levels(); level++) {
            const int64_t got = level_at(level)->check_representable(x, (int64_t)n, format);
            if (got != expected)
                fail("%s: first bad value at %d, not %d", level_at(level)->name, (int)got, (int)expected);
        }
        if (bad < n) x[bad] = draw(s, 2) ? 0.0f : 1.0f;
    }
}

static void step_write(source *s, world *w) {
    sequence q = draw_runs(s, w, 1);
    const size_t floats = (size_t)q.num_tokens * w->row;
    const int sides = draw(s, 8), kind = draw(s, NUM_KINDS),
              checked = draw(s, 4); /* sides: 1 K alone, 2 V alone */
    memory x[2];
    const float *given[2];
    for (int side = 0; side < 2; side++) {
        x[side] = take(floats * sizeof(float), 4, draw(s, 2));
        draw_floats(s, kind, x[side].at, floats);
        const kvc_format format = side ? w->layout.value_format : w->layout.key_format;
        if (checked) make_representable(s, x[side].at, floats, format);
        given[side] = sides == 2 - side ? NULL : x[side].at;
    }
    memory before = take(w->arena_bytes, 64, 1);
    memcpy(before.at, w->arena, w->arena_bytes);
    const kvc_kernels *scalar = scalar_level();
    scalar->write_runs(&w->layout, w->arena, q.runs.at, q.num_runs, given[0], given[1]);
    for (int level = 0; level < num_levels(); level++) {
        memory arena = take(w->arena_bytes, 64, draw(s, 2));
        memcpy(arena.at, before.at, w->arena_bytes);
        level_at(level)->write_runs(&w->layout, arena.at, q.runs.at, q.num_runs, given[0], given[1]);
        if (checked && memcmp(arena.at, w->arena, w->arena_bytes))
            fail("%s: other bytes stored", level_at(level)->name);
        give_back(&arena);
    }
    for (int side = 0; side < 2; side++) {
        if (!given[side]) continue;
        float *back = malloc((floats + 1) * sizeof *back);
        scalar->read_runs(&w->layout, w->arena, q.runs.at, q.num_runs, side ? NULL : back,
                          side ? back : NULL);
        for (int64_t t = 0; t < q.num_tokens; t++)
            memcpy(w->rows[side] + q.slots[t] * w->row, back + (size_t)t * w->row, w->row * sizeof(float));
        free(back);
        if (checked) expect_written(w, &q, (kvc_side)side, given[side]);
    }
    for (int64_t t = 0; t < q.num_tokens; t++)
        w->plain[q.slots[t]] = kind == GAUSSIAN && given[0] && given[1];
    give_back(&before), give_back(&x[0]), give_back(&x[1]);
    drop_runs(&q);
}

static void step_copy(source *s, world *w) {
    const int size = w->layout.block_size, from = draw(s, w->num_blocks),
              to = draw(s, 3) ? draw(s, w->num_blocks) : from;
    const int src = draw(s, size), dst = draw(s, 3) ? draw(s, size) : src;
    const int count = draw_between(s, 0, size - (src > dst ? src : dst));
    kvc_copy_slots(&w->layout, w->arena, from, src, w->arena, to, dst, count);
    const size_t a = slot_of(w, from, src), b = slot_of(w, to, dst);
    for (int side = 0; side < 2; side++)
        memmove(w->rows[side] + b * w->row, w->rows[side] + a * w->row,
                (size_t)count * w->row * sizeof(float));
    memmove(w->plain + b, w->plain + a, (size_t)count);
}

static void step_clear(source *s, world *w) {
    const int block = draw(s, w->num_blocks), slot = draw(s, w->layout.block_size);
    const int count = draw_between(s, 0, w->layout.block_size - slot);
    kvc_clear_slots(&w->layout, w->arena, block, slot, count);
    for (int side = 0; side < 2; side++)
        memset(w->rows[side] + slot_of(w, block, slot) * w->row, 0, (size_t)count * w->row * sizeof(float));
    memset(w->plain + slot_of(w, block, slot), 0, (size_t)count);
}

/* ---- Attention. */

typedef struct question {
    const world *world;
    sequence of[MOST_SEQS];
    kvc_seq seqs[MOST_SEQS];
    int num_seqs, query_heads, threads, offset; /* offset: of the scratch, which may start anywhere */
    float scale;
    int64_t queries, tokens;
    memory q, sink_q;
    int has_sinks, has_scores, kind, at_end;
} question;

typedef struct answer {
    const kvc_kernels *kernels;
    const question *question;
    memory out, scores;
} answer;

static void *ask(void *to) {
    answer *a = to;
    const question *q = a->question;
    const kvc_layout *l = &q->world->layout;
    const size_t floats = (size_t)q->queries * (size_t)q->query_heads * (size_t)l->head_dim;
    const size_t bytes = kvc_attend_scratch_bytes(l, q->seqs, q->num_seqs, q->query_heads, q->threads);
    a->out = take(floats * sizeof(float), 4, q->at_end);
    a->scores = take((size_t)q->tokens * sizeof(float), 4, q->at_end);
    memory scratch = take(bytes + (size_t)q->offset, 16, q->at_end);
    const kvc_attend_args args = {.layout = l,
                                  .arena = q->world->arena,
                                  .seqs = q->seqs,
                                  .num_seqs = q->num_seqs,
                                  .num_query_heads = q->query_heads,
                                  .scale = q->scale,
                                  .queries = q->q.at,
                                  .sink_queries = q->has_sinks ? q->sink_q.at : NULL,
                                  .out = a->out.at,
                                  .scores = q->has_scores ? a->scores.at : NULL};
    kvc_attend(a->kernels, &args, (char *)scratch.at + q->offset, q->threads);
    give_back(&scratch);
    return NULL;
}

/* One thread, or several at once that must agree. */
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
            (q->has_scores && memcmp(first.scores.at, others[i].scores.at, first.scores.size)))
            fail("%s: two threads, two results", kernels->name);
        give_back(&others[i].out), give_back(&others[i].scores);
    }
#else
    ask(&first);
#endif
    return first;
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
    for (int i = 0; i < q.num_seqs; i++) {
        q.of[i] = draw_runs(s, w, 1);
        const int64_t tokens = q.of[i].num_tokens, each = (tokens + 1) * q.query_heads * dim;
        int64_t queries = DRAW_OF(s, 1, 1, 2, 3, 8, 16, 17, 33, 50, 97, 100, 200, 0, -1);
        if (queries < 0) queries = tokens;
        if (queries * each > room) queries = room / each;
        room -= queries * each;
        q.seqs[i] = (kvc_seq){q.of[i].runs.at, q.of[i].num_runs, tokens, draw(s, 40), queries};
        q.queries += queries, q.tokens += tokens;
    }
    const size_t floats = (size_t)q.queries * (size_t)q.query_heads * (size_t)dim;
    q.q = take(floats * sizeof(float), 4, q.at_end);
    q.sink_q = take(floats * sizeof(float), 4, q.at_end);
    draw_floats(s, q.kind, q.q.at, floats);
    draw_floats(s, q.kind, q.sink_q.at, floats);
    return q;
}

static int query_is_ordinary(const float *q, int dim) {
    for (int d = 0; d < dim; d++) {
        if (!(fabsf(q[d]) < ldexpf(1.0f, LARGEST))) return 0;
    }
    return 1;
}

/* One (query, query head) of every level's answers against the twin; its weights join `total`, their errors `error`.
 * Returns whether the row is ordinary. */
static int expect_row(const question *q, int seq, int64_t query, int64_t first, int query_head,
                      const answer *answers, double *weights, double *total, double *error) {
    const world *w = q->world;
    const int dim = w->layout.head_dim, head = query_head / (q->query_heads / w->layout.num_heads);
    const size_t at = ((size_t)(first + query) * (size_t)q->query_heads + (size_t)query_head) * (size_t)dim;
    const float *row = (const float *)q->q.at + at,
                *sink_row = q->has_sinks ? (const float *)q->sink_q.at + at : NULL;
    if (!query_is_ordinary(row, dim) || (sink_row && !query_is_ordinary(sink_row, dim))) return 0;
    const kvc_seq *of = &q->seqs[seq];
    int64_t seen = of->num_tokens - of->num_queries + query + 1;
    if (seen < 0) seen = 0;
    const row_answer expected =
        attend_row(w, q->of[seq].slots, seen, head, q->scale, row, sink_row, of->sink_tokens, weights);
    for (int64_t t = 0; t < seen; t++) {
        total[t] += weights[t];
        error[t] += fmin(expm1(2 * expected.score_error) * weights[t], 1.0) + 1e-5 * weights[t] + 1e-7;
    }
    double squares = 0, largest = 0;
    for (int d = 0; d < dim; d++) {
        squares += expected.out[d] * expected.out[d];
        largest = fmax(largest, fabs(expected.out[d]));
    }
    const int is_exact = w->layout.key_format <= KVC_F16 && w->layout.value_format <= KVC_F16;
    const int plain = expected.plain && q->kind == GAUSSIAN && q->scale * sqrtf((float)dim) < 1.1f;
    for (int level = 0; level < num_levels(); level++) {
        const float *out = (const float *)answers[level].out.at + at;
        double off = 0, most = 0;
        for (int d = 0; d < dim; d++) {
            const double each = out[d] - expected.out[d];
            off += each * each;
            most = isfinite(each) ? fmax(most, fabs(each)) : INFINITY;
        }
        off = sqrt(off);
        if (!(off <= expected.error))
            fail("%s: output %g off, may %g", level_at(level)->name, off, expected.error);
        if (plain && is_exact && most > 5e-6 * largest)
            fail("%s: output %g of the largest off", level_at(level)->name, most / largest);
        if (plain && !is_exact && off > 0.01 * sqrt(squares))
            fail("%s: output %g of the row off", level_at(level)->name, off / sqrt(squares));
    }
    return 1;
}

static void expect_sequence(const question *q, int seq, int64_t first_query, int64_t first_score,
                            const answer *answers) {
    const kvc_seq *of = &q->seqs[seq];
    const sequence *tokens = &q->of[seq];
    for (int64_t t = 0; t < of->num_tokens; t++) {
        const int size = q->world->layout.block_size, slot = (int)(tokens->slots[t] % (size_t)size);
        if (!slot_is_ordinary(q->world, (int)(tokens->slots[t] / (size_t)size), slot)) return;
    }
    double *space = calloc(3 * (size_t)of->num_tokens + 1, sizeof *space);
    double *weights = space, *total = space + of->num_tokens, *error = total + of->num_tokens;
    int ordinary = 1;
    for (int64_t query = 0; query < of->num_queries; query++) {
        for (int head = 0; head < q->query_heads; head++)
            ordinary &= expect_row(q, seq, query, first_query, head, answers, weights, total, error);
    }
    for (int level = 0; q->has_scores && ordinary && level < num_levels(); level++) {
        const float *scores = (const float *)answers[level].scores.at + first_score;
        for (int64_t t = 0; t < of->num_tokens; t++) {
            if (!(fabs(scores[t] - total[t]) <= error[t]))
                fail("%s: weight of token %d is %g, not %g, may err %g", level_at(level)->name, (int)t,
                     scores[t], total[t], error[t]);
        }
    }
    free(space);
}

static void step_attend(source *s, world *w) {
    question q = draw_question(s, w);
    answer answers[4];
    for (int level = 0; level < num_levels(); level++) answers[level] = ask_level(level_at(level), &q);
    int64_t first_query = 0, first_score = 0;
    for (int i = 0; i < q.num_seqs; i++) {
        expect_sequence(&q, i, first_query, first_score, answers);
        first_query += q.seqs[i].num_queries, first_score += q.seqs[i].num_tokens;
    }
    for (int level = 0; level < num_levels(); level++)
        give_back(&answers[level].out), give_back(&answers[level].scores);
    for (int i = 0; i < q.num_seqs; i++) drop_runs(&q.of[i]);
    give_back(&q.q), give_back(&q.sink_q);
}

/* ---- A case. */

static void fill_arena(source *s, world *w) {
    uint64_t state = (uint64_t)draw(s, 65536);
    const int kind = draw(s, 5);
    for (size_t i = 0; i < w->arena_bytes; i++) {
        switch (kind) {
        case 0: w->arena[i] = 0; break;
        case 1: w->arena[i] = 0xff; break;
        case 2:
            w->arena[i] = (unsigned char)(i % 2 ? 0x3c + draw_byte(s) % 8 : draw_byte(s));
            break; /* halves near 1 */
        case 3: w->arena[i] = (unsigned char)draw_byte(s); break;
        default: w->arena[i] = (unsigned char)splitmix(&state);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    source s = source_of(data, least(size, 4096));
    world w = {.num_blocks = 0};
    failing = &w;
    try_any_shape(&s);
    draw_layout(&s, &w);
    memory arena = take(w.arena_bytes, 64, draw(&s, 2));
    w.arena = arena.at;
    fill_arena(&s, &w);
    const size_t slots = (size_t)(w.num_blocks * w.layout.block_size);
    w.plain = calloc(slots, 1);
    for (int side = 0; side < 2; side++) w.rows[side] = malloc(slots * w.row * sizeof(float));
    read_whole(scalar_level(), &w, w.arena, w.rows);
    expect_rows(&w, "nothing");
    for (int left = draw_between(&s, 1, 8); left; left--) {
        switch (draw(&s, 8)) {
        case 0: step_copy(&s, &w), expect_rows(&w, "copy"); break;
        case 1: step_clear(&s, &w), expect_rows(&w, "clear"); break;
        case 2:
        case 3:
        case 4: step_write(&s, &w), expect_rows(&w, "write"); break;
        default: step_attend(&s, &w);
        }
    }
    give_back(&arena);
    free(w.plain), free(w.rows[0]), free(w.rows[1]);
    return 0;
}
