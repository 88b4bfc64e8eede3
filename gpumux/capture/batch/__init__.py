"""What a batch is made of besides tensors and plain containers: objects (`containers.py`), numpy arrays (`arrays.py`).
For `capture`, and for the parts of `client` that look into batches."""
