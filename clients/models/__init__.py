"""Models for the client programs and the benchmarks, written here. Each has a `tiny` size that trains on a CPU in
seconds."""
