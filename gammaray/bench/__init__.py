"""Measuring a running cluster as its users see it: what `gammaray bench` and `benchmarks/` share."""
