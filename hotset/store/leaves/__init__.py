"""Leaves and the schema: how a sample's tree of values becomes bytes, and values again."""
