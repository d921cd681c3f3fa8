"""From a cached dataset to batches: the order, the workers, the gather, and the state to resume from."""
