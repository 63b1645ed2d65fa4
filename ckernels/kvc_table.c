/* kvc_table.c - the function table of the level that is being compiled. */
#include "kvc_simd.h"

void KVC_FN(write_runs)(const kvc_layout *, unsigned char *, const kvc_run *, int64_t, const float *,
                        const float *);
void KVC_FN(read_runs)(const kvc_layout *, const unsigned char *, const kvc_run *, int64_t, float *, float *);
int64_t KVC_FN(check_representable)(const float *, int64_t, kvc_format);
void KVC_FN(attend_item)(const kvc_attend_args *, const kvc_item *, void *);
void KVC_FN(combine_parts)(const kvc_attend_args *, const kvc_item *);
void KVC_FN(score_item)(const kvc_attend_args *, const kvc_item *, void *);

extern const kvc_kernels KVC_FN(kernels);
const kvc_kernels KVC_FN(kernels) = {
    .name = KVC_STR(KVC_LEVEL),
    .write_runs = KVC_FN(write_runs),
    .read_runs = KVC_FN(read_runs),
    .check_representable = KVC_FN(check_representable),
    .attend_item = KVC_FN(attend_item),
    .combine_parts = KVC_FN(combine_parts),
    .score_item = KVC_FN(score_item),
};
