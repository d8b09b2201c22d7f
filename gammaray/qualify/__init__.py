"""Checks whether drafts suit a target: what is asked (`task`), clusters that are measured one after the other
(`clusters`), and the `judgement`.
"""
