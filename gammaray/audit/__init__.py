"""Audits of OpenAI-compatible servers from outside."""
