"""What the batch command costs: against `LLM.generate` on the same prompts, and in memory over many records."""
