"""What the daemon keeps in its state directory beside snapshots of jobs: `directory.py` opens it and what lies in it,
`learned.py` keeps what the guard has learned of interference."""
