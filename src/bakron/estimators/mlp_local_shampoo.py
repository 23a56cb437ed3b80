"""``mlp_local_shampoo``: ``mlp_local`` with the Shampoo factorisation, E[tr(M_t) xxᵀ] ⊗ E[‖x‖² M_t]."""

from __future__ import annotations

from bakron.estimators.mlp_local import MlpLocal

ESTIMATOR = MlpLocal(shampoo=True)
