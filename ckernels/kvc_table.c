/* kvc_table.c - the function table of the level that is being compiled. The scalar level has two, one of which has instructions for
 * fma. That of amx has the functions of avx512 but for products and
 * attention, that of avxvnni likewise those of avx2, that of i8mm those of neon but for products. */
#include "kvc_simd.h"

#if defined(KVC_I8MM)
#define ATTENTION(name) KVC_FN(name)
#else
#define ATTENTION(name) KVC_OWN(name)
#endif
#if defined(KVC_I8MM) || defined(KVC_AVXVNNI)
#define ROWS(name) KVC_OWN(name) /* blocks of rows are larger, or have other digits */
#else
#define ROWS(name) KVC_FN(name)
#endif

void KVC_UNFUSED(write_runs)(const kvc_layout *, unsigned char *, const kvc_run *, int64_t, kvc_float_rows,
                        kvc_float_rows, const kvc_head_keys *);
void KVC_UNFUSED(gather_rows)(const kvc_tensor *, int64_t, int64_t, int, int, float *);
void KVC_UNFUSED(read_runs)(const kvc_layout *, const unsigned char *, const kvc_run *, int64_t, float *, float *,
                       size_t, size_t, const kvc_head_keys *);
int64_t KVC_UNFUSED(check_representable)(const float *, int64_t, kvc_format);
void ATTENTION(attend_item)(const kvc_attend_args *, const kvc_item *, void *);
void ATTENTION(combine_parts)(const kvc_attend_args *, const kvc_item *);
void ATTENTION(score_item)(const kvc_attend_args *, const kvc_item *, void *);
void KVC_UNFUSED(quantise_weights)(kvc_matrix_format, int64_t, int64_t, const float *, unsigned char *, uint16_t *,
                              uint16_t *);
void ROWS(prepare_rows)(const kvc_matmul_args *, int64_t, int64_t);
void KVC_FN(multiply_floats)(const kvc_matmul_args *, int64_t, int64_t, float *);
void KVC_OWN(multiply_packed)(const kvc_matmul_args *, int64_t, int64_t, float *);
void KVC_OWN(multiply_bf16)(const kvc_matmul_args *, int64_t, int64_t, float *);
void KVC_FN(rms_norm)(int64_t, int64_t, int64_t, const float *, int64_t, const float *, float, float *);
void KVC_FN(layer_norm)(int64_t, int64_t, const float *, int64_t, const float *, const float *, float, float *);
void KVC_FN(thin)(int64_t, int64_t, float *, int64_t, float);
void KVC_FN(mix)(int64_t, int64_t, int64_t, int64_t, const float *, const float *, const float *, float *);
void KVC_FN(swiglu)(int64_t, int64_t, const float *, float *);
void KVC_FN(geglu)(int64_t, int64_t, const float *, float *);
void KVC_FN(gelu)(int64_t, int64_t, const float *, float *);
void KVC_FN(xielu)(int64_t, int64_t, const float *, float, float, float, float, float *);
void KVC_FN(clamped_swiglu)(int64_t, int64_t, const float *, float, float, float *);
void KVC_FN(softcap)(int64_t, const float *, float, float *);
void KVC_FN(rotate)(int64_t, int64_t, int64_t, int64_t, const float *, int64_t, const float *, const float *, float *);
void KVC_FN(gate)(int64_t, int64_t, const float *, int64_t, const float *, int64_t, int, float *);
uint64_t KVC_FN(shares)(int64_t, const float *, float, float, uint64_t *);
void KVC_FN(convolve)(const kvc_convolution *, int64_t, int64_t, int64_t);
void KVC_FN(scan)(const kvc_scan *, int64_t, int64_t, int64_t, int);
void KVC_FN(decays)(int64_t, int64_t, const float *, int64_t, const float *, const float *, float, float, float *, float *);
void KVC_FN(bounded_decays)(int64_t, int64_t, const float *, int64_t, const float *, const float *, float, float *);
void KVC_UNFUSED(digest)(int64_t, const unsigned char *, const uint32_t *, uint64_t *);
void KVC_UNFUSED(summarise_page)(const kvc_layout *, const unsigned char *, int32_t, int, const struct kvc_summaries *);
void ATTENTION(attend_chosen)(const kvc_attend_args *, const struct kvc_sparse_args *, const kvc_item *, void *);
void ATTENTION(index_scores)(const kvc_attend_args *, const float *, const kvc_item *, float *, void *);
void ATTENTION(choose_tokens)(float *, int64_t, int64_t, int32_t *);

extern const kvc_kernels KVC_OWN(kernels);
const kvc_kernels KVC_OWN(kernels) = {
#if defined(KVC_SCALARFMA)
    .name = "scalar",
    .base = "scalar",
#else
    .name = KVC_STR(KVC_LEVEL),
    .base = KVC_STR(KVC_BASE),
#endif
    .tiles = KVC_TILES,
    .write_runs = KVC_UNFUSED(write_runs),
    .gather_rows = KVC_UNFUSED(gather_rows),
    .read_runs = KVC_UNFUSED(read_runs),
    .check_representable = KVC_UNFUSED(check_representable),
    .attend_item = ATTENTION(attend_item),
    .combine_parts = ATTENTION(combine_parts),
    .score_item = ATTENTION(score_item),
    .quantise_weights = KVC_UNFUSED(quantise_weights),
    .prepare_rows = ROWS(prepare_rows),
    .multiply_floats = KVC_FN(multiply_floats),
    .multiply_packed = KVC_OWN(multiply_packed),
#if defined(KVC_BF16_SIDE)
    .multiply_bf16 = KVC_OWN(multiply_bf16),
#endif
    .rms_norm = KVC_FN(rms_norm),
    .layer_norm = KVC_FN(layer_norm),
    .thin = KVC_FN(thin),
    .mix = KVC_FN(mix),
    .swiglu = KVC_FN(swiglu),
    .geglu = KVC_FN(geglu),
    .gelu = KVC_FN(gelu),
    .xielu = KVC_FN(xielu),
    .clamped_swiglu = KVC_FN(clamped_swiglu),
    .softcap = KVC_FN(softcap),
    .rotate = KVC_FN(rotate),
    .gate = KVC_FN(gate),
    .shares = KVC_FN(shares),
    .convolve = KVC_FN(convolve),
    .scan = KVC_FN(scan),
    .decays = KVC_FN(decays),
    .bounded_decays = KVC_FN(bounded_decays),
    .digest = KVC_UNFUSED(digest),
    .summarise_page = KVC_UNFUSED(summarise_page),
    .attend_chosen = ATTENTION(attend_chosen),
    .index_scores = ATTENTION(index_scores),
    .choose_tokens = ATTENTION(choose_tokens),
};
