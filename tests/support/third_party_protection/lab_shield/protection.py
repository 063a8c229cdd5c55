"""How the protection takes part in a run: what a step releases, and what writes the gradients."""

from opusim import PoissonProtection, RecordGradients
from training.protections.base import central_noise


class ShieldProtection(PoissonProtection):
    """Clips records and adds central noise of a fixed strength."""

    def mechanism(self, noise_multiplier):
        """Return one step of the algorithm on clipped records."""
        return self._algorithm.mechanism(noise_multiplier)

    def gradients(self, device):
        """Return the writer of clipped and noised gradients."""
        return RecordGradients(
            clip_norm=self.section.clip,
            noise_multiplier=self.noise_multiplier,
            divisor=self._plan.config.divisor,
            noise=central_noise(self._plan, device),
        )
