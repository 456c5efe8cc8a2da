"""A load generator for any server with OpenAI's completions or chat endpoint: `python -m jaxinfer.bench serve`."""
