"""``kvtier serve``: an OpenAI-compatible server on FastAPI and uvicorn. Needs ``pip install 'kvtier[serve]'``."""
