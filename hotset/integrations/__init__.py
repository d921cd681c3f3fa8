"""Training libraries that take a loader apart and build their own: how it stays hotset's there.

Each module here is for one library and imports it; nothing else in hotset does. A loader needs none of them
in a plain loop, in Lightning without resuming, or in Fabric.
"""
