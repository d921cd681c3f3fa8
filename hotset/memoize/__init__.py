"""`hotset.memo`: results of functions, kept per machine and found by their arguments."""
