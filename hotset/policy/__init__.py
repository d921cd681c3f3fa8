"""Pure arithmetic that processes agree on without talking: no I/O, clock, thread or torch."""
