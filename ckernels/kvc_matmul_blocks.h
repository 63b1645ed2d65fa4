/* kvc_matmul_blocks.h - prepared rows times panels of floats (kvc_matrix.h), block by block of channels.
 *
 * Few rows read four panels from begin to end, at the speed of memory: those of one tile without a stop between the blocks of
 * channels, which took a tenth of the time. Many rows go in chunks. A chunk is multiplied with one group
 * of panels after another, and with each group block by block of channels. Meanwhile the second level of the cache keeps the
 * chunk's prepared rows of this block and its sums of the group, the first keeps `wide` panels of it.
 */
#ifndef KVC_MATMUL_BLOCKS_H
#define KVC_MATMUL_BLOCKS_H

#include "kvc_matmul_tile.h"

enum {
    /* Bytes of a panel from what is read to what is prefetched, up to four panels at a time, measured: into the first level of
     * the cache, up to NEAR_ROWS rows; into the second, which tiles of more rows read at most two panels of at a time. */
    AHEAD_OF_FEW = 2048,
    NEAR_ROWS = KVC_FLOAT_ROWS == 12 ? 6 : 4,
    FLOATS_AHEAD = 4096,
    FEW_ROWS = 16, /* of floats: the speed of memory is the limit */
};

/* What a tile of floats reads: channels of its panels, which lie `stride` bytes apart. */
typedef struct block {
    const unsigned char *data;
    size_t stride;
    int64_t channels;
} block;

typedef void float_fn(const block *weights, const void *x, tile *);

/* How rows meet panels. */
typedef struct meeting {
    float_fn *const *tiles;       /* by rows */
    int (*rows)(int64_t left);    /* of the next tile, if `left` are left */
    int64_t (*panels)(int rows);  /* of tiles of `rows` rows */
    block (*changed)(kvc_matrix_format, block weights, int64_t panels, size_t ahead, float *to); /* first; NULL: as they are */
    int64_t channels; /* of a row that lie side by side: a block is filled up to a multiple */
    int64_t bytes;    /* of a number of x */
    void (*finish)(tile *); /* keeps the sums of the last tile, where a tile keeps those of the one before it; or NULL */
} meeting;

INLINE const unsigned char *panel_of(const block *weights, int panel, const tile *t) {
    return weights->data + (size_t)(panel < t->existing ? panel : t->existing - 1) * weights->stride;
}

/* Prefetches a line of a panel while byte `at` of it is read; `rows` is a constant. */
INLINE void fetch(const tile *t, int rows, const unsigned char *panel, size_t at) {
    prefetch(rows <= NEAR_ROWS, panel + at + ahead_of(t, at, rows <= NEAR_ROWS ? AHEAD_OF_FEW : FLOATS_AHEAD), 64);
}

/* Where the block of channels ends that begins at k; k itself behind the last one. Between the blocks of a tile its sums are in
 * its results. */
INLINE int64_t begin_block(const block *weights, int64_t k, tile *t) {
    const int64_t left = weights->channels - k;
    if (weights->channels > KVC_CHANNEL_BLOCK) {
        t->before = k ? t->results : NULL;
        t->partial = left > KVC_CHANNEL_BLOCK ? t->results : NULL;
    }
    return k + (left < KVC_CHANNEL_BLOCK ? left : KVC_CHANNEL_BLOCK);
}

INLINE size_t channel_bytes(const kvc_matrix *matrix, int64_t channels) {
    const kvc_matrix_format_info *info = kvc_matrix_format_of(matrix->format);
    if (!info->packed) return (size_t)(channels * KVC_PANEL * info->bits / 8);
    const int64_t of_record = KVC_GROUP * kvc_groups_per_record(info);
    return (size_t)((channels + of_record - 1) / of_record) * kvc_record_bytes(info);
}

/* Channels that a tile multiplies before the next one: of few rows, if they are one tile, all channels, block by block. */
INLINE int64_t channels_at_once(const kvc_matmul_args *args, const meeting *how) {
    const int one = args->n <= FEW_ROWS && !how->changed && how->rows(args->n) == args->n;
    return one ? args->matrix->columns : KVC_CHANNEL_BLOCK;
}

/* Up to `most` channels from k on, of the panels from `panel` on, that are multiplied together. */
INLINE block block_at(const kvc_matrix *matrix, int64_t panel, int64_t k, int64_t most) {
    const int64_t left = matrix->columns - k;
    return (block){matrix->data + (size_t)panel * matrix->panel_bytes + channel_bytes(matrix, k), matrix->panel_bytes,
                   left < most ? left : most};
}

/* Panels [panel, panel_stop) times rows [start, stop), over the block of channels from k on. `sums`: of these panels and rows,
 * tile by tile, over the blocks before. */
INLINE void multiply_block(const kvc_matmul_args *args, const meeting *how, int64_t start, int64_t stop, int64_t panel,
                           int64_t panel_stop, int64_t k, float *sums, float *floats) {
    const kvc_matrix *matrix = args->matrix;
    const block stored = block_at(matrix, panel, k, channels_at_once(args, how));
    const int64_t channels = stored.channels, left = matrix->columns - k, panels = panel_stop - panel;
    const int many = args->n > FEW_ROWS;
    const size_t read_stop = channel_bytes(matrix, many ? channels : left);
    const size_t end = many ? read_stop : matrix->panel_bytes; /* from the panel's first byte that they read */
    const size_t ahead = many ? (size_t)panels * stored.stride : AHEAD_OF_FEW;
    const block weights = how->changed ? how->changed(matrix->format, stored, panels, ahead, floats) : stored;
    const int64_t filled = (channels + how->channels - 1) / how->channels * how->channels;
    const unsigned char *x = args->prepared + k * kvc_prepared_rows(args) * how->bytes;
    tile own[2], *t = own, *last = NULL;
    for (int64_t row = start; row < stop;) {
        const int rows = how->rows(stop - row);
        const int64_t step = how->panels(rows);
        for (int64_t q = panel; q < panel_stop; q += step, sums += rows * step * KVC_PANEL) {
            const block here = {weights.data + (size_t)(q - panel) * weights.stride, weights.stride, channels};
            begin(t, args, row, rows, q, step, panel_stop, row % KVC_CHUNK_ROWS == 0 && !how->changed,
                  k > 0 ? sums : NULL, channels < left ? sums : NULL);
            t->block_rows = how->rows(args->n), t->read_stop = read_stop;
            t->skipped = (size_t)step * matrix->panel_bytes - end, t->last = last;
            how->tiles[rows](&here, x + row * filled * how->bytes, t);
            if (!how->finish) give(args, t);
            if (!how->finish) continue;
            if (last) give(args, last);
            last = t, t = t == own ? own + 1 : own;
        }
        row += rows;
    }
    if (last) how->finish(last), give(args, last);
}

/* A block of channels of panels [panel, panel_stop), four at most, and rows [start, stop) of a chunk. Tiles of few rows are four
 * panels wide: so the rows behind the last whole tile meet all four together, unless two at a time are converted. */
INLINE void multiply_four(const kvc_matmul_args *args, const meeting *how, int most, int64_t start, int64_t stop, int64_t panel,
                          int64_t panel_stop, int64_t k, float *sums, float *floats) {
    const int few = args->n <= FEW_ROWS;
    const int64_t wide = few ? 4 : how->panels(most);
    const int64_t whole = few || how->changed ? stop : start + (stop - start) / most * most;
    const int64_t each = (whole - start + KVC_SPARE_ROWS) * KVC_PANEL; /* sums of a panel; behind four, those of the last rows */
    for (int64_t p = panel; p < panel_stop; p += wide)
        multiply_block(args, how, start, whole, p, p + wide < panel_stop ? p + wide : panel_stop, k, sums + (p - panel) * each,
                       floats);
    if (whole < stop) multiply_block(args, how, whole, stop, panel, panel_stop, k, sums + 4 * each, floats);
}

/* The results of panels [panel, panel_stop) for all rows, which meet them in blocks of up to `most` rows. */
INLINE void multiply_blocks(const kvc_matmul_args *args, const meeting *how, int most, int64_t panel, int64_t panel_stop,
                            float *scratch) {
    const int64_t group = args->n <= FEW_ROWS ? 4 : kvc_group_panels(args), chunk = kvc_chunk_rows(args);
    float *sums = scratch + (how->changed ? KVC_WIDE_FLOATS : 0);
    for (int64_t start = 0; start < args->n; start += chunk) {
        const int64_t stop = start + chunk < args->n ? start + chunk : args->n;
        for (int64_t first = panel; first < panel_stop; first += group) {
            const int64_t last = first + group < panel_stop ? first + group : panel_stop;
            for (int64_t k = 0; k < args->matrix->columns; k += channels_at_once(args, how)) {
                for (int64_t p = first; p < last; p += 4)
                    multiply_four(args, how, most, start, stop, p, p + 4 < last ? p + 4 : last, k,
                                  sums + (p - first) * (stop - start + KVC_SPARE_ROWS) * KVC_PANEL, scratch);
            }
        }
    }
}

#endif
