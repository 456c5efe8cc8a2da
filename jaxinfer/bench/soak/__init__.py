"""Everything that clients do to a server, for minutes, and what must hold: `python -m jaxinfer.bench soak`."""
