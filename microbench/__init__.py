"""Every figure the README quotes, with the command that made it: `python -m microbench.NAME`."""
