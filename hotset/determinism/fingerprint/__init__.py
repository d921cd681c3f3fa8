"""Fingerprints: when two datasets, transforms or functions are the same."""
