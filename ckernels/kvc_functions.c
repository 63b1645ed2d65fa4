/* kvc_functions.c - see kvc_functions.h. Numbers that need more than a double are the sum of two, `high` the nearest double. */
#include <math.h>
#include <string.h>

#include "kvc_function_tables.h"
#include "kvc_functions.h"

typedef struct pair {
    double high, low;
} pair;

static inline uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The nearest whole number, of equally near ones the even one; |x| below 2^51. */
static inline double whole(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

/* Exact (Knuth). */
static inline pair sum_of(double a, double b) {
    const double sum = a + b, part = sum - a;
    return (pair){sum, (a - (sum - part)) + (b - part)};
}

/* Exact (Dekker), for products from 2^-968 to 2^996 of numbers below that. */
static inline pair product_of(double a, double b) {
    const double big_a = 0x1.0000002p27 * a, big_b = 0x1.0000002p27 * b;
    const double a1 = big_a - (big_a - a), a2 = a - a1, b1 = big_b - (big_b - b), b2 = b - b1;
    const double product = a * b;
    return (pair){product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2};
}

/* x * 2^n, rounded once, for |x| from 1/2 to 4 and n from -1100 to 1024. */
static double scaled(double x, int64_t n) {
    if (n > 1023) return x * 0x1p1023 * double_of((uint64_t)(n - 1023 + 1023) << 52);
    if (n > -1021) return x * double_of((uint64_t)(n + 1023) << 52);
    return x * double_of((uint64_t)(n + 128 + 1023) << 52) * 0x1p-128;
}

/* 2^(k / 64) e^(rest), for |rest| up to ln 2 / 128 and more of it in `low`, without the power of two that *n is. The relative error
 * is below 2^-59. e^r - 1 is a series: the first term that it lacks is below 2^-64. */
static pair power_of(double k, double rest, double low, int64_t *n) {
    const int64_t whole_k = (int64_t)k, i = whole_k & 63;
    const double tail = 0.5 + rest * (0x1.5555555555555p-3 + rest * (0x1.5555555555555p-5 + rest * (0x1.1111111111111p-7 +
                        rest * 0x1.6c16c16c16c17p-10)));
    const double more = rest + (low + rest * rest * tail);
    *n = (whole_k - i) / 64;
    return sum_of(POWERS[i][0], POWERS[i][1] + POWERS[i][0] * more);
}

/* e^x for |x| below 750. */
static pair exp_of(pair x, int64_t *n) {
    const double k = whole(x.high * 0x1.71547652b82fep+6);
    const pair most = sum_of(x.high, -(k * 0x1.62e42fef8p-7)); /* the product is exact */
    const pair rest = sum_of(most.high, most.low + (x.low - k * 0x1.1cf79abc9e3b4p-42));
    return power_of(k, rest.high, rest.low, n);
}

double kvc_exp(double x) {
    if (x != x) return x;
    if (x > 709.79) return INFINITY;
    if (x < -745.14) return 0.0;
    int64_t n;
    const pair found = exp_of((pair){x, 0.0}, &n);
    return scaled(found.high, n);
}

double kvc_exp2(double x) {
    if (x != x) return x;
    if (x >= 1024.0) return INFINITY;
    if (x < -1075.0) return 0.0;
    int64_t n;
    const double k = whole(x * 64.0), rest = x - k / 64.0;
    const pair power = product_of(rest, 0x1.62e42fefa39efp-1);
    const pair found = power_of(k, power.high, power.low + rest * 0x1.abc9e3b39803fp-56, &n);
    return scaled(found.high, n);
}

/* ln(x.high + x.low) of a finite number above 0. With m = x / 2^k from 0.707 to 1.414 and c near 1 / m, of 9 bits, m c - 1 is exact and
 * below 2^-7: ln x = k ln 2 - ln c + ln(1 + (m c - 1)), the last a series whose first missing term is below 2^-80. The relative error
 * is below 2^-70. */
static pair log_of(pair x) {
    int64_t k = -1023;
    if (x.high < 0x1p-1022) x.high *= 0x1p54, x.low *= 0x1p54, k -= 54;
    const uint64_t bits = bits_of(x.high), i = bits >> 45 & 127, half = i >= 53;
    k += (int64_t)(bits >> 52) + (int64_t)half;
    const double m = double_of((bits & 0xfffffffffffffu) | (uint64_t)(1023 - half) << 52), c = LOGARITHMS[i][0];
    const double low = x.low == 0.0 ? 0.0 : x.low * (m / x.high), m1 = double_of(bits_of(m) & ~(uint64_t)0x7ffffff);
    const pair exact = sum_of(m1 * c - 1.0, (m - m1) * c), r = sum_of(exact.high, exact.low + low * c);
    const pair square = product_of(r.high, r.high);
    const double z = r.high;
    const double tail = 0x1.5555555555555p-2 - z * (0.25 - z * (0x1.999999999999ap-3 - z * (0x1.5555555555555p-3 -
                        z * (0x1.2492492492492p-3 - z * (0.125 - z * (0x1.c71c71c71c71cp-4 - z * 0x1.999999999999ap-4))))));
    const double rest = r.low - (0.5 * square.low + r.high * r.low) + z * square.high * tail;
    const double turns = (double)k;
    const pair first = sum_of(turns * 0x1.62e42fefa38p-1, LOGARITHMS[i][1]), second = sum_of(first.high, r.high);
    const pair third = sum_of(second.high, -0.5 * square.high);
    const double lows = first.low + second.low + third.low + (turns * 0x1.ef35793c7673p-45 + LOGARITHMS[i][2]);
    return sum_of(third.high, lows + rest);
}

double kvc_log(double x) {
    if (x != x || x == INFINITY) return x;
    if (x == 0.0) return -INFINITY;
    return x < 0.0 ? NAN : log_of((pair){x, 0.0}).high;
}

double kvc_log1p(double x) {
    if (x != x || x == INFINITY || (x > -0x1p-60 && x < 0x1p-60)) return x;
    if (x == -1.0) return -INFINITY;
    return x < -1.0 ? NAN : log_of(sum_of(1.0, x)).high;
}

double kvc_power(double x, double y) {
    if (y == 0.0 || x == 1.0) return 1.0;
    if (x != x || y != y || x < 0.0) return NAN;
    if (x == 0.0 || x == INFINITY) return (x == 0.0) == (y > 0.0) ? 0.0 : INFINITY;
    const pair log = log_of((pair){x, 0.0});
    const double about = y * log.high;
    if (about > 710.0) return INFINITY;
    if (about < -746.0) return 0.0;
    if (about > -0x1p-60 && about < 0x1p-60) return 1.0;
    int64_t n;
    const pair product = product_of(y, log.high), found = exp_of(sum_of(product.high, product.low + y * log.low), &n);
    return scaled(found.high, n);
}

/* 1 - 2 / (e^2x + 1) as (e^2x - 1) / (e^2x + 1); near 0 a series. */
double kvc_tanh(double x) {
    const double size = x < 0.0 ? -x : x;
    if (x != x || x == 0.0) return x;
    if (size > 20.0) return x < 0.0 ? -1.0 : 1.0;
    if (size < 0.0625) {
        const double z = x * x;
        const double tail = -0x1.5555555555555p-2 + z * (0x1.1111111111111p-3 + z * (-0x1.ba1ba1ba1ba1cp-5 + z * (0x1.664f4882c10fap-6 +
                            z * (-0x1.226e355e6c23dp-7 + z * 0x1.d6d3d0e157dep-9))));
        return x + x * z * tail;
    }
    int64_t n;
    pair power = exp_of((pair){2.0 * size, 0.0}, &n);
    power.high = scaled(power.high, n), power.low *= double_of((uint64_t)(n + 1023) << 52);
    const pair above = sum_of(power.high, -1.0), below = sum_of(power.high, 1.0);
    const double top = above.low + power.low, bottom = below.low + power.low;
    const double ratio = above.high / below.high;
    const pair back = product_of(ratio, below.high);
    const double found = ratio + ((above.high - back.high) - back.low + top - ratio * bottom) / below.high;
    return x < 0.0 ? -found : found;
}

/* x = quarters * pi / 2 + what is left, from -pi / 4 to pi / 4, with an error below 2^-60 of that; quarters modulo 4. */
static inline pair reduced(double x, int64_t *quarters) {
    const double k = whole(x * 0x1.45f306dc9c883p-1);
    const pair p1 = product_of(k, 0x1.921fb54442d18p+0), p2 = product_of(k, 0x1.1a62633145c07p-54);
    const pair a = sum_of(x - p1.high, -p1.low), b = sum_of(a.high, -p2.high), c = sum_of(a.low, b.low);
    *quarters = (int64_t)k & 3;
    return sum_of(b.high, c.high + (c.low - p2.low + k * 0x1.f1976b7ed8fbcp-110));
}

/* The same of a number from 2^30 on (Payne and Hanek): x = m 2^e times 190 bits of 2 / pi, from the one on that counts modulo 4.
 * What is cut off is below 2^-137. */
static pair reduced_large(double x, int64_t *quarters) {
    const uint64_t bits = bits_of(x), m = (bits & 0xfffffffffffffu) | (uint64_t)1 << 52;
    const int at = 64 + (int)(bits >> 52 & 2047) - 1075 - 2, word = at / 64, shift = at % 64;
    uint64_t window[3], low, middle, high;
    for (int i = 0; i < 3; i++) {
        const uint64_t *from = INVERSE_OF_HALF_PI + word + i;
        window[i] = shift ? from[0] << shift | from[1] >> (64 - shift) : from[0];
    }
    const unsigned __int128 first = (unsigned __int128)m * window[2];
    const unsigned __int128 second = (unsigned __int128)m * window[1] + (uint64_t)(first >> 64);
    low = (uint64_t)first, middle = (uint64_t)second, high = m * window[0] + (uint64_t)(second >> 64);
    *quarters = (int64_t)(high >> 62);
    high = high << 2 | middle >> 62, middle = middle << 2 | low >> 62, low <<= 2; /* the fraction, of 190 bits */
    const int above = (int)(high >> 63);
    if (above) { /* a half and more: less than 0 of the next quarter */
        *quarters = (*quarters + 1) & 3;
        low = ~low + 1, middle = ~middle + !low, high = ~high + (!low && !middle);
    }
    double unit = 0x1p-64;
    while (high < (uint64_t)1 << 63 && unit > 0x1p-190)
        high = high << 1 | middle >> 63, middle = middle << 1 | low >> 63, low <<= 1, unit *= 0.5;
    const double top = (double)(high >> 11), rest = (double)((high & 2047) << 42 | middle >> 22); /* of 53 bits each */
    const pair share = {top * 2048.0 * unit, rest * 0x1p-42 * unit};
    const pair angle = product_of(share.high, 0x1.921fb54442d18p+0);
    const pair found = sum_of(angle.high, angle.low + (share.high * 0x1.1a62633145c07p-54 + share.low * 0x1.921fb54442d18p+0));
    return above ? (pair){-found.high, -found.low} : found;
}

/* Series of a sine and a cosine up to pi / 4: the first terms that they lack are below 2^-63. */
static inline double sine_of(pair x) {
    const double z = x.high * x.high;
    const double tail = 0x1.1111111111111p-7 + z * (-0x1.a01a01a01a01ap-13 + z * (0x1.71de3a556c734p-19 + z * (-0x1.ae64567f544e4p-26 +
                        z * (0x1.6124613a86d09p-33 + z * (-0x1.ae7f3e733b81fp-41 + z * 0x1.952c77030ad4ap-49)))));
    return x.high + (x.high * z * (-0x1.5555555555555p-3 + z * tail) + x.low * (1.0 - 0.5 * z));
}

static inline double cosine_of(pair x) {
    const double z = x.high * x.high;
    const double tail = 0x1.5555555555555p-5 + z * (-0x1.6c16c16c16c17p-10 + z * (0x1.a01a01a01a01ap-16 + z * (-0x1.27e4fb7789f5cp-22 +
                        z * (0x1.1eed8eff8d898p-29 + z * (-0x1.93974a8c07c9dp-37 + z * (0x1.ae7f3e733b81fp-45 + z * -0x1.6827863b97d97p-53))))));
    const double half = 0.5 * z, most = 1.0 - half;
    return most + (((1.0 - most) - half) + (z * z * tail - x.high * x.low));
}

static inline double turned(pair x, int64_t quarters) {
    const double found = quarters & 1 ? cosine_of(x) : sine_of(x);
    return quarters & 2 ? -found : found;
}

/* The sine of x, or with ahead = 1 that of the angle a quarter further, which is the cosine. */
static double sine_ahead(double x, int64_t ahead) {
    const double size = x < 0.0 ? -x : x;
    int64_t quarters = 0;
    if (!(size < INFINITY)) return NAN;
    const pair rest = size < 0x1p30 ? reduced(size, &quarters) : reduced_large(size, &quarters);
    const double found = turned(rest, quarters + ahead);
    return x < 0.0 && !ahead ? -found : found;
}

double kvc_sin(double x) {
    if (x == 0.0) return x; /* -0 */
    return x > -0x1p-30 && x < 0x1p-30 ? x - x * x * x * 0x1.5555555555555p-3 : sine_ahead(x, 0);
}
double kvc_cos(double x) { return sine_ahead(x, 1); }

void kvc_turns(int64_t n, int64_t pairs, const int64_t *positions, const double *frequencies, double scale, float *cosines,
               float *sines) {
    for (int64_t i = 0; i < n; i++) {
        const double position = (double)positions[i];
        for (int64_t k = 0; k < pairs; k++) {
            const double angle = position * frequencies[k];
            cosines[i * pairs + k] = (float)(kvc_cos(angle) * scale);
            sines[i * pairs + k] = (float)(kvc_sin(angle) * scale);
        }
    }
}

void kvc_product(int64_t n, int64_t k, int64_t m, const double *a, const double *b, double *restrict out) {
    enum { COLUMNS = 512, DEPTH = 32 }; /* b of DEPTH rows and COLUMNS columns stays in a cache */
    for (int64_t first = 0; first < m; first += COLUMNS) {
        const int64_t columns = m - first < COLUMNS ? m - first : COLUMNS;
        for (int64_t top = 0; top < k; top += DEPTH) {
            const int64_t stop = k - top < DEPTH ? k : top + DEPTH;
            for (int64_t i = 0; i < n; i++) {
                for (int64_t d = top; d < stop; d++) {
                    for (int64_t j = 0; j < columns; j++) out[i * m + first + j] += a[i * k + d] * b[d * m + first + j];
                }
            }
        }
    }
}
