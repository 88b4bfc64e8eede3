"""One job on several devices: a training step split over ranks by a burst-parallel plan (DeepPool, sections 3 and 4).

Start with `ranks.py`; `placement.py` says which layer is on which ranks, `layout.py` where operators and values lie,
`split.py` writes the operators of each rank, `proof.py` and `numbering.py` prove them, `programs.py` says what each
rank is given and whether all fit together. It imports `capture` and `program`; the client imports it.
"""
