"""Programs found by search, and the tasks they are searched on."""
