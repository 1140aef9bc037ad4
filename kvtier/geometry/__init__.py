"""What is cached and what it takes: groups, keys, layouts, sizes, options."""
