/* kvc_kernels.h - what the files of one level share with each other. */
#ifndef KVC_KERNELS_H
#define KVC_KERNELS_H

#include "kvc_quant.h"
#include "kvc_simd.h"

/* kvc_quant.c: write_runs of quantised sides, rotated first where the layout says so; rows of slots
 * [slot, slot + count) of one head, which stay rotated. */
void KVC_FN(quantise_runs)(const kvc_layout *layout, unsigned char *arena, const kvc_run *runs,
                           int64_t num_runs, const float *keys, const float *values);
void KVC_FN(dequantise_head)(kvc_rows rows, const unsigned char *head, int slot, int count, float *x,
                             size_t row_stride);
/* x becomes H x, H of +-1 and H H = dim; dim a power of two, at least 8. */
void KVC_FN(hadamard)(float *x, int dim);

#endif
