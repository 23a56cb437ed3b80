"""Transforms of a decoder's weights that leave its function as it is and make them easier to round (docs/transforms.md).

Every one is a product of matrices inside the weights: nothing is left to do when the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bakron.core.transforms import TRANSFORMS, balance, rotation
from bakron.errors import ModelError, require_one_of
from bakron.models.decoder import Decoder
from bakron.models.flow import Norm, Passage, find_norms, find_products, find_values

CHECK_LENGTH = 32
CHECK_TOLERANCE = 1e-4  # of the logits' norm; float32 rounding makes 1e-6 (docs/transforms.md)

Change = Callable[[Tensor], Tensor]  # of the last dimension


def transform(decoder: Decoder, names: Sequence[str], seed: int = 0) -> Decoder:
    """Apply the transforms ``names`` to the weights of ``decoder``, in place, and return it.

    names: "fold", "rotate" (which folds first), "heads", "rescale", applied in this order.  seed: of the rotations.
    Every step is computed in float64 and rounded to the decoder's float32 (or float64); ``decoder.changed`` grows by the
    parameters that change.  A tied head becomes a weight of its own when the model is rotated.

    Raises ConfigError (no such transform), ModelError naming the block for a structure in which a transform is not exact,
    for weights of less than float32, and when the logits are not those of before; the weights may have changed then.
    """
    for name in names:
        require_one_of("transform", name, TRANSFORMS)
    if decoder.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"transform: expected float32 weights, seen {decoder.dtype}. Load the model in float32."
        )
    ids = torch.arange(min(CHECK_LENGTH, decoder.max_length)) * 7919 % decoder.vocab_size
    before = decoder.logits(ids)
    weights, generator = _Weights(decoder), torch.Generator().manual_seed(seed)
    if "rotate" in names:
        _rotate(weights, generator)
    elif "fold" in names:
        _fold(weights, [norm for norm in find_norms(decoder) if weights.head not in norm.readers])
    if "heads" in names:
        _rotate_heads(weights, generator)
    if "rescale" in names:
        _rescale(weights)
    miss = float((decoder.logits(ids) - before).double().norm() / before.double().norm())
    if not miss <= CHECK_TOLERANCE:
        raise ModelError(
            f"transform {'+'.join(names)}: the logits are off by {miss:.2g} of their norm, so this model does something "
            "with its hidden states that the transform does not know. Choose fewer transforms, or none."
        )
    return decoder


class _Weights:
    """The weights of a decoder's modules, changed along their inputs or outputs."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.model = decoder, decoder.model
        self.head = decoder.head_name
        self.embeddings = [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and module.embedding_dim == decoder.hidden_size
        ]

    def matrix(self, name: str) -> Tensor:
        """The weight of a linear or embedding in float64, (d_out, d_in) or (V, d)."""
        module = self.model.get_submodule(name)
        weight = module.get_parameter("weight").detach().double()
        return weight.T if isinstance(module, Conv1D) else weight

    def vector(self, name: str, parameter: str) -> Tensor | None:
        """A one-dimensional parameter in float64, None where the module has none."""
        value = getattr(self.model.get_submodule(name), parameter, None)
        return None if value is None else value.detach().double()

    def inputs(self, name: str, change: Change) -> None:
        """W ← change of every row of a linear (d_out, d_in) or an embedding (V, d)."""
        self._set_matrix(name, change(self.matrix(name)))

    def outputs(self, name: str, change: Change) -> None:
        """W ← change of every column of a linear (d_out, d_in), and of its bias."""
        self._set_matrix(name, change(self.matrix(name).T).T)
        bias = self.vector(name, "bias")
        if bias is not None:
            self.set(f"{name}.bias", change(bias))

    def set(self, parameter: str, value: Tensor) -> None:
        """Overwrite a parameter, in its own dtype."""
        if parameter not in self.decoder.changed:
            self.decoder.changed[parameter] = self.decoder.key_of(parameter)
        with torch.no_grad():
            self.model.get_parameter(parameter).copy_(value)

    def untie(self) -> None:
        """Give the head a weight of its own, if it shares the embedding's."""
        if not self.decoder.tied:
            return
        embedding = f"{self.decoder.embedding_name}.weight"
        prefix, found, _ = self.decoder.key_of(embedding).partition(embedding)
        head = self.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        self.decoder.changed[f"{self.head}.weight"] = f"{prefix if found else ''}{self.head}.weight"
        for config in (self.model.config, self.decoder.config):
            config.tie_word_embeddings = False

    def _set_matrix(self, name: str, W: Tensor) -> None:
        self.set(f"{name}.weight", W.T if isinstance(self.model.get_submodule(name), Conv1D) else W)


def _fold(weights: _Weights, norms: Sequence[Norm]) -> None:
    """W (g ⊙ x + c) = (W diag(g)) x + W c: the gains g of ``norms`` move into the linears that read them.

    So does the bias c where all of these have one, too; else it stays in the norm as c/g.
    """
    for norm in norms:
        weight, bias = weights.vector(norm.name, "weight"), weights.vector(norm.name, "bias")
        assert weight is not None
        gain = weight + norm.offset
        if bias is not None and all(weights.vector(name, "bias") is not None for name in norm.readers):
            for name in norm.readers:
                weights.set(f"{name}.bias", weights.vector(name, "bias") + weights.matrix(name) @ bias)
            weights.set(f"{norm.name}.bias", torch.zeros_like(bias))
        elif bias is not None:
            if not bool(gain.all()):
                raise _refusal("fold", norm.name, "has a gain of 0 and a bias that its readers cannot take")
            weights.set(f"{norm.name}.bias", bias / gain)
        for name in norm.readers:
            weights.inputs(name, lambda rows, gain=gain: rows * gain)
        weights.set(f"{norm.name}.weight", torch.full_like(weight, 1 - norm.offset))


def _rotate(weights: _Weights, generator: torch.Generator) -> None:
    """h ← Q h for the hidden state between all blocks, Q orthogonal: Q W of what writes to it, W Qᵀ of what reads it.

    Norms without gains commute with Q; those that subtract the mean do when Q keeps it.
    """
    decoder = weights.decoder
    norms = find_norms(decoder)
    if not any(weights.head in norm.readers for norm in norms):
        raise _refusal("rotate", weights.head, "does not read a norm")
    for b in range(decoder.n_blocks):
        writers = decoder.writers(b)
        if not writers or any(writer.norm for writer in writers):
            what = "does not add the outputs of linears to the hidden state as they are, but normalised or scaled"
            raise _refusal("rotate", f"{decoder.root}.{b}", what)
    weights.untie()
    _fold(weights, norms)
    Q = rotation(decoder.hidden_size, generator, keep_mean=any(norm.centres for norm in norms))
    for name in weights.embeddings:
        weights.inputs(name, Q)
    for b in range(decoder.n_blocks):
        for writer in decoder.writers(b):
            weights.outputs(writer.name, Q)
    for norm in norms:
        for name in norm.readers:
            weights.inputs(name, Q)
        bias = weights.vector(norm.name, "bias")
        if bias is not None:
            weights.set(f"{norm.name}.bias", Q(bias))


def _rotate_heads(weights: _Weights, generator: torch.Generator) -> None:
    """v ← R v in every head, R orthogonal: R W_v, and W_o Rᵀ for each head of queries that reads it."""
    decoder = weights.decoder
    for b in range(decoder.n_blocks):
        values = _values(decoder, b, "heads")
        width = getattr(decoder.model.get_submodule(values.reader.rpartition(".")[0]), "head_dim", None)
        if not isinstance(width, int) or len(values.rows) % width:
            raise _refusal("heads", values.reader, "belongs to a module that does not say its head_dim")
        read = values.rows.view(-1, width)
        written = read.unique(dim=0)
        if (
            not torch.equal(read, read[:, :1] + torch.arange(width))
            or len(written.unique()) < written.numel()
        ):
            raise _refusal("heads", values.reader, f"does not read whole heads of {width} channels")
        R = _in_heads(rotation(width, generator), width)
        weights.outputs(values.writer, _at(written.flatten(), R))
        weights.inputs(values.reader, R)


def _in_heads(change: Change, width: int) -> Change:
    """``change`` of each run of ``width`` channels."""
    return lambda x: change(x.unflatten(-1, (-1, width))).flatten(-2)


def _at(channels: Tensor, change: Change) -> Change:
    """``change`` of these channels, the others left as they are."""
    return lambda x: x.index_copy(-1, channels.to(x.device), change(x[..., channels.to(x.device)]))


def _rescale(weights: _Weights) -> None:
    """Channels between two linears ← D times them, so that both matrices have equal norms there: up and down, v and o."""
    decoder = weights.decoder
    for b in range(decoder.n_blocks):
        values = _values(decoder, b, "rescale")
        products = find_products(decoder, b)
        if len(products) != 1:
            what = f"has {len(products)} pairs of linears with only a factor between them (up and down of a gated MLP)"
            raise _refusal("rescale", f"{decoder.root}.{b}", f"{what}, expected one")
        for passage in (values, products[0]):
            _balance(weights, passage)


def _balance(weights: _Weights, passage: Passage) -> None:
    written = weights.matrix(passage.writer).norm(dim=1)
    rows = passage.rows.to(written.device)
    read = weights.matrix(passage.reader).square().sum(0)
    D = balance(written, torch.zeros_like(written).index_add(0, rows, read).sqrt())
    weights.outputs(passage.writer, lambda column: column * D)
    weights.inputs(passage.reader, lambda row: row / D[rows])


def _values(decoder: Decoder, b: int, name: str) -> Passage:
    values = find_values(decoder, b)
    if values is None:
        what = "has no linear whose outputs attention hands on to another one as they are"
        raise _refusal(name, f"{decoder.root}.{b}", what)
    return values


def _refusal(name: str, where: str, what: str) -> ModelError:
    return ModelError(
        f"transform {name}: {where} {what}, so it would change what the model computes. Leave {name} out."
    )
