"""The cache server: it owns a budget, lifetimes, metrics and a page, and never touches a sample."""
