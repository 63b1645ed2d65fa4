/* kvc_formats.h - the table of storage formats: one line each, in the order of their numbers.
 *
 * Everything that asks about a format reads this table: the kernels through kvc_format_of and the lists below, Python
 * through kvcache.kernels.kernels.FORMATS. How to add a line: CONTRIBUTING.md, "How to add a storage format".
 *
 *   symbol     KVC_<symbol> is the format's number; no file keeps it
 *   name       what callers write, at most 4 characters: saved caches keep it
 *   bits       of one value
 *   quantised  1: a value is minimum + scale * code, with a minimum and scale per row (kvc_quant.h); 0: a float
 *   fitted     1: minimum and scale are those of least squared error (kvc_fit.h), where they beat the row's range
 *   overflow   the smallest magnitude that it cannot hold
 *   largest    the largest that it can hold, for messages
 *
 * A quantised format is known to the kernels by its bits, which are constants in them: no two have the same.
 */
#ifndef KVC_FORMATS_H
#define KVC_FORMATS_H

#include "kvc_half.h"

/* The smallest |x| above the largest that f32 storage takes, 2^96. Attention sums weights times values before it
 * divides by the sum of the weights: with weights of at most 1, 2^31 tokens of 2^96 make 2^127, below the largest
 * float. Scores sum at most 512 products of a key and a scaled query: they are finite for scaled queries up to 2^22. */
#define KVC_F32_OVERFLOW 0x1.000002p+96f

/* f16 keeps halves. A quantised row keeps a scale and a minimum in halves, whose magnitudes are at most those of the
 * row (also under the rotation, which is scaled by 1/head_dim).
 *
 * symbol, name, bits, quantised, fitted, overflow, largest */
#define KVC_FLOAT_FORMATS(X)                           \
    X(F32, "f32", 32, 0, 0, KVC_F32_OVERFLOW, "2**96") \
    X(F16, "f16", 16, 0, 0, KVC_HALF_OVERFLOW, "65504")
#define KVC_QUANTISED_FORMATS(X)                     \
    X(Q8, "q8", 8, 1, 0, KVC_HALF_OVERFLOW, "65504") \
    X(Q6, "q6", 6, 1, 0, KVC_HALF_OVERFLOW, "65504") \
    X(Q5, "q5", 5, 1, 1, KVC_HALF_OVERFLOW, "65504") \
    X(Q4, "q4", 4, 1, 1, KVC_HALF_OVERFLOW, "65504") \
    X(Q3, "q3", 3, 1, 1, KVC_HALF_OVERFLOW, "65504") \
    X(Q2, "q2", 2, 1, 1, KVC_HALF_OVERFLOW, "65504")
#define KVC_FORMATS(X) KVC_FLOAT_FORMATS(X) KVC_QUANTISED_FORMATS(X)

#define KVC_NUMBER(symbol, ...) KVC_##symbol,
typedef enum kvc_format { KVC_FORMATS(KVC_NUMBER) KVC_NUM_FORMATS } kvc_format;
#undef KVC_NUMBER

typedef struct kvc_format_info {
    const char *name;
    int bits, quantised, fitted;
    float overflow;
    const char *largest;
} kvc_format_info;

static inline const kvc_format_info *kvc_format_of(kvc_format format) {
#define KVC_LINE(symbol, ...) {__VA_ARGS__},
    static const kvc_format_info table[] = {KVC_FORMATS(KVC_LINE)};
#undef KVC_LINE
    return &table[format];
}

#endif
