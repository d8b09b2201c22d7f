"""Whether a draft is fit for a target: what was measured (`measured`), what follows from it (`verdict`), how
it is shown (`tables`), and the process that measures (`process`).
"""
