/* kvc_quant.c - float rows to codes and back.
 *
 *   minimum = f16(lowest)      scale = f16((highest - minimum) / top), the next half where that is too small
 *   code    = round((x - minimum) / scale), half to even, within 0 .. top = 2^bits - 1
 *
 * At 4 bits and less, the minimum and scale of kvc_fit.h instead, where the row's squared error is smaller with them.
 *
 * All levels store the same bytes: the arithmetic is plain float32, never fused, in one order, or exact.
 *
 * Error of a row, in what is stored (under rotation: of the rotated row), with ulp16 the spacing of halves:
 *
 *   |read - x| <= max(scale / 2, ulp16(lowest) / 2) + 2^-23 * largest     from lowest to highest
 *   scale      <= range / top * (1 + 2^-10) + 2^-24                       range = highest - minimum
 *
 * and with the fit no larger in the root of the mean square (up to a 64th of a step, see error_of), so that no single
 * value errs more than sqrt(head_dim) times that. A constant row comes back as f16(x). Rows within +-65504 never overflow: the range, at most 131008, is
 * divided by at least 3.
 *
 * ROTATION: a row is stored as H x / head_dim and read as H y, with H the Hadamard matrix of +-1 (H H =
 * head_dim), so no value grows and the scaling, by a power of two, is exact. Reading multiplies the error by
 * sqrt(head_dim) in the mean and head_dim at worst, but rotating divides the range of a typical row by
 * sqrt(head_dim), and that of a row with outliers by more.
 */
#include "kvc_fit.h"
#include "kvc_kernels.h"

/* Steps over 4, 2, 1 (and 8, where a vector has 16 lanes), within a vector or 8 neighbours. */
#if KVC_LANES >= 8
enum { SHORT_STEPS = KVC_LANES };
INLINE f32v short_steps(f32v x) {
    x = f32v_butterfly1(f32v_butterfly2(f32v_butterfly4(x)));
    return KVC_LANES > 8 ? f32v_butterfly8(x) : x;
}
#else
enum { SHORT_STEPS = 8 };
#endif

static void eight_steps(float *e) {
    float a[8], b[8];
    for (int j = 0; j < 4; j++) a[j] = e[j] + e[j + 4], a[j + 4] = e[j] - e[j + 4];
    for (int j = 0; j < 2; j++) {
        b[j] = a[j] + a[j + 2], b[j + 2] = a[j] - a[j + 2];
        b[j + 4] = a[j + 4] + a[j + 6], b[j + 6] = a[j + 4] - a[j + 6];
    }
    for (int j = 0; j < 8; j += 2) e[j] = b[j] + b[j + 1], e[j + 1] = b[j] - b[j + 1];
}

INLINE void transform(float *x, int dim) {
    f32v v[KVC_MAX_HEAD_DIM / KVC_LANES];
    const int n = dim / KVC_LANES;
#if KVC_LANES < 8
    for (int i = 0; i < dim; i += 8) eight_steps(x + i);
#endif
    UNROLL
    for (int i = 0; i < n; i++) {
        v[i] = f32v_load(x + i * KVC_LANES);
#if KVC_LANES >= 8
        v[i] = short_steps(v[i]);
#endif
    }
    for (int step = SHORT_STEPS / KVC_LANES; step < n; step *= 2) {
        UNROLL
        for (int i = 0; i < n; i++) {
            if (i & step) continue;
            const f32v a = v[i], b = v[i + step];
            v[i] = f32v_add(a, b), v[i + step] = f32v_sub(a, b);
        }
    }
    UNROLL
    for (int i = 0; i < n; i++) f32v_store(x + i * KVC_LANES, v[i]);
}

/* Fast Walsh-Hadamard transform in place, unscaled; dim a power of two, 8 to 256. */
void KVC_FN(hadamard)(float *x, int dim) {
    switch (dim) {
    case 8: eight_steps(x); break;
    case 16: transform(x, 16); break;
    case 32: transform(x, 32); break;
    case 64: transform(x, 64); break;
    case 128: transform(x, 128); break;
    default: transform(x, 256); break;
    }
}

static void range_of(const float *x, int dim, float *lowest, float *highest) {
    f32v low_v = f32v_set1(x[0]), high_v = low_v;
    int d = 0;
    for (; d + KVC_LANES <= dim; d += KVC_LANES) {
        low_v = f32v_min(low_v, f32v_load(x + d));
        high_v = f32v_max(high_v, f32v_load(x + d));
    }
    float low = -f32v_max_of(f32v_sub(f32v_zero(), low_v)), high = f32v_max_of(high_v);
    for (; d < dim; d++) low = x[d] < low ? x[d] : low, high = x[d] > high ? x[d] : high;
    *lowest = low + 0.0f, *highest = high; /* -0 to 0: which of them is least depends on the order */
}

/* head_dim times the same value. Rotated it is (value, 0, 0, ...): the value is 2^k steps from 0, so that the
 * scale |value| / 2^k is exact, with the largest k that leaves no denormal: scales stay near other rows'. */
static void constant_row(kvc_rows rows, float value, unsigned char *codes, uint16_t *scale,
                         uint16_t *minimum) {
    const uint16_t half = kvc_half_of_float(value);
    const float kept = kvc_float_of_half(half), magnitude = kept < 0.0f ? -kept : kept;
    int code = rows.rotated ? 1 << (rows.bits - 1) : 0;
    while (code > 1 && magnitude / (float)code < 0x1p-14f) code /= 2;
    *scale = code ? kvc_half_of_float(magnitude / (float)code) : 0;
    *minimum = code && kept >= 0.0f ? 0 : half;
    memset(codes, kept < 0.0f ? code : 0, (size_t)rows.dim);
    codes[0] = (unsigned char)(kept < 0.0f ? 0 : code);
}

/* Codes of x as whole floats, at a minimum and a scale. */
static void encode(const float *x, int dim, uint16_t minimum, uint16_t scale, int top, float *whole) {
    const float m = kvc_float_of_half(minimum);
    const float s = scale ? kvc_float_of_half(scale) : 1.0f, limit = scale ? (float)top : 0.0f;
    for (int d = 0; d < dim; d++) {
        const float code = (x[d] - m) / s, low = code > 0.0f ? code : 0.0f, in = low < limit ? low : limit;
        whole[d] = (in + 0x1p23f) - 0x1p23f; /* no bits below the point: half to even */
    }
}

/* The squared errors of x, summed, each error in 64ths of a step: whole, and at most 255, so that 256 squares stay
 * below 2^24 and the sum is exact in any order. */
static float error_of(const float *x, int dim, uint16_t minimum, uint16_t scale, const float *whole,
                      float step) {
    const f32v m = f32v_set1(kvc_float_of_half(minimum)), s = f32v_set1(kvc_float_of_half(scale));
    const f32v in_parts = f32v_set1(64.0f / step), most = f32v_set1(255.0f);
    f32v sum = f32v_zero();
    for (int d = 0; d < dim; d += KVC_LANES) {
        const f32v read = f32v_add(m, f32v_mul(s, load_dims(whole, d, dim)));
        f32v error = f32v_abs(f32v_mul(f32v_sub(read, load_dims(x, d, dim)), in_parts));
        error = f32v_round(f32v_min(error, most));
        if (KVC_LANES > 8 && d + 8 == dim) {
            float kept[KVC_LANES] = {0};
            f32v_store8(kept, error);
            error = f32v_load(kept);
        }
        sum = f32v_fma(error, error, sum);
    }
    return f32v_sum_of(sum);
}

/* The fitted minimum and scale in place of those of the range, where the row then errs less. */
static void fit(const float *x, int dim, int bits, float lowest, float highest, float *whole, uint16_t *scale,
                uint16_t *minimum) {
    const int top = (1 << bits) - 1;
    const float step = kvc_float_of_half(*scale);
    const kvc_line line = kvc_fit_row(x, dim, bits, lowest, highest);
    const uint16_t low = kvc_half_of_float((float)line.low), wide = kvc_half_of_float((float)line.step);
    if (line.gain == 0.0 || wide == 0) return;
    float fitted[KVC_MAX_HEAD_DIM];
    encode(x, dim, low, wide, top, fitted);
    if (error_of(x, dim, low, wide, fitted, step) >= error_of(x, dim, *minimum, *scale, whole, step)) return;
    memcpy(whole, fitted, (size_t)dim * sizeof *whole);
    *minimum = low, *scale = wide;
}

/* One row, rotated where the rows are. head_dim codes, scale and minimum as halves. */
static void quantise_row(kvc_rows rows, const float *x, unsigned char *codes, uint16_t *scale,
                         uint16_t *minimum) {
    const int dim = rows.dim, top = (1 << rows.bits) - 1;
    float lowest, highest, rotated[KVC_MAX_HEAD_DIM], whole[KVC_MAX_HEAD_DIM];
    range_of(x, dim, &lowest, &highest);
    if (lowest == highest) {
        constant_row(rows, lowest, codes, scale, minimum);
        return;
    }
    if (rows.rotated) {
        const float inverse = 1.0f / (float)dim;
        for (int d = 0; d < dim; d++) rotated[d] = x[d] * inverse;
        KVC_FN(hadamard)(rotated, dim);
        range_of(rotated, dim, &lowest, &highest);
        x = rotated;
    }
    *minimum = kvc_half_of_float(lowest);
    const float m = kvc_float_of_half(*minimum), range = highest > m ? highest - m : 0.0f;
    *scale = kvc_half_of_float(range / (float)top);
    if (kvc_float_of_half(*scale) * ((float)top + 0.5f) < range)
        ++*scale; /* the next half, where rounding fell short */
    encode(x, dim, *minimum, *scale, top, whole);
    if (rows.bits <= 4 && *scale) fit(x, dim, rows.bits, lowest, highest, whole, scale, minimum);
    for (int d = 0; d < dim; d++) codes[d] = (unsigned char)(int)whole[d];
}

static void dequantise_row(int dim, const unsigned char *codes, uint16_t scale, uint16_t minimum, float *x) {
    const float s = kvc_float_of_half(scale), m = kvc_float_of_half(minimum);
    for (int d = 0; d < dim; d++) x[d] = m + s * (float)codes[d]; /* the product has 19 bits: exact */
}

/* Through constants, so that shifts and divisions are. */
static void put_codes(kvc_rows rows, const unsigned char *codes, int t, unsigned char *packed) {
#define PUT(constant_bits)                                                \
    rows.bits = constant_bits;                                            \
    if (rows.side == KVC_KEYS)                                            \
        rows.side = KVC_KEYS, kvc_put_tile_codes(rows, codes, t, packed); \
    else                                                                  \
        rows.side = KVC_VALUES, kvc_put_tile_codes(rows, codes, t, packed);
    switch (rows.bits) {
    case 8: PUT(8) break;
    case 4: PUT(4) break;
    case 3: PUT(3) break;
    default: PUT(2) break;
    }
#undef PUT
}

enum { FEW_TOKENS = 3 }; /* written one by one: a tile is 16 times the work of a token */

/* Tokens [first, first + count) of one tile. */
static void write_tile(kvc_rows rows, unsigned char *tile, int first, int count, const float *x,
                       size_t row_stride) {
    unsigned char units[KVC_MAX_HEAD_DIM * KVC_TILE], codes[KVC_TILE][KVC_MAX_HEAD_DIM];
    unsigned char *packed = tile + KVC_TILE_HEADER;
    uint16_t *scales = (uint16_t *)tile, *minima = scales + KVC_TILE;
    for (int t = first; t < first + count; t++, x += row_stride) {
        quantise_row(rows, x, codes[t], &scales[t], &minima[t]);
    }
    if (count <= FEW_TOKENS) {
        for (int t = first; t < first + count; t++) put_codes(rows, codes[t], t, packed);
        return;
    }
    if (count < KVC_TILE) { /* the codes of the other tokens stay */
        kvc_unpack_units(rows.bits, rows.dim, packed, units);
        for (int t = 0; t < KVC_TILE; t++) {
            if (t < first || t >= first + count) kvc_codes_of_units(rows.side, rows.dim, units, t, codes[t]);
        }
    }
    kvc_units_of_rows(rows.side, rows.dim, codes, units);
    kvc_pack_units(rows.bits, rows.dim, units, packed);
}

static void read_tile(kvc_rows rows, const unsigned char *tile, int first, int count, float *x,
                      size_t row_stride) {
    unsigned char units[KVC_MAX_HEAD_DIM * KVC_TILE], codes[KVC_MAX_HEAD_DIM];
    const uint16_t *scales = (const uint16_t *)tile, *minima = scales + KVC_TILE;
    kvc_unpack_units(rows.bits, rows.dim, tile + KVC_TILE_HEADER, units);
    for (int t = first; t < first + count; t++, x += row_stride) {
        kvc_codes_of_units(rows.side, rows.dim, units, t, codes);
        dequantise_row(rows.dim, codes, scales[t], minima[t], x);
    }
}

static void write_row(kvc_rows rows, unsigned char *row, const float *x) {
    unsigned char codes[KVC_MAX_HEAD_DIM];
    uint16_t header[2];
    quantise_row(rows, x, codes, &header[0], &header[1]);
    memcpy(row, header, sizeof header);
    kvc_pack_row(rows.bits, rows.dim, codes, row + sizeof header);
}

static void read_row(kvc_rows rows, const unsigned char *row, float *x) {
    unsigned char codes[KVC_MAX_HEAD_DIM];
    uint16_t header[2];
    memcpy(header, row, sizeof header);
    kvc_unpack_row(rows.bits, rows.dim, row + sizeof header, codes);
    dequantise_row(rows.dim, codes, header[0], header[1], x);
}

/* Tokens of the tile that holds slot, from slot on, at most count. */
static int in_tile(int slot, int count) {
    const int rest = KVC_TILE - slot % KVC_TILE;
    return rest < count ? rest : count;
}

void KVC_FN(quantise_head)(kvc_rows rows, unsigned char *head, int slot, int count, const float *x,
                           size_t row_stride) {
    for (int n; count > 0; count -= n, slot += n, x += (size_t)n * row_stride) {
        n = rows.tiled ? in_tile(slot, count) : 1;
        if (rows.tiled) {
            unsigned char *tile = head + (size_t)(slot / KVC_TILE) * kvc_tile_bytes(rows);
            write_tile(rows, tile, slot % KVC_TILE, n, x, row_stride);
        } else {
            write_row(rows, head + (size_t)slot * kvc_row_bytes(rows), x);
        }
    }
}

void KVC_FN(dequantise_head)(kvc_rows rows, const unsigned char *head, int slot, int count, float *x,
                             size_t row_stride) {
    for (int n; count > 0; count -= n, slot += n, x += (size_t)n * row_stride) {
        n = rows.tiled ? in_tile(slot, count) : 1;
        if (rows.tiled) {
            const unsigned char *tile = head + (size_t)(slot / KVC_TILE) * kvc_tile_bytes(rows);
            read_tile(rows, tile, slot % KVC_TILE, n, x, row_stride);
        } else {
            read_row(rows, head + (size_t)slot * kvc_row_bytes(rows), x);
        }
    }
}
