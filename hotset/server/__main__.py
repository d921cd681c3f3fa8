"""``python -m hotset.server``: the daemon that ``hotset start`` makes, with options that it has checked."""

from __future__ import annotations

import json
import sys

from hotset.server.daemon import serve
from hotset.server.options import Options


def main() -> int:
    """Serve with the options that the one argument holds."""
    return serve(Options(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
