"""Datasets that can only be iterated over: how they are probed, recorded and read again."""
