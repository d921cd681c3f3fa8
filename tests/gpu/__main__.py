"""All checks and figures without pytest: ``python -m tests.gpu``."""

from __future__ import annotations

import argparse
import sys
import traceback

from .checks import CHECKS
from .figures import add_arguments, report_on


def main() -> int:
    options = add_arguments(argparse.ArgumentParser(prog="python -m tests.gpu")).parse_args()
    failed = 0
    for check in CHECKS:
        try:
            check(options.device)
            print(f"ok      {check.__name__}", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED  {check.__name__}", flush=True)
    report_on(options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
