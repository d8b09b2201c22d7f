"""Measurements of candidates, as `run_bench` returns them."""

MANY = 1000


def row(gamma, speedup, cycles=MANY, alpha=0.8):
    return {
        "system": f"gammaray-{gamma}",
        "over_plain": {"median": speedup},
        "speculation": {"cycles": cycles, "alpha": alpha},
    }


def result(*rows, temperature=0.0, compared=10, equal=10):
    point = {
        "temperature": temperature,
        "rows": [row(0, 1.0, alpha=None), *rows],
        "equality": {"compared": compared, "equal": equal},
    }
    return {"points": [point]}
