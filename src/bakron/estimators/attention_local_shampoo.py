"""``attention_local_shampoo``: ``attention_local`` with the Shampoo factorisation, in the MLP too."""

from __future__ import annotations

from bakron.estimators.attention_local import AttentionLocal

ESTIMATOR = AttentionLocal(shampoo=True)
