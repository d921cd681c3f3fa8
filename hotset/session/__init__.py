"""Names and lifetime: the runtime folder and the list of the caches on this machine."""
