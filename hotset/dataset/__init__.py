"""From a user's dataset to a cached one: the plan, the fingerprint, the reading of samples, the window."""
