"""One step over a batch as k accumulated parts of it: `submit(..., microbatches=k)`.

The step is traced on the whole batch and on its first part. The two traces tell, operator by operator, how each value
depends on the batch (`classify`): not at all, per sample, as a part's share of a reduction over the batch, or known
only after all parts. From that a new trace is made (`emit`, `split`): operators independent of the batch once, forward
and backward for each part over views of the batch, shares accumulated, and the rest (clipping, the optimizer) once.
Before its first use it is compared with the whole step on real numbers (`proof`). A difference raises NotSplittable,
which names the operator and the user's line. Start with `split.py`.
"""
