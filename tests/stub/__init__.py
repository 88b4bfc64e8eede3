"""The real driver wrapper and the real cuda-bindings, on a libcuda that stands in for the driver's (libcuda.c).
`inside` holds the tests that run on it, in processes of their own, one for each release of cuda-bindings; build.py
makes what they need."""
