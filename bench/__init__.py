"""Benchmarks: `python -m bench --help`. One file per noun; a bench is a table of cases."""
