"""Models for the client programs, written here. Each has a `tiny` size that trains on a CPU in seconds."""
