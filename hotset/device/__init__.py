"""Batches and steps on the device: the queue, the resident samples, the sink."""
