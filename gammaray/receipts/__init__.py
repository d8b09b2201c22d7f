"""Receipts of completions: their form (`receipt`), and the keys that sign them (`keys`)."""
