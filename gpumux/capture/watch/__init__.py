"""What Python may change between two calls of a step, and how it is noticed. Start with `fingerprint.py`. For `capture`
alone."""
