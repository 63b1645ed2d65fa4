/* kvc_kernels.h - what the files of one level share with each other. */
#ifndef KVC_KERNELS_H
#define KVC_KERNELS_H

#include "kvc_quant.h"
#include "kvc_simd.h"

/* kvc_quant.c: rows of slots [slot, slot + count) of one head. What is written is rotated first where
 * rows.rotated; what is read stays rotated. */
void KVC_FN(quantise_head)(kvc_rows rows, unsigned char *head, int slot, int count, const float *x,
                           size_t row_stride);
void KVC_FN(dequantise_head)(kvc_rows rows, const unsigned char *head, int slot, int count, float *x,
                             size_t row_stride);
/* x becomes H x, H of +-1 and H H = dim; dim a power of two, at least 8. */
void KVC_FN(hadamard)(float *x, int dim);

#endif
