"""Offline jobs: `python -m jaxinfer.batch` reads prompts from files and writes a result for each, exactly once."""
