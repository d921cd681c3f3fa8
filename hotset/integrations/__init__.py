"""Adapters for training libraries that build a loader of their own from the one they are given.

Each module is for one library and imports it; the rest of hotset does not. A plain loop, Lightning without
resuming, and Fabric need none of them.
"""
