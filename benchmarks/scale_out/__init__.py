"""Several engines behind a router: whether a conversation's next turn goes where its prefix is."""
