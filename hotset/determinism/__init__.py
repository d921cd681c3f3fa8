"""Determinism: the samples and transforms that may be cached, the evidence for that, and fingerprints."""
