"""What the load generator itself costs."""
