"""Speculative decoding at real sizes on one GPU; see README.md."""
