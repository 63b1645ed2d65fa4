"""A second implementation of parts of ckernels/BITS.md, in NumPy, written from its text."""

import numpy as np

from kvcache.kernels.functions import exp, log_add_exp

f = np.float32
LOWEST = f(-np.finfo(f).max)
LEAST = 2.0**-126
EXP2 = "0x1.41d334p-13 0x1.5f456ap-10 0x1.3b2dbcp-7 0x1.c6aed4p-5 0x1.ebfbdap-3 0x1.62e430p-1 1"
EXP2_SHORT = "0x1.409104p-7 0x1.ca9008p-5 0x1.ebf1b4p-3 0x1.62dfcap-1 1"
LEFT_OUT = {2: (0.0675, 0.2025), 3: (0.036, 0.108), 4: (0.016, 0.048), 5: (0.002, 0.02)}


def fma(a, b, c):
    """a * b + c of finite float32, rounded once: the sum of an exact product in float64, rounded to odd."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    wide = np.asarray(c, np.float64)
    total = product + wide
    of_c = total - product
    lost = (product - (total - of_c)) + (wide - of_c)
    odd = np.atleast_1d(total).view(np.int64) & 1 == 1
    beside = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & ~odd.reshape(np.shape(total)), beside, total).astype(f)


def exp2(x, coefficients=EXP2):
    """2^x by the polynomial."""
    x = np.asarray(x, f)
    held = np.minimum(f(128), np.maximum(x, f(-127)))
    whole = np.rint(held)
    first, *rest = (f(float.fromhex(each)) for each in coefficients.split())
    power = np.full_like(x, first)
    for each in rest:
        power = fma(power, held - whole, each)
    return np.where(x < -126, f(0), np.ldexp(power, whole.astype(int)).astype(f))


def by_halves(sums):
    """16 partial sums as one."""
    for half in (8, 4, 2, 1):
        sums = sums[:half] + sums[half : 2 * half]
    return sums[0]


def sixteen(*rows):
    """The sum of 16 of one row, or of the products of two."""
    sums = np.zeros(16, f)
    for lanes in zip(*(np.append(row, np.zeros(-len(row) % 16, f)).reshape(-1, 16) for row in rows), strict=True):
        sums = sums + lanes[0] if len(lanes) == 1 else fma(*lanes, sums)
    return by_halves(sums)


def half(x):
    """A float of the nearest half."""
    return np.float16(x).astype(f)


def turned(x, distances):
    """Steps of the rotation, one after the other."""
    for distance in distances:
        pairs = x.reshape(-1, 2, distance)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
    return x


def written(x):
    """A row as it is stored under its rotation, of a power of two channels."""
    return turned(x * f(1 / len(x)), [1 << i for i in range(len(x).bit_length() - 2, -1, -1)])


def read(x):
    """The inverse."""
    return turned(x, [4, 2, 1, *(1 << i for i in range(3, len(x).bit_length() - 1))])


class Fit:
    """The fit of a row of 5 to 2 bits."""

    def __init__(self, x, bits, lowest, highest):
        self.top, self.bits, self.lowest = 2**bits - 1, bits, lowest
        self.per_step = f(2 ** (15 - bits))
        self.whole, self.first = f(self.top) * self.per_step, self.per_step - f(1)
        span = max(highest - lowest, f(2.0**-40))
        self.finest, self.unit, self.n = self.whole / span, span / self.whole, f(len(x))
        self.u = np.rint((x - lowest) * self.finest).astype(np.int64) + int(self.first)
        self.mean = f(self.u.sum()) * (f(1) / self.n)

    def sums(self, low, step):
        cut = int(np.rint(min(max(low - step * f(0.5), f(0)), f(32767))))
        times = int(np.rint(min(f(2**24) / step, f(32767))))
        codes = np.minimum((np.maximum(self.u - cut, 0) * times + 2**14) >> 24, self.top)
        of_codes = f(codes.sum())
        return of_codes, f((codes * codes).sum()), f((codes * self.u).sum()) - of_codes * self.mean

    def refitted(self, low, step):
        codes, squares, products = self.sums(low, step)
        spread = self.n * squares - codes * codes
        if spread < LEAST or products < LEAST:
            return low, step, f(0)
        other = self.n * products / spread
        gain = products * other
        if gain < LEAST:
            return low, step, gain
        return self.mean - other * (codes * (f(1) / self.n)), other, gain

    def error(self, minimum, scale):
        low, step = (minimum - self.lowest) * self.finest + self.first, scale * self.finest
        codes, squares, products = self.sums(low, step)
        away = low - self.mean
        return self.n * (away * away) + step * (f(2) * (away * codes - products) + step * squares)

    def better(self, minimum, scale):
        best, most = (self.first, self.per_step), f(0)
        for i in range(4):
            left, right = f(LEFT_OUT[self.bits][i & 1]), f(LEFT_OUT[self.bits][i >> 1])
            start = self.first + left * self.whole, (f(1) - left - right) * self.per_step
            *line, gain = self.refitted(*start)
            if most < gain:
                best, most = line, gain
        low, step, _ = self.refitted(*best)
        fitted = self.lowest + (low - self.first) * self.unit, step * self.unit
        low, step = half(min(max(fitted[0], f(-65504)), f(65504))), half(fitted[1])
        margin = self.n * self.per_step * self.per_step * f(2.0**-12)
        near = abs(minimum - self.lowest) < scale * f(0.5)
        if self.error(low, step) + margin < self.error(minimum, scale) and step >= LEAST and near:
            return low, step
        return minimum, scale


def quantised(x, bits):
    """(scale, minimum, codes) of a row that is not constant, of scales that are normal halves."""
    top, lowest, highest = f(2**bits - 1), x.min() + f(0), x.max()
    minimum = half(lowest)
    span = max(highest - minimum, f(0))
    scale = half(span / top)
    if scale * (top + f(0.5)) < span:
        scale = np.nextafter(np.float16(scale), np.float16(np.inf)).astype(f)
    if bits in LEFT_OUT:
        minimum, scale = Fit(x, bits, lowest, highest).better(minimum, scale)
    return scale, minimum, np.rint(np.minimum(np.maximum((x - minimum) / scale, f(0)), top)).astype(f)


class Floats:
    """Rows of floats as keys or values."""

    weights = EXP2

    def __init__(self, rows):
        self.rows = rows

    def scores(self, q, tokens):
        return np.array([sixteen(q, self.rows[t]) for t in tokens], f)

    def mixed(self, weights, tokens):
        total = np.zeros(self.rows.shape[1], f)
        for weight, t in zip(weights, tokens, strict=True):
            total = fma(weight, self.rows[t], total)
        return total


class Tiles:
    """Rows of codes as keys or values, in tiles."""

    weights = EXP2_SHORT

    def __init__(self, rows, bits):
        parts = [quantised(row, bits) for row in rows]
        self.scales, self.minima, codes = (np.array(each) for each in zip(*parts, strict=True))
        self.codes, self.bits = codes.astype(np.int64) - (128 if bits == 8 else 0), bits
        self.middle = f(128) if bits == 8 else f((2**bits - 1) / 2)

    def whole(self, x, most):
        largest = np.abs(x).max()
        inverse = most / largest if largest > 2.0**-100 else f(0)
        return largest / most, np.rint(x * inverse).astype(np.int64)

    def scores(self, q, tokens):
        step, numbers = self.whole(q, f(1791 if self.bits <= 4 else 8127))
        total = sixteen(q)
        left = f(0) if self.bits == 8 else step * f(numbers.sum())
        centre = self.middle * (total - left)
        product = (self.codes[tokens] @ numbers).astype(f)
        return fma(self.minima[tokens], total, self.scales[tokens] * fma(product, step, centre))

    def mixed(self, weights, tokens):
        step, numbers = self.whole(weights * self.scales[tokens], f(1791 if self.bits <= 4 else 16383))
        base = sixteen(weights, fma(self.scales[tokens], self.middle, self.minima[tokens]))
        if self.bits != 8:
            base = base - self.middle * step * f(numbers.sum())
        return fma((numbers @ self.codes[tokens]).astype(f), step, base)


def attended(q, scale, keys, values, num_tokens, unseen=0):
    """The output of one query that sees all tokens but the first `unseen`; they fill their blocks."""
    q = fma(q, f(float(f(scale)) * 1.4426950408889634), f(0))
    found = []
    for first in range(unseen // 1024 * 1024, num_tokens, 1024):
        largest, total, mixed = LOWEST, f(0), f(0)
        for start in range(first, min(num_tokens, first + 1024), 128):
            tokens = np.arange(start, min(num_tokens, start + 128))
            scores = np.where(tokens < unseen, f(-np.inf), keys.scores(q, tokens))
            most = max(largest, scores.max())
            alpha, weights = exp2(largest - most), exp2(scores - most, keys.weights)
            total, largest = total * alpha + sixteen(weights), most
            mixed = fma(mixed, alpha, values.mixed(weights, tokens))
        found.append((largest, total, mixed))
    largest, total, mixed = found[0]
    for here, own, of_own in found[1:]:
        most = max(here, largest)
        new, old = exp2(here - most), exp2(largest - most)
        largest, total, mixed = most, fma(total, old, own * new), fma(mixed, old, of_own * new)
    return mixed * (f(1) / total) + f(0)


def multiplied(x, codes, scales, minima, *, digits, zero):
    """A row of x times one of a format with a scale for each group of 32 channels."""
    most, result = f(127 if digits == 1 else 16256), f(0)
    for i, scale in enumerate(scales):
        group = x[32 * i : 32 * i + 32]
        largest = np.abs(group).max()
        numbers = np.rint(group * (most / largest)).astype(np.int64)
        step = largest / most
        if digits == 1:
            step = (np.array([step]).view(np.uint32) & ~np.uint32(3)).view(f)[0]
        total = int(numbers @ (codes[32 * i : 32 * i + 32].astype(np.int64) - zero))
        own = f(total * float(step)) if digits == 1 else f(total) * step
        result = fma(own, f(scale), result)
        if minima is not None:
            result = fma(f(minima[i]), step * f(numbers.sum()), result)
    return result


def multiplied_in_bf16(x, weights, order):
    """Rows of x times weights transposed, both of numbers of bf16, in an order of kvc_matrix.h; quads are left out."""
    total = None
    for block in range(0, x.shape[1], 256):
        wide = np.zeros((len(x) + len(weights), 256), f)
        both = np.concatenate([x, weights])[:, block : block + 256]
        wide[:, : both.shape[1]] = both
        rows, outputs = wide[: len(x), None], wide[None, len(x) :]
        own = np.zeros((len(x), len(weights)), f)
        if order == "tiles":
            for first in range(0, 256, 32):
                halves = np.zeros((2, *own.shape), f)
                for k in range(first, first + 32):
                    halves[k % 2] = fma(rows[..., k], outputs[..., k], halves[k % 2])
                own = own + (halves[0] + halves[1])
        else:
            for k in range(256):
                at = k ^ 1 if order == "pairs" else k
                own = fma(rows[..., at], outputs[..., at], own)
        total = own if total is None else total + own
    return total


def merged(parts, own):
    """Attention over parts of a context and over the rest of it, `(output, log-sum-exp)` each, merged in this order."""

    def two(a, b):
        (out_a, log_a), (out_b, log_b) = a, b
        with np.errstate(invalid="ignore", over="ignore"):
            share = (1 / (1 + exp(log_b.astype(np.float64) - log_a))).astype(np.float32)
        share[np.isneginf(log_a)] = 0
        return out_b + share[..., None] * (out_a - out_b), log_add_exp(log_a, log_b).astype(np.float32)

    found = parts[0]
    for each in [*parts[1:], own]:
        found = two(found, each)
    return found
