"""Trains a drafter for a target on text that the target wrote; started by `gammaray train`."""
