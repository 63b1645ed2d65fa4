"""A real browser without a window, driven over pipes by the protocol of Chrome's tools; no package is needed."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A page of a browser, until the end of the `with` block.

    Attributes:
        errors: what its scripts raised or wrote as an error.
    """

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs, ours), (back, sent) = os.pipe(), os.pipe()
        os.set_inheritable(theirs, True)
        os.set_inheritable(sent, True)
        script = f'exec "$0" "$@" 3<&{theirs} 4>&{sent}'
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
            f"--user-data-dir={self._folder.name}", "--no-first-run", "--hide-scrollbars",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, PROGRAM, *options], close_fds=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(sent)
        self._out, self._in = os.fdopen(ours, "wb", 0), os.fdopen(back, "rb")
        self._count, self._session, self._waiting, self.errors = 0, None, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()
        self._folder.cleanup()

    def call(self, method, **params):
        """The result of a method."""
        self._count += 1
        asked = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        self._out.write(json.dumps(asked).encode() + b"\0")
        while (found := self._next()).get("id") != self._count:
            if found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                entry = found["params"]
                if entry.get("entry", {}).get("level", "error") == "error":
                    self.errors.append(json.dumps(entry))
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        return found["result"]

    def _next(self):
        while b"\0" not in self._waiting:
            if not (more := os.read(self._in.fileno(), 1 << 16)):
                raise RuntimeError("the browser ended")
            self._waiting += more
        message, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(message)

    def run(self, script):
        """The value of an expression of JavaScript; of a promise, that of its end."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def until(self, script, seconds=60):
        """The value of an expression, when it is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, self.run("document.body.innerText")
            time.sleep(0.05)
        return found

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def picture(self, path):
        """Write what it shows, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
