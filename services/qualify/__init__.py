"""Measures a pair of models in one process with the schedulers of both workers: no network, no cluster."""
