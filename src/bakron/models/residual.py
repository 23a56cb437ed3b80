"""Which linears of a block write to the hidden state, and how: as they are, or through a norm of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

GAIN_FLOOR = 0.3  # × the median gain of a norm's channels


@dataclass(frozen=True)
class Writer:
    """A linear whose output y (T, d) is added to the hidden state: itself, or as norm(y) (Gemma 2 and 3).

    norm: multiplies each token by a number of its own and each channel by a gain, like RMSNorm.
    """

    name: str
    norm: nn.Module | None = None

    def added(self, y: Tensor) -> Tensor:
        """What y adds to the hidden state, (T, d)."""
        return y if self.norm is None else self.norm(y)

    def wanted(self, y: Tensor, missed: Tensor) -> Tensor:
        """The change of y (T, d) that changes ``added(y)`` by about ``missed`` (T, d).

        A norm scales channel i of token t by D = c_t γ_i, and does not see the length of y_t. So this is missed / D, less
        its part along y_t; where D is far below its median over the channels it is less (D missed / (D² + floor²)): a
        large change of y that hardly reaches the hidden state would only make the norm shrink all other channels.
        """
        if self.norm is None:
            return missed
        gains = self._gains(y)
        floor = GAIN_FLOOR * gains.abs().median(1, keepdim=True).values
        change = gains * missed / (gains.square() + floor.square()).clamp(min=1e-30)
        along = (change * y).sum(1, keepdim=True) / y.square().sum(1, keepdim=True).clamp(min=1e-30)
        return change - along * y

    def _gains(self, y: Tensor) -> Tensor:
        """c_t γ_i of each token and channel (T, d), float32."""
        assert self.norm is not None
        channel = self.norm(torch.ones_like(y[:1])).float()
        scaled, y = self.norm(y).float(), y.float() * channel
        token = (scaled * y).sum(1, keepdim=True) / y.square().sum(1, keepdim=True).clamp(min=1e-30)
        return token * channel

    def holds(self, y: Tensor) -> bool:
        """Whether ``norm`` is of the kind described."""
        if self.norm is None:
            return True
        error = (self._gains(y) * y - self.norm(y)).float().norm()
        return float(error) <= 32 * torch.finfo(y.dtype).eps * float(self.norm(y).float().norm())


def find_writers(
    block: nn.Module, linears: Mapping[str, nn.Module], run: Callable[[Tensor], Tensor], h: Tensor
) -> tuple[Writer, ...]:
    """The linears (by name) whose outputs make up ``run(h) - h``, in order of execution; none if others take part.

    run: the block on a hidden state h (T, d).  A linear with a norm is one whose output tensor a module without linears
    receives.
    """
    outputs: dict[str, Tensor] = {}
    behind: dict[str, tuple[nn.Module, Tensor]] = {}

    def after_linear(name: str, y: Tensor) -> None:
        outputs[name] = y

    def after_other(module: nn.Module, x: Tensor, z: Tensor) -> None:
        for name, y in outputs.items():
            if y is x:
                behind[name] = module, z

    handles = [
        module.register_forward_hook(lambda _m, _x, y, name=name: after_linear(name, y))
        for name, module in linears.items()
    ]
    norms = [module for module in block.modules() if not list(module.children()) and _is_norm(module)]
    handles += [module.register_forward_hook(lambda m, x, z: after_other(m, x[0], z)) for module in norms]
    try:
        with torch.no_grad():
            added = run(h) - h
    finally:
        for handle in handles:
            handle.remove()
    flat = {name: y.reshape(-1, y.shape[-1]) for name, y in outputs.items()}
    flat = {name: y for name, y in flat.items() if y.shape == h.shape}
    if names := _summands(flat, added, h):
        return tuple(Writer(name) for name in names)
    normed = {name: z.reshape(h.shape) for name, (_, z) in behind.items() if name in flat}
    writers = [Writer(name, behind[name][0]) for name in _summands(normed, added, h)]
    with torch.no_grad():
        return tuple(writers) if all(writer.holds(flat[writer.name]) for writer in writers) else ()


def _is_norm(module: nn.Module) -> bool:
    """Whether a module without children has at most a vector or two as parameters."""
    return all(parameter.ndim <= 1 for parameter in module.parameters())


def _summands(candidates: Mapping[str, Tensor], added: Tensor, h: Tensor) -> list[str]:
    """The names of the (T, d) tensors whose sum is ``added``, or none."""
    if not candidates:
        return []
    columns = torch.stack([y.double().flatten() for y in candidates.values()], 1).cpu()
    goal = added.double().flatten().cpu()
    share = torch.linalg.lstsq(columns, goal[:, None]).solution[:, 0].round()
    miss = float((columns @ share - goal).norm() / goal.norm())
    if miss >= 32 * torch.finfo(h.dtype).eps * float(h.norm() / added.norm()) + 1e-6:
        return []
    return [name for name, s in zip(candidates, share.tolist(), strict=True) if s == 1]
