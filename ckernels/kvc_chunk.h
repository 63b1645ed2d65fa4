/* kvc_chunk.h - scores and mixing of one head over one chunk, by one of three ways: integers on tiles, floats read from
 * the block (few rows of a float format), or floats that are staged first. */
#ifndef KVC_CHUNK_H
#define KVC_CHUNK_H

#include "kvc_job.h"
#include "kvc_products.h"
#include "kvc_tiled.h"

/* The staged row of a lane: of one before the first token that of this, of one behind the last token that of this. */
static int staged_row(const chunk *c, int lane) {
    const int first = c->piece[0].lane;
    return lane < first ? first : lane < c->lanes ? lane : c->lanes - 1;
}

/* One head's rows of the chunk as floats, and pointers to them. Pointers behind the last token repeat it. */
static void stage_rows(const job *j, const chunk *c, kvc_rows rows, int head, const unsigned char **staged) {
    const int padded = rows.side == KVC_KEYS ? j->padded : j->v_padded;
    const size_t k_bytes = j->layout->key_head_bytes, v_bytes = j->layout->value_head_bytes;
    const size_t values = kvc_values_at(j->layout) + (size_t)head * v_bytes;
    const size_t offset = rows.side == KVC_KEYS ? (size_t)head * k_bytes : values;
    for (int i = 0; rows.quantised && i < c->pieces; i++) {
        const piece *p = &c->piece[i];
        float *to = j->stage + p->lane * padded;
        KVC_UNFUSED(dequantise_head)(rows, p->block + offset, p->slot, p->count, to, (size_t)padded);
    }
    const int first = c->piece[0].lane;
    for (int t = 0; t < KVC_POINTERS; t++) {
        float *to = j->stage + staged_row(c, t) * padded;
        staged[t] = (const unsigned char *)to;
        if (rows.quantised || t < first || t >= c->lanes) continue;
        const unsigned char *from =
            rows.side == KVC_KEYS ? c->k[t] + (size_t)head * k_bytes : c->v[t] + (size_t)head * v_bytes;
        for (int d = 0; d < rows.dim; d += KVC_LANES)
            f32v_store(to + d, load_row(rows.format, from, d, rows.dim));
    }
}

/* The tiles of a head's rows in a chunk, and those of the next chunk to prefetch; where it has fewer, the same again.
 * `offset`: of the head in a block, from head 0 on. Returns whether there is a next chunk. */
INLINE int list_tiles(const unsigned char *const *first, const unsigned char *const *then, int tiles, int more, size_t offset,
                      const unsigned char **tile, const unsigned char **ahead) {
    for (int i = 0; i < tiles; i++) {
        tile[i] = first[i] + offset;
        ahead[i] = (i < more ? then[i] : first[i]) + offset;
        fetch_lines(ahead[i], KVC_TILE_HEADER);
    }
    return more > 0;
}

static int score_tiles(const job *j, const chunk *c, int head, const unit_query *q, int rows,
                       const chunk *next) {
    const unsigned char *tile[KVC_CHUNK / KVC_TILE], *ahead[KVC_CHUNK / KVC_TILE];
    const int more = list_tiles(c->k, next ? next->k : NULL, c->pieces, next ? next->pieces : 0,
                                (size_t)head * j->layout->key_head_bytes, tile, ahead);
    const int tiled = tiled_rows(rows);
#if KVC_TILES
    if (tiled) dot_tiled(j->k_rows.bits, j->k_rows.dim, tiled, c->pieces, q, tile, j->weights, more ? ahead : NULL);
#endif
    UNITS(unit_dot)(j->k_rows.bits, j->k_rows.dim, rows - tiled, c->pieces, q + tiled, tile, j->weights + tiled * KVC_CHUNK,
             more && !tiled ? ahead : NULL);
    return c->lanes;
}

/* Loads the scales of a tile. Lanes of a tile without a token of the piece have weight 0 but arbitrary bytes as scale and
 * minimum, so these become 0. */
static void tile_scales(const piece *p, const unsigned char *tile, float centre, float *scales, float *middles) {
    const uint16_t *halves = (const uint16_t *)tile;
    for (int t = 0; t < KVC_TILE; t += KVC_LANES) {
        const f32v scale_v = f32v_load_half(halves + t), minimum_v = f32v_load_half(halves + KVC_TILE + t);
        f32v_store(scales + t, scale_v);
        f32v_store(middles + t, f32v_fma(scale_v, f32v_set1(centre), minimum_v));
    }
    const int first = p->slot % KVC_TILE;
    for (int t = 0; p->count < KVC_TILE && t < KVC_TILE; t++) {
        if (t < first || t >= first + p->count) scales[t] = middles[t] = 0.0f;
    }
}

/* Replaces tiles of latent rows by tiles of their V: the same codes in the order of V. */
static void turn_tiles(const job *j, int tiles, const unsigned char **tile) {
    unsigned char units[KVC_MAX_HEAD_DIM * KVC_TILE], turned[KVC_MAX_HEAD_DIM * KVC_TILE];
    unsigned char *to = j->turned;
    const int dim = j->v_rows.dim;
    for (int i = 0; i < tiles; i++, to += kvc_tile_bytes(j->v_rows)) {
        memcpy(to, tile[i], KVC_TILE_HEADER);
        kvc_unpack_units(j->v_rows.bits, dim, tile[i] + KVC_TILE_HEADER, units);
        kvc_turn_units(dim, units, turned);
        kvc_pack_units(j->v_rows.bits, dim, turned, to + KVC_TILE_HEADER);
        tile[i] = to;
    }
}

static void mix_tiles(const job *j, const chunk *c, int head, int rows, float *acc, const chunk *next) {
    const unsigned char *tile[KVC_CHUNK / KVC_TILE], *ahead[KVC_CHUNK / KVC_TILE];
    const int more = list_tiles(c->v, next ? next->v : NULL, c->pieces, next ? next->pieces : 0,
                                (size_t)head * j->layout->value_head_bytes, tile, ahead);
    if (j->layout->latent) turn_tiles(j, c->pieces, tile);
    const int tiled = tiled_rows(rows);
#if KVC_TILES
    if (tiled)
        mix_tiled(j->v_rows.bits, j->v_rows.dim, tiled, c->pieces, depth_of(j->k_rows.dim), j->unit_w, tile, j->alpha, acc,
                  j->v_padded, more ? ahead : NULL);
#endif
    UNITS(unit_mix)(j->v_rows.bits, j->v_rows.dim, rows - tiled, c->pieces, j->unit_w + tiled, tile, j->alpha + tiled,
             acc + (size_t)tiled * (size_t)j->v_padded, j->v_padded, more && !tiled ? ahead : NULL);
}

/* Loads the scales of a head's V in a chunk. */
static void load_scales(const job *j, const chunk *c, int head, v_scales *v) {
    const size_t offset = (size_t)head * j->layout->value_head_bytes;
    const float centre = centre_of(j->v_rows.bits);
    for (int i = 0; i < c->pieces; i++)
        tile_scales(&c->piece[i], c->v[i] + offset, centre, v->scales + KVC_TILE * i, v->middles + KVC_TILE * i);
}

/* Writes the scores of the chunk for the rows packed at index to weights. Lanes without a token have undefined scores.
 * Returns the number of lanes with tokens, up to a multiple of 16. */
NOINLINE int score_chunk(const job *j, const chunk *c, int head, size_t index, int rows, ahead_rows ahead,
                         const chunk *next) {
    if (j->units) return score_tiles(j, c, head, (c->sink ? j->unit_sink_q : j->unit_q) + index, rows, next);
    (void)next;
    const float *q = (c->sink ? j->sink_q : j->q) + index * (size_t)j->padded;
    const int few = rows <= KVC_DOT_ROWS,
              step = few || KVC_PANEL < KVC_DOT_TOKENS ? KVC_DOT_TOKENS : KVC_PANEL;
    const int tokens = (c->lanes + step - 1) / step * step;
    const unsigned char *staged[KVC_POINTERS], *const *k = c->k;
    size_t offset = (size_t)head * j->layout->key_head_bytes;
    const int stage = j->k_rows.quantised || (j->k_rows.format != KVC_F32 && !few);
    if (stage) {
        stage_rows(j, c, j->k_rows, head, staged);
        k = staged, offset = 0;
    }
    if (!few)
        KVC_FN(panels)(j->k_rows.dim, rows, tokens, q, j->padded, k, offset, j->panels, j->weights, ahead);
    else
        KVC_FN(dots)(stage ? KVC_F32 : j->k_rows.format, j->k_rows.dim, rows, tokens, q, j->padded, k, offset, j->weights,
             ahead);
    return (c->lanes + 15) / 16 * 16;
}

/* acc = acc * alpha + weights V. */
NOINLINE void mix_values(const job *j, const chunk *c, int head, int rows, int tokens, float *acc,
                         ahead_rows ahead, const chunk *next) {
    if (j->units) {
        mix_tiles(j, c, head, rows, acc, next);
        return;
    }
    (void)next;
    const int few = rows <= KVC_DOT_ROWS;
    const unsigned char *staged[KVC_POINTERS], *const *v = c->v;
    size_t offset = (size_t)head * j->layout->value_head_bytes;
    const int stage = j->v_rows.quantised || (j->v_rows.format != KVC_F32 && !few);
    if (stage && j->layout->latent) { /* the rows that were staged for the scores of this chunk have V first */
        for (int t = 0; t < KVC_POINTERS; t++) staged[t] = (const unsigned char *)(j->stage + staged_row(c, t) * j->padded);
        v = staged, offset = 0;
    } else if (stage) {
        stage_rows(j, c, j->v_rows, head, staged);
        v = staged, offset = 0;
    }
    if (!few)
        KVC_FN(mix_many)(j->v_rows.dim, rows, tokens, j->weights, v, offset, j->alpha, acc, j->v_padded, ahead);
    else
        KVC_FN(mix_few)(stage ? KVC_F32 : j->v_rows.format, j->v_rows.dim, rows, tokens, j->weights, v, offset, j->alpha,
                acc, j->v_padded, ahead);
}

#endif
