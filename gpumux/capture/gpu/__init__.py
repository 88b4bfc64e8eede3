"""Tracing on the CPU for a GPU: operators, autocast and devices as the GPU would have them. Start with
`operators.py`. For `capture` alone."""
