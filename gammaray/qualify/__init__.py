"""Checks whether a draft is fit for a target: measurements (`measured`), their evaluation (`verdict`), output
(`tables`), and the measuring process (`process`).
"""
