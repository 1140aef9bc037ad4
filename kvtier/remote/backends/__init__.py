"""Who keeps objects: the contract of a backend, and those that there are."""
