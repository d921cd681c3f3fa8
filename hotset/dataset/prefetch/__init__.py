"""Processes that read a window's next samples ahead of use."""
