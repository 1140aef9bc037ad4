"""Views of a cache: changes of what can be found, for routers, and explanations."""
