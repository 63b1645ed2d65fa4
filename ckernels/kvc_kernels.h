/* kvc_kernels.h - what the files of one level share with each other. */
#ifndef KVC_KERNELS_H
#define KVC_KERNELS_H

#include "kvc_quant.h"
#include "kvc_simd.h"

/* kvc_quant.c: one side of write_runs, rotated first where rows.rotated; first_head is that of block 0. Rows of slots
 * [slot, slot + count) of one head, which stay rotated. */
void KVC_FN(quantise_runs)(kvc_rows rows, int heads, unsigned char *first_head, size_t head_bytes,
                           size_t block_bytes, const kvc_run *runs, int64_t num_runs, const float *x);
void KVC_FN(dequantise_head)(kvc_rows rows, const unsigned char *head, int slot, int count, float *x,
                             size_t row_stride);
/* x becomes H x, H of +-1 and H H = dim; dim a power of two, at least 8. */
void KVC_FN(hadamard)(float *x, int dim);

#endif
