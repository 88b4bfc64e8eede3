"""The aten overloads a Program may call, by name, family by family (reviewed by hand).

A name without an overload means `.default`. Left out on purpose, whatever a client asks:
- anything that reads or writes files, addresses or descriptors, or swaps a tensor's storage or shape
  under the executor (`set_`, `resize_*`, `from_file`, `as_strided_`, `t_`, `squeeze_`, every `.out`);
- results whose size or value reaches Python (`item`, `nonzero`, `unique*`, `masked_select`, `equal`);
- operators whose kernels read past an argument that is smaller than the others imply and whose calls no capture makes,
  and those that shape rules can't run (tests/program/side_arguments.json has a row for every operator that is here);
- asserts, printing, profiling, streams, pinning, distributed, quantised, sparse, nested and named tensors;
- lazy conjugation and negation (`_conj`, `_neg_view`): a view of a Program can't say the bit, so the
  captured step must use `conj_physical` or `neg`.
Composite operators are mostly absent because a capture decomposes them.
"""

from __future__ import annotations

POINTWISE_UNARY = """
abs abs_ acos acos_ acosh acosh_ angle asin asin_ asinh asinh_ atan atan_ atanh atanh_ bitwise_not bitwise_not_
ceil ceil_ _conj_physical conj_physical conj_physical_ cos cos_ cosh cosh_ deg2rad deg2rad_ digamma digamma_
erf erf_ erfc erfc_ erfinv erfinv_ exp exp_ exp2 exp2_ expm1 expm1_ floor floor_ frac frac_ frexp.Tensor i0 i0_
isinf isnan isneginf isposinf isfinite lgamma lgamma_ log log_ log10 log10_ log1p log1p_ log2 log2_
logical_not logical_not_ logit logit_ mvlgamma mvlgamma_ nan_to_num nan_to_num_ neg neg_ polygamma polygamma_
positive rad2deg rad2deg_ reciprocal reciprocal_ round round_ round.decimals round_.decimals rsqrt rsqrt_
sgn sgn_ sigmoid sigmoid_ sign sign_ signbit sin sin_ sinc sinc_ sinh sinh_ sqrt sqrt_ square square_ tan tan_
tanh tanh_ trunc trunc_
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx
special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_spherical_bessel_j0
"""

POINTWISE_BINARY = """
add.Scalar add.Tensor add_.Scalar add_.Tensor sub.Scalar sub.Tensor sub_.Scalar sub_.Tensor rsub.Scalar rsub.Tensor
mul.Scalar mul.Tensor mul_.Scalar mul_.Tensor div.Scalar div.Tensor div_.Scalar div_.Tensor
div.Scalar_mode div.Tensor_mode div_.Scalar_mode div_.Tensor_mode floor_divide floor_divide.Scalar
floor_divide_.Scalar floor_divide_.Tensor fmod.Scalar fmod.Tensor fmod_.Scalar fmod_.Tensor
remainder.Scalar remainder.Scalar_Tensor remainder.Tensor remainder_.Scalar remainder_.Tensor
pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow_.Scalar pow_.Tensor
atan2 atan2_ copysign.Scalar copysign.Tensor copysign_.Scalar copysign_.Tensor fmax fmin gcd gcd_ lcm lcm_
heaviside heaviside_ hypot hypot_ igamma igamma_ igammac igammac_ ldexp.Tensor ldexp_ logaddexp logaddexp2
maximum minimum max.other min.other nextafter nextafter_ xlogy.Tensor
xlogy.Scalar_Other xlogy.Scalar_Self xlogy_.Scalar_Other xlogy_.Tensor complex polar
special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar
special_zeta special_zeta.other_scalar special_zeta.self_scalar
eq.Scalar eq.Tensor eq_.Scalar eq_.Tensor ne.Scalar ne.Tensor ne_.Scalar ne_.Tensor
ge.Scalar ge.Tensor ge_.Scalar ge_.Tensor gt.Scalar gt.Tensor gt_.Scalar gt_.Tensor
le.Scalar le.Tensor le_.Scalar le_.Tensor lt.Scalar lt.Tensor lt_.Scalar lt_.Tensor
isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor isclose
bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_and_.Scalar bitwise_and_.Tensor
bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_or_.Scalar bitwise_or_.Tensor
bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Tensor bitwise_xor_.Scalar bitwise_xor_.Tensor
bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
bitwise_left_shift_.Tensor bitwise_left_shift_.Tensor_Scalar
bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
bitwise_right_shift_.Tensor bitwise_right_shift_.Tensor_Scalar
__and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Scalar __xor__.Tensor
__iand__.Scalar __iand__.Tensor __ior__.Scalar __ior__.Tensor __ixor__.Scalar __ixor__.Tensor
__lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor
__ilshift__.Scalar __ilshift__.Tensor __irshift__.Scalar __irshift__.Tensor
logical_and logical_and_ logical_or logical_or_ logical_xor logical_xor_
"""

POINTWISE_OTHER = """
addcdiv addcdiv_ addcmul addcmul_ lerp.Scalar lerp.Tensor lerp_.Scalar lerp_.Tensor
clamp clamp.Tensor clamp_ clamp_.Tensor clamp_max clamp_max.Tensor clamp_max_ clamp_max_.Tensor
clamp_min clamp_min.Tensor clamp_min_ clamp_min_.Tensor where.self where.Scalar where.ScalarOther where.ScalarSelf
fill.Scalar fill.Tensor fill_.Scalar fill_.Tensor zero zero_ renorm renorm_
"""

ACTIVATION = """
celu celu_ elu elu_ elu_backward gelu gelu_ gelu_backward glu glu_backward glu_jvp glu_backward_jvp
hardshrink hardshrink_backward hardsigmoid hardsigmoid_ hardsigmoid_backward hardswish hardswish_ hardswish_backward
hardtanh hardtanh_ hardtanh_backward leaky_relu leaky_relu_ leaky_relu_backward log_sigmoid_forward
log_sigmoid_backward mish mish_ mish_backward _prelu_kernel _prelu_kernel_backward relu relu_ relu6 relu6_
logit_backward rrelu_with_noise_backward selu selu_ sigmoid_backward
silu silu_ silu_backward softplus softplus_backward softshrink softshrink_backward tanh_backward
threshold threshold_ threshold_backward infinitely_differentiable_gelu_backward
_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
_masked_softmax
"""

REDUCTION = """
all all.dim all.dims any any.dim any.dims amax amin aminmax _aminmax _aminmax.dim argmax argmin bucketize.Scalar
bucketize.Tensor count_nonzero count_nonzero.dim_IntList cummax cummin cumprod cumprod_ cumsum cumsum_
logcumsumexp _logcumsumexp logsumexp dist histc kthvalue max max.dim mean mean.dim median median.dim min min.dim
mode nanmedian nanmedian.dim nansum norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype
native_norm native_norm.ScalarOpt_dim_dtype norm_except_dim prod prod.dim_int searchsorted.Scalar searchsorted.Tensor
sort sort.stable std.correction std_mean.correction sum sum.dim_IntList topk trace trace_backward
var.correction var_mean.correction cumprod_backward cummaxmin_backward value_selecting_reduction_backward
"""

MATRIX = """
addbmm addbmm_ addmm addmm.dtype addmm_ _addmm_activation addmv addmv_ addr addr_ baddbmm baddbmm.dtype baddbmm_
bmm bmm.dtype dot ger mm mm.dtype mv vdot _grouped_mm _int_mm _scaled_mm _trilinear
linear _cdist_forward _cdist_backward _euclidean_dist _pdist_forward _pdist_backward
"""

LINEAR_ALGEBRA = """
cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_cross _linalg_det
linalg_eig _linalg_eigh _linalg_eigvals linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
linalg_pinv.atol_rtol_tensor linalg_qr _linalg_slogdet _linalg_solve_ex linalg_solve_triangular _linalg_svd
linalg_vector_norm linalg__powsum lu_unpack ormqr triangular_solve
"""

CONVOLUTION = """
convolution convolution_backward _convolution
conv_tbc conv_tbc_backward conv_depthwise3d _conv_depthwise2d cudnn_convolution cudnn_convolution_transpose
cudnn_convolution_relu cudnn_convolution_add_relu
im2col col2im unfold_backward
"""

POOLING = """
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward
avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d fractional_max_pool3d_backward
max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
max_unpool2d max_unpool3d
"""

NORMALIZATION = """
native_batch_norm native_batch_norm_backward _native_batch_norm_legit
_native_batch_norm_legit.no_stats _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update
cudnn_batch_norm cudnn_batch_norm_backward batch_norm_stats
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
_fused_rms_norm _fused_rms_norm_backward _weight_norm_interface _weight_norm_interface_backward
"""

LOSS = """
binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
huber_loss huber_loss_backward mse_loss mse_loss_backward multi_margin_loss multi_margin_loss_backward
multilabel_margin_loss_forward multilabel_margin_loss_backward nll_loss_forward nll_loss_backward
nll_loss2d_forward nll_loss2d_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
soft_margin_loss_backward kl_div
"""

ATTENTION = """
_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
_flash_attention_backward _efficient_attention_backward
"""

INDEXING = """
embedding embedding_dense_backward embedding_renorm embedding_renorm_ _embedding_bag _embedding_bag_forward_only
_embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
gather index.Tensor _unsafe_index.Tensor index_add index_add_ index_copy index_copy_ index_fill.int_Scalar
index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor index_put index_put_ _index_put_impl_
_unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate index_reduce index_reduce_ index_select
masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor masked_scatter masked_scatter_
masked_scatter_backward nonzero_static put put_ scatter.reduce scatter.src scatter.value scatter.value_reduce
scatter_.reduce scatter_.src scatter_.value scatter_.value_reduce scatter_add scatter_add_ scatter_reduce.two
scatter_reduce_.two take take_along_dim select_backward select_scatter slice_backward slice_scatter
diagonal_backward diagonal_scatter as_strided_scatter
"""

SHAPE = """
block_diag cat stack _stack clone contiguous copy copy_ lift_fresh_copy constant_pad_nd flip roll rot90 repeat
channel_shuffle pixel_shuffle pixel_unshuffle diag_embed tril tril_ triu triu_ _to_copy
_reshape_copy
reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
reflection_pad3d reflection_pad3d_backward replication_pad1d replication_pad1d_backward
replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward
alias_copy as_strided_copy detach_copy diagonal_copy expand_copy narrow_copy permute_copy select_copy.int
slice_copy.Tensor split_copy.Tensor split_with_sizes_copy squeeze_copy squeeze_copy.dim squeeze_copy.dims t_copy
transpose_copy.int unbind_copy.int unfold_copy unsqueeze_copy unsafe_split.Tensor unsafe_split_with_sizes
view_copy view_copy.dtype view_as_complex_copy view_as_real_copy _chunk_cat
"""

# Views change no byte. A capture turns them into rows of the view table; where one stays an operator, its
# outputs lie on its argument's storage, and the check holds it to that.
VIEW = """
alias as_strided detach diagonal expand lift lift_fresh permute _reshape_alias select.int slice.Tensor
split.Tensor split_with_sizes squeeze squeeze.dim squeeze.dims t transpose.int unbind.int unfold unsqueeze
_unsafe_view view view.dtype view_as_complex view_as_real
"""

RESAMPLING = """
affine_grid_generator affine_grid_generator_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d
grid_sampler_3d_backward cudnn_grid_sampler
cudnn_grid_sampler_backward cudnn_affine_grid_generator cudnn_affine_grid_generator_backward
upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d
upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d
upsample_trilinear3d_backward upsample_nearest2d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec
_upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
_upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
_upsample_nearest_exact2d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward
"""

CREATION = """
arange arange.start arange.start_step empty.memory_format empty_like empty_permuted empty_strided eye eye.m
full full_like linspace linspace.Scalar_Tensor linspace.Tensor_Scalar linspace.Tensor_Tensor
logspace new_empty new_empty_strided new_full new_ones new_zeros ones ones_like range range.step scalar_tensor
tril_indices triu_indices zeros zeros_like fft_fftfreq fft_rfftfreq bartlett_window bartlett_window.periodic
blackman_window blackman_window.periodic hamming_window hamming_window.periodic hamming_window.periodic_alpha
hamming_window.periodic_alpha_beta hann_window hann_window.periodic kaiser_window kaiser_window.beta
kaiser_window.periodic
"""

# Draws from the job's generator: every call must carry a random slot.
RANDOM = """
bernoulli bernoulli.p bernoulli.Tensor bernoulli_.Tensor bernoulli_.float binomial cauchy cauchy_ exponential
exponential_ _fused_dropout geometric geometric_ log_normal log_normal_ multinomial native_dropout
normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor normal.float_float normal_ normal_functional poisson
rand rand_like randint randint.low randint_like randint_like.low_dtype randint_like.Tensor randn randn_like
random random.from random.to random_ random_.from random_.to randperm
_sample_dirichlet _standard_gamma uniform uniform_
"""

# Draws only when told to (a dropout probability, training): a call may carry a random slot.
PERHAPS_RANDOM = """
rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional _cudnn_rnn
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
_scaled_dot_product_attention_math
_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward _cudnn_attention_backward
"""

RANDOM_HELPERS = "native_dropout_backward _masked_scale _standard_gamma_grad _dirichlet_grad"

FOREACH = """
_foreach_abs _foreach_abs_ _foreach_acos _foreach_acos_ _foreach_asin _foreach_asin_ _foreach_atan _foreach_atan_
_foreach_ceil _foreach_ceil_ _foreach_cos _foreach_cos_ _foreach_cosh _foreach_cosh_ _foreach_erf _foreach_erf_
_foreach_erfc _foreach_erfc_ _foreach_exp _foreach_exp_ _foreach_expm1 _foreach_expm1_ _foreach_floor
_foreach_floor_ _foreach_frac _foreach_frac_ _foreach_lgamma _foreach_lgamma_ _foreach_log _foreach_log_
_foreach_log10 _foreach_log10_ _foreach_log1p _foreach_log1p_ _foreach_log2 _foreach_log2_ _foreach_neg
_foreach_neg_ _foreach_reciprocal _foreach_reciprocal_ _foreach_round _foreach_round_ _foreach_rsqrt
_foreach_rsqrt_ _foreach_sigmoid _foreach_sigmoid_ _foreach_sign _foreach_sign_ _foreach_sin _foreach_sin_
_foreach_sinh _foreach_sinh_ _foreach_sqrt _foreach_sqrt_ _foreach_tan _foreach_tan_ _foreach_tanh _foreach_tanh_
_foreach_trunc _foreach_trunc_ _foreach_zero _foreach_zero_ _foreach_clone _foreach_copy _foreach_copy_
_foreach_add.List _foreach_add.Scalar _foreach_add.ScalarList _foreach_add.Tensor
_foreach_add_.List _foreach_add_.Scalar _foreach_add_.ScalarList _foreach_add_.Tensor
_foreach_sub.List _foreach_sub.Scalar _foreach_sub.ScalarList
_foreach_sub_.List _foreach_sub_.Scalar _foreach_sub_.ScalarList
_foreach_mul.List _foreach_mul.Scalar _foreach_mul.ScalarList _foreach_mul.Tensor
_foreach_mul_.List _foreach_mul_.Scalar _foreach_mul_.ScalarList _foreach_mul_.Tensor
_foreach_div.List _foreach_div.Scalar _foreach_div.ScalarList _foreach_div.Tensor
_foreach_div_.List _foreach_div_.Scalar _foreach_div_.ScalarList _foreach_div_.Tensor
_foreach_addcdiv.Scalar _foreach_addcdiv.ScalarList
_foreach_addcdiv_.Scalar _foreach_addcdiv_.ScalarList
_foreach_addcmul.Scalar _foreach_addcmul.ScalarList
_foreach_addcmul_.Scalar _foreach_addcmul_.ScalarList
_foreach_clamp_max.List _foreach_clamp_max.Scalar _foreach_clamp_max.ScalarList
_foreach_clamp_max_.List _foreach_clamp_max_.Scalar _foreach_clamp_max_.ScalarList
_foreach_clamp_min.List _foreach_clamp_min.Scalar _foreach_clamp_min.ScalarList
_foreach_clamp_min_.List _foreach_clamp_min_.Scalar _foreach_clamp_min_.ScalarList
_foreach_lerp.List _foreach_lerp.Scalar _foreach_lerp.ScalarList
_foreach_lerp_.List _foreach_lerp_.Scalar _foreach_lerp_.ScalarList
_foreach_max _foreach_maximum.List _foreach_maximum.Scalar _foreach_maximum.ScalarList
_foreach_maximum_.List _foreach_maximum_.Scalar _foreach_maximum_.ScalarList
_foreach_minimum.List _foreach_minimum.Scalar _foreach_minimum.ScalarList
_foreach_minimum_.List _foreach_minimum_.Scalar _foreach_minimum_.ScalarList
_foreach_norm.Scalar _foreach_powsum.Scalar _foreach_pow.List _foreach_pow.Scalar _foreach_pow.ScalarAndTensor
_foreach_pow.ScalarList _foreach_pow_.List _foreach_pow_.Scalar _foreach_pow_.ScalarList _foreach_mm
"""

OPTIMIZER = """
_fused_adagrad_ _fused_adagrad_.tensor_lr
_fused_adam_ _fused_adam_.tensor_lr
_fused_adamw_ _fused_adamw_.tensor_lr
_fused_sgd_ _fused_sgd_.tensor_lr
_amp_foreach_non_finite_check_and_unscale _amp_foreach_non_finite_check_and_unscale_
_amp_update_scale _amp_update_scale_
"""

RECURRENT = """
mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn_backward _cudnn_rnn_flatten_weight
_thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
_thnn_fused_lstm_cell_backward_impl _thnn_differentiable_gru_cell_backward _thnn_differentiable_lstm_cell_backward
"""

FOURIER = "_fft_c2c _fft_c2r _fft_r2c"

# Those that read a number from memory on a GPU, where it may differ from step to step (device/cuda/operators.py).
NUMBERS_ON_GPU = """
_foreach_add.List _foreach_add.Scalar _foreach_add.ScalarList _foreach_add_.List _foreach_add_.Scalar
_foreach_add_.ScalarList _foreach_addcdiv.Scalar _foreach_addcdiv.ScalarList _foreach_addcdiv_.Scalar
_foreach_addcdiv_.ScalarList _foreach_addcmul.Scalar _foreach_addcmul.ScalarList _foreach_addcmul_.Scalar
_foreach_addcmul_.ScalarList _foreach_div.Scalar _foreach_div.ScalarList _foreach_div_.Scalar _foreach_div_.ScalarList
_foreach_lerp.Scalar _foreach_lerp.ScalarList _foreach_lerp_.Scalar _foreach_lerp_.ScalarList _foreach_mul.Scalar
_foreach_mul.ScalarList _foreach_mul_.Scalar _foreach_mul_.ScalarList _foreach_pow.ScalarAndTensor _foreach_sub.List
_foreach_sub.Scalar _foreach_sub.ScalarList _foreach_sub_.List _foreach_sub_.Scalar _foreach_sub_.ScalarList
_fused_adam_ _fused_adamw_ _fused_sgd_ add.Scalar add.Tensor add_.Scalar add_.Tensor addcdiv addcdiv_ addcmul addcmul_
clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ div.Scalar div_.Scalar eq.Scalar eq_.Scalar fill.Scalar
fill_.Scalar full full_like ge.Scalar ge_.Scalar gt.Scalar gt_.Scalar le.Scalar le_.Scalar lerp.Scalar lerp_.Scalar
lt.Scalar lt_.Scalar masked_fill.Scalar masked_fill_.Scalar mul.Scalar mul_.Scalar ne.Scalar ne_.Scalar pow.Scalar
pow.Tensor_Scalar pow_.Scalar rsub.Scalar rsub_.Scalar scalar_tensor softshrink softshrink_ sub.Scalar sub.Tensor
sub_.Scalar sub_.Tensor
"""

FAMILIES = (
    POINTWISE_UNARY, POINTWISE_BINARY, POINTWISE_OTHER, ACTIVATION, REDUCTION, MATRIX, LINEAR_ALGEBRA, CONVOLUTION,
    POOLING, NORMALIZATION, LOSS, ATTENTION, INDEXING, SHAPE, VIEW, RESAMPLING, CREATION, RANDOM, PERHAPS_RANDOM,
    RANDOM_HELPERS, FOREACH, OPTIMIZER, RECURRENT, FOURIER,
)  # fmt: skip
