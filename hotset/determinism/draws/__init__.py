"""Draws: random number generators, the system's entropy, and the watch over both."""
