/* kvc_attend_floats.c - the products of attention on rows of floats (kvc_products.h), compiled for each float format. */
#include "kvc_products.h"

/* One function per float format and head_dim: 64 and 128 as constants, the rest as a bound. */
#define WITH_DIM(call, ...)                  \
    switch (KVC_OWN_SIZES ? dim : 0) {       \
    case 64: call(64, __VA_ARGS__); break;   \
    case 128: call(128, __VA_ARGS__); break; \
    default: call(dim, __VA_ARGS__); break;  \
    }

#define DOT_CHUNK(dim, format) dot_chunk(format, dim, rows, tokens, q, q_stride, k, offset, s, ahead)
#define DOTS(symbol, ...)                                                                                   \
    NOINLINE void dots_##symbol(int dim, int rows, int tokens, const float *q, int q_stride,                \
                                const unsigned char *const *k, size_t offset, float *s, ahead_rows ahead) { \
        WITH_DIM(DOT_CHUNK, KVC_##symbol)                                                                   \
    }
KVC_FLOAT_FORMATS(DOTS)

void KVC_FN(dots)(kvc_format format, int dim, int rows, int tokens, const float *q, int q_stride, const unsigned char *const *k,
                  size_t offset, float *s, ahead_rows ahead) {
#define DOTS_OF(symbol, ...) \
    case KVC_##symbol: dots_##symbol(dim, rows, tokens, q, q_stride, k, offset, s, ahead); break;
    switch (format) {
        KVC_FLOAT_FORMATS(DOTS_OF)
    default: break;
    }
}

#define PANEL_CHUNK(dim, space) panel_chunk(dim, rows, tokens, q, q_stride, k, offset, space, s, ahead)
void KVC_FN(panels)(int dim, int rows, int tokens, const float *q, int q_stride, const unsigned char *const *k, size_t offset,
                    float *space, float *s, ahead_rows ahead) {
    WITH_DIM(PANEL_CHUNK, space)
}

#define MIX_CHUNK(dim, tile_rows, format) \
    mix_chunk(tile_rows, format, dim, rows, tokens, s, v, offset, alpha, acc, acc_stride, ahead)
#define MIX(symbol, ...)                                                                                     \
    NOINLINE void mix_##symbol(int dim, int rows, int tokens, const float *s, const unsigned char *const *v, \
                               size_t offset, const float *alpha, float *acc, int acc_stride,                \
                               ahead_rows ahead) {                                                           \
        WITH_DIM(MIX_CHUNK, 0, KVC_##symbol)                                                                 \
    }
KVC_FLOAT_FORMATS(MIX)

void KVC_FN(mix_few)(kvc_format format, int dim, int rows, int tokens, const float *s, const unsigned char *const *v,
                     size_t offset, const float *alpha, float *acc, int acc_stride, ahead_rows ahead) {
#define MIX_OF(symbol, ...) \
    case KVC_##symbol: mix_##symbol(dim, rows, tokens, s, v, offset, alpha, acc, acc_stride, ahead); break;
    switch (format) {
        KVC_FLOAT_FORMATS(MIX_OF)
    default: break;
    }
}

void KVC_FN(mix_many)(int dim, int rows, int tokens, const float *s, const unsigned char *const *v, size_t offset,
                      const float *alpha, float *acc, int acc_stride, ahead_rows ahead) {
    WITH_DIM(MIX_CHUNK, KVC_TILE_ROWS, KVC_F32)
}
