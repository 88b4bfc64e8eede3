"""Watching what Python may change between two calls of a step. Start with `fingerprint.py`. For `capture`
alone."""
