"""Turns text, chats, saved token ids or a hub dataset into reproducible sequences of token ids."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bakron.errors import ConfigError, DataError, MissingExtraError

HUB_ROWS = 20_000
FILE_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".safetensors", ".csv", ".parquet", ".gz")

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Document:
    """One text, one chat (messages of role and content), or one row of token ids (T,) int64 without pads.

    where: the file and line, or the dataset and row, that it came from, for errors.
    """

    where: str
    content: str | Messages | Tensor

    @property
    def needs_tokenizer(self) -> bool:
        """Whether the content is not token ids yet."""
        return not isinstance(self.content, Tensor)


def load_documents(source: str | Path) -> list[Document]:
    """The documents of a file or of a hub dataset, in their order.

    ``.jsonl``: a line is ``{"text": ...}`` or ``{"messages": [{"role": ..., "content": ...}, ...]}``.
    ``.safetensors``: ``input_ids`` (N, T) or (T,) integers, and ``attention_mask`` of the same shape, 1 for
    tokens, 0 for pads (left or right, dropped); a row is a document.
    Any other file is one document, text in UTF-8.
    What is no file is a hub dataset: ``NAME``, ``NAME:CONFIG`` or ``NAME:CONFIG:SPLIT`` (split ``train``);
    its rows are like the lines above, and the first 20,000 are read.  It needs the extra ``data``.
    Raises DataError for whatever is missing, empty or malformed; MissingExtraError.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if _looks_like_file(str(source)):
            raise DataError(f"{source}: there is no such file. Check the path, seen from {Path.cwd()}.")
        documents = _from_hub(str(source))
    elif path.is_dir():
        raise DataError(f"{path}: expected a file, seen a directory. Name one file of it.")
    elif path.suffix == ".jsonl":
        documents = _from_jsonl(path)
    elif path.suffix == ".safetensors":
        documents = _from_token_ids(path)
    elif path.suffix == ".json":
        raise DataError(
            f'{path}: expected one object a line. Rewrite it as .jsonl, lines of {{"text": ...}}.'
        )
    else:
        documents = [Document(str(path), _read_text(path))]
    if not any(_has_content(document) for document in documents):
        raise DataError(f"{source}: {len(documents)} documents, all of them empty. Give another file.")
    return documents


def load_sequences(
    source: str | Path | Sequence[Document],
    tokenizer: Any,
    *,
    n_sequences: int,
    sequence_length: int,
    seed: int | None,
    mode: Literal["pack", "per-sample"] = "pack",
    vocab_size: int | None = None,
) -> list[Tensor]:
    """``n_sequences`` tensors (T_i,) int64 on the CPU, T_i ≤ ``sequence_length``; none holds a pad.

    "pack": all documents one after the other, in their order, each with the special tokens that the tokenizer
    itself puts (EOS after a text if it puts no BOS), cut into windows of exactly ``sequence_length``.  A window that
    starts inside a text that was opened with BOS has BOS in place of its first token: such models know no context
    without, and behave quite differently there.
    "per-sample": one document one sequence, cut at ``sequence_length``; those of fewer than two tokens are
    passed over.
    seed: drawn without replacement by ``torch.Generator``; fewer sequences are a prefix of more.  None takes
    the first ones.  tokenizer: a transformers one; None suffices for token ids.  vocab_size: all ids must be
    below it, by default the tokenizer's size.
    Raises DataError (too little text, ids out of the vocabulary, chats without a template, or a source that
    ``load_documents`` refuses), ConfigError, MissingExtraError.
    """
    if n_sequences < 1 or sequence_length < 2:
        raise ConfigError(
            "expected n_sequences of at least 1 and sequence_length of at least 2, "
            f"seen {n_sequences} and {sequence_length}."
        )
    if mode not in ("pack", "per-sample"):
        raise ConfigError(f"sampling mode {mode!r} is not one of pack, per-sample.")
    documents = load_documents(source) if isinstance(source, str | Path) else source
    encoder = _Encoder(tokenizer, vocab_size)
    draw = _pack if mode == "pack" else _per_sample
    return draw(documents, encoder, n_sequences, sequence_length, seed)


def fingerprint(sequences: Iterable[Tensor]) -> str:
    """The SHA-256 (hex) of the sequences' lengths and ids, in their order."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


# Reading


def _looks_like_file(source: str) -> bool:
    return source.startswith(("/", ".", "~")) or source.endswith(FILE_SUFFIXES) or source.count("/") > 1


def _has_content(document: Document) -> bool:
    content = document.content
    return bool(content.strip()) if isinstance(content, str) else len(content) > 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected text in UTF-8, seen byte {error.object[error.start]:#x} at {error.start}. "
            "Convert it to UTF-8; a compressed or binary file cannot be read."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: it cannot be read ({error.strerror}). Check its permissions.") from error


def _from_jsonl(path: Path) -> list[Document]:
    documents = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: expected one JSON object, seen {line.strip()[:60]!r} "
                f"({error.msg}, column {error.colno}). Each line must be complete by itself."
            ) from error
        documents.append(_from_row(row, where))
    return documents


def _from_row(row: Any, where: str) -> Document:
    """A row of JSONL or of a dataset as a document. Raises DataError."""
    expected = '{"text": "..."} or {"messages": [{"role": "...", "content": "..."}, ...]}'
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected {expected}, seen a {type(row).__name__}.")
    found = [key for key in ("text", "messages") if row.get(key) is not None]
    if len(found) != 1:
        keys = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"{where}: expected {expected}, one of the two, seen the keys {keys}. Rename or drop keys."
        )
    content = row[found[0]]
    if found == ["text"]:
        if not isinstance(content, str):
            raise DataError(f'{where}: expected "text" to be a string, seen a {type(content).__name__}.')
        return Document(where, content)
    if not isinstance(content, list) or not all(
        isinstance(message, Mapping) and "role" in message and "content" in message for message in content
    ):
        raise DataError(f'{where}: expected "messages" to be a list of objects with role and content.')
    return Document(where, [dict(message) for message in content])


def _from_token_ids(path: Path) -> list[Document]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: not a readable safetensors file ({error}). Save it again.") from error
    ids = tensors.get("input_ids")
    if ids is None or ids.ndim not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool:
        seen = (
            ", ".join(f"{key} {tuple(value.shape)} {value.dtype}" for key, value in tensors.items())
            or "nothing"
        )
        raise DataError(f"{path}: expected input_ids, integers of shape (sequences, tokens), seen {seen}.")
    mask = tensors.get("attention_mask", torch.ones_like(ids))
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise DataError(
            f"{path}: expected an attention_mask of 0 and 1 with the shape of input_ids {tuple(ids.shape)}, "
            f"seen shape {tuple(mask.shape)}, {mask.dtype}. A tokenizer's attention_mask has this form."
        )
    ids, mask = torch.atleast_2d(ids.to(torch.int64)), torch.atleast_2d(mask)
    return [_unpadded(ids[i], mask[i] == 1, f"{path}, row {i}") for i in range(len(ids))]


def _unpadded(ids: Tensor, kept: Tensor, where: str) -> Document:
    """The ids (T,) where kept (T,) is true, pads being on the left or right only. Raises DataError."""
    position = kept.nonzero()[:, 0]
    if len(position) and len(position) != int(position[-1] - position[0]) + 1:
        raise DataError(
            f"{where}: the attention_mask has a gap; expected pads on the left or right only. "
            "Dropping tokens inside would join text that was apart: save the parts as rows of their own."
        )
    return Document(where, ids[kept])


def _from_hub(source: str) -> list[Document]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            f"{source}: there is no such file, and reading a hub dataset needs the package datasets. "
            'Check the path, or install it: pip install "bakron[data]"'
        ) from error
    name, *rest = source.split(":")
    config, split = (*rest, None, None)[:2]
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        return [_from_row(row, f"{source}, row {i}") for i, row in enumerate(islice(rows, HUB_ROWS))]
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{source}: there is no such file, and as a hub dataset it cannot be loaded "
            f"({type(error).__name__}: {error}). Check the name (NAME:CONFIG:SPLIT chooses a configuration "
            "and a split) and the network."
        ) from error


# Tokenising


class _Encoder:
    """Documents to token ids, checked against the vocabulary.

    adds_bos: the tokenizer opens each text with BOS.  separates: it does not, so that EOS must close texts.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size if vocab_size is not None or tokenizer is None else len(tokenizer)
        self.bos = None if tokenizer is None else tokenizer.bos_token_id
        self.eos = None if tokenizer is None else tokenizer.eos_token_id
        self.adds_bos = tokenizer is not None and self._tokens("", special=True)[:1] == [self.bos]
        self.separates = not self.adds_bos and self.eos is not None

    def encode(self, document: Document) -> Tensor:
        """The ids (T,) int64 of a document, possibly none. Raises DataError."""
        content = document.content
        if isinstance(content, Tensor):
            ids = content
        elif self.tokenizer is None:
            raise DataError(f"{document.where}: text needs a tokenizer. Give one, or token ids.")
        else:
            ids = torch.tensor(self._encode(content, document.where), dtype=torch.int64)
        self._check(ids, document.where)
        return ids

    def _encode(self, content: str | Messages, where: str) -> list[int]:
        chat = not isinstance(content, str)
        if not content:
            return []
        text = self._render(content, where) if chat else content
        try:
            text.encode()  # JSON can write half a surrogate pair, at which tokenizers fail without a reason
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: not valid Unicode ({error.reason}). Remove the broken characters."
            ) from error
        ids = self._tokens(text, special=not chat)  # a chat template writes its special tokens itself
        return ids[1:] if self.adds_bos and ids[:2] == [self.bos, self.bos] else ids

    def _tokens(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _render(self, messages: Messages, where: str) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"{where}: messages need a chat template, and this tokenizer has none (a base model's?). "
                'Use the instruction-tuned model, or give plain text: {"text": ...}.'
            )
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template is a program of the model's author: anything may come out
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"{where}: the chat template refuses these messages ({type(error).__name__}: {error}). "
                f"Seen the roles {roles}; rewrite or drop this document."
            ) from error

    def _check(self, ids: Tensor, where: str) -> None:
        if not len(ids):
            return
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
            limit = "0 and above" if self.vocab_size is None else f"0 to {self.vocab_size - 1}"
            raise DataError(
                f"{where}: expected token ids of {limit} (the vocabulary), seen {low} to {high}. "
                "Were they made by another model's tokenizer, or are pads not masked?"
            )


# Drawing


def _order(n: int, seed: int | None) -> Tensor:
    """0 … n − 1, shuffled unless seed is None."""
    if seed is None:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def _stream(documents: Iterable[Document], encoder: _Encoder) -> Iterator[tuple[Tensor, bool]]:
    """The ids of all documents, EOS following a text whose successor would otherwise be joined to it.

    With each part, whether it is a text that the tokenizer opened with BOS.
    """
    open_end = False  # the last token was of a text that nothing closes
    for document in documents:
        ids = encoder.encode(document)
        if not len(ids):
            continue
        if open_end:
            yield torch.tensor([encoder.eos]), False
        is_text = not isinstance(document.content, Tensor)
        yield ids, is_text and encoder.adds_bos and int(ids[0]) == encoder.bos
        open_end = encoder.separates and isinstance(document.content, str) and int(ids[-1]) != encoder.eos


def _pack(
    documents: Sequence[Document], encoder: _Encoder, n: int, length: int, seed: int | None
) -> list[Tensor]:
    parts: list[Tensor] = []
    opened: list[bool] = []
    found, needed = 0, n * length
    for ids, has_bos in _stream(documents, encoder):
        parts.append(ids)
        opened.append(has_bos)
        found += len(ids)
        if seed is None and found >= needed:
            break  # the first windows are complete
    if found < needed:
        raise DataError(
            f"{_sources(documents)}: expected {needed} tokens or more ({n} × {length}), found {found}. "
            f"Give more text, or ask for fewer sequences (it has {found // length}) or shorter ones."
        )
    windows = torch.cat(parts)[: found // length * length].reshape(-1, length)
    if any(opened):
        ends = torch.tensor([len(ids) for ids in parts]).cumsum(0)
        part = torch.searchsorted(ends, torch.arange(len(windows)) * length, right=True)
        windows[torch.tensor(opened)[part], 0] = encoder.bos
    return [windows[i].clone() for i in _order(len(windows), seed)[:n].tolist()]


def _per_sample(
    documents: Sequence[Document], encoder: _Encoder, n: int, length: int, seed: int | None
) -> list[Tensor]:
    sequences: list[Tensor] = []
    for i in _order(len(documents), seed).tolist():
        ids = encoder.encode(documents[i])[:length]
        if len(ids) > 1:
            sequences.append(ids.clone())
        if len(sequences) == n:
            return sequences
    raise DataError(
        f"{_sources(documents)}: expected {n} documents of at least two tokens, found {len(sequences)} "
        f"among {len(documents)} (with {sum(map(len, sequences))} tokens). "
        'Give more documents, ask for fewer sequences, or use the mode "pack", which cuts long texts.'
    )


def _sources(documents: Sequence[Document]) -> str:
    """What the documents were read from, as far as their first one tells."""
    return re.sub(r", (line|row) \d+$", "", documents[0].where) if documents else "no documents"
