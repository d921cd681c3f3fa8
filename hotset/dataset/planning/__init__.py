"""The plan: what is cached, found by reading a few samples and by cutting chains of transforms."""
