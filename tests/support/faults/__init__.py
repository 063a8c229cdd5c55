"""Planted faults, one file each: ways in which a run would release less protection than it accounts for.

A detector of such faults (a self-test, an audit) is tested against all of `FAULTS`; see `Fault` for
what each entry says and how it is planted. A new fault is a new file and a line here.
"""

from tests.support.faults import (
    all_subsets_sampled,
    answers_too_bright,
    averaged_before_noise,
    batches_repeat_every_epoch,
    batches_reused,
    bias_unclipped,
    biases_without_noise,
    clip_too_wide,
    clipped_by_layer,
    clipped_together,
    coins_paired,
    counts_not_discarded,
    counts_too_bright,
    divided_by_realised_size,
    empty_batches_without_noise,
    final_noise_missing_on_release,
    fixed_size_batches,
    fixed_size_batches_on_release,
    labels_kept_too_often,
    labels_not_permuted,
    labels_same_in_every_run,
    last_layer_without_noise,
    leverage_of_most_records,
    noise_halved,
    noise_halved_on_release,
    noise_missing_on_release,
    noise_of_wide_columns,
    noise_reused,
    noise_reused_on_release,
    noise_same_in_every_run,
    noise_shared_by_coordinates,
    noise_shared_by_parameters,
    noise_too_small,
    part_repeated,
    part_without_noise,
    sampled_too_often,
    steps_without_noise,
)
from tests.support.faults.base import Fault

FAULTS: tuple[Fault, ...] = (
    noise_too_small.FAULT,
    noise_reused.FAULT,
    noise_same_in_every_run.FAULT,
    noise_shared_by_coordinates.FAULT,
    noise_shared_by_parameters.FAULT,
    biases_without_noise.FAULT,
    last_layer_without_noise.FAULT,
    clipped_by_layer.FAULT,
    clip_too_wide.FAULT,
    fixed_size_batches.FAULT,
    fixed_size_batches_on_release.FAULT,
    batches_reused.FAULT,
    batches_repeat_every_epoch.FAULT,
    sampled_too_often.FAULT,
    divided_by_realised_size.FAULT,
    labels_kept_too_often.FAULT,
    labels_same_in_every_run.FAULT,
    counts_not_discarded.FAULT,
    labels_not_permuted.FAULT,
    answers_too_bright.FAULT,
    counts_too_bright.FAULT,
    noise_of_wide_columns.FAULT,
    all_subsets_sampled.FAULT,
    noise_missing_on_release.FAULT,
    noise_halved_on_release.FAULT,
    noise_reused_on_release.FAULT,
    final_noise_missing_on_release.FAULT,
    steps_without_noise.FAULT,
    part_without_noise.FAULT,
    part_repeated.FAULT,
    empty_batches_without_noise.FAULT,
    clipped_together.FAULT,
    coins_paired.FAULT,
)

OF_ONE_RUN: tuple[Fault, ...] = (noise_halved.FAULT, bias_unclipped.FAULT, averaged_before_noise.FAULT)
"""Faults for the audit of one training (benchmarks.attacks.one_run); the self-test finds them as well."""

OF_RELEASES: tuple[Fault, ...] = (leverage_of_most_records.FAULT,)
"""Faults of releases that the self-test does not read, for tests of `tests.support.releases`."""

__all__ = ["FAULTS", "OF_ONE_RUN", "OF_RELEASES", "Fault"]
