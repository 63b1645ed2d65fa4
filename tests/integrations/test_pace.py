"""Import orders and numbers of threads: what the library does about them, and what it says."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.one_build

CODE = """
import sys, warnings
{first}
import kvcache
import kvcache.integrations.transformers as kvt
import torch
from transformers import LlamaConfig

assert kvcache.get_num_threads() == {number}
config = LlamaConfig(num_hidden_layers=2)


def said(torch_threads, threads):
    torch.set_num_threads(torch_threads)
    kvcache.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        kvt.PagedCache(config)
    assert all(each.filename == "<string>" for each in found)
    return "".join(str(each.message) for each in found)


assert said(1, 1) == ""
late = said(2, 2)
assert ("OMP_WAIT_POLICY=PASSIVE" in late) == {late}, late
assert "attention uses 2 threads and torch 1; kvcache.set_num_threads(" in said(1, 2)
assert said(1, 2) == said(2, 2) == ""  # once
"""


@pytest.mark.parametrize(
    ("first", "late", "variables"),
    [
        ("import torch", sys.platform == "linux", {}),
        ("import torch", False, {"OMP_WAIT_POLICY": "PASSIVE", "KVCACHE_NUM_THREADS": "3"}),
        ("", False, {}),
    ],
)
def test_orders_and_numbers(first, late, variables):
    names = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KVCACHE_NUM_THREADS"
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    number = variables.get("KVCACHE_NUM_THREADS", "torch.get_num_threads()")
    code = CODE.format(first=first, late=late, number=number)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
