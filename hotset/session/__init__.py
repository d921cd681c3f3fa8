"""Names and lifetimes: sessions and their quotas, the runtime folder, the list of caches on this machine."""
