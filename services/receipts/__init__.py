"""Checks receipts of completions: the process of `gammaray check`."""
