"""`/v1/messages`: the Messages API of Anthropic's clients."""
