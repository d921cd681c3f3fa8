#!/usr/bin/env bash
# Installs Debian's Chromium for the tests of pages, where apt-get may; those tests are skipped without it.
set -euo pipefail
if command -v chromium > /dev/null; then
    exit 0
fi
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    echo "chromium is not installed, and only root may install it by apt-get: tests of pages are skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium; } > /dev/null 2>&1; then
    echo "chromium cannot be installed by apt-get: tests of pages are skipped"
fi
