"""The OpenAI-compatible server: `python -m jaxinfer.serve`."""
