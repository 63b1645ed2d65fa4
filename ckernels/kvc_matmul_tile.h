/* kvc_matmul_tile.h - a tile of a product: which rows and panels it has, and the way of its sums into `out`. */
#ifndef KVC_MATMUL_TILE_H
#define KVC_MATMUL_TILE_H

#include <string.h>

#include "kvc_matrix.h"
#include "kvc_simd.h"

enum {
    TILE_ROWS = 2 * KVC_TILED_ROWS, TILE_PANELS = 2, /* of bf16 in tiles */
    MOST_RESULTS = KVC_TILES ? TILE_ROWS * TILE_PANELS * KVC_PANEL : KVC_FLOAT_SUMS * KVC_LANES,
};

/* The sums go straight into `out`, or by way of `results`, [row][panel][16], where they are not whole rows of results; those
 * of floats, as long as blocks of channels follow, go to `partial`, in the order of `results`. */
typedef struct tile {
    int rows, panels;
    int block_rows;          /* of the call's first block: in tiles, rows that lie together, the last ones perhaps none of x */
    int64_t first;           /* row of x */
    int64_t panel, existing; /* panels behind the existing ones repeat the last */
    int cold;                /* the first rows of a chunk: they prefetch, later ones find the panels in the cache */
    int add;                 /* to what `out` has */
    const float *before;     /* the sums of the blocks of channels before this one, or NULL */
    float *partial;          /* NULL: this is the last block */
    size_t read_stop;        /* of a panel: behind this byte the same rows read the next panels */
    size_t skipped;          /* bytes from there to where these begin */
    float *out;              /* of the first row; NULL: results */
    int64_t out_stride;      /* floats between rows there */
    float results[MOST_RESULTS];
    struct tile *last;       /* the one before it, whose sums it keeps; or NULL */
#if KVC_TILES
    _Alignas(64) float sums[TILE_ROWS][TILE_PANELS * KVC_PANEL];
#endif
} tile;

/* The distance from byte `at` of a panel to the byte that is read `ahead` bytes later. */
INLINE size_t ahead_of(const tile *t, size_t at, size_t ahead) {
    return at + ahead < t->read_stop ? ahead : ahead + t->skipped;
}
/* Into the first level of the cache (near), or into the second. */
INLINE void prefetch(int near, const unsigned char *p, size_t bytes) {
    UNROLL
    for (size_t line = 0; line < bytes; line += 64) {
        if (near)
            __builtin_prefetch(p + line, 0, 3);
        else
            __builtin_prefetch(p + line, 0, 2);
    }
}

/* All but the results, which an initialiser would fill with zeros for every tile. The lines of `out` are fetched while the
 * tile is computed. */
INLINE void begin(tile *t, const kvc_matmul_args *args, int64_t first, int rows, int64_t panel, int64_t panels,
                  int64_t panel_stop, int cold, const float *before, float *partial) {
    const int64_t stride = args->matrix->rows;
    float *out = args->out + first * stride + panel * KVC_PANEL;
    t->rows = rows, t->panels = (int)panels, t->first = first, t->panel = panel, t->existing = panel_stop - panel;
    t->cold = cold, t->add = args->add, t->before = before, t->partial = partial;
    t->read_stop = args->matrix->panel_bytes, t->skipped = (size_t)(panels - 1) * t->read_stop;
    t->out = !args->bias && panels <= t->existing && (panel + panels) * KVC_PANEL <= stride ? out : NULL;
    t->out_stride = stride;
    if (partial) return;
    for (int i = 0; i < rows; i++, out += stride) {
        for (int64_t p = 0; p < panels; p++) __builtin_prefetch(out + p * KVC_PANEL, 1, 2);
    }
}

/* Where the sums of a tile go. */
typedef struct target {
    float *to;
    int64_t stride; /* floats between rows */
    int add;        /* to what is there */
} target;

INLINE target target_of(tile *t, int panels) {
    if (t->out && !t->partial) return (target){t->out, t->out_stride, t->add};
    return (target){t->partial ? t->partial : t->results, panels * KVC_PANEL, 0};
}

/* Sums of row i; the number of panels is a constant. */
INLINE void keep_row(tile *t, int i, int panels, const f32x16 *sums) {
    const target place = target_of(t, panels);
    float *to = place.to + i * place.stride;
    UNROLL
    for (int p = 0; p < panels; p++) {
        UNROLL
        for (int v = 0; v < KVC_VECTORS; v++) {
            const int at = p * KVC_PANEL + v * KVC_LANES;
            const f32v own = sums[p].v[v];
            const f32v sum = t->before ? f32v_add(f32v_load(t->before + i * panels * KVC_PANEL + at), own) : own;
            f32v_store(to + at, place.add ? f32v_add(f32v_load(to + at), sum) : sum);
        }
    }
}

/* Rows and panels are constants. */
INLINE void keep(tile *t, int rows, int panels, const f32x16 *sums) {
    UNROLL
    for (int i = 0; i < rows; i++) keep_row(t, i, panels, sums + i * panels);
}

/* Sets `out` to the results, or adds them to it; then adds the bias. Files of tiles alone do not use it. */
static __attribute__((noinline, unused)) void give(const kvc_matmul_args *args, const tile *t) {
    const float *bias = args->bias;
    if (t->out || t->partial) return;
    for (int i = 0; i < t->rows; i++) {
        for (int p = 0; p < t->panels && p < t->existing; p++) {
            const int64_t column = (t->panel + p) * KVC_PANEL, left = args->matrix->rows - column;
            const float *from = t->results + (i * t->panels + p) * KVC_PANEL;
            float *to = args->out + (t->first + i) * args->matrix->rows + column;
            const int count = left < KVC_PANEL ? (int)left : KVC_PANEL;
            if (!t->add) memcpy(to, from, (size_t)count * sizeof(float));
            for (int j = 0; t->add && j < count; j++) to[j] += from[j];
            for (int j = 0; bias && j < count; j++) to[j] += bias[column + j];
        }
    }
}

#endif
