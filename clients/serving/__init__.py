"""Inference services as the important job: a decoder with a static key-value cache, and an HTTP server that batches.

`python -m clients.serving.latency` measures both, alone and beside a greedy low-priority job.
"""
