/* kvc_segment.h - the results of one segment of the context for each row, and the merging of segments.
 *
 *   context    | text positions 0 to KVC_SEGMENT - 1 | the next KVC_SEGMENT positions | ... | maybe fewer |
 *   results    acc [head][row][v_padded]; largest, sum [head][row]        one segment, n = heads * rows
 *
 * The online softmax of a segment starts from zero. merge_results merges segments in text order: after each segment if
 * one item has them all, at the end of the call if several items share them. So the bits of a row depend neither on the
 * threads nor on other rows. A segment of which a row sees no token does not change the row. So the segments before a
 * window need not be read, nor be stored: segments are counted by text positions.
 *
 * The tokens of a residual are one segment more, merged last. Its V is not rotated and its keys have no centre, so the
 * packed segments before it are freed of both first (make_whole).
 *
 * With 1,024 tokens per segment, merging costs decode in q4, the fastest format, about 2 % at head_dim 64 and 1 % at
 * 128; with 512 tokens about 4 and 2 %. The threads still have enough pieces: decode with too few segments is also
 * divided by heads (kvc_parallel.c).
 *
 * The results of a unit in parts take (value_head_dim + 2) floats per segment, row and head: with K and V of 128 channels
 * and 4 rows per head, about 1/500 of the bytes of K and V of the segment in f32.
 */
#ifndef KVC_SEGMENT_H
#define KVC_SEGMENT_H

#include "kvc_attend.h"
#include "kvc_simd.h"

#include <float.h>
#include <string.h>

#define LOWEST (-FLT_MAX) /* no score is below it, yet finite: LOWEST - LOWEST is 0, -inf - LOWEST is -inf */

typedef struct results {
    float *acc, *largest, *sum;
} results;

/* The results in kvc_result_floats(rows) floats. */
static results results_at(float *floats, int64_t rows, int padded) {
    float *largest = floats + rows * padded;
    return (results){floats, largest, largest + (rows + 15) / 16 * 16};
}

/* Clears maxima and sums from a row on, up to whole vectors. */
static void clear_sums(results r, int from, int rows) {
    for (int i = from; i < (rows + 15) / 16 * 16; i++) r.largest[i] = LOWEST, r.sum[i] = 0.0f;
}

static void clear_results(results r, int rows, int padded) {
    memset(r.acc, 0, (size_t)rows * (size_t)padded * sizeof(float));
    clear_sums(r, 0, rows);
}

/* Merges rows [first, stop) of a segment into those of the segments before it. first is a multiple of 16; stop is one
 * too, or the end of all rows. If a row sees no token of the segment, 2^(LOWEST - largest) = 0 or both sums are 0. */
static void merge_results(results segment, int first, int stop, int padded, results total) {
    for (int i = first; i < stop; i += KVC_LANES) {
        float factors[KVC_LANES], old_factors[KVC_LANES];
        const f32v here = f32v_load(segment.largest + i), before = f32v_load(total.largest + i);
        const f32v most = f32v_max(here, before), sum = f32v_load(segment.sum + i);
        const f32v factor = f32v_exp2(f32v_sub(here, most)), old_factor = f32v_exp2(f32v_sub(before, most));
        f32v_store(factors, factor);
        f32v_store(old_factors, old_factor);
        f32v_store(total.sum + i, f32v_fma(f32v_load(total.sum + i), old_factor, f32v_mul(sum, factor)));
        f32v_store(total.largest + i, most);
        for (int r = 0; r < KVC_LANES && i + r < stop; r++) {
            const size_t at = (size_t)(i + r) * (size_t)padded;
            const f32v factor_v = f32v_set1(factors[r]), old_v = f32v_set1(old_factors[r]);
            if (segment.sum[i + r] == 0.0f) continue;
            for (int d = 0; d < padded; d += KVC_LANES) {
                const f32v joining = f32v_mul(f32v_load(segment.acc + at + d), factor_v);
                f32v_store(total.acc + at + d, f32v_fma(f32v_load(total.acc + at + d), old_v, joining));
            }
        }
    }
}

#endif
