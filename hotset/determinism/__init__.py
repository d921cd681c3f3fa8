"""Determinism: what a source declares, what a probe sees of it, and its samples' fingerprint."""
