"""What the choice of a step's next tokens costs."""
