"""Subinterpreters: `import kvcache` raises ImportError there, instead of deadlocking in the first call."""

import subprocess
import sys

import pytest

OURS = "kvcache: expected the main interpreter, got a subinterpreter"
CYTHONS = "Interpreter change detected - this module can only be loaded into one interpreter per process."
CODE = """
try:
    import kvcache
except ImportError as error:
    assert str(error) in {messages!r}, error
else:
    raise SystemExit("imported")
with open({path!r}, "w") as file:
    file.write("refused")
"""
RUN = """
import sys, warnings
warnings.simplefilter("ignore")
code = {code!r}
if {first}:
    import kvcache
    cache = kvcache.PagedKvCache(4, 4, 2, 8)
try:
    import _interpreters as interpreters
    made = interpreters.create("legacy")
    found = interpreters.exec(made, code)
    assert found is None, found
except ImportError:
    import _xxsubinterpreters as interpreters
    made = interpreters.create(isolated=False)
    interpreters.run_string(made, code)
interpreters.destroy(made)
if {first}:
    cache.allocate(1, 4)
    cache.check()
print("done")
"""


@pytest.mark.parametrize("first", [False, True], ids=["alone", "after the main interpreter"])
def test_import_in_a_subinterpreter(tmp_path, first):
    messages = [OURS, CYTHONS] if first else [OURS]  # Cython refuses modules of the main interpreter
    code = CODE.format(path=str(tmp_path / "outcome"), messages=messages)
    ran = subprocess.run(
        [sys.executable, "-c", RUN.format(code=code, first=first)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "done"
    assert (tmp_path / "outcome").read_text() == "refused"
