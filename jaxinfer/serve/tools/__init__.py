"""Tools: their definitions, the calls in a model's text, and the grammar that forces calls."""
