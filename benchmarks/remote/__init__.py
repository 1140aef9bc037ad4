"""What a remote tier gives and takes."""
