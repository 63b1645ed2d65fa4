/* kvc_recurrence.h - the arguments of layers that keep a state of fixed size per text (kvc_recurrence.c).
 *
 * A call has the rows of several texts, one text after another. Of text t they are rows [starts[t], starts[t + 1]), and its
 * state is in slot index[t]; no two texts have the same. A state changes in place, row by row in one order, so its bits and
 * those of the rows depend neither on how a text is cut into calls nor on other texts or on threads. A state of zeros is
 * that of an empty text.
 */
#ifndef KVC_RECURRENCE_H
#define KVC_RECURRENCE_H

#include <stdint.h>

enum {
    KVC_STATE_COLUMNS = 16, /* of a block: one vector of the widest level */
    KVC_STATE_BLOCKS = 4    /* that a call of `scan` takes at most */
};

typedef struct kvc_texts {
    int64_t count;
    const int64_t *starts; /* (count + 1) */
    const int64_t *index;  /* (count) */
    float *states;         /* of slot s at states + s * slot_floats */
    int64_t slot_floats;
} kvc_texts;

/* A depthwise causal convolution: out[i, c] = bias[c] + sum over j of weight[j, c] * in[i - (taps - 1) + j, c], j ascending, with
 * `in` the rows of the text, those of the state before them. The state is the last taps - 1 rows, (taps - 1, channels). */
typedef struct kvc_convolution {
    kvc_texts texts;
    int64_t channels, taps, x_stride; /* x_stride: floats from row to row of x */
    const float *x, *weight, *bias;   /* weight (taps, channels); bias (channels), or NULL */
    int silu;                         /* 1: out = silu(out) */
    float *out;                       /* (n, channels) */
} kvc_convolution;

/* Per head a state S (size, dim), with one row after another: S = decay * S + key (outer) added; out = query @ S (+ skip * value).
 *
 *   Mamba2 (Dao and Gu, arXiv 2405.21060): added = step * value.
 *   The gated delta rule (Yang et al., arXiv 2412.06464), where skip is NULL: added = step * (value - decay * (key @ S)).
 *   Kimi delta attention (Kimi Team, arXiv 2510.26692), `by_channel`: a decay of its own for each row of S; no skip.
 *
 * All sums are over the rows of S, ascending, one lane for each column. The state of a head lies in blocks of KVC_STATE_COLUMNS
 * columns: [block][row][column], the last block filled up with zeros. Head h has the key and query of group h / (heads / groups),
 * or h % groups if they are `tiled`. */
typedef struct kvc_scan {
    kvc_texts texts;
    int64_t heads, groups, size, dim;
    const float *keys, *queries; /* rows (groups, size), key_stride floats apart */
    const float *values;         /* rows (heads, dim), value_stride floats apart */
    int64_t key_stride, value_stride;
    const float *decays, *steps; /* (n, heads); decays by_channel (n, heads, size) */
    const float *skip;           /* (heads) or NULL */
    int tiled, by_channel;
    float *out; /* (n, heads, dim) */
} kvc_scan;

#endif
