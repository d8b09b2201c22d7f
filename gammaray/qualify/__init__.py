"""Checks whether a draft is fit for a target: measurements (`measured`), their `judgement`, output (`tables`)
and the measuring process (`process`).
"""
