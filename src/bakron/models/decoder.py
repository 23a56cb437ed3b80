"""A decoder language model seen as embedding, blocks and tail, each of which can be run by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bakron.core.layers import LinearSpec
from bakron.errors import DataError, ModelError, NonFiniteError, ShapeError
from bakron.models.checkpoint import first_line, resolve_key
from bakron.models.families import MAX_LENGTH_FIELDS
from bakron.models.replay import BlockCall, CallCache, StopForward, stubbed
from bakron.models.residual import Writer, find_writers
from bakron.models.structure import LINEAR_TYPES, expert_count, find_blocks, find_linears, trace, weight_shape

if TYPE_CHECKING:
    from bakron.models.offload import OffloadedBlocks

TRACE_LENGTH = 4
TAIL_CHECK_LENGTH = 32


class Decoder:
    """A causal decoder, in evaluation mode, without caches, one sequence without pads at a time.

    model, config: the transformers objects (config of the text part).  path: checkpoint directory, or None.
    blocks, n_blocks: the decoder blocks.  hidden_size, vocab_size, max_length: of the configuration.
    device, dtype: of hidden states and weights.  tied: head and embedding are one tensor.
    offloaded: what fills blocks from disk when they run, one at a time; None when all are in memory.
    linears: per block, the quantizable linears in order of execution; routers of experts are not among them.
    groups: per block, the names of linears that receive the very same input tensor, in order of execution.
    other_linears: names of all further linears (head, routers), which are never quantized.
    changed: parameters that are no longer the checkpoint's, by name, and the checkpoint's keys for them.
    """

    def __init__(
        self,
        model: Any,
        *,
        path: Path | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        offloaded: OffloadedBlocks | None = None,
    ) -> None:
        """model: a transformers causal language model.  shapes: of the source checkpoint's tensors by key;
        without them a linear's tensor key is its name and ``.weight``.  offloaded: the blocks, if they are on disk.
        Raises ModelError, and NonFiniteError naming parameters of an offloaded block: each is filled once.
        """
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.path = path
        self.changed: dict[str, str] = {}
        self._shapes = shapes
        self.root, self.blocks = find_blocks(model)
        self.n_blocks = len(self.blocks)
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)
        self.max_length = _max_length(self.config)
        parameter = next(self.blocks[0].parameters())
        self.device, self.dtype = offloaded.device if offloaded else parameter.device, parameter.dtype
        self.offloaded = offloaded

        n_experts = expert_count(self.config)
        named = [find_linears(block, f"{self.root}.{b}", n_experts) for b, block in enumerate(self.blocks)]
        self.groups, self._returns_tuple = trace(model, self._dummy(TRACE_LENGTH), self.blocks, named)
        self._modules = [
            {name: named[b][name] for group in groups for name in group}
            for b, groups in enumerate(self.groups)
        ]
        self.linears = [
            [self._spec(b, name, module) for name, module in block.items()]
            for b, block in enumerate(self._modules)
        ]
        chosen = {name for block in self._modules for name in block}
        self.other_linears = [
            name
            for name, module in model.named_modules()
            if isinstance(module, LINEAR_TYPES) and name not in chosen
        ]
        self._calls = CallCache(self._record_calls)
        self._writers: dict[int, tuple[Writer, ...]] = {}

    def _spec(self, b: int, name: str, module: nn.Module) -> LinearSpec:
        d_out, d_in = weight_shape(module)
        key = self.key_of(f"{name}.weight")
        return LinearSpec(name, key, b, d_out, d_in, transposed=isinstance(module, Conv1D))

    def key_of(self, parameter: str) -> str:
        """The checkpoint's key of a parameter; its own name where the decoder has no checkpoint. Raises ModelError."""
        if self._shapes is None:
            return parameter
        return resolve_key(
            parameter, self.root, tuple(self.model.get_parameter(parameter).shape), self._shapes
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint. Raises ModelError when there is none."""
        from transformers import AutoTokenizer

        from bakron.models.load import quiet

        if self.path is None:
            raise ModelError("This decoder was made from a model in memory, which has no tokenizer.")
        try:
            with quiet():
                return AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except Exception as error:
            raise ModelError(
                f"{self.path}: its tokenizer cannot be loaded ({type(error).__name__}: "
                f"{first_line(error)}). Copy tokenizer.json and "
                "tokenizer_config.json into the directory, or pass token ids as data."
            ) from error

    @cached_property
    def fused(self) -> list[tuple[str, ...]]:
        """The linears in sets that inference engines join into one matrix: q, k, v; gate, up; all experts of a block.

        Those of one module that receive the same input, so that no table of names is needed; every linear is in one set.
        """
        sets: dict[tuple[str, int, str], list[str]] = {}
        for b, groups in enumerate(self.groups):
            for g, group in enumerate(groups):
                for name in group:
                    owner, experts, _ = name.partition(".experts.")
                    key = (owner, -1, "") if experts else (name.rpartition(".")[0], b, str(g))
                    sets.setdefault(key, []).append(name)
        return [tuple(names) for names in sets.values()]

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        head = self.model.get_output_embeddings()
        return head is not None and head.weight is self.model.get_input_embeddings().weight

    @property
    def embedding_name(self) -> str:
        """Path of the embedding of tokens."""
        return self._path(self.model.get_input_embeddings())

    @property
    def head_name(self) -> str:
        """Path of the linear that makes logits. Raises ModelError when there is none."""
        return self._path(self.model.get_output_embeddings())

    def _path(self, wanted: nn.Module | None) -> str:
        for name, module in self.model.named_modules():
            if module is wanted:
                return name
        raise ModelError(f"{type(self.model).__name__}: expected an embedding and a head among its modules.")

    # Parts of the forward pass

    def embed(self, ids: Tensor) -> Tensor:
        """ids (T,) integers → the hidden state (T, d) that enters block 0. Raises ShapeError, DataError."""

        def stub(b: int, hidden: Tensor, call: BlockCall) -> Any:
            raise StopForward(hidden)

        return self._stopped(self._batch(ids), stub)[0]

    def run_block(self, b: int, h: Tensor) -> Tensor:
        """Block b on the hidden state h (T, d) → (T, d); differentiable in h when gradients are enabled."""
        return self._calls.get(h.shape[0])[b](self.blocks[b], h[None])[0]

    def arguments(self, b: int, length: int) -> dict[str, Any]:
        """The keyword arguments that block b gets besides its hidden state, in a sequence of this length."""
        return self._calls.get(length)[b].kwargs

    @overload
    def run_block_capturing(
        self, b: int, h: Tensor, *, outputs: Literal[False] = False, until: str | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    @overload
    def run_block_capturing(
        self, b: int, h: Tensor, *, outputs: Literal[True], until: str | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]: ...

    def run_block_capturing(
        self, b: int, h: Tensor, *, outputs: bool = False, until: str | None = None
    ) -> tuple[Any, ...]:
        """``run_block`` without gradients, and the input x (T, d_in) of each linear by name.

        With ``outputs`` also each linear's output y (T, d_out).  A linear that did not run is absent; an
        expert has only the tokens routed to it.  The linears of a group share one x.
        """
        xs: dict[str, Tensor] = {}
        ys: dict[str, Tensor] = {}

        def seen(name: str, x: Tensor, y: Tensor) -> None:
            xs[name] = x.reshape(-1, x.shape[-1])
            if outputs:
                ys[name] = y.reshape(-1, y.shape[-1])
            if name == until:
                raise StopForward(y)

        with torch.no_grad(), self._observed(b, seen):
            try:
                h_out = self.run_block(b, h)
            except StopForward as stopped:
                h_out = stopped.hidden.reshape(-1, stopped.hidden.shape[-1])
        return (h_out, xs, ys) if outputs else (h_out, xs)

    def writers(self, b: int) -> tuple[Writer, ...]:
        """The linears of block b whose outputs are added to the hidden state, in order of execution.

        Found by running the block: its output minus its input is exactly the sum of what they add. Empty where
        something else is added.
        """
        if b not in self._writers:
            generator = torch.Generator().manual_seed(0)
            h = torch.randn(TRACE_LENGTH, self.hidden_size, generator=generator).to(self.device, self.dtype)
            run = lambda h: self.run_block(b, h)  # noqa: E731
            self._writers[b] = find_writers(self.blocks[b], self._modules[b], run, h)
        return self._writers[b]

    def backward_block(
        self, b: int, h: Tensor, grad_out: Tensor, on_linear: Callable[[str, Tensor, Tensor], None]
    ) -> Tensor:
        """Take grad_out (T, d), the gradient at block b's output, back through the block entered by h (T, d).

        on_linear(name, x, g) is called for each linear, the last one first, with its input x (T, d_in) and
        the gradient g (T, d_out) at its output; both may be used only during the call.
        Weights get no gradient.  Returns the gradient (T, d) at h.
        """

        def seen(name: str, x: Tensor, y: Tensor) -> None:
            if not y.requires_grad:
                return
            x = x.detach().reshape(-1, x.shape[-1])
            y.register_hook(lambda g: on_linear(name, x, g.reshape(-1, g.shape[-1])))

        h = h.detach().requires_grad_()
        with torch.enable_grad(), self._observed(b, seen):
            h_out = self.run_block(b, h)
        return torch.autograd.grad(h_out, h, grad_out)[0]

    def tail(self, h: Tensor) -> Tensor:
        """h (t, d) leaving the last block → logits (t, V): norm, head and the like; differentiable in h."""

        def stub(b: int, hidden: Tensor, call: BlockCall) -> Any:
            return self._as_output(h[None] if b == self.n_blocks - 1 else hidden)

        with stubbed(self.blocks, stub):
            return self.model(self._dummy(h.shape[0]), use_cache=False).logits[0]

    def hidden_states(
        self, sequences: Sequence[Tensor], advance: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """For each of the ids (T,), the state (T, d) that leaves the last block; all go through a block before the next.

        advance: called after each run of a block.  Raises ShapeError, DataError.
        """
        states = [self.embed(ids) for ids in sequences]
        for b in range(self.n_blocks):
            for index, h in enumerate(states):
                with torch.no_grad():
                    states[index] = self.run_block(b, h)
                advance()
        return states

    def logits(self, ids: Tensor) -> Tensor:
        """ids (T,) → logits (T, V), by the model's own forward. Raises ShapeError, DataError."""
        with torch.no_grad():
            return self.model(self._batch(ids), use_cache=False).logits[0]

    # Weights

    def get_weight(self, name: str) -> Tensor:
        """A (d_out, d_in) copy of a linear's weight, float32 (float64 if stored so). Raises ModelError."""
        module = self._filled(name)
        weight = module.get_parameter("weight").detach()
        weight = weight.T if isinstance(module, Conv1D) else weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return weight.to(dtype, copy=True).contiguous()

    def set_weight(self, name: str, weight: Tensor) -> None:
        """Overwrite a linear's weight with (d_out, d_in) values, cast to the model's dtype, on its device.

        In an offloaded block it lasts until another block runs; ``replace_weights`` is for good.
        Raises ModelError (no such linear), ShapeError, NonFiniteError; nothing is changed then.
        """
        module = self._filled(name)
        if tuple(weight.shape) != weight_shape(module):
            raise ShapeError(f"{name}: expected a weight {weight_shape(module)}, seen {tuple(weight.shape)}.")
        parameter = module.get_parameter("weight")
        value = weight.detach().to(device=parameter.device, dtype=parameter.dtype)
        if not bool(torch.isfinite(value).all()):
            raise NonFiniteError(f"{name}: the new weight holds NaN or infinity in {parameter.dtype}.")
        with torch.no_grad():
            parameter.copy_(value.T if isinstance(module, Conv1D) else value)

    def cast(self, dtype: torch.dtype) -> None:
        """Turn all parameters into ``dtype``, in place; buffers, such as those of rotary positions, stay as they are."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.dtype = dtype
        self._calls = CallCache(self._record_calls)

    def replace_weights(self, b: int, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Give linears of block b, for good, the (d_out, d_in) values that ``weights()`` has, with their names.

        They are asked for at once, of an offloaded block instead whenever it is filled.  Raises what ``set_weight`` does.
        """

        def replace() -> None:
            for name, weight in weights():
                self.set_weight(name, weight)

        if self.offloaded is None:
            replace()
        else:
            self.offloaded.replace(b, replace)

    def _filled(self, name: str) -> nn.Module:
        """The linear called ``name``, its parameters in memory. Raises ModelError."""
        for b, block in enumerate(self._modules):
            if name in block:
                if self.offloaded:
                    self.offloaded.fill(b)
                return block[name]
        known = [name for block in self._modules for name in block]
        raise ModelError(f"{name}: not a quantizable linear; there are {', '.join(known[:8])} ...")

    # Checks

    def check_replay(self, ids: Tensor) -> None:
        """Raises ModelError, naming the block, unless embedding, blocks and tail, run one by one, give bit
        for bit what the model's own forward gives on ids (T,).  The tail is checked on the first tokens only.
        """
        calls, forwards = self._calls.get(len(ids)), [block.forward for block in self.blocks]
        embedded = self.embed(ids)

        def both(b: int, hidden: Tensor, call: BlockCall) -> Any:
            if b == 0:
                _require_equal("the embedding", embedded, hidden[0])
            own = call(forwards[b], hidden)
            _require_equal(f"block {self.root}.{b}", calls[b](forwards[b], hidden), own)
            if b == self.n_blocks - 1:
                raise StopForward(own)
            return self._as_output(own)

        self._stopped(self._batch(ids), both)
        last, logits = self._own_end(ids[:TAIL_CHECK_LENGTH])
        with torch.no_grad():
            _require_equal("the tail after the last block", self.tail(last), logits)

    def _own_end(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The state (T, d) leaving the last block and the logits (T, V) in the model's own forward on ids (T,)."""
        outputs: list[Any] = []
        handle = self.blocks[-1].register_forward_hook(lambda _module, _args, out: outputs.append(out))
        try:
            with torch.no_grad():
                logits = self.model(self._batch(ids), use_cache=False).logits[0]
        finally:
            handle.remove()
        (out,) = outputs
        return (out[0] if isinstance(out, tuple) else out)[0], logits

    # Machinery

    def _batch(self, ids: Tensor) -> Tensor:
        """ids (T,) checked, as a batch (1, T) on the model's device."""
        if ids.ndim != 1:
            raise ShapeError(f"Token ids: expected one sequence (T,), seen shape {tuple(ids.shape)}.")
        if not 0 < len(ids) <= self.max_length:
            raise DataError(
                f"Token ids: expected 1 to {self.max_length} tokens (the model's maximum), seen {len(ids)}. "
                "Use a shorter sequence length."
            )
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"Token ids: expected 0 to {self.vocab_size - 1}, seen {low} to {high}. "
                "Were they made by another model's tokenizer?"
            )
        return ids.to(self.device)[None]

    def _dummy(self, length: int) -> Tensor:
        """Token ids (1, length), none of them a pad."""
        token = 1 if getattr(self.config, "pad_token_id", None) == 0 else 0
        return torch.full((1, length), token, device=self.device)

    def _as_output(self, hidden: Tensor) -> Any:
        return (hidden,) if self._returns_tuple else hidden

    def _stopped(self, batch: Tensor, stub: Callable[[int, Tensor, BlockCall], Any]) -> Tensor:
        """Run the model with stubbed blocks, one of which raises StopForward; returns what it carries."""
        try:
            with torch.no_grad(), stubbed(self.blocks, stub):
                self.model(batch, use_cache=False)
        except StopForward as stopped:
            return stopped.hidden
        raise ModelError(f"{self.root}: the model's forward did not run its blocks.")

    def _record_calls(self, length: int) -> list[BlockCall]:
        calls: list[BlockCall] = []

        def stub(b: int, hidden: Tensor, call: BlockCall) -> Any:
            calls.append(call)
            if b == self.n_blocks - 1:
                raise StopForward(hidden)
            return self._as_output(hidden)

        self._stopped(self._dummy(length), stub)
        return calls

    @contextmanager
    def _observed(self, b: int, seen: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
        """Within, seen(name, x, y) is called after each run of a linear of block b."""

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            return lambda _module, args, y: seen(name, args[0], y)

        handles = [module.register_forward_hook(hook(name)) for name, module in self._modules[b].items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _max_length(config: Any) -> int:
    lengths = [getattr(config, field, None) for field in MAX_LENGTH_FIELDS]
    return next((length for length in lengths if isinstance(length, int) and length > 0), sys.maxsize)


def _require_equal(what: str, seen: Tensor, expected: Tensor) -> None:
    same_shape = seen.shape == expected.shape  # NaN for NaN is no difference: whoever runs the block names it
    if not (same_shape and torch.allclose(seen, expected, rtol=0, atol=0, equal_nan=True)):
        worst = float((seen - expected).abs().max()) if same_shape else float("nan")
        raise ModelError(
            f"{what}: run by itself, it differs from the model's own forward (by up to {worst:.3g}). Its "
            "result depends on more than its input and the sequence length, so bakron cannot "
            "calibrate this model."
        )
