"""Answers that the target writes, and its hidden states over them."""
