/* case.c - one input of the fuzzer: writes, copies, clears, reads and attention in a world of blocks; then a matrix
 * and its products (products.h), a layer, sums of NH (layers.h), a layer with a state (recurrence.h), and others to the end.
 *
 * The bytes choose sizes that callers accept and unchecked data: blocks start as arbitrary bytes, as from a hostile
 * saved file, and queries have arbitrary bits. After every step, at every level of this CPU:
 *
 *   every result     the bits of the scalar level (runs.h), whatever the data
 *   stored bytes     only those of the named slots have changed
 *   rows read        equal to the twin's bit for bit (twin.h); written rows within the format's error
 *   attention, lse   at the scalar level finite and within the error of twin.h if slots and queries are ordinary. Otherwise any
 *                    values, but the call ends, stays inside its memory, and does not affect other sequences
 *   one query        alone, with another number of threads, and without the tokens before its window: the same bits, if
 *                    all tokens that it sees are ordinary
 *   Gaussian data    error of 5e-6 of the largest output in f32 and f16, 1 % of the row in quantised formats
 *
 * Memory is exact (memory.h). With -DCALLERS=n, n threads make each attention call in parallel and must agree bit for
 * bit.
 */
#include "attention.h"
#include "indexer.h"
#include "layers.h"
#include "products.h"
#include "recurrence.h"
#include "sparse.h"

/* ---- Layouts. */

/* An unchecked shape is refused or has these properties. */
static void try_any_shape(source *s) {
    int x[7];
    for (int i = 0; i < 7; i++) {
        uint32_t bits = draw_byte(s) << 24 | draw_byte(s) << 16 | draw_byte(s) << 8 | draw_byte(s);
        x[i] = draw(s, 2) ? (int)bits : draw(s, 300) - 20;
    }
    kvc_layout l;
    const int value_dim = x[0] % 2 ? x[2] : x[5];
    const int latent = x[6] >> 1 & 1;
    if (kvc_layout_init(&l, x[0], x[1], x[2], value_dim, (kvc_format)x[3], (kvc_format)x[4], x[5], x[6], latent)) return;
    const size_t row = (size_t)l.head_dim * (size_t)kvc_format_of(l.key_format)->bits / 8;
    const size_t value_row = latent ? 0 : (size_t)l.value_head_dim * (size_t)kvc_format_of(l.value_format)->bits / 8;
    if (l.block_size < 1 || l.block_size > KVC_MAX_BLOCK_SIZE || l.head_dim < 8 || l.head_dim % 8 ||
        l.head_dim > KVC_MAX_HEAD_DIM || l.value_head_dim < 8 || l.value_head_dim % 8 ||
        l.value_head_dim > KVC_MAX_HEAD_DIM || l.num_heads < 1 || l.key_format >= KVC_NUM_FORMATS ||
        l.value_format >= KVC_NUM_FORMATS || l.block_bytes % 64 || l.key_head_bytes < row * (size_t)l.block_size ||
        l.value_head_bytes < value_row * (size_t)l.block_size ||
        l.block_bytes < (size_t)l.num_heads * (l.key_head_bytes + l.value_head_bytes) ||
        (latent && (l.num_heads != 1 || l.value_head_dim > l.head_dim)))
        fail("a layout of %d, %d, %d, %d, %d, %d", x[0], x[1], x[2], value_dim, x[3], x[4]);
}

static void draw_layout(source *s, world *w) {
    const int size = DRAW_OF(s, 16, 16, 32, 1, 2, 5, 15, 17, 33, 48, 64, 255, 256, 0);
    const int dim = w->many ? DRAW_OF(s, 8, 32, 32)
                            : DRAW_OF(s, 64, 128, 32, 8, 16, 24, 40, 72, 96, 512, 136, 160, 320, 256, 0);
    const int key = draw(s, KVC_NUM_FORMATS), drawn = draw(s, 3) ? key : draw(s, KVC_NUM_FORMATS);
    const int rotated = draw(s, 4);
    const int block_size = size ? size : draw_between(s, 1, 256),
              head_dim = dim ? dim : 8 * draw_between(s, 1, 64);
    uint64_t state = w->options;
    const int others[] = {8, 16, 24, 32, 40, 64, 96, 128, 136, w->many ? 32 : 512};
    const int wide = w->apart ? others[splitmix(&state) % 10] : head_dim;
    const int latent = splitmix(&state) % 4 == 0, value = latent ? key : drawn;
    const int value_dim = latent && wide > head_dim ? head_dim : wide;
    const int most_dim = head_dim > value_dim ? head_dim : value_dim;
    const int parts = head_dim % 16 == 0 && value_dim % 16 == 0;
    const int can = latent ? parts : (head_dim & (head_dim - 1)) == 0;
    const int can_values = latent ? parts : (value_dim & (value_dim - 1)) == 0;
    int heads = draw_between(s, 1, 4);
    w->most_floats = 1 << DRAW_OF(s, 10, 11, 12, 12, 13, 15); /* small cases are fast, so there can be many */
    if (w->many) w->most_floats = 1 << 15, heads = 1 + heads % 2;
    if (latent) heads = 1;
    while (heads > 1 && heads * most_dim * block_size > w->most_floats) heads--;
    const int refused =
        kvc_layout_init(&w->layout, block_size, heads, head_dim, value_dim, (kvc_format)key, (kvc_format)value,
                        can && kvc_format_of((kvc_format)key)->quantised && (rotated & 1),
                        can_values && kvc_format_of((kvc_format)value)->quantised && (rotated & (latent ? 1 : 2)), latent);
    if (refused) fail("refused %d, %d, %d, %d, %d, %d", block_size, heads, head_dim, value_dim, key, value);
    w->row[0] = (size_t)heads * (size_t)head_dim, w->row[1] = (size_t)heads * (size_t)value_dim;
    const int room = w->most_floats / (heads * most_dim * block_size);
    w->num_blocks = w->many ? 1 + 1024 / block_size : draw_between(s, 1, 1 + (room < 40 ? room : 40));
    w->arena_bytes = (size_t)w->num_blocks * w->layout.block_bytes;
    say("blocks %d of %d, heads %d, dims %d %d, formats %d %d, rotated %d %d, latent %d", w->num_blocks, block_size,
        heads, head_dim, value_dim, key, value, w->layout.rotate_keys, w->layout.rotate_values, latent);
}

/* ---- The twin: rows as the scalar level reads them; the steps below copy them too. */

static void read_sides(const kvc_kernels *kernels, const world *w, const unsigned char *arena, float *keys, float *values,
                       size_t row, int dim) {
    kvc_run *runs = malloc((size_t)w->num_blocks * sizeof *runs);
    for (int b = 0; b < w->num_blocks; b++) runs[b] = (kvc_run){b, 0, (uint16_t)w->layout.block_size};
    kernels->read_runs(&w->layout, arena, runs, w->num_blocks, keys, values, row, (size_t)dim, NULL);
    free(runs);
}

static void read_side(const kvc_kernels *kernels, const world *w, const unsigned char *arena, int side, float *rows) {
    const int dim = side ? w->layout.value_head_dim : w->layout.head_dim;
    read_sides(kernels, w, arena, side ? NULL : rows, side ? rows : NULL, w->row[side], dim);
}

static void read_whole(const kvc_kernels *kernels, const world *w, const unsigned char *arena,
                       float *const rows[2]) {
    if (w->layout.head_dim == w->layout.value_head_dim) {
        read_sides(kernels, w, arena, rows[0], rows[1], w->row[0], w->layout.head_dim);
    } else {
        read_side(kernels, w, arena, 0, rows[0]), read_side(kernels, w, arena, 1, rows[1]);
    }
}

static void expect_rows(const world *w, const char *after) {
    const size_t slots = (size_t)(w->num_blocks * w->layout.block_size), *row = w->row;
    for (int level = 0; level < num_levels(); level++) {
        memory keys = take(slots * row[0] * sizeof(float), 4, 1), values = take(slots * row[1] * sizeof(float), 4, 1);
        float *const rows[2] = {keys.at, values.at};
        read_whole(level_at(level), w, w->arena, rows);
        for (int side = 0; side < 2; side++) {
            for (size_t i = 0; i < slots * row[side]; i++) {
                const float got = rows[side][i], expected = w->rows[side][i];
                if (memcmp(&got, &expected, sizeof got) && !(isnan(got) && isnan(expected)))
                    fail("%s: after %s, %s %zu is %a, not %a", level_at(level)->name, after, side ? "V" : "K",
                         i, got, expected);
            }
        }
        give_back(&keys), give_back(&values);
    }
}

/* ---- Steps that store. */

static void expect_written(const world *w, const sequence *q, kvc_side side, const float *written) {
    const kvc_rows rows = kvc_rows_of(&w->layout, side);
    for (int64_t t = 0; t < q->num_tokens; t++) {
        for (size_t at = 0; at < w->row[side]; at += (size_t)rows.dim) {
            const float *x = written + (size_t)t * w->row[side] + at,
                        *got = w->rows[side] + q->slots[t] * w->row[side] + at;
            double squares = 0;
            for (int d = 0; d < rows.dim; d++) squares += ((double)got[d] - x[d]) * ((double)got[d] - x[d]);
            const double error = sqrt(squares / rows.dim), allowed = allowed_error(rows, x);
            if (!(error <= allowed)) fail("%s errs %g, may %g", side ? "V" : "K", error, allowed);
        }
    }
}

/* Every level finds the first value that the format cannot hold; it is then replaced by zero. */
static void make_representable(source *s, float *x, size_t n, kvc_format format) {
    const float limit = kvc_format_of(format)->overflow;
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

/* Every level makes the same float rows of a tensor whose heads lie apart. */
static void expect_gathered(source *s, const world *w) {
    static const size_t sizes[] = {4, 2, 2, 8};
    const int heads = w->layout.num_heads, dim = w->layout.head_dim, tokens = draw_between(s, 1, 20);
    const kvc_element element = (kvc_element)draw(s, 4);
    const int64_t row_bytes = (int64_t)sizes[element] * dim;
    const size_t floats = (size_t)tokens * w->row[0];
    memory from = take(floats * sizes[element], sizes[element], draw(s, 2)), want = take(floats * sizeof(float), 4, 1);
    if (element == KVC_ELEMENT_F32)
        draw_floats(s, draw(s, NUM_KINDS), from.at, floats);
    else
        for (size_t i = 0; i < floats * sizes[element] / 2; i++) ((uint16_t *)from.at)[i] = (uint16_t)(draw(s, 256) << 8 | draw(s, 256));
    const kvc_tensor tensor = {from.at, row_bytes, row_bytes * tokens, element};
    scalar_level()->gather_rows(&tensor, 0, tokens, heads, dim, want.at);
    for (int level = 0; level < num_levels(); level++) {
        memory got = take(floats * sizeof(float), 4, draw(s, 2));
        const int cut = draw_between(s, 0, tokens);
        level_at(level)->gather_rows(&tensor, 0, cut, heads, dim, got.at);
        level_at(level)->gather_rows(&tensor, cut, tokens - cut, heads, dim, (float *)got.at + (size_t)cut * w->row[0]);
        expect_bits("gather_rows", level_at(level), got.at, want.at, (int64_t)floats);
        give_back(&got);
    }
    give_back(&from), give_back(&want);
}

/* Centres and factors of all heads, in one piece of memory behind `known`: pushes of at most 1 / dim, so that no sum of
 * them grows. The second head has none. */
static memory draw_known(const world *w, kvc_head_keys *known) {
    const size_t dim = (size_t)w->layout.head_dim;
    memory m = take(dim * (dim + 1) * sizeof(float), 4, 1);
    float *x = m.at;
    uint32_t state = (uint32_t)w->num_blocks;
    for (size_t i = 0; i < dim * (dim + 1); i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = ((float)(state >> 8) * 0x1p-23f - 1.0f) / (i < dim ? 1.0f : (float)dim);
    }
    for (int h = 0; h < w->layout.num_heads; h++)
        known[h] = h == 1 ? (kvc_head_keys){NULL, NULL} : (kvc_head_keys){x, x + dim};
    return m;
}

/* Rows of one side with some floats between them; none where they are NULL. */
static kvc_float_rows apart_rows(source *s, const world *w, const sequence *q, int side, const float *x, memory *to) {
    const size_t row = w->row[side], stride = row + (size_t)draw(s, 3);
    *to = take(q->num_tokens ? ((size_t)(q->num_tokens - 1) * stride + row) * sizeof(float) : 0, 4, draw(s, 2));
    for (int64_t t = 0; x && t < q->num_tokens; t++)
        memcpy((float *)to->at + (size_t)t * stride, x + (size_t)t * row, row * sizeof(float));
    return (kvc_float_rows){x ? to->at : NULL, (int64_t)stride};
}

/* Rows with the centres that were subtracted are those of the scalar level. V of latent rows is the first channels of their keys. */
static void expect_whole_rows(const world *w, const sequence *q, const kvc_head_keys *known) {
    const size_t rows[2] = {w->row[0], w->row[1]}, n = (size_t)q->num_tokens;
    const int dims[2] = {w->layout.head_dim, w->layout.value_head_dim};
    float *x[2][2]; /* of the scalar level, of this one */
    for (int i = 0; i < 4; i++) x[i / 2][i % 2] = malloc((n * rows[i % 2] + 1) * sizeof(float));
    for (int level = num_levels() - 1; level >= 0; level--) {
        const kvc_kernels *kernels = level_at(level);
        float *const *own = x[kernels != scalar_level()];
        for (int side = 0; side < 2; side++) {
            kernels->read_runs(&w->layout, w->arena, q->runs.at, q->num_runs, side ? NULL : own[0], side ? own[1] : NULL,
                               rows[side], (size_t)dims[side], known);
            expect_bits("read rows with centres", kernels, own[side], x[0][side], (int64_t)(n * rows[side]));
        }
        for (size_t t = 0; w->layout.latent && t < n; t++) {
            if (!same_bits(own[0] + t * rows[0], own[1] + t * rows[1], (int64_t)rows[1])) fail("%s: V is no part of K", kernels->name);
        }
    }
    for (int i = 0; i < 4; i++) free(x[i / 2][i % 2]);
}

/* A level stores the bytes of the scalar one; of rows with NaN, whose bytes may differ, what is read back is the same. */
static void expect_stored(const world *w, const kvc_kernels *kernels, const unsigned char *arena, int checked) {
    if (checked && memcmp(arena, w->arena, w->arena_bytes)) fail("%s: other bytes stored", kernels->name);
    for (int side = 0; !checked && side < 2; side++) {
        const kvc_rows of = kvc_rows_of(&w->layout, (kvc_side)side);
        const size_t floats = (size_t)(w->num_blocks * w->layout.block_size) * w->row[side];
        float *got = malloc(floats * sizeof *got), *want = malloc(floats * sizeof *want);
        char kernel[48];
        snprintf(kernel, sizeof kernel, "write any floats as %s%s", kvc_format_of(of.format)->name, of.rotated ? ", rotated" : "");
        read_side(scalar_level(), w, arena, side, got), read_side(scalar_level(), w, w->arena, side, want);
        expect_bits(kernel, kernels, got, want, (int64_t)floats);
        free(got), free(want);
    }
}

static void step_write(source *s, world *w) {
    sequence q = draw_runs(s, w, 1);
    const int sides = draw(s, 8), kind = draw(s, NUM_KINDS),
              checked = draw(s, 4); /* sides: 1 only K, 2 only V */
    memory x[2];
    const float *given[2];
    for (int side = 0; side < 2; side++) {
        const size_t floats = (size_t)q.num_tokens * w->row[side];
        x[side] = take(floats * sizeof(float), 4, draw(s, 2));
        draw_floats(s, kind, x[side].at, floats);
        const kvc_format format = side ? w->layout.value_format : w->layout.key_format;
        if (checked) make_representable(s, x[side].at, floats, format);
        given[side] = sides == 2 - side ? NULL : x[side].at;
    }
    memory before = take(w->arena_bytes, 64, 1);
    memcpy(before.at, w->arena, w->arena_bytes);
    const kvc_kernels *scalar = scalar_level();
    const int steered = checked == 3;
    kvc_head_keys *all = malloc((size_t)w->layout.num_heads * sizeof *all), *known = steered ? all : NULL;
    memory of_known = draw_known(w, all);
    memory apart[2];
    const kvc_float_rows rows[2] = {apart_rows(s, w, &q, 0, given[0], &apart[0]), apart_rows(s, w, &q, 1, given[1], &apart[1])};
    scalar->write_runs(&w->layout, w->arena, q.runs.at, q.num_runs, rows[0], rows[1], known);
    for (int level = 0; level < num_levels(); level++) {
        memory arena = take(w->arena_bytes, 64, draw(s, 2));
        memcpy(arena.at, before.at, w->arena_bytes);
        kvc_write_runs(level_at(level), &w->layout, arena.at, q.runs.at, q.num_runs, rows[0], rows[1], known,
                       1 + draw(s, 4));
        expect_stored(w, level_at(level), arena.at, checked);
        give_back(&arena);
    }
    for (int side = 0; side < 2; side++) {
        if (!given[w->layout.latent ? 0 : side]) continue;
        const size_t row = w->row[side];
        float *back = malloc(((size_t)q.num_tokens * row + 1) * sizeof *back);
        scalar->read_runs(&w->layout, w->arena, q.runs.at, q.num_runs, side ? NULL : back, side ? back : NULL, row,
                          row / (size_t)w->layout.num_heads, NULL);
        for (int64_t t = 0; t < q.num_tokens; t++)
            memcpy(w->rows[side] + q.slots[t] * row, back + (size_t)t * row, row * sizeof(float));
        free(back);
        if (checked && !(side ? w->layout.latent : steered)) expect_written(w, &q, (kvc_side)side, given[side]);
    }
    for (int64_t t = 0; t < q.num_tokens; t++)
        w->plain[q.slots[t]] = kind == GAUSSIAN && given[0] && (given[1] || w->layout.latent) && !steered;
    if (steered) expect_whole_rows(w, &q, known);
    give_back(&of_known), free(all);
    give_back(&before), give_back(&x[0]), give_back(&x[1]), give_back(&apart[0]), give_back(&apart[1]);
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
        memmove(w->rows[side] + b * w->row[side], w->rows[side] + a * w->row[side],
                (size_t)count * w->row[side] * sizeof(float));
    memmove(w->plain + b, w->plain + a, (size_t)count);
}

static void step_clear(source *s, world *w) {
    const int block = draw(s, w->num_blocks), slot = draw(s, w->layout.block_size);
    const int count = draw_between(s, 0, w->layout.block_size - slot);
    kvc_clear_slots(&w->layout, w->arena, block, slot, count);
    for (int side = 0; side < 2; side++)
        memset(w->rows[side] + slot_of(w, block, slot) * w->row[side], 0, (size_t)count * w->row[side] * sizeof(float));
    memset(w->plain + slot_of(w, block, slot), 0, (size_t)count);
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
    say("any shape");
#if defined(CALLERS)
    w.many = 1;
#else
    w.many = (s.state >> 40) % 6 == 1; /* derived from the bytes, but consumes none */
#endif
    w.lse = (s.state >> 32) % 2; /* likewise */
    w.options = s.state >> 8;    /* likewise */
    w.apart = (s.state >> 48) % 4 == 1; /* likewise; true of one input of the corpus */
    try_any_shape(&s);
    draw_layout(&s, &w);
    memory arena = take(w.arena_bytes, 64, draw(&s, 2));
    w.arena = arena.at;
    fill_arena(&s, &w);
    const size_t slots = (size_t)(w.num_blocks * w.layout.block_size);
    w.plain = calloc(slots, 1);
    for (int side = 0; side < 2; side++) w.rows[side] = malloc(slots * w.row[side] * sizeof(float));
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
    step_products(&s);
    step_layer(&s);
    expect_gathered(&s, &w); /* the last ones are the newest: the inputs of the corpus keep their meaning */
    step_digest(&s);
    step_recurrence(&s);
    step_sparse(&s);
    step_shares(&s);
    step_mix(&s);
    step_indexer(&s);
    return 0;
}
