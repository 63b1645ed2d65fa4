/* kvc_blend.c - the outputs of attention over two parts of a context, merged. */
#include "kvc.h"

#include <math.h>

void kvc_blend(int64_t rows, int64_t dim, const float *restrict a, const float *restrict b, const float *log_odds,
               float *restrict out) {
    for (int64_t row = 0; row < rows; row++) {
        const float share = 1.0f / (1.0f + expf(-log_odds[row])); /* of a */
        for (int64_t d = row * dim; d < (row + 1) * dim; d++) out[d] = b[d] + share * (a[d] - b[d]);
    }
}
