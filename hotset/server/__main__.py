"""``python -m hotset.server``: the daemon that ``hotset start`` makes, with options that it has checked."""

from __future__ import annotations

import argparse
import sys

from hotset.server.daemon import serve
from hotset.server.options import LEVELS, Options


def main() -> int:
    """Serve with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m hotset.server", description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True, help="bytes")
    parser.add_argument("--log-level", choices=LEVELS, required=True)
    parser.add_argument("--spill")
    parser.add_argument("--log-file", action="store_true", help="standard error is the log file")
    given = parser.parse_args()
    return serve(Options(given.host, given.port, given.memory, given.spill, given.log_level, given.log_file))


if __name__ == "__main__":
    sys.exit(main())
