"""Claims: every family's writers to the hidden state are found; what they add makes up the block, and the change that is
wanted of an output leads where it should, to first order."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from torch import Tensor

from bakron.models import Decoder, residual

NORMED = ("gemma2", "gemma3")
ENDS = ("o_proj", "down_proj", "c_proj")  # of attention and MLP, in all families


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_attention_and_mlp_write_to_the_hidden_state(family: str) -> None:
    decoder = Decoder(tiny_model(family))
    h = randn(6, decoder.hidden_size)
    for b in range(decoder.n_blocks):
        writers = decoder.writers(b)
        assert [w.name for w in writers] == [s.name for s in decoder.linears[b] if s.name.endswith(ENDS)]
        assert [w.norm is not None for w in writers] == [family in NORMED] * 2
        h_out, _, outputs = decoder.run_block_capturing(b, h, outputs=True)
        added = torch.stack([w.added(outputs[w.name]) for w in writers]).sum(0)
        torch.testing.assert_close(h + added, h_out)


@pytest.mark.parametrize("family", ["llama", *NORMED])
def test_a_change_that_some_output_can_make_is_made(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """J wanted(J v) = J v, J being the Jacobian of what y adds: with a norm it has no inverse, but a range."""
    monkeypatch.setattr(residual, "GAIN_FLOOR", 0.0)
    decoder = Decoder(tiny_model(family).double())
    y, v = (randn(5, decoder.hidden_size, seed=seed).double() for seed in (1, 2))
    for writer in decoder.writers(0):
        _, reachable = torch.autograd.functional.jvp(writer.added, y, v)
        _, reached = torch.autograd.functional.jvp(writer.added, y, writer.wanted(y, reachable))
        torch.testing.assert_close(reached, reachable, rtol=1e-5, atol=1e-5)


def test_a_channel_that_hardly_reaches_the_state_is_not_asked_for_much() -> None:
    decoder = Decoder(tiny_model("gemma2"))
    writer = decoder.writers(0)[0]
    assert writer.norm is not None
    with torch.no_grad():
        writer.norm.get_parameter("weight").zero_()[3] = -1 + 1e-6  # gains: one and, there, next to nothing
    y, missed = randn(5, decoder.hidden_size, seed=1), randn(5, decoder.hidden_size, seed=2)
    assert float(writer.wanted(y, missed)[:, 3].abs().max()) < 1
