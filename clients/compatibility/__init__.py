"""Idioms of training scripts as people write them, each run plainly and through gpumux, compared bit for bit.

`suite.py` says what an idiom is and compares; the other modules hold the idioms, by theme. docs/compatibility.md is
their table, made by `python -m clients.compatibility.table`.
"""
