"""A headless Chromium for tests of pages, by the DevTools protocol over a pair of pipes.

With ``--remote-debugging-pipe`` Chromium reads commands from descriptor 3 and writes answers and events to
descriptor 4: JSON, each ended by a zero byte. So nothing is needed besides the browser; where there is none,
tests are skipped. tests/install_chromium.sh installs Debian's package.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from base64 import b64decode
from pathlib import Path
from types import TracebackType
from typing import Any

MISSING = "there is no chromium on this machine; tests/install_chromium.sh installs Debian's"
SECONDS = 60.0
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-zygote",
    "--remote-debugging-pipe",
]


def program() -> str | None:
    """The browser's path; None where there is none."""
    return shutil.which("chromium")


class Browser:
    """One Chromium with one tab.

    Attributes:
        problems: what went wrong on pages since :meth:`open`: exceptions, errors on the console, requests
            that failed or went to a network.
    """

    def __init__(self) -> None:
        path = program()
        assert path is not None, MISSING
        self.problems: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{read_commands} 4>&{write_answers}; exec "$0" "$@"', path, *FLAGS]
            + [f"--user-data-dir={self._folder}", "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._number, self._rest, self._session = 0, b"", ""
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._commands)
        os.close(self._answers)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **arguments: Any) -> Any:
        """Send a command, and return its result.

        Raises:
            RuntimeError: it was refused, or the browser has ended.
        """
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, url: str) -> None:
        """Go to a page, and wait until it has loaded."""
        self.problems.clear()
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        self.wait_for("document.readyState === 'complete'")

    def look(self, width: int, scheme: str, height: int = 900) -> None:
        """Take this width in pixels, and prefer ``light`` or ``dark``."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        # With motion, a page that was made wider is measured while its navigation still moves.
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def ask(self, script: str) -> Any:
        """Evaluate an expression on the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true, and return it."""
        until = time.monotonic() + SECONDS
        while True:
            value = self.ask(script)
            if value:
                return value
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.02)

    def press(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Save a screenshot, of the whole page or of what fits into the window."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(b64decode(answer["data"]))

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        if "method" in answer:
            self._note(answer["method"], answer["params"])
        return answer

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(each.get("value", each)) for each in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.loadingFailed" and not params.get("canceled"):
            self.problems.append(f"a request failed: {params['errorText']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:", "http://127.0.0.1:")):
                self.problems.append(f"a request left the machine: {url}")
