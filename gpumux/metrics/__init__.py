"""Prometheus metrics and the page at `/`. Start with `series.py` (counters), then `gauges.py` and `server.py`. The
daemon imports it; it may only import `types` and `errors`."""
