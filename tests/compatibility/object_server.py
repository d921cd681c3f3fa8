"""A server of objects over HTTP on this machine, each of whose answers takes a while, as a store's does."""

from __future__ import annotations

import contextlib
import functools
import http.server
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["served"]


class Objects(http.server.SimpleHTTPRequestHandler):
    """The files of a folder, with an ETag, a connection for many requests, and a delay for each."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and content go together
    seconds = 0.0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        time.sleep(self.seconds)
        super().do_GET()

    def end_headers(self) -> None:
        with contextlib.suppress(OSError):
            found = Path(self.translate_path(self.path)).stat()
            self.send_header("ETag", f'"{found.st_mtime_ns:x}-{found.st_size:x}"')
        super().end_headers()


@contextlib.contextmanager
def served(folder: Path, seconds: float = 0.01) -> Iterator[str]:
    """The address at which a process of its own serves the folder."""
    command = [sys.executable, __file__, str(folder), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def main(folder: str, seconds: float) -> None:
    Objects.seconds = seconds
    handler = functools.partial(Objects, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
