"""How the protection takes part in a run: what a step releases, and what writes the gradients."""

from training.protections.base import PoissonProtection, central_noise
from training.protections.planning import divisor_of
from training.protections.record import RecordGradients


class ShieldProtection(PoissonProtection):
    """Clips records to half the usual norm and adds central noise."""

    def mechanism(self, noise_multiplier):
        """One step of the algorithm on clipped records."""
        return self._algorithm.mechanism(noise_multiplier)

    def gradients(self, device):
        """What clips and noises."""
        return RecordGradients(
            clip_norm=self.section.clip,
            noise_multiplier=self.noise_multiplier,
            divisor=divisor_of(self._plan.config),
            noise=central_noise(self._plan, device),
        )
