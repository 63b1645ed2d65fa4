/* kvc_merge.h - attention over a context in parts: the results of the parts become those of the whole (ckernels/BITS.md, "Scores").
 *
 * Compiled once, without fma: the same bits at all levels.
 */
#ifndef KVC_MERGE_H
#define KVC_MERGE_H

#include <stdint.h>

/* Row r of `mixed` (n, heads, dim) and of its log-sum-exps `masses` (n, heads) becomes what the rows
 * chosen[starts[r]] ... chosen[starts[r + 1] - 1] of `parts` (m, heads, dim) and `logs` (m, heads), and last its own, merge to, in
 * this order. The first chosen row of each is written to. */
void kvc_merge(int64_t n, int64_t heads, int64_t dim, const int64_t *starts, const int64_t *chosen, float *parts, float *logs,
               float *mixed, float *masses);

#endif
