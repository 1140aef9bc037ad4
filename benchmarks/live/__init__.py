"""What the live page costs, and pictures of it."""
