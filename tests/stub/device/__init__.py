"""The whole device on the real driver wrapper and the stand-in for libcuda; what torch does on a GPU is done in host
memory."""
