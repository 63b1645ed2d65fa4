/* products.h - the matrix step: weights in and out of a matrix, and products at every level, compared with a twin in
 * double.
 *
 *   codes, words    come back as they went in; a row reads as the float next to scale * (code - zero) + minimum
 *   quantised       the same codes at all levels; each value within the error that its format's steps allow
 *   products        those of the scalar level, of any rows; of rows below 2^40 these are within the bounds of kvc_matrix.h; a
 *                   row with infinities or NaN has no finite result
 *   rows            in several calls, on other numbers of threads, with panels in other pieces: the same bits
 *   bf16            where instructions multiply rows in bf16, the bits of their order (orders.h)
 *
 * The twin multiplies weights by the numbers that meet them: x itself (floats), both rounded to bf16, or group by group. Rows
 * that fill up the last panel are zeros or NaN: no result may depend on them.
 */
#ifndef PRODUCTS_H
#define PRODUCTS_H

#include "orders.h"
#include "runs.h"

typedef struct weights {
    kvc_matrix matrix;
    memory data;
    double *values, *sizes; /* (rows, columns): the weights; the sum of the magnitudes that each is made of */
    int64_t n;              /* rows of x that suit the shape */
} weights;

static double half_value(unsigned half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const double magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                             : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                            : ldexp(mantissa, -24);
    return half & 0x8000 ? -magnitude : magnitude;
}

static int64_t groups_of(const kvc_matrix *m) { return (m->columns + KVC_GROUP - 1) / KVC_GROUP; }

static int64_t scales_of(const kvc_matrix *m) { /* of a row */
    const int channels = kvc_matrix_format_of(m->format)->channels;
    return (m->columns + channels - 1) / channels;
}

static int64_t units_of(const kvc_matrix *m) { /* of a row; with minima there are pairs */
    const kvc_matrix_format_info *info = kvc_matrix_format_of(m->format);
    return kvc_has_units(info) ? (m->columns + 255) / 256 * (1 + info->has_minima) : 0;
}

/* Scale i, or with `minima` minimum i, of those that lie at `from`. */
static double scale_value(const kvc_matrix_format_info *info, const void *from, int64_t i) {
    const unsigned char *bytes = from;
    const int byte = bytes[i], mantissa = byte & 7;
    switch (info->scales) {
    case KVC_HALVES: return half_value(((const uint16_t *)from)[i]);
    case KVC_E8M0: return ldexp(1, byte - 128);
    case KVC_E4M3: return byte >> 3 ? ldexp(8 + mantissa, (byte >> 3) - 11) : ldexp(mantissa, -10);
    default: return info->has_minima || byte < 128 ? byte : byte - 256;
    }
}

/* An unchecked shape is refused or has these properties. */
static void try_any_matrix(source *s) {
    int64_t x[2];
    for (int i = 0; i < 2; i++) {
        uint64_t bits = 0;
        for (int byte = 0; byte < 8; byte++) bits = bits << 8 | draw_byte(s);
        x[i] = draw(s, 8) ? (int64_t)bits >> draw(s, 64) : INT64_MAX - draw(s, 256);
    }
    const int format = draw(s, KVC_NUM_MATRIX_FORMATS + 2) - 1;
    kvc_matrix m;
    if (kvc_matrix_init(&m, (kvc_matrix_format)format, x[0], x[1])) return;
    const int bits = kvc_matrix_format_of(m.format)->bits;
    if (format < 0 || format >= KVC_NUM_MATRIX_FORMATS || m.rows < 1 || m.columns < 1 || m.panel_bytes % 64 ||
        m.panels < 1 || (m.rows - 1) / KVC_PANEL != m.panels - 1 || groups_of(&m) > m.groups ||
        (double)m.panel_bytes < (double)m.columns * KVC_PANEL * bits / 8 ||
        (double)m.panels * (double)m.panel_bytes >= 0x1p63)
        fail("a matrix of %lld, %lld, %d", (long long)x[0], (long long)x[1], format);
}

/* ---- Weights. */

static kvc_matrix draw_matrix(source *s, int64_t *n) {
    enum { USUAL = 7, LARGE = USUAL, LONG, TALL, NUM_SHAPES };
#if defined(CALLERS)
    const int shape = LARGE;
#else
    const int shape = draw(s, NUM_SHAPES);
#endif
    int64_t most = 1 << DRAW_OF(s, 14, 15, 16, 17, 18); /* products; small cases are fast, so there can be many */
    int64_t rows = DRAW_OF(s, 1, 5, 15, 16, 17, 33, 48, 64, 65, 100, 130, 0, 0);
    int64_t columns = DRAW_OF(s, 1, 2, 31, 32, 33, 63, 64, 65, 70, 96, 127, 128, 255, 256, 257, 300, 513, 1030, 0, 0);
    if (!rows) rows = draw_between(s, 1, 200);
    if (!columns) columns = draw_between(s, 1, 700);
    *n = DRAW_OF(s, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 18, 23, 24, 25, 30, 48, 49, 60, 0, 0);
    if (!*n) *n = draw_between(s, 1, 60);
    if (shape == LARGE) /* worth several threads (kvc_matmul_parallel.c) */
        rows = draw_between(s, 352, 415), columns = draw_between(s, 640, 767), most = 1 << 20;
    if (shape == LONG) { /* prepared rows in several chunks (kvc_matmul.c) */
        rows = draw_between(s, 1, 3), columns = draw_between(s, 6000, 8000);
        *n = draw_between(s, 25, 60), most = 1 << 21;
    }
    if (shape == TALL) rows = draw_between(s, 1, 40), columns = draw_between(s, 1, 300), *n = draw_between(s, 90, 560);
    if (shape != TALL && *n * rows * columns > most) *n = most / (rows * columns) + 1;
    kvc_matrix m;
    const int format = draw(s, KVC_NUM_MATRIX_FORMATS);
    if (kvc_matrix_init(&m, (kvc_matrix_format)format, rows, columns)) fail("refused %d, %d", (int)rows, (int)columns);
    return m;
}

/* A row of quantised weights against the floats that it was made of. */
static void expect_near(const weights *w, const float *x, int64_t row, const uint16_t *scales) {
    const kvc_matrix *m = &w->matrix;
    const kvc_rows rows = {.format = KVC_Q4, .bits = 4, .quantised = 1, .dim = KVC_GROUP};
    for (int64_t g = 0; g < groups_of(m); g++) {
        const int64_t first = row * m->columns + g * KVC_GROUP, left = m->columns - g * KVC_GROUP;
        const int channels = left < KVC_GROUP ? (int)left : KVC_GROUP;
        const double step = fabs(half_value(scales[row * groups_of(m) + g]));
        float group[KVC_GROUP], far = 0;
        double squares = 0;
        for (int k = 0; k < KVC_GROUP; k++) group[k] = x[first + (k < channels ? k : channels - 1)];
        for (int k = 0; k < channels; k++) far = fabsf(group[k]) > fabsf(far) ? group[k] : far;
        for (int k = 0; k < channels; k++) {
            const double error = fabs(w->values[first + k] - group[k]);
            /* Half a step, or the rounding of the scale at the far end; q4_0 has no 16th step at the other end. */
            const int clipped = m->format == KVC_MATRIX_Q4_0 && group[k] * (double)far < 0;
            const double allowed = (clipped ? 1.0001 : 0.5001) * step + 0x1p-11 * fabs(far) + 0x1p-18;
            squares += error * error;
            if (m->format != KVC_MATRIX_Q4_1 && !(error <= allowed))
                fail("weight %g errs %g, may %g", group[k], error, allowed);
        }
        const double allowed = allowed_error(rows, group);
        if (m->format == KVC_MATRIX_Q4_1 && !(squares <= KVC_GROUP * allowed * allowed))
            fail("weights err %g, may %g", sqrt(squares / KVC_GROUP), allowed);
    }
}

/* Codes of every level, which must agree. */
static void quantise(source *s, const kvc_matrix *m, const float *x, memory parts[3]) {
    for (int level = num_levels() - 1; level >= 0; level--) {
        memory mine[3];
        for (int i = 0; i < 3; i++) mine[i] = take(parts[i].size, i ? 2 : 1, draw(s, 2));
        level_at(level)->quantise_weights(m->format, m->rows, m->columns, x, mine[0].at, mine[1].at,
                                          parts[2].size ? mine[2].at : NULL);
        for (int i = 0; i < 3; i++) {
            if (level_at(level) == scalar_level())
                memcpy(parts[i].at, mine[i].at, parts[i].size);
            else if (memcmp(parts[i].at, mine[i].at, parts[i].size))
                fail("%s: other %s", level_at(level)->name, i == 0 ? "codes" : i == 1 ? "scales" : "minima");
            give_back(&mine[i]);
        }
    }
}

static void draw_halves(source *s, uint16_t *to, size_t n) {
    const int kind = draw(s, 4), exponent = draw_between(s, -20, 12);
    uint64_t state = (uint64_t)draw(s, 65536);
    for (size_t i = 0; i < n; i++) {
        const uint16_t any = (uint16_t)splitmix(&state);
        to[i] = kind == 0 ? any : kind == 1 ? 0x7bff : kvc_half_of_float(ldexpf(gaussian(&state), exponent));
    }
}

/* n scales or minima: any that the format has. */
static void draw_scales(source *s, const kvc_matrix_format_info *info, void *to, size_t n) {
    static const int tops[] = {[KVC_BYTES] = 256, [KVC_NIBBLES] = 16, [KVC_E8M0] = 255, [KVC_E4M3] = 127};
    const int kind = draw(s, 3), top = tops[info->scales];
    const int low = info->scales == KVC_E8M0 && kind ? 100 : 0, count = low ? 40 : top; /* of any size, or ordinary ones */
    if (info->scales == KVC_HALVES) {
        draw_halves(s, to, n);
        return;
    }
    uint64_t state = (uint64_t)draw(s, 65536);
    for (size_t i = 0; i < n; i++) {
        const int any = (int)(splitmix(&state) >> 16 & 0xffff);
        ((unsigned char *)to)[i] = (unsigned char)(low + (kind == 2 ? (any & 1) * (count - 1) : any % count));
    }
}

/* What the parts of a row stand for, into w. */
static void read_parts(const weights *w, int64_t row, const kvc_parts *parts) {
    const kvc_matrix *m = &w->matrix;
    const kvc_matrix_format_info *info = kvc_matrix_format_of(m->format);
    const float *units = parts->units + row * units_of(m);
    for (int64_t k = 0; k < m->columns; k++) {
        const size_t at = (size_t)(row * m->columns + k);
        const int64_t scale = row * scales_of(m) + k / info->channels, unit = k / 256 * (1 + info->has_minima);
        const int code = parts->codes[at], byte = info->table ? kvc_table_of(info->table)[code] : code;
        double product = scale_value(info, parts->scales, scale) * (byte - info->zero), minimum = 0;
        if (info->has_minima) minimum = scale_value(info, parts->minima, scale);
        if (kvc_has_units(info)) product *= units[unit], minimum *= info->has_minima ? units[unit + 1] : 0;
        w->values[at] = minimum + product, w->sizes[at] = fabs(minimum) + fabs(product);
    }
}

/* Row `row` in parts is what was put. */
static void expect_parts(const kvc_matrix *m, int64_t row, const memory *parts) {
    memory back[4];
    for (int i = 0; i < 4; i++) back[i] = take(parts[i].size / (size_t)m->rows, i ? i == 3 ? 4 : 2 : 1, 1);
    kvc_matrix_get_parts(m, row, &(kvc_parts){back[0].at, back[1].at, back[2].at, back[3].at});
    for (int i = 0; i < 4; i++) {
        if (memcmp(back[i].at, (char *)parts[i].at + (size_t)row * back[i].size, back[i].size))
            fail("part %d of row %d is not what was put", i, (int)row);
        give_back(&back[i]);
    }
}

static void draw_codes(source *s, const kvc_matrix *m, const kvc_parts *parts) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(m->format);
    const size_t scales = (size_t)(m->rows * scales_of(m)), top = (size_t)(1 << info->bits);
    const int kind = draw(s, 4), exponent = draw_between(s, -14, 4);
    uint64_t state = (uint64_t)draw(s, 65536);
    for (int64_t i = 0; i < m->rows * m->columns; i++) {
        const uint64_t bits = splitmix(&state) >> 16, end = bits % 2 * (top - 1);
        parts->codes[i] = (unsigned char)(kind == 0 ? 0 : kind == 1 ? top - 1 : kind == 2 ? end : bits % top);
    }
    draw_scales(s, info, parts->scales, scales);
    if (info->has_minima) draw_scales(s, info, parts->minima, scales);
    for (int64_t i = 0; i < m->rows * units_of(m); i++) /* halves: products of three factors are exact in double then */
        parts->units[i] = kvc_float_of_half(kvc_half_of_float(ldexpf(gaussian(&state), exponent)));
}

static void draw_packed(source *s, weights *w) {
    const kvc_matrix *m = &w->matrix;
    const kvc_matrix_format_info *info = kvc_matrix_format_of(m->format);
    const int64_t rows = m->rows, columns = m->columns, cut = draw(s, (int)rows + 1);
    const size_t count = (size_t)(rows * columns), scales = (size_t)(rows * scales_of(m)) * kvc_scale_bytes(info);
    const int quantised = draw(s, 2) && kvc_quantises(info);
    memory parts[] = {take(count, 1, draw(s, 2)), take(scales, 2, draw(s, 2)),
                      take(info->has_minima ? scales : 0, 2, draw(s, 2)),
                      take((size_t)(rows * units_of(m)) * sizeof(float), 4, draw(s, 2))};
    const kvc_parts all = {parts[0].at, parts[1].at, parts[2].at, parts[3].at};
    memory x = take(quantised ? count * sizeof(float) : 0, 4, draw(s, 2));
    if (quantised) {
        float *values = x.at;
        draw_floats(s, draw(s, NUM_KINDS), values, count);
        for (size_t i = 0; i < count; i++) {
            if (isnan(values[i])) values[i] = 0;
            if (fabsf(values[i]) >= KVC_HALF_OVERFLOW) values[i] = copysignf(65504, values[i]);
        }
        quantise(s, m, values, parts);
    } else {
        draw_codes(s, m, &all);
    }
    const int64_t starts[] = {cut, 0}, counts[] = {rows - cut, cut};
    for (int i = 0; i < 2; i++) {
        const size_t scale = (size_t)(starts[i] * scales_of(m)) * kvc_scale_bytes(info);
        const kvc_parts part = {all.codes + starts[i] * columns, (char *)all.scales + scale,
                                info->has_minima ? (char *)all.minima + scale : NULL,
                                all.units + starts[i] * units_of(m)};
        kvc_matrix_put_parts(m, starts[i], counts[i], &part);
    }
    for (int64_t row = 0; row < rows; row++) {
        expect_parts(m, row, parts);
        read_parts(w, row, &all);
        if (quantised) expect_near(w, x.at, row, parts[1].at);
    }
    give_back(&x);
    for (int i = 0; i < 4; i++) give_back(&parts[i]);
}

static void draw_words(source *s, weights *w) {
    const kvc_matrix *m = &w->matrix;
    const size_t count = (size_t)(m->rows * m->columns), size = (size_t)kvc_matrix_format_of(m->format)->bits / 8;
    const int kind = draw(s, NUM_KINDS), cut = draw(s, (int)m->rows + 1), offset = draw(s, 2);
    memory words = take(count * size + (size_t)offset, 4, draw(s, 2)); /* also at odd addresses */
    unsigned char *to = (unsigned char *)words.at + offset;
    float *x = malloc(count * sizeof *x);
    uint64_t state = (uint64_t)draw(s, 65536);
    draw_floats(s, kind, x, count);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        const uint64_t any = splitmix(&state);
        const uint16_t half = m->format == KVC_MATRIX_F16 ? kvc_half_of_float(x[i]) : (uint16_t)(bits >> 16);
        const uint16_t word = kind == ANY_BITS ? (uint16_t)any : half;
        const uint32_t wide = (uint32_t)word << 16;
        float read;
        memcpy(&read, m->format == KVC_MATRIX_F32 ? &bits : &wide, 4);
        memcpy(to + i * size, size == 4 ? (const void *)&bits : &word, size);
        w->values[i] = m->format == KVC_MATRIX_F16 ? half_value(word) : read;
        w->sizes[i] = fabs(w->values[i]);
    }
    kvc_matrix_put_words(m, cut, m->rows - cut, to + (size_t)(cut * m->columns) * size);
    kvc_matrix_put_words(m, 0, cut, to);
    free(x), give_back(&words);
}

static weights draw_weights(source *s) {
    weights w = {.n = 0};
    w.matrix = draw_matrix(s, &w.n);
    kvc_matrix *m = &w.matrix;
    const size_t count = (size_t)(m->rows * m->columns);
    say("%s of %d x %d", kvc_matrix_format_of(m->format)->name, (int)m->rows, (int)m->columns);
    w.data = take((size_t)m->panels * m->panel_bytes, 64, draw(s, 2));
    m->data = w.data.at;
    memset(m->data, draw(s, 2) ? 0 : 0xff, w.data.size);
    w.values = malloc(2 * count * sizeof(double)), w.sizes = w.values + count;
    if (kvc_matrix_format_of(m->format)->packed)
        draw_packed(s, &w);
    else
        draw_words(s, &w);
    for (int64_t row = 0; row < m->rows; row++) {
        memory back = take((size_t)m->columns * sizeof(float), 4, draw(s, 2));
        kvc_matrix_get_row(m, row, back.at);
        for (int64_t k = 0; k < m->columns; k++) {
            const float got = ((const float *)back.at)[k], expected = (float)w.values[row * m->columns + k];
            if (got != expected && !(isnan(got) && isnan(expected)))
                fail("weight %d, %d reads as %a, not %a", (int)row, (int)k, got, expected);
        }
        give_back(&back);
    }
    return w;
}

/* ---- Products. */

typedef struct product {
    const weights *of;
    memory x, bias;
    int64_t n;
    int has_bias, digits, rounded, offset, at_end; /* offset: of the prepared rows, at any alignment of 4 */
    double *expected, *allowed;           /* (n, rows); allowed -1: the result is not finite, infinite: it is any */
} product;

/* Rows [first, first + n) in a call of their own. With `threads` 0 blocks of rows and pieces of panels come in another
 * order. */
static memory multiply(const kvc_kernels *kernels, const product *p, int64_t first, int64_t n, int threads) {
    const kvc_matrix *m = &p->of->matrix;
    memory out = take((size_t)(n * m->rows) * sizeof(float), 4, p->at_end);
    kvc_matmul_args args = {.matrix = m, .x = (float *)p->x.at + first * m->columns,
                            .bias = p->has_bias ? p->bias.at : NULL, .out = out.at, .n = n, .digits = p->digits};
    if (p->rounded) args.bf16_rows = kvc_bf16_rows_of(kernels);
    memory scratch = take(kvc_matmul_scratch_bytes(&args, threads ? threads : 1) + (size_t)p->offset, 16, p->at_end);
    args.prepared = (unsigned char *)scratch.at + p->offset;
    if (threads) {
        kvc_matmul(kernels, &args, threads);
    } else {
        const int64_t cut = m->panels / 3, step = 48; /* a multiple of every size of a block */
        if (kernels->tiles && kvc_in_codes(&args)) args.tiled = n / KVC_TILED_ROWS * KVC_TILED_ROWS;
        for (int64_t at = (n - 1) / step * step; at >= 0; at -= step)
            kernels->prepare_rows(&args, at, at + step < n ? at + step : n);
        float *sums = (float *)(void *)(args.prepared + (size_t)kvc_prepared_rows(&args) * kvc_prepared_row_bytes(&args));
        kvc_multiply_panels(kernels, &args, cut, m->panels, sums);
        if (cut) kvc_multiply_panels(kernels, &args, 0, cut, sums);
    }
    give_back(&scratch);
    return out;
}

#if defined(CALLERS)
typedef struct caller {
    const kvc_kernels *kernels;
    const product *product;
    memory out;
} caller;

static void *call(void *to) {
    caller *c = to;
    c->out = multiply(c->kernels, c->product, 0, c->product->n, 3);
    return NULL;
}
#endif

static void expect_same(const kvc_kernels *kernels, const product *p, const memory *out, int64_t first, int64_t n,
                        memory again) {
    const float *a = (const float *)out->at + first * p->of->matrix.rows, *b = again.at;
    for (int64_t i = 0; i < n * p->of->matrix.rows; i++) {
        if (memcmp(a + i, b + i, sizeof *a) && !(isnan(a[i]) && isnan(b[i])))
            fail("%s: of %d rows, rows %d to %d have other bits in another call", kernels->name, (int)p->n, (int)first,
                 (int)(first + n));
    }
    give_back(&again);
}

/* The numbers that a row meets packed weights with, times their scale. */
static void round_row(const float *x, int64_t columns, int digits, double *to) {
    const float most = digits == 1 ? 127.0f : 127.0f * 128.0f;
    for (int64_t first = 0; first < columns; first += KVC_GROUP) {
        const int64_t stop = first + KVC_GROUP < columns ? first + KVC_GROUP : columns;
        float largest = 0;
        for (int64_t k = first; k < stop; k++) largest = fmaxf(largest, fabsf(x[k]));
        const float all = largest / most, per_step = largest > 0x1p-100f ? most / largest : 0.0f;
        const float step = digits == 1 ? kvc_float_of_bits(kvc_float_bits(all) & ~3u) : all;
        for (int64_t k = first; k < stop; k++) {
            to[k] = fminf(fmaxf(rintf(x[k] * per_step), -most), most) * (double)step;
            if (!(fabs(to[k] - x[k]) <= 0.505 * step + 0x1p-100)) fail("the twin rounds %a to %a", x[k], to[k]);
        }
    }
}

/* Row i of the twin. */
static void expect_from(product *p, int64_t i) {
    const kvc_matrix *m = &p->of->matrix;
    const int rounded = p->rounded, packed = kvc_matrix_format_of(m->format)->packed && !rounded;
    const float *x = (const float *)p->x.at + i * m->columns, *bias = p->has_bias ? p->bias.at : NULL;
    double *used = malloc((size_t)m->columns * sizeof *used);
    float largest = 0;
    int finite = 1;
    for (int64_t k = 0; k < m->columns; k++) finite &= !!isfinite(x[k]), largest = fmaxf(largest, fabsf(x[k]));
    const int ordinary = finite && largest < ldexpf(1.0f, LARGEST);
    if (ordinary && packed) round_row(x, m->columns, p->digits, used);
    for (int64_t k = 0; ordinary && !packed && k < m->columns; k++) used[k] = rounded ? as_bf16(x[k]) : x[k];
    const int channels = kvc_matrix_format_of(m->format)->channels;
    const double rounding = packed ? (4 + m->columns / (double)channels) * 0x1p-23 : (258 + m->columns / 256.0) * 0x1p-24;
    for (int64_t row = 0; row < m->rows; row++) {
        const double *values = p->of->values + row * m->columns, *sizes = p->of->sizes + row * m->columns;
        double sum = 0, mass = 0;
        for (int64_t k = 0; ordinary && k < m->columns; k++) {
            const double value = rounded ? as_bf16((float)values[k]) : values[k];
            sum += used[k] * value, mass += fabs(used[k]) * fmax(sizes[k], fabs(value));
        }
        double allowed = rounding * mass + 0x1p-126;
        for (int64_t k = 0; ordinary && rounded && k < m->columns; k++) /* below 2^-126 pairs are zeros, and so are sums */
            allowed += 0x1p-126 * (1 + fabs(used[k]) + sizes[k]);
        if (bias) sum += bias[row], allowed += 0x1p-23 * (fabs(bias[row]) + mass);
        if (!ordinary || !(mass < 0x1p120)) allowed = finite ? INFINITY : -1;
        p->expected[i * m->rows + row] = sum, p->allowed[i * m->rows + row] = allowed;
    }
    free(used);
}

/* Some rows, where instructions multiply words of bf16. */
static void expect_order(const kvc_kernels *kernels, const product *p, const float *out) {
    const kvc_matrix *m = &p->of->matrix;
    const kvc_bf16_rows order = kvc_bf16_rows_of(kernels);
    float *w = malloc((size_t)m->columns * sizeof *w);
    for (int64_t row = 0; row < m->rows; row++) {
        kvc_matrix_get_row(m, row, w);
        for (int64_t i = 0; i < p->n; i += p->n / 4 + 1) {
            float sum = in_order(order, m->columns, (const float *)p->x.at + i * m->columns, w);
            if (p->has_bias) sum += ((const float *)p->bias.at)[row];
            const float got = out[i * m->rows + row];
            if (memcmp(&got, &sum, sizeof got) && !(isnan(got) && isnan(sum)))
                fail("%s: output %d, %d of %d is %a, not %a, with %d channels in order", kernels->name, (int)i, (int)row,
                     (int)p->n, got, sum, (int)m->columns);
        }
    }
    free(w);
}

/* Products beside the twin. */
static void expect_near_twin(const product *p, const float *out) {
    const int64_t rows = p->of->matrix.rows;
    for (int64_t i = 0; i < p->n * rows; i++) {
        const double allowed = p->allowed[i];
        if (allowed < 0 && isfinite(out[i]))
            fail("output %d, %d of %d is %g, from a row that is not finite", (int)(i / rows), (int)(i % rows), (int)p->n, out[i]);
        if (allowed >= 0 && allowed < INFINITY && !(fabs(out[i] - p->expected[i]) <= allowed))
            fail("output %d, %d of %d is %g, not %g, may err %g", (int)(i / rows), (int)(i % rows), (int)p->n, out[i],
                 p->expected[i], allowed);
    }
}

/* Products of the scalar level are near the twin, those of others the same; but where instructions have orders of their own. */
static void expect_products(source *s, const product *p, const kvc_kernels *kernels, memory scalar) {
    const int64_t rows = p->of->matrix.rows, cut = draw(s, (int)p->n + 1);
    memory out = multiply(kernels, p, 0, p->n, DRAW_OF(s, 1, 2, 3, 4, 8));
#if defined(CALLERS)
    caller callers[CALLERS];
    pthread_t threads[CALLERS];
    for (int i = 1; i < CALLERS; i++) {
        callers[i] = (caller){kernels, p, out};
        if (pthread_create(&threads[i], NULL, call, &callers[i])) abort();
    }
    expect_same(kernels, p, &out, 0, p->n, multiply(kernels, p, 0, p->n, 4));
    for (int i = 1; i < CALLERS; i++) {
        pthread_join(threads[i], NULL);
        expect_same(kernels, p, &out, 0, p->n, callers[i].out);
    }
#endif
    const kvc_matrix_format_info *info = kvc_matrix_format_of(p->of->matrix.format);
    const int in_order = p->rounded && kvc_bf16_rows_of(kernels) > KVC_BF16_ROUNDED;
    if (in_order || kernels == scalar_level()) expect_near_twin(p, out.at);
    if (in_order)
        expect_order(kernels, p, out.at);
    else {
        char kernel[48];
        const char *what = p->rounded ? "product %s in bf16" : info->packed ? "product %s, %d digits" : "product %s";
        snprintf(kernel, sizeof kernel, what, info->name, p->digits);
        expect_bits(kernel, kernels, out.at, scalar.at, p->n * rows);
    }
    if (cut) expect_same(kernels, p, &out, 0, cut, multiply(kernels, p, 0, cut, draw(s, 5)));
    if (cut < p->n) expect_same(kernels, p, &out, cut, p->n - cut, multiply(kernels, p, cut, p->n - cut, draw(s, 5)));
    give_back(&out);
}

static void step_multiply(source *s, const weights *w) {
    const kvc_matrix *m = &w->matrix;
    const size_t rows = (size_t)m->rows;
    product p = {.of = w, .n = w->n, .has_bias = draw(s, 2), .digits = draw_between(s, 1, 2)};
    p.rounded = draw(s, 2);
    p.offset = 4 * draw(s, 16), p.at_end = draw(s, 2);
    p.x = take((size_t)(p.n * m->columns) * sizeof(float), 4, p.at_end);
    p.bias = take(rows * sizeof(float), 4, p.at_end);
    draw_floats(s, draw(s, NUM_KINDS), p.x.at, (size_t)(p.n * m->columns));
    draw_floats(s, draw(s, ANY_BITS), p.bias.at, rows); /* finite */
    p.expected = malloc(2 * (size_t)p.n * rows * sizeof(double)), p.allowed = p.expected + (size_t)p.n * rows;
    for (int64_t i = 0; i < p.n; i++) expect_from(&p, i);
    memory scalar = multiply(scalar_level(), &p, 0, p.n, 1);
    for (int level = 0; level < num_levels(); level++) expect_products(s, &p, level_at(level), scalar);
    give_back(&scalar);
    free(p.expected), give_back(&p.x), give_back(&p.bias);
}

static void step_products(source *s) {
    try_any_matrix(s);
    weights w = draw_weights(s);
    step_multiply(s, &w);
    free(w.values), give_back(&w.data);
}

#endif
