"""A forward on a CPU whose bits depend on a token and the text before it alone; ``trial`` shows it, or says why not."""
