"""Commands and checks for setting a machine up. They talk to no daemon: `installation.py` is what is installed here,
`deploy.py`, `settings.py` and `keys.py` are the commands deploy, config and keys."""
