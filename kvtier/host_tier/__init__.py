"""The door for engines with device memory, block ids and keys of their own."""
