"""Benchmarks: `python -m bench --help`. One file per noun; a bench is a table of cases."""

import kvcache  # noqa: F401  # before NumPy: kvcache limits how long the threads of BLAS spin
