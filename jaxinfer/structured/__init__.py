"""Outputs of a given form: a JSON schema, a regular expression, choices, a grammar, as masks over the vocabulary."""
