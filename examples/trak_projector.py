"""Project the gradients of TRAK (pip install traker) by a device: two methods of its AbstractProjector.

python examples/trak_projector.py
"""

import tempfile

import numpy as np
import torch
from trak import TRAKer
from trak.projectors import AbstractProjector, BasicProjector
from trak.utils import vectorize

import opusim
from opusim.features import OpticalOperator


class OpticalProjector(AbstractProjector):
    """B g of each gradient g, with entries of B of variance 1 as in TRAK's own, and another B for each model ID.

    Gradients are shown to the device `optics` in binary digits, `planes` of them. `device` is torch's.
    """

    def __init__(
        self, grad_dim, proj_dim, seed=0, proj_type="normal", device="cpu", optics="gaussian", planes=6
    ):
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        self.optics, self.planes = optics, planes
        self.operator, self.model_id, self.opened = None, None, 0

    def project(self, grads, model_id):
        """See AbstractProjector; several calls see one matrix, and noise of their own."""
        if self.operator is None or model_id != self.model_id:
            self.free_memory()
            self.opened += 1  # a seed of its own for the noise, which must not repeat
            opened = opusim.open_device(
                self.optics, n_inputs=self.grad_dim, n_outputs=self.proj_dim,
                medium={"seed": self.seed + 100_000 * model_id}, seed=self.opened,
            )  # fmt: skip
            self.operator, self.model_id = OpticalOperator(opened, planes=self.planes), model_id
        grads = vectorize(grads, device="cpu") if isinstance(grads, dict) else grads
        found = self.operator @ grads.detach().cpu().float().numpy().T
        return torch.from_numpy(found.T.copy()).to(self.device, grads.dtype)

    def free_memory(self):
        """Close the device."""
        if self.operator is not None:
            self.operator.device.close()
            self.operator = None


def scores(projector, n: int = 200) -> np.ndarray:
    """Return TRAK's scores of a linear model, from every record to every record, shape (n, n)."""
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(64, 4), torch.randn(n, 64), torch.randint(4, (n,))
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            model, "image_classification", n, folder, device="cpu", projector=projector, proj_dim=None,
            use_half_precision=False, logging_level=100,
        )  # fmt: skip
        traker.load_checkpoint(model.state_dict(), model_id=0)
        traker.featurize([x, y], num_samples=n)
        traker.finalize_features()
        traker.start_scoring_checkpoint("all", model.state_dict(), model_id=0, num_targets=n)
        traker.score([x, y], num_samples=n)
        return np.array(traker.finalize_scores("all"))


def main(proj_dim: int = 64) -> dict[str, float]:
    """Return the correlation of scores through a device, and through TRAK's own projector, with those of another seed.

    The scores of two random matrices differ, so that TRAK's own is the figure to compare with.
    """
    own = [BasicProjector(260, proj_dim, seed, "normal", "cpu", block_size=32) for seed in (1, 2)]
    first, other, device = (scores(each).ravel() for each in (*own, OpticalProjector(260, proj_dim)))
    found = {
        "TRAK": float(np.corrcoef(first, other)[0, 1]),
        "device": float(np.corrcoef(first, device)[0, 1]),
    }
    print(", ".join(f"correlation by {name}: {value:.3f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
