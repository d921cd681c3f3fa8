"""The first thing to run: one small training, with torch's DataLoader and with hotset, side by side."""

from __future__ import annotations
