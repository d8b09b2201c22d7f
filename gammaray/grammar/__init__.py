"""Grammars that completions follow: their text, from JSON schemas and the like, and their masks."""
