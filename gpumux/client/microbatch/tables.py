"""What splitting needs to know of single operators."""

from __future__ import annotations

# Operators that use a tensor argument as a pattern only: its values do not matter.
PATTERN_ONLY = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
     "new_empty_strided")
)  # fmt: skip

# Operators whose result is not defined yet: nothing to compare.
UNDEFINED = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))

# Operators that give shares of a sum when given shares of a sum. They may stay within a part, so that fewer
# shares are accumulated; everything else that reads a share runs once, on the sum.
_LINEAR = ["add", "sub", "neg", "mul", "div", "sum", "mean", "clone", "copy", "_to_copy", "view", "_unsafe_view", "reshape", "expand", "t", "transpose", "permute", "cat", "stack", "squeeze", "unsqueeze"]  # fmt: skip
LINEAR = frozenset(
    form for name in _LINEAR for form in (name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_")
)  # fmt: skip
DIVISIONS = frozenset(("div", "div_"))
PRODUCTS = frozenset(("mul", "mul_", "_foreach_mul", "_foreach_mul_"))

# Reductions that are no sums: where all that was seen of one is zeros, that says nothing.
NOT_SUMS = frozenset(
    [
        "amax",
        "amin",
        "aminmax",
        "max",
        "min",
        "prod",
        "std",
        "var",
        "std_mean",
        "var_mean",
        "any",
        "all",
        "norm",
        "linalg_vector_norm",
        "logsumexp",
        "median",
        "nanmedian",
        "mode",
        "kthvalue",
        "argmax",
        "argmin",
    ]
)

BATCH_NORMS = frozenset(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
     "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "batch_norm_with_update")
)  # fmt: skip

# Losses that divide by the number (or weight) of the labels not ignored: that of the whole batch must be used.
# reduction is argument 3 and 4, total_weight return 1 and argument 6.
NLL_FORWARD = frozenset(("nll_loss_forward", "nll_loss2d_forward"))
NLL_BACKWARD = frozenset(("nll_loss_backward", "nll_loss2d_backward"))
MEAN, SUM = 1, 2
