"""Programs found by search."""
