"""How the protection takes part in a run: what a step releases, and what writes the gradients."""

from opusim.training import PoissonProtection, RecordGradients


class ShieldProtection(PoissonProtection):
    """Clips records and adds central noise of a fixed strength."""

    def mechanism(self, noise_multiplier):
        """Return one step of the algorithm on clipped records."""
        return self.algorithm.mechanism(noise_multiplier)

    def gradients(self, device):
        """Return the writer of clipped and noised gradients."""
        return RecordGradients(
            clip_norm=self.options.clip,
            noise_multiplier=self.noise_multiplier,
            divisor=self.config.divisor,
            noise=self.central_noise(device),
        )
