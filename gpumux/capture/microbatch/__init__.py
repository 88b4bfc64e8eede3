"""One step over a batch as k accumulated parts of it: `submit(..., microbatches=k)`.

The step is traced on the whole batch and on the first part of it. Operator by operator the two traces
say what each value is (`values`, `classify`): untouched by the batch, per sample, a part's share of something
reduced over the batch, or known only when all parts have run. From that a new trace is put together
(`emit`, `join`): what does not depend on the batch once, forward and backward for each part over views
into the batch, shares accumulated as they appear, and the rest (clipping, the optimizer) once. Before it is used
it is run next to the whole step on real numbers (`proof`); where the two part, the operator and the
user's line are named in a NotSplittable.
"""
