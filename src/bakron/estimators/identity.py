"""``identity``: H_in = I and H_out = I, which makes every solver round to nearest."""

from __future__ import annotations

from torch import Tensor


class Identity:
    """No data enters."""

    needs_gradients = False
    shares_input = True
    per_token = True

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """No terms."""
        return None, None

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """All tokens weigh the same."""
        return None


ESTIMATOR = Identity()
