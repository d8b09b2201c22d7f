"""Checks whether drafts suit a target: what is asked (`task`), and the `judgement`."""
