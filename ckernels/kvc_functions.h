/* kvc_functions.h - elementary functions of double numbers, with the same bits on every CPU (ckernels/BITS.md, "Functions").
 *
 * Additions, multiplications and divisions of IEEE 754 in the order of the source, without fma and without libm, compiled once. An
 * error is below 0.6 of a unit in the last place of the result, 0.85 for a sine and a cosine.
 */
#ifndef KVC_FUNCTIONS_H
#define KVC_FUNCTIONS_H

#include <stdint.h>

double kvc_exp(double x);
double kvc_exp2(double x);
double kvc_log(double x);   /* -inf of 0, NaN below */
double kvc_log1p(double x); /* ln(1 + x) */
double kvc_power(double x, double y); /* x^y; NaN for x below 0, unless y is 0 */
double kvc_sin(double x);
double kvc_cos(double x);
double kvc_tanh(double x);

/* cosines and sines (n, pairs) of positions[i] * frequencies[k], times scale, rounded to float last. */
void kvc_turns(int64_t n, int64_t pairs, const int64_t *positions, const double *frequencies, double scale, float *cosines,
               float *sines);

/* out (n, m) += a (n, k) b (k, m): each adds its products in order. */
void kvc_product(int64_t n, int64_t k, int64_t m, const double *a, const double *b, double *out);

#endif
