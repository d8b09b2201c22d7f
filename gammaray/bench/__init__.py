"""Client-side measurement of a running cluster, shared by `gammaray bench` and `benchmarks/`."""
