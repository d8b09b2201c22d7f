"""Benchmark and evaluation clients of other projects, run unmodified against `gammaray up`."""
