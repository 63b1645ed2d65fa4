/* kvc_network.c - what a network computes between two products: norms and activations, row by row.
 *
 * The bits of a row depend on that row alone. Sums are of 16 lanes over a row, then of the lanes by halves.
 */
#include <math.h>
#include <string.h>

#include "kvc_row.h"

/* out (n, heads, dim) = x / sqrt(mean of x^2 + eps) * weight (heads, dim); rows of x are x_stride floats apart. Relative
 * error below (dim / 16 + 8) * 2^-24. */
void KVC_FN(rms_norm)(int64_t n, int64_t heads, int64_t dim, const float *x, int64_t x_stride, const float *weight,
                      float eps, float *out) {
    for (int64_t i = 0; i < n; i++) {
        for (int64_t h = 0; h < heads; h++, out += dim) {
            const float *row = x + i * x_stride + h * dim, *weights = weight + h * dim;
            f32x16 squares = f32x16_zero();
            for (int64_t d = 0; d < dim; d += 16) {
                const f32x16 x16 = f32x16_load_some(row + d, dim - d);
                squares = f32x16_fma(x16, x16, squares);
            }
            const f32v scale = f32v_set1(1.0f / sqrtf(f32x16_sum_of(squares) / (float)dim + eps));
            for (int64_t d = 0; d < dim; d += KVC_LANES) {
                const f32v v = f32v_mul(load_some(row + d, dim - d), scale);
                store_some(out + d, dim - d, f32v_mul(v, load_some(weights + d, dim - d)));
            }
        }
    }
}

INLINE float mean_of(int64_t dim, const float *x) {
    f32x16 sum = f32x16_zero();
    for (int64_t d = 0; d < dim; d += 16) sum = f32x16_add(sum, f32x16_load_some(x + d, dim - d));
    return f32x16_sum_of(sum) / (float)dim;
}

/* The mean of (x - mean)^2. */
INLINE float variance_of(int64_t dim, const float *x, f32v mean) {
    f32x16 squares = f32x16_zero();
    for (int64_t d = 0; d < dim; d += 16) {
        UNROLL
        for (int i = 0; i < KVC_VECTORS; i++) {
            const int64_t left = dim - d - i * KVC_LANES;
            if (left <= 0) continue;
            const f32v v = some_of(f32v_sub(load_some(x + d + i * KVC_LANES, left), mean), left);
            squares.v[i] = f32v_fma(v, v, squares.v[i]);
        }
    }
    return f32x16_sum_of(squares) / (float)dim;
}

/* out (n, dim) = (x - mean) / sqrt(mean of (x - mean)^2 + eps) * weight + bias; rows of x are x_stride floats apart. The mean
 * errs by less than (dim / 16 + 5) * 2^-24 of the largest |x|, and each x - mean by that and half an ulp. */
void KVC_FN(layer_norm)(int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *weight, const float *bias,
                        float eps, float *out) {
    for (int64_t i = 0; i < n; i++, x += x_stride, out += dim) {
        const f32v mean = f32v_set1(mean_of(dim, x));
        const f32v scale = f32v_set1(1.0f / sqrtf(variance_of(dim, x, mean) + eps));
        for (int64_t d = 0; d < dim; d += KVC_LANES) {
            const f32v v = f32v_mul(f32v_sub(load_some(x + d, dim - d), mean), scale);
            store_some(out + d, dim - d,
                       f32v_fma(v, load_some(weight + d, dim - d), load_some(bias + d, dim - d)));
        }
    }
}

/* x (n, dim), rows x_stride floats apart, in place: what is above its row's mean + factor * deviation stays, less that; the
 * rest becomes 0. The bound errs as the mean of layer_norm does, and by factor times as much of the deviation. */
void KVC_FN(thin)(int64_t n, int64_t dim, float *x, int64_t x_stride, float factor) {
    for (int64_t i = 0; i < n; i++, x += x_stride) {
        const float mean = mean_of(dim, x), deviation = sqrtf(variance_of(dim, x, f32v_set1(mean)));
        const f32v bound = f32v_set1(mean + deviation * factor);
        for (int64_t d = 0; d < dim; d += KVC_LANES)
            store_some(x + d, dim - d, f32v_max(f32v_zero(), f32v_sub(load_some(x + d, dim - d), bound)));
    }
}

/* out (n, outs, dim) = base + shares (n, outs, ins) times x (n, ins, dim): for each value an fma after another, in the order
 * of ins. base may be out, or x. */
void KVC_FN(mix)(int64_t n, int64_t outs, int64_t ins, int64_t dim, const float *shares, const float *x, const float *base,
                 float *out) {
    for (int64_t i = 0; i < n; i++, x += ins * dim) {
        for (int64_t o = 0; o < outs; o++, shares += ins, base += dim, out += dim) {
            for (int64_t d = 0; d < dim; d += KVC_LANES) {
                f32v sum = load_some(base + d, dim - d);
                for (int64_t j = 0; j < ins; j++)
                    sum = f32v_fma(f32v_set1(shares[j]), load_some(x + j * dim + d, dim - d), sum);
                store_some(out + d, dim - d, sum);
            }
        }
    }
}

/* out (n, dim) = silu(x[:, :dim]) * x[:, dim:] of x (n, 2 * dim). silu(g) = g * sigmoid(g). */
void KVC_FN(swiglu)(int64_t n, int64_t dim, const float *x, float *out) {
    for (int64_t i = 0; i < n; i++, x += 2 * dim, out += dim) {
        for (int64_t d = 0; d < dim; d += KVC_LANES) {
            const f32v gate = load_some(x + d, dim - d), up = load_some(x + dim + d, dim - d);
            store_some(out + d, dim - d, f32v_mul(gated(gate, gate), up));
        }
    }
}

/* GELU by its approximation with tanh: g (1 + tanh(s)) / 2 = g * sigmoid(2 s), s = sqrt(2 / pi) (g + 0.044715 g^3). 2 s has
 * four roundings: the relative error is below (5 + 3 max(-2 s, 0)) * 2^-23. */
INLINE f32v gelu_of(f32v gate) {
    const f32v curve = f32v_fma(f32v_mul(gate, gate), f32v_set1(0.044715f), f32v_set1(1.0f));
    return gated(gate, f32v_mul(f32v_mul(gate, f32v_set1(1.5957691216f)), curve));
}

/* out (n, dim) = gelu(x[:, :dim]) * x[:, dim:] of x (n, 2 * dim). */
void KVC_FN(geglu)(int64_t n, int64_t dim, const float *x, float *out) {
    for (int64_t i = 0; i < n; i++, x += 2 * dim, out += dim) {
        for (int64_t d = 0; d < dim; d += KVC_LANES) {
            const f32v up = load_some(x + dim + d, dim - d);
            store_some(out + d, dim - d, f32v_mul(gelu_of(load_some(x + d, dim - d)), up));
        }
    }
}

/* out (n, dim) = gelu(x). */
void KVC_FN(gelu)(int64_t n, int64_t dim, const float *x, float *out) {
    for (int64_t i = 0; i < n; i++, x += dim, out += dim) {
        for (int64_t d = 0; d < dim; d += KVC_LANES) store_some(out + d, dim - d, gelu_of(load_some(x + d, dim - d)));
    }
}

/* e^m - 1 - m of m <= 0. From -1 on m^2 times the Taylor series of the rest, whose first 10 terms leave 1e-8 of it; below -1
 * by the exponential, where the result is at least 1 / e: relative error at most 6e-7. */
INLINE f32v exp_beyond_line(f32v m) {
    static const float terms[] = {1.0f / 39916800, 1.0f / 3628800, 1.0f / 362880, 1.0f / 40320, 1.0f / 5040,
                                  1.0f / 720,      1.0f / 120,     1.0f / 24,     1.0f / 6,     1.0f / 2};
    f32v p = f32v_set1(terms[0]);
    for (int i = 1; i < 10; i++) p = f32v_fma(p, m, f32v_set1(terms[i]));
    const f32v power = f32v_exp2(f32v_mul(m, f32v_set1(1.442695041f)));
    const f32v far = f32v_sub(f32v_sub(power, f32v_set1(1.0f)), m);
    return f32v_pick(m, f32v_set1(-1.0f), far, f32v_mul(f32v_mul(m, m), p));
}

/* xIELU (Huang, arXiv 2411.13010): out (n, dim) = positive x^2 + beta x where x > 0, else
 * negative (e^min(x, eps) - 1 - x) + beta x; eps < 0. */
void KVC_FN(xielu)(int64_t n, int64_t dim, const float *x, float positive, float negative, float beta, float eps,
                   float *out) {
    const f32v zero = f32v_zero(), p = f32v_set1(positive), q = f32v_set1(negative), line = f32v_set1(beta);
    for (int64_t i = 0; i < n; i++, x += dim, out += dim) {
        for (int64_t d = 0; d < dim; d += KVC_LANES) {
            const f32v v = load_some(x + d, dim - d), m = f32v_min(f32v_set1(eps), v), linear = f32v_mul(line, v);
            const f32v above = f32v_fma(f32v_mul(p, v), v, linear);
            const f32v below = f32v_fma(f32v_add(exp_beyond_line(m), f32v_sub(m, v)), q, linear);
            store_some(out + d, dim - d, f32v_pick(f32v_sub(zero, v), zero, above, below));
        }
    }
}

/* The same as g * sigmoid(alpha g) * (u + 1), with g at most `limit` and u from -limit to limit. A NaN stays one. */
void KVC_FN(clamped_swiglu)(int64_t n, int64_t dim, const float *x, float alpha, float limit, float *out) {
    const f32v most = f32v_set1(limit), least = f32v_set1(-limit), slope = f32v_set1(alpha), one = f32v_set1(1.0f);
    for (int64_t i = 0; i < n; i++, x += 2 * dim, out += dim) {
        for (int64_t d = 0; d < dim; d += KVC_LANES) {
            const f32v gate = f32v_min(most, load_some(x + d, dim - d));
            const f32v up = f32v_max(least, f32v_min(most, load_some(x + dim + d, dim - d)));
            store_some(out + d, dim - d, f32v_mul(gated(gate, f32v_mul(gate, slope)), f32v_add(up, one)));
        }
    }
}

/* out (n, dim) = x * f(gates), f by `kind`; rows of x are x_stride and those of gates gate_stride floats apart. */
void KVC_FN(gate)(int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *gates, int64_t gate_stride,
                  int kind, float *out) {
    for (int64_t i = 0; i < n; i++, x += x_stride, gates += gate_stride, out += dim) {
        for (int64_t d = 0; d < dim; d += KVC_LANES) {
            const f32v gate = load_some(gates + d, dim - d), value = load_some(x + d, dim - d);
            const f32v gated_value = kind == KVC_GATE_SIGMOID ? gated(value, gate)
                                     : kind == KVC_GATE_SILU  ? f32v_mul(gated(gate, gate), value)
                                                              : f32v_mul(softplus(gate), value);
            store_some(out + d, dim - d, gated_value);
        }
    }
}

/* out (n) = cap * tanh(x / cap). */
void KVC_FN(softcap)(int64_t n, const float *x, float cap, float *out) {
    const f32v factor = f32v_set1(cap), inverse = f32v_set1(1.0f / cap);
    for (int64_t d = 0; d < n; d += KVC_LANES) {
        const f32v tanh = f32v_tanh(f32v_mul(load_some(x + d, n - d), inverse));
        store_some(out + d, n - d, f32v_mul(tanh, factor));
    }
}

/* Rotary position embeddings: out (n, heads, dim) = heads of x, turned by the angles of their rows. Rows of x are x_stride
 * floats apart. cos and sin (n, turned / 2); channel i forms a pair with channel i + turned / 2. Each result is rounded as
 * a * cos - b * sin with three roundings. Channels from `turned` on stay. */
void KVC_FN(rotate)(int64_t n, int64_t heads, int64_t dim, int64_t turned, const float *x, int64_t x_stride,
                    const float *cos, const float *sin, float *out) {
    const int64_t half = turned / 2;
    for (int64_t i = 0; i < n; i++, cos += half, sin += half) {
        for (int64_t h = 0; h < heads; h++, out += dim) {
            const float *head = x + i * x_stride + h * dim;
            for (int64_t d = 0; d < half; d += KVC_LANES) {
                const int64_t left = half - d;
                const f32v a = load_some(head + d, left), b = load_some(head + half + d, left);
                const f32v c = load_some(cos + d, left), s = load_some(sin + d, left);
                store_some(out + d, left, f32v_sub(f32v_mul(a, c), f32v_mul(b, s)));
                store_some(out + half + d, left, f32v_add(f32v_mul(b, c), f32v_mul(a, s)));
            }
            memcpy(out + turned, head + turned, (size_t)(dim - turned) * sizeof(float));
        }
    }
}
