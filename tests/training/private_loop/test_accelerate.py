"""A private loop takes the loader that Accelerate, and so the Hugging Face Trainer, has prepared."""

from pathlib import Path

import pytest
from torch.utils.data import DataLoader, RandomSampler

from tests.support.private_loops import parts, private_loop, records, run_epoch

accelerate = pytest.importorskip("accelerate")


@pytest.mark.parametrize("seedable", [True, False])
def test_a_prepared_loader_is_taken(tmp_path: Path, seedable: bool) -> None:
    settings = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=seedable)
    model, optimizer, criterion, loader = parts()
    prepared = accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader)
    assert (type(prepared.batch_sampler.sampler) is not RandomSampler) == seedable
    with private_loop(tmp_path, (model, optimizer, criterion, prepared)) as private:
        assert run_epoch(private) != 60  # each record at random, so not all of them once
        assert private.step == 5
        assert (private.settings.sample_rate, private.settings.batch_size) == (0.2, 12)


class SeedableRandomSampler(RandomSampler):
    """Another sampler of that name."""


@pytest.mark.parametrize("replacement", [True, False])
def test_other_samplers_are_refused(tmp_path: Path, replacement: bool) -> None:
    kind = accelerate.data_loader.SeedableRandomSampler if replacement else SeedableRandomSampler
    loader = DataLoader(records(), batch_size=12, sampler=kind(records(), replacement=replacement))
    with pytest.raises(ValueError, match="SeedableRandomSampler of its own"):
        private_loop(tmp_path, (*parts()[:3], loader))
