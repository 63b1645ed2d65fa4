/* kvc_products.h - the two products of attention over one chunk of tokens, in register tiles.
 *
 *   scores    s[row][token]  = q[row] . k[token]                    q: [row][dim padded to 16 with zeros], for panels by kvc_lane
 *   mixing    acc[row][dim]  = acc * alpha[row] + sum of s[row][token] * v[token]
 *
 * Tokens are given as pointers to their rows, so the products do not depend on block sizes, holes or staging. A chunk
 * has KVC_POINTERS of them; those behind its last token repeat it and have weight 0.
 *
 * Few rows (decode): K and V are read from the block, each row once; scores are dot products along dim.
 * Many rows (prefill): K is packed into panels of KVC_PANEL tokens, [dim][token], one after another, for all rows.
 * Both give the same bits. A score has 16 partial sums: sum `lane` adds dimensions lane, lane + 16, .. in
 * this order, from zero; where the row ends, zeros. They are added by halves: in dot products lanes of a vector at a time,
 * of narrow vectors one after the other (kvc_lane); in panels lane by lane in that order. A mixed value is a sum over the
 * tokens in their order, for every tile.
 * Sums of a chunk start from zero and are added to the accumulator once, so rounding grows with the square root of
 * KVC_CHUNK + chunks, not of tokens.
 */
#ifndef KVC_PRODUCTS_H
#define KVC_PRODUCTS_H

#include "kvc_attend.h"
#include "kvc_simd.h"

#define KVC_PANEL (KVC_TILE_VECS * KVC_LANES)
#define STEPS(dim) (((dim) + 15) / 16) /* dimensions that a lane sums, padding included */
#define KVC_PANEL_ROWS (KVC_TILE_ROWS / KVC_PANEL_LANES)
enum { KVC_LANE_BITS = 4 }; /* of 16 lanes */
_Static_assert(KVC_CHUNK % KVC_PANEL == 0, "a chunk is whole panels");
_Static_assert(KVC_DOT_TOKENS % KVC_DOT_SUMS == 0,
               "a step of dot products is whole tiles for every row count");

/* Rows of the next product. While a product reads a line of token t, it prefetches what lies there in the next one's, also where
 * those rows are shorter or longer. */
typedef struct ahead_rows {
    const unsigned char *const *rows; /* KVC_POINTERS of them, or NULL */
    size_t offset;                    /* from each of them */
    size_t bytes;                     /* of a value */
} ahead_rows;

/* kvc_attend_floats.c: the products of kvc_products.h, compiled for each float format. `format` is of the rows that k or v
 * points to; panels and mix_many have rows of f32. */
void KVC_FN(dots)(kvc_format format, int dim, int rows, int tokens, const float *q, int q_stride, const unsigned char *const *k,
                  size_t offset, float *s, ahead_rows ahead);
void KVC_FN(panels)(int dim, int rows, int tokens, const float *q, int q_stride, const unsigned char *const *k, size_t offset,
                    float *space, float *s, ahead_rows ahead);
void KVC_FN(mix_few)(kvc_format format, int dim, int rows, int tokens, const float *s, const unsigned char *const *v,
                     size_t offset, const float *alpha, float *acc, int acc_stride, ahead_rows ahead);
void KVC_FN(mix_many)(int dim, int rows, int tokens, const float *s, const unsigned char *const *v, size_t offset,
                      const float *alpha, float *acc, int acc_stride, ahead_rows ahead);

/* Prefetches what lies as far in the next product's row as a line of `values` (a constant) from d on lies in its own. Into
 * the L2 cache: a chunk of K or V is larger than the L1 cache, and prefetching there measured twice as slow. One line at a time,
 * between the multiplications: a burst fills the miss buffers and stalls the core. */
INLINE void fetch_ahead(ahead_rows ahead, int token, int d, int line) {
    const unsigned char *p = ahead.rows[token] + ahead.offset + (size_t)d * ahead.bytes;
    __builtin_prefetch(p, 0, 2);
    if ((size_t)line * ahead.bytes > 64) __builtin_prefetch(p + 64, 0, 2);
}

/* Prefetches from there into the L1 cache, some tokens ahead. The hardware prefetcher follows one row at a time and is
 * too late. */
INLINE void fetch_near(const unsigned char *line) { __builtin_prefetch(line, 0, 3); }

/* Prefetches between tiles of many rows, so that each does a little: the rows of that share of `tokens` from `first` on which
 * belongs to rows [r, r_stop) of `rows`. Into the L1 cache, from where they come into the second: a prefetch into that
 * alone is lost where many are under way. */
INLINE void fetch_share(ahead_rows ahead, int dim, int first, int tokens, int r, int r_stop, int rows) {
    if (!ahead.rows) return;
    for (int t = first + tokens * r / rows, stop = first + tokens * r_stop / rows; t < stop; t++) {
        const unsigned char *p = ahead.rows[t] + ahead.offset;
        for (size_t at = 0; at < (size_t)dim * ahead.bytes; at += 64) fetch_near(p + at);
    }
}

/* Accumulators of each of 1 to 4 rows, a power of two: 3 rows have as many each as 4. */
#define ROW_SUMS(rows) (KVC_DOT_SUMS / ((rows) == 3 ? 4 : (rows)))

/* Partial sums of rows (1 to 4) x ROW_SUMS(rows) tokens: of the vector of lanes of turn g. Each turn prefetches some of the lines: all
 * of them in one turn would leave the memory idle in the others. */
INLINE void dot_lanes(int g, int rows, kvc_format format, int dim, const float *q, int q_stride,
                      const unsigned char *const *k, size_t offset, ahead_rows ahead, int first, f32v *sums) {
    const int tokens = ROW_SUMS(rows), lane = kvc_lane(g);
    UNROLL
    for (int i = 0; i < KVC_DOT_SUMS; i++) sums[i] = f32v_zero();
    const int line = 512 / kvc_format_of(format)->bits; /* values of a cache line; the inner loop has constant bounds */
    for (int start = 0; start < dim; start += line) {
        const int fetches = start / line % KVC_VECTORS == g;
        UNROLL
        for (int i = 0; i < line; i += 16) {
            const int d = start + i + lane;
            if (start + i >= dim) break;
            f32v q_v[4];
            UNROLL
            for (int r = 0; r < rows; r++) q_v[r] = f32v_load(q + r * q_stride + d);
            UNROLL
            for (int t = 0; t < tokens; t++) {
                const f32v k_v = lane && d >= dim ? f32v_zero() : load_row(format, k[t] + offset, d, dim);
                if (i == 0 && fetches) fetch_near(k[t + tokens] + offset + (size_t)start * (64 / (size_t)line));
                if (i == 0 && fetches && ahead.rows) fetch_ahead(ahead, first + t, start, line);
                UNROLL
                for (int r = 0; r < rows; r++)
                    sums[r * tokens + t] = f32v_fma(q_v[r], k_v, sums[r * tokens + t]);
            }
        }
    }
}

/* Rows times tokens, as above. K is converted once, and rows and tokens are as many as if a vector were all lanes. */
INLINE void dot_tile(int rows, kvc_format format, int dim, const float *q, int q_stride,
                     const unsigned char *const *k, size_t offset, float *s, ahead_rows ahead, int first) {
    const int tokens = ROW_SUMS(rows);
    f32v sums[KVC_DOT_SUMS], left[KVC_LANE_BITS * KVC_DOT_SUMS];
    UNROLL
    for (int g = 0; g < KVC_VECTORS; g++) {
        dot_lanes(g, rows, format, dim, q, q_stride, k, offset, ahead, first, sums);
        const int n = f32v_join(g, KVC_DOT_SUMS, sums, left);
        if (g + 1 == KVC_VECTORS) break;
        UNROLL
        for (int i = 0; i < KVC_DOT_SUMS; i++) left[n * KVC_DOT_SUMS + i] = sums[i];
    }
    float lanes[KVC_DOT_SUMS];
    UNROLL
    for (int i = 0; i < KVC_DOT_SUMS; i += KVC_LANES) f32v_store(lanes + i, f32v_sums(sums + i));
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int t = 0; t < tokens; t++) s[r * KVC_CHUNK + t] = lanes[r * tokens + t];
    }
}

/* All rows times KVC_DOT_TOKENS tokens, which stay in the L1 cache. */
INLINE void dot_step(int rows, kvc_format format, int dim, const float *q, int q_stride,
                     const unsigned char *const *k, size_t offset, float *s, ahead_rows ahead, int first) {
    int r = 0;
#define DOT_ROWS(n)                                                                                    \
    for (; r + (n) <= rows; r += (n), ahead.rows = NULL) {                                             \
        for (int t = 0; t < KVC_DOT_TOKENS; t += ROW_SUMS(n)) {                                        \
            dot_tile(n, format, dim, q + r * q_stride, q_stride, k + t, offset, s + r * KVC_CHUNK + t, \
                     ahead, first + t);                                                                \
        }                                                                                              \
    }
    DOT_ROWS(4)
    DOT_ROWS(3)
    DOT_ROWS(2)
    DOT_ROWS(1)
#undef DOT_ROWS
}

INLINE void dot_chunk(kvc_format format, int dim, int rows, int tokens, const float *q, int q_stride,
                      const unsigned char *const *k, size_t offset, float *s, ahead_rows ahead) {
    for (int t = 0; t < tokens; t += KVC_DOT_TOKENS) {
        dot_step(rows, format, dim, q, q_stride, k + t, offset, s + t, ahead, t);
    }
}

/* The offset in a panel of the KVC_PANEL values of dimension step * 16 + lane, in the order of panel_tile. */
INLINE int panel_at(int steps, int step, int lane) {
    const int i = kvc_lane(lane); /* the order is its own inverse */
    return ((i / KVC_PANEL_LANES * steps + step) * KVC_PANEL_LANES + i % KVC_PANEL_LANES) * KVC_PANEL;
}

/* Packs KVC_PANEL rows of floats into a panel by transposing squares of KVC_LANES x KVC_LANES. */
INLINE void pack_panel(int dim, const unsigned char *const *k, size_t offset, float *panel) {
    const int steps = STEPS(dim);
    for (int t = 0; t < KVC_PANEL; t += KVC_LANES, k += KVC_LANES, panel += KVC_LANES) {
        for (int step = 0; step < steps; step++) {
            UNROLL
            for (int half = 0; half < 16; half += KVC_LANES) {
                const int d = 16 * step + half;
                f32v square[KVC_LANES];
                UNROLL
                for (int i = 0; i < KVC_LANES; i++)
                    square[i] = d < dim ? load_dims((const float *)(k[i] + offset), d, dim) : f32v_zero();
                f32v_transpose(square);
                UNROLL
                for (int i = 0; i < KVC_LANES; i++) f32v_store(panel + panel_at(steps, step, half + i), square[i]);
            }
        }
    }
}

/* Sums each of KVC_PANEL_LANES lanes over the steps, the first of them at q, then adds these sums by halves. */
INLINE void panel_lanes(int rows, int steps, const float *q, int q_stride, const float *panel,
                        f32v sums[KVC_PANEL_ROWS * KVC_TILE_VECS]) {
    f32v each[KVC_PANEL_LANES][KVC_PANEL_ROWS][KVC_TILE_VECS];
    UNROLL
    for (int i = 0; i < KVC_PANEL_LANES; i++) {
        UNROLL
        for (int r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < KVC_TILE_VECS; v++) each[i][r][v] = f32v_zero();
        }
    }
    for (int step = 0; step < steps; step++, q += 16) {
        UNROLL
        for (int i = 0; i < KVC_PANEL_LANES; i++, panel += KVC_PANEL) {
            f32v k_v[KVC_TILE_VECS];
            UNROLL
            for (int v = 0; v < KVC_TILE_VECS; v++) k_v[v] = f32v_load(panel + v * KVC_LANES);
            UNROLL
            for (int r = 0; r < rows; r++) {
                const f32v q_v = f32v_set1(q[r * q_stride + i]);
                UNROLL
                for (int v = 0; v < KVC_TILE_VECS; v++) each[i][r][v] = f32v_fma(q_v, k_v[v], each[i][r][v]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < KVC_TILE_VECS; v++) {
            UNROLL
            for (int apart = 1; apart < KVC_PANEL_LANES; apart *= 2) {
                UNROLL
                for (int i = 0; i < KVC_PANEL_LANES; i += 2 * apart)
                    each[i][r][v] = f32v_add(each[i][r][v], each[i + apart][r][v]);
            }
            sums[r * KVC_TILE_VECS + v] = each[0][r][v];
        }
    }
}

/* Adds groups of lanes one after the other. */
INLINE void panel_tile(int rows, int dim, const float *q, int q_stride, const float *panel, float *s) {
    const int steps = STEPS(dim), groups = 16 / KVC_PANEL_LANES, count = rows * KVC_TILE_VECS;
    f32v left[KVC_LANE_BITS * KVC_PANEL_ROWS * KVC_TILE_VECS], sums[KVC_PANEL_ROWS * KVC_TILE_VECS];
    for (int g = 0; g < groups; g++, panel += steps * KVC_PANEL_LANES * KVC_PANEL) {
        panel_lanes(rows, steps, q + g * KVC_PANEL_LANES, q_stride, panel, sums);
        const int n = f32v_join(g, count, sums, left);
        UNROLL
        for (int i = 0; i < count; i++) {
            if (g + 1 < groups)
                left[n * count + i] = sums[i];
            else
                f32v_store(s + i / KVC_TILE_VECS * KVC_CHUNK + i % KVC_TILE_VECS * KVC_LANES, sums[i]);
        }
    }
}

/* Panel by panel, so that each is in the L1 cache when all rows meet it. Meanwhile the tokens of the next panel are prefetched,
 * and those of the next product. */
INLINE void panel_chunk(int dim, int rows, int tokens, const float *q, int q_stride, const unsigned char *const *k,
                        size_t offset, float *panel, float *s, ahead_rows ahead) {
    for (int t = 0, next = KVC_PANEL; t < tokens; t = next, next += KVC_PANEL) {
        const ahead_rows own = {next < tokens ? k : NULL, offset, sizeof(float)};
        pack_panel(dim, k + t, offset, panel);
        int r = 0;
#define PANEL_ROWS(n)                                                                 \
    for (; r + (n) <= rows; r += (n)) {                                               \
        fetch_share(own, dim, next, KVC_PANEL, r, r + (n), rows);                     \
        fetch_share(ahead, dim, t, KVC_PANEL, r, r + (n), rows);                      \
        panel_tile(n, dim, q + r * q_stride, q_stride, panel, s + r * KVC_CHUNK + t); \
    }
        PANEL_ROWS(KVC_PANEL_ROWS)
        PANEL_ROWS(2)
        PANEL_ROWS(1)
#undef PANEL_ROWS
    }
}

/* rows x vecs vectors of the accumulator over all tokens of the chunk. */
INLINE void mix_tile(int rows, int vecs, kvc_format format, int dim, int d, int tokens, const float *s,
                     const unsigned char *const *v, size_t offset, const float *alpha, float *acc,
                     int acc_stride, ahead_rows ahead) {
    f32v sums[KVC_TILE_ROWS][8];
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int i = 0; i < vecs; i++) sums[r][i] = f32v_zero();
    }
    for (int t = 0; t < tokens; t++, s++) { /* s[r * KVC_CHUNK + t] would be computed in 32 bits, which may wrap */
        f32v v_v[8];
        UNROLL
        for (int i = 0; i < vecs; i++) {
            v_v[i] = load_row(format, v[t] + offset, d + i * KVC_LANES, dim);
            const int at = d + i * KVC_LANES, line = 512 / kvc_format_of(format)->bits; /* values of a cache line */
            if (at % line) continue;
            fetch_near(v[t + KVC_NEAR_VALUES] + offset + (size_t)at * (64 / (size_t)line));
            if (ahead.rows) fetch_ahead(ahead, t, at, line);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            const f32v s_v = f32v_set1(s[r * KVC_CHUNK]);
            UNROLL
            for (int i = 0; i < vecs; i++) sums[r][i] = f32v_fma(s_v, v_v[i], sums[r][i]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int i = 0; i < vecs; i++) {
            float *to = acc + r * acc_stride + d + i * KVC_LANES;
            f32v_store(to, f32v_fma(f32v_load(to), f32v_set1(alpha[r]), sums[r][i]));
        }
    }
}

INLINE void mix_rows(int rows, int vecs, kvc_format format, int dim, int tokens, const float *s,
                     const unsigned char *const *v, size_t offset, const float *alpha, float *acc,
                     int acc_stride, ahead_rows ahead) {
    int d = 0;
    for (; d + vecs * KVC_LANES <= dim; d += vecs * KVC_LANES) {
        mix_tile(rows, vecs, format, dim, d, tokens, s, v, offset, alpha, acc, acc_stride, ahead);
    }
    for (; d < dim; d += KVC_LANES) {
        mix_tile(rows, 1, format, dim, d, tokens, s, v, offset, alpha, acc, acc_stride, ahead);
    }
}

/* Vectors per tile of 1 to 4 rows: at most 8 per row. */
#define MIX_VECS(rows) (ROW_SUMS(rows) < 8 ? ROW_SUMS(rows) : 8)

INLINE void mix_chunk(int tile_rows, kvc_format format, int dim, int rows, int tokens, const float *s,
                      const unsigned char *const *v, size_t offset, const float *alpha, float *acc,
                      int acc_stride, ahead_rows ahead) {
    const int many = tile_rows == KVC_TILE_ROWS;
    const ahead_rows later = {many ? ahead.rows : NULL, ahead.offset, ahead.bytes};
    const int count = ahead.bytes == sizeof(float) ? KVC_PANEL : tokens; /* which it reads first: the others are staged at once */
    int r = 0;
    if (many) ahead.rows = NULL;
#define MIX_ROWS(n, vecs)                                                               \
    for (; r + (n) <= rows; r += (n), ahead.rows = NULL) {                              \
        fetch_share(later, dim, 0, count, r, r + (n), rows);                            \
        mix_rows(n, vecs, format, dim, tokens, s + r * KVC_CHUNK, v, offset, alpha + r, \
                 acc + r * acc_stride, acc_stride, ahead);                              \
    }
    if (many) {
        MIX_ROWS(KVC_TILE_ROWS, KVC_TILE_VECS)
    }
    MIX_ROWS(4, MIX_VECS(4))
    MIX_ROWS(3, MIX_VECS(3))
    MIX_ROWS(2, MIX_VECS(2))
    MIX_ROWS(1, MIX_VECS(1))
#undef MIX_ROWS
}

#endif
