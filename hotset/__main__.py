"""``python -m hotset``: the command line, where its program is not on the path."""

from __future__ import annotations

from hotset.cli.main import main

if __name__ == "__main__":
    main()
