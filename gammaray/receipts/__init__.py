"""Receipts of completions: their form (`receipt`), the keys (`keys`), what a check finds (`verdicts`)."""
