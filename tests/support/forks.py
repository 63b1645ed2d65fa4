"""Processes that begin where another one stands: forks of one that has imported what they need.

To start Python and import the library takes longer than what many of these processes do.

    python -m forks MODULE...      for each line of its input, a JSON list of a path, a module and arguments: a child
                                   that runs `main(*arguments)` of the module and writes what it prints to the path;
                                   then a line with its status
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress


class Forks:
    """A process to fork from; it starts with the first run.

    Args:
        folder: where the outputs of its children go.
        modules: what it imports.
        environment: its variables.
    """

    def __init__(self, folder, modules, environment):
        self._folder, self._environment, self._runs, self._process = folder, environment, 0, None
        self._command = [sys.executable, "-m", "forks", *modules]

    def run(self, module, *arguments, timeout=1200):
        """Run `main(*arguments)` of a module in a child: its status, as of `subprocess`, and what it printed."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
            )
        self._runs += 1
        output = self._folder / f"{self._runs}.txt"
        self._process.stdin.write(json.dumps([str(output), module, *arguments]) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.close()
            raise subprocess.TimeoutExpired([module, *arguments], timeout, output.read_text())
        status = self._process.stdout.readline()
        assert status, f"the process that forks has ended with status {self._process.wait()}"
        return int(status), output.read_text(errors="replace")

    def close(self):
        """End the process and its child."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def main(modules):
    for module in modules:
        importlib.import_module(module)
    for line in iter(sys.stdin.readline, ""):
        path, module, *arguments = json.loads(line)
        child = os.fork()
        if not child:  # it returns and ends as any process does
            with open(path, "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            return importlib.import_module(module).main(*arguments)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
