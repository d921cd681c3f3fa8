"""From a cached dataset to batches: the order, the workers, the gather, the state to go on from."""
