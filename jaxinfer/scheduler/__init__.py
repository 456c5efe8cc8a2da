"""Who runs in the next step. Host only: no jax, no model."""
