"""What a store behind the host tier gives and takes."""
