"""Commands and checks for setting a machine up. They talk to no daemon: `installation.py` is what is installed here,
`deploy.py` the command that writes the files of deploy/."""
