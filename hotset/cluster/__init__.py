"""Other machines: records asked of them, and served to them."""
