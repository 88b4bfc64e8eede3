"""Prometheus metrics and the page at `/`. Start with `series.py`. May import `types` and `errors` alone."""
