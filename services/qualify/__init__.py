"""Measures a pair of models in one process, by the schedulers of the two workers: no network, no cluster."""
