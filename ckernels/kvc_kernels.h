/* kvc_kernels.h - functions that the files of one level share. */
#ifndef KVC_KERNELS_H
#define KVC_KERNELS_H

#include "kvc_quant.h"
#include "kvc_simd.h"

/* kvc_quant.c: write_runs of the quantised sides, rotated first if the layout has rotation. dequantise_head reads slots
 * [slot, slot + count) of one head and leaves the rows rotated. */
void KVC_UNFUSED(quantise_runs)(const kvc_layout *layout, unsigned char *arena, const kvc_run *runs,
                           int64_t num_runs, kvc_float_rows keys, kvc_float_rows values, const kvc_head_keys *known);
void KVC_UNFUSED(dequantise_head)(kvc_rows rows, const unsigned char *head, int slot, int count, float *x,
                             size_t row_stride);
/* kvc_rows.c: tokens [first, first + count) of a tensor as float rows. */
void KVC_UNFUSED(gather_rows)(const kvc_tensor *tensor, int64_t first, int64_t count, int heads, int dim, float *rows);
/* Replaces x by H x, where H has entries +-1 and H H = dim; dim is a power of two, at least 8. */
void KVC_UNFUSED(hadamard)(float *x, int dim, int part);

#endif
