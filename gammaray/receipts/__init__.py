"""Receipts of completions: their form and signature (`receipt`), the keys (`keys`) and what a check finds (`verdicts`)."""
