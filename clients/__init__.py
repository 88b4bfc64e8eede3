"""Runnable client programs on real data: `python -m clients.digits_cnn --help`."""
