"""The prompt sets of `gammaray bench`, under the name that the benchmarks know them by."""

from __future__ import annotations

from gammaray.bench.workloads import WORKLOADS, fingerprint, prompts

__all__ = ["WORKLOADS", "fingerprint", "prompts"]
