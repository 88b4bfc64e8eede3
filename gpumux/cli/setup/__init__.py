"""Commands and checks for setting a machine up. They talk to no daemon: `installation.py` is what is installed here,
`deploy.py`, `settings.py`, `keys.py` and `grants.py` are the commands deploy, config, keys and grants."""
