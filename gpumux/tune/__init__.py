"""Hyper-parameter tuning over arrays of models: HFHT (HFTA, appendix E) without rewritten models. Start with
`tune.py`."""
