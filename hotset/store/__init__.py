"""Bytes: the segment's format, its index and claims, room, records, blocks, and the gather."""
