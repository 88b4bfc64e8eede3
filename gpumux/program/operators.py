"""The operators a Program may call, and the facts about them that need no torch.

`ALLOWED` is every name of `allowed_ops`. `INDEX_ARGS` names the arguments that are indices: kernels don't check
them, so index inputs are copied and range-checked before a launch. `written_args` gives the arguments that a call
changes, including those that batch norm's schema does not declare. Tests compare all of it with torch's schemas.
"""

from __future__ import annotations

from collections.abc import Collection

from gpumux.errors import ProgramError
from gpumux.program import allowed_ops


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in text.split())


ALLOWED: frozenset[str] = frozenset().union(*map(_names, allowed_ops.FAMILIES))
RANDOM: frozenset[str] = _names(allowed_ops.RANDOM)
PERHAPS_RANDOM: frozenset[str] = _names(allowed_ops.PERHAPS_RANDOM)
NUMBERS_ON_GPU: frozenset[str] = _names(allowed_ops.NUMBERS_ON_GPU)

# Allowed names that the oldest supported torch (2.11) does not have yet.
NOT_IN_EVERY_TORCH: frozenset[str] = _names("_foreach_clone _foreach_mm")


def is_allowed(target: str, extra: Collection[str] = ()) -> bool:
    """Whether a Program may call `target`; `extra` holds names that the daemon's administrator added."""
    return target in ALLOWED or target in extra


def resolve(target: str, extra: Collection[str] = ()) -> str:
    """`target` itself if it may be called, else ProgramError naming it."""
    if is_allowed(target, extra):
        return target
    raise ProgramError(
        f"the operator {target!r:.200} is not on the allow-list",
        "express the step without it, or ask the daemon's operator to add it to allow_ops",
    )


def _table(rows: str) -> dict[str, tuple[int, ...]]:
    table: dict[str, tuple[int, ...]] = {}
    for row in rows.strip().splitlines():
        positions, names = row.split(":")
        for name in _names(names):
            table[name] = tuple(map(int, positions.split(",")))
    return table


# Argument positions that hold indices, positions, targets, pivots or offsets into another argument.
INDEX_ARGS: dict[str, tuple[int, ...]] = _table("""
1: embedding embedding_dense_backward embedding_renorm embedding_renorm_
1,2: _embedding_bag _embedding_bag_forward_only
1,2,4: _embedding_bag_dense_backward
2,3,4: _embedding_bag_per_sample_weights_backward
2: gather index_select index_add index_add_ index_copy index_copy_ index_reduce index_reduce_
2: index_fill.int_Scalar index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor
2: scatter.reduce scatter.src scatter.value scatter.value_reduce scatter_add scatter_add_ scatter_reduce.two
2: scatter_.reduce scatter_.src scatter_.value scatter_.value_reduce scatter_reduce_.two
1: index.Tensor _unsafe_index.Tensor index_put index_put_ _index_put_impl_ _unsafe_index_put
2: _unsafe_masked_index _unsafe_masked_index_put_accumulate
1: take put put_ take_along_dim
1: nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward
2: nll_loss_backward nll_loss2d_backward multi_margin_loss_backward multilabel_margin_loss_backward
7: max_pool2d_with_indices_backward max_pool3d_with_indices_backward
2: adaptive_max_pool2d_backward adaptive_max_pool3d_backward value_selecting_reduction_backward cummaxmin_backward
4: fractional_max_pool2d_backward fractional_max_pool3d_backward
1: max_unpool2d max_unpool3d
1: linalg_ldl_solve linalg_lu_solve lu_unpack
2: _grouped_mm
3,4: _flash_attention_forward
6,7: _flash_attention_backward _scaled_dot_product_flash_attention_backward _efficient_attention_backward
4,5: _efficient_attention_forward _cudnn_attention_forward
9,10: _cudnn_attention_backward _scaled_dot_product_cudnn_attention_backward
""")

_WRITES: dict[str, tuple[int, ...]] = _table("""
0,1,2,3,4: _fused_adam_ _fused_adam_.tensor_lr _fused_adamw_ _fused_adamw_.tensor_lr
0,1,2: _fused_sgd_ _fused_sgd_.tensor_lr _fused_adagrad_.tensor_lr
0,1,2,3: _fused_adagrad_
0,1: _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ rrelu_with_noise_
1: rrelu_with_noise
3,4: native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update
""")

# Arguments that are written although the schema does not say so.
HIDDEN_WRITES: frozenset[str] = _names("native_batch_norm cudnn_batch_norm")


def written_args(target: str) -> tuple[int, ...]:
    """Positions of the arguments an allow-listed operator may change. Nothing is known here of operators that an
    administrator added; `check` reads their schemas instead."""
    known = _WRITES.get(target)
    if known is not None:
        return known
    name = target.split(".")[1]
    in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    return (0,) if in_place else ()
