"""No function or sum of floats whose bits NumPy or libm choose by the CPU stands in the way of a token."""

import ast
import re
from collections import Counter

import pytest
from house_rules import sources

pytestmark = pytest.mark.one_build

# Rooms between a prompt and its tokens. `kernels` has the functions in their place; a calibration is an input, and
# `integrations` compute with tensors of other libraries.
ROOMS = ["networks", "sampling", "serving", "engine", "paged", "texts", "policies", "states", "lists", "prefix"]
ROOMS += ["core", "drafts", "gguf", "grammar", "kernels"]
# Their order of sums, or their polynomials, differ by CPU and by version.
FUNCTIONS = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "cos", "sin", "tan", "tanh", "sinh", "cosh", "arctan",
    "power", "float_power", "pow", "logaddexp", "logaddexp2", "dot", "vdot", "inner", "matmul", "einsum", "tensordot",
    "mean", "average", "var", "std", "nansum", "nanmean", "cbrt", "hypot", "erf", "gamma", "lgamma", "convolve",
    "interp", "trapezoid", "norm", "fsum", "sumprod",
}
# Sums of any module and array; those of whole numbers are exact.
SUMS = {"sum", "cumsum", "mean", "std", "var", "dot", "cumprod", "reduce", "reduceat", "accumulate"}
OWNERS = {"np", "numpy", "math", "cmath", "linalg", "fft"}
ALL_OF = {"linalg", "fft"}  # LAPACK and pocketfft: every function
# Functions of libm in C, but for those that IEEE 754 rounds (sqrt) or that are exact (fabs, copysign).
LIBM = "exp exp2 expm1 log log2 log10 log1p pow asin sin sinh acos cos cosh atan atan2 tan tanh cbrt hypot erf erfc"
LIBM += " tgamma lgamma fmod remainder fma rint"
# What may stand there, by file: each with the reason.
ALLOWED = {
    "kvcache/drafts/draft_pace.py": {"**": 1},  # how many tokens are drafted, which changes no text
    "kvcache/drafts/pass_times.py": {"**": 1},  # seconds
    "kvcache/engine/compression.py": {"sum": 1},  # of weights in whole numbers
    "kvcache/grammar/mask_batch.py": {"cumsum": 1},  # lengths
    "kvcache/lists/manager.py": {"cumsum": 1},  # lengths
    "kvcache/networks/linear.py": {"cumsum": 2},  # lengths
    "kvcache/networks/expert_kinds.py": {"mean": 2},  # whether experts are averaged
    "kvcache/networks/model.py": {"mean": 1},  # the same
    "kvcache/policies/adakv.py": {"cumsum": 1},  # lengths
    "kvcache/prefix/index_file.py": {"cumsum": 1},  # pages
    "kvcache/sampling/sampling.py": {"cumsum": 2, "sum": 1},  # weights in whole numbers; tokens
    "kvcache/sampling/sentinels.py": {"**": 1},  # whole numbers
    "kvcache/serving/budget.py": {"**": 2},  # seconds
    "kvcache/texts/budgets.py": {"**": 1, "mean": 1},  # whole numbers; Scoring.mean, which adds rows in order
    "kvcache/texts/compressed_prefix.py": {"cumsum": 1, "sum": 1},  # lengths
    "kvcache/texts/kinds/evicting.py": {"cumsum": 1},  # lengths
    "kvcache/texts/forward.py": {"cumsum": 2, "sum": 1},  # lengths
    "kvcache/texts/scores.py": {"cumsum": 1},  # lengths
    "kvcache/texts/kinds/part_layers.py": {"cumsum": 1},  # lengths
    "kvcache/texts/kinds/state.py": {"cumsum": 1},  # lengths
    "kvcache/texts/kinds/whole.py": {"sum": 1},  # blocks
}


def uses(text):
    """The names of such functions in a file and how often each is there; `@`, powers by other than whole numbers."""
    found = Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found["@"] += 1
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Pow):
            right = node.right if isinstance(node, ast.BinOp) else node.value
            if not (isinstance(right, ast.Constant) and type(right.value) is int):
                found["**"] += 1
        elif isinstance(node, ast.ImportFrom) and node.module in ("numpy", "math", "cmath", "numpy.linalg"):
            found.update(each.name for each in node.names if each.name in FUNCTIONS | SUMS)
        elif isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
            if owner in ("maximum", "minimum"):
                continue
            if node.attr in SUMS or (node.attr in FUNCTIONS and owner in OWNERS) or owner in ALL_OF:
                found[node.attr] += 1
    return found


def test_nothing_in_the_way_of_a_token_has_bits_of_the_cpu():
    rooms = [f"kvcache/{room}" for room in ROOMS]
    found = {name: dict(uses(text)) for name, text in sources("py", rooms=rooms) if uses(text)}
    assert found == ALLOWED


def test_cython_takes_nothing_of_libm():
    """All that it may take from there are roots, which IEEE 754 rounds, kinds of numbers, and their names."""
    taken, other = set(), {}
    for name, text in sources("pyx", "pxd"):
        for names in re.findall(r"from libc.math cimport (.*)", text):
            taken.update(re.split(r"[, ]+", names))
        if found := in_cython(text):
            other[name] = found
    assert taken == {"INFINITY", "NAN", "isfinite", "isnan", "sqrt"}
    assert not other


def in_cython(text):
    """The same functions of NumPy and `math`, other ways to libm, and powers by other than whole numbers."""
    calls = re.findall(rf"\b(?:np|numpy|math)\.(?:{'|'.join(sorted(FUNCTIONS))})\(", text)
    return calls + re.findall(r"libc cimport math|cimport libc\.math|math\.h|[\w)] \*\* [a-z(]", text)


def in_c(text):
    """Calls of functions of libm in C, without its comments."""
    return re.findall(rf"\b(?:{LIBM.replace(' ', '|')})[fl]?\(", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def test_kernels_take_nothing_of_libm():
    found = {name: in_c(text) for name, text in sources("c", "h", rooms=["ckernels"]) if in_c(text)}
    assert not found
    assert len(list(sources("c", rooms=["ckernels"]))) > 20


def test_what_is_found():
    text = """
import numpy as np, math
from math import log
a = np.exp(x) + math.cos(y) + x.sum() + a @ b + x**-0.5 + x**n + np.add(x, y) + x**2 + np.linalg.norm(x) + own.log(x)
x **= 0.5
np.add.reduce(x); np.linalg.solve(x, y)
"""
    assert uses(text) == {"log": 1, "exp": 1, "cos": 1, "sum": 1, "@": 1, "**": 3, "norm": 1, "reduce": 1, "solve": 1}
    assert in_cython("np.exp(x)\nfrom libc cimport math\na = b ** c + 2.0 ** -40 + d ** 2\nf(**options)") == [
        "np.exp(", "libc cimport math", "b ** c"
    ]
    assert in_c("/* exp(x) */ y = expf(x) + kvc_exp(x) + f32v_exp2(x) + pow (x, y) + pow(x, y);") == ["expf(", "pow("]
