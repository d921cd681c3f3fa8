"""Samples to batches: the cached data set, and the loader over it."""
