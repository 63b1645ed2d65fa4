/* kvc_merge.c - see kvc_merge.h. */
#include <math.h>

#include "kvc_functions.h"
#include "kvc_merge.h"

/* Merges part a and part b into `out`, which may be either. */
static void merge_two(int64_t dim, const float *a, float *log_a, const float *b, const float *log_b, float *out, float *log_out) {
    const double own = *log_a, other = *log_b;
    const double smaller = kvc_exp(own == other ? 0.0 : -fabs(own - other)); /* infinities of one sign are not apart */
    const double ratio = own > other ? smaller : kvc_exp(other - own);
    const float share = own == -INFINITY ? 0.0f : (float)(1.0 / (1.0 + ratio));
    for (int64_t d = 0; d < dim; d++) {
        float product = share * (a[d] - b[d]);
        out[d] = b[d] + product;
    }
    *log_out = (float)((own > other ? own : other) + kvc_log1p(smaller));
}

void kvc_merge(int64_t n, int64_t heads, int64_t dim, const int64_t *starts, const int64_t *chosen, float *parts, float *logs,
               float *mixed, float *masses) {
    for (int64_t row = 0; row < n; row++) {
        int64_t first = starts[row], stop = starts[row + 1];
        if (first == stop) continue;
        for (int64_t head = 0; head < heads; head++) {
            int64_t own = row * heads + head, all = chosen[first] * heads + head;
            for (int64_t i = first + 1; i < stop; i++) {
                int64_t part = chosen[i] * heads + head;
                merge_two(dim, parts + all * dim, logs + all, parts + part * dim, logs + part, parts + all * dim, logs + all);
            }
            merge_two(dim, parts + all * dim, logs + all, mixed + own * dim, masses + own, mixed + own * dim, masses + own);
        }
    }
}
