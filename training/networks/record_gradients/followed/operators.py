"""The operators whose rows are known, and the rule of each one.

An operator that no table names has no rule and is refused if it takes records; on tensors that hold none it needs none.
"""

from __future__ import annotations

from collections.abc import Iterator

from opusim.training.networks.record_gradients.followed import lookups, rules
from opusim.training.networks.record_gradients.followed.rules import JOINS, VIEWS, Operation, Rule


def _each(names: str, rule: Rule) -> Iterator[tuple[str, Rule]]:
    return ((name, rule) for name in names.split())


_POINTWISE = """
add sub rsub mul div true_divide floor_divide remainder fmod pow neg abs sign sgn exp exp2 expm1 log log2 log10 log1p
sqrt rsqrt reciprocal square sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid
logit relu relu6 leaky_relu elu celu selu gelu silu mish hardtanh hardswish hardsigmoid softplus softshrink hardshrink
threshold _prelu_kernel rrelu_with_noise rrelu_with_noise_functional clamp clamp_min clamp_max clip maximum minimum fmax
fmin where eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor
bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf isfinite
isposinf isneginf signbit nan_to_num round floor ceil trunc frac lerp addcmul addcdiv masked_fill hypot xlogy logaddexp
logaddexp2 copysign nextafter heaviside polar complex digamma lgamma polygamma sinc i0 deg2rad rad2deg angle real imag
conj _conj _conj_physical conj_physical resolve_conj resolve_neg log_sigmoid_forward clone _to_copy detach alias lift
copy positive fill zero contiguous native_dropout native_dropout_backward bernoulli normal uniform exponential
random cauchy log_normal geometric special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
special_ndtri special_xlog1py special_zeta ldexp threshold_backward gelu_backward silu_backward mish_backward
elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward softplus_backward
softshrink_backward hardshrink_backward tanh_backward sigmoid_backward logit_backward log_sigmoid_backward
rrelu_with_noise_backward _prelu_kernel_backward gelu_backward infinitely_differentiable_gelu_backward
huber_loss_backward smooth_l1_loss_backward mse_loss_backward fake_quantize_per_tensor_affine_cachemask
"""
_REDUCTIONS = """
sum nansum mean nanmean prod amax amin var std var_mean std_mean logsumexp linalg_vector_norm norm argmax argmin any all
max min median nanmedian mode kthvalue count_nonzero aminmax
"""
_ALONG = """
_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod logcumsumexp cummax
cummin sort topk glu glu_backward linalg_cross
"""
_MOVES = """
permute transpose t unsqueeze expand slice select split unsafe_split split_with_sizes unsafe_split_with_sizes unbind
chunk narrow repeat flip roll rot90 diagonal unfold as_strided constant_pad_nd pixel_shuffle pixel_unshuffle
channel_shuffle slice_backward select_backward diagonal_backward tril triu movedim expand_copy permute_copy
"""
_SPATIAL = """
avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices max_pool3d_with_indices
max_pool2d_with_indices_backward max_pool3d_with_indices_backward _adaptive_avg_pool2d _adaptive_avg_pool3d
adaptive_avg_pool1d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool3d
adaptive_max_pool2d_backward adaptive_max_pool3d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_nearest1d_backward
upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward upsample_bilinear2d_backward
upsample_bicubic2d_backward upsample_trilinear3d_backward reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad1d replication_pad2d replication_pad3d reflection_pad1d_backward reflection_pad2d_backward
reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
"""
_MATRICES = """
linalg_inv_ex linalg_cholesky_ex _linalg_solve_ex linalg_solve_triangular linalg_qr _linalg_svd _linalg_eigh
_linalg_slogdet _linalg_det linalg_lu_factor_ex linalg_matrix_exp cholesky_solve cholesky_inverse _cdist_forward
_cdist_backward
"""
_BATCH_NORMS = """
native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm
native_batch_norm_backward cudnn_batch_norm_backward _native_batch_norm_legit_no_training
"""
RULES: dict[str, Rule] = {
    **dict(_each(_POINTWISE, rules.pointwise)),
    **dict(_each(_REDUCTIONS, rules.reduced)),
    **dict(_each(_ALONG, rules.along)),
    **dict(_each(" ".join(VIEWS | JOINS) + _MOVES, rules.moved)),
    **dict(_each("squeeze", rules.squeezed)),
    **dict(_each("unfold_backward", rules.unfolded_back)),
    **dict(_each("mse_loss smooth_l1_loss huber_loss binary_cross_entropy nll_loss_forward", rules.loss)),
    **dict(_each("mm bmm", rules.mm)),
    **dict(_each("mv", rules.mv)),
    **dict(_each("dot vdot", rules.dot)),
    **dict(_each("addmm", rules.added(lambda op: rules.product(op, op["mat1"], op["mat2"])))),
    **dict(_each("baddbmm", rules.added(lambda op: rules.product(op, op["batch1"], op["batch2"])))),
    **dict(_each("linear", rules.linear)),
    **dict(_each("mkldnn_rnn_layer _cudnn_rnn", rules.recurrent)),
    **dict(_each("_trilinear", rules.trilinear)),
    **dict(_each("convolution convolution_backward", rules.convolution)),
    **dict(_each("native_layer_norm native_layer_norm_backward", rules.layer_norm)),
    **dict(_each("_fused_rms_norm _fused_rms_norm_backward", rules.layer_norm)),
    **dict(_each("native_group_norm native_group_norm_backward", rules.group_norm)),
    **dict(_each(_BATCH_NORMS, rules.batch_norm)),
    **dict(_each(_SPATIAL, rules.spatial)),
    **dict(_each(_MATRICES, rules.leading(2))),
    **dict(
        _each(
            "grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward",
            rules.leading(2),
        )
    ),
    **dict(_each("im2col col2im affine_grid_generator", rules.first_dimension)),
    **dict(_each("_fft_r2c _fft_c2c _fft_c2r", rules.along)),
    **dict(_each("view_as_real view_as_complex", rules.view_as_numbers)),
    **dict(_each("embedding", lookups.embedding)),
    **dict(_each("_embedding_bag _embedding_bag_forward_only", lookups.embedding_bag)),
    **dict(_each("gather scatter scatter_add scatter_reduce", lookups.indexed_lines)),
    **dict(_each("index_select", lookups.selected)),
    **dict(_each("index_add index_copy index_fill", lookups.added_at)),
    **dict(_each("index _unsafe_index", lookups.indexed)),
    **dict(_each("index_put _index_put_impl _unsafe_index_put", lookups.put)),
    **dict(_each("zeros_like ones_like full_like empty_like rand_like randn_like randint_like", rules.like)),
}
"""The rule of each operator, by its name in torch.ops.aten."""


_PATTERNS = JOINS | {
    "constant_pad_nd",
    "tril",
    "triu",
    "slice_backward",
    "select_backward",
    "diagonal_backward",
}
"""Operators that put other numbers next to those that they move."""


def keeps_alike(op: Operation) -> bool:
    """Whether numbers that are alike at every place are so after an operator, in whatever rows a view puts them."""
    if RULES.get(op.name) not in (rules.pointwise, rules.moved, rules.squeezed, rules.like):
        return False
    others = [tensor for tensor, state in op.pairs() if state is None]
    return op.name not in _PATTERNS and all(tensor.numel() == 1 for tensor in others)


def rule_of(name: str) -> Rule | None:
    """Return the rule of an operator, or None if its rows are not known.

    Args:
        name: Its name in torch.ops.aten, without the mark of an operator in place.
    """
    return rules.attention if name.startswith("_scaled_dot_product") else RULES.get(name)
