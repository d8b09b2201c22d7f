"""Drafters of a target, compared; and a drafter that ships."""
