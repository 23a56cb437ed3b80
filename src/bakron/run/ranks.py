"""The processes that share a run: which part of the work is whose, and how their results come together."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group is made: its defaults keep alive the one they find
from torch import Tensor

from bakron.errors import ConfigError, RankError

T = TypeVar("T")

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
TIMEOUT = timedelta(hours=24)  # ranks wait while the first one evaluates, or another solves a large layer
GRACE = 30.0  # seconds in which the launcher ends this process, once another one has died


class Ranks:
    """A run's only process, which does everything; ``Launched`` is one of several and keeps the same promises.

    rank: the number of this process, from 0.  size: how many there are.
    All ranks must call the same methods in the same order, but for ``share``, ``owners`` and ``first_to_say``.
    """

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that speaks and writes."""
        return self.rank == 0

    def share(self, n: int) -> range:
        """Which of n things in a row are this rank's: neighbours, as evenly as it goes; empty for a rank too many."""
        each, more = divmod(n, self.size)
        start = self.rank * each + min(self.rank, more)
        return range(start, start + each + (self.rank < more))

    def owners(self, costs: Sequence[float]) -> list[int]:
        """The rank that does each of several tasks: the dearest first, each to the rank that has least to do."""
        load = [0.0] * self.size
        owners = [0] * len(costs)
        for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
            owners[task] = load.index(min(load))
            load[owners[task]] += costs[task]
        return owners

    def require_device(self, device: str) -> None:
        """Raise ConfigError unless every rank can have a device of its own where ``device`` asks for GPUs."""

    def from_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on rank 0, which alone does it once all ranks have come here."""
        return work()

    def total(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The float64 sums of all ranks, added in their order, on every rank; a rank may lack some.

        Those given are overwritten.
        """
        return sums

    def joined(self, pieces: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """By key, the pieces of all ranks one after the other along dimension 0; on rank 0 only, elsewhere nothing."""
        return {key: torch.cat(list(parts)) for key, parts in pieces.items()}

    def exchanged(self, found: dict[str, T]) -> dict[str, T]:
        """What all ranks found, on every rank."""
        return found

    def first_to_say(self, message: str) -> bool:
        """Whether no other rank has said this before, so that an error that all run into is told once."""
        return True

    def close(self) -> None:
        """Part in peace, at the end of a run that went well."""


ALONE = Ranks()


@functools.cache
def launched() -> Ranks:
    """This process as one of those that torchrun started, with a GPU of its own if there is one; else by itself.

    Raises RankError when the others cannot be reached.
    """
    if any(name not in os.environ for name in LAUNCHER) or int(os.environ["WORLD_SIZE"]) == 1:
        return ALONE
    rank, local, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return Launched(rank, local, size)


class Launched(Ranks):
    """One of several processes, which talk by torch.distributed: gloo between CPUs, nccl between GPUs."""

    def __init__(self, rank: int, local: int, size: int) -> None:
        """local: the number of this process on its machine, and of its GPU."""
        self.rank, self.local, self.size = rank, local, size
        gpu = torch.cuda.is_available()
        if gpu and local < torch.cuda.device_count():
            torch.cuda.set_device(local)
        with self._connected():
            self._store = next(iter(dist.rendezvous("env://")))[0]
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpu else "gloo",
                store=dist.PrefixStore("group", self._store),
                rank=rank,
                world_size=size,
                timeout=TIMEOUT,
            )

    def require_device(self, device: str) -> None:
        """Raise ConfigError for one GPU that all would share, or fewer GPUs than processes."""
        if device.startswith("cuda:"):
            raise ConfigError(
                f"device: {device} is one GPU, and {self.size} processes were started. Pass device cuda (or leave it "
                "out), so that each takes its own, or start a single process."
            )
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device == "cuda" or (device == "auto" and there)) and self.local >= there:
            raise ConfigError(
                f"device: expected a GPU for each process, seen {there} on the machine of rank {self.rank}. "
                "Start no more processes there (--nproc-per-node), or pass device cpu."
            )

    def from_first(self, work: Callable[[], T]) -> T:
        """Rank 0's result, pickled to the others."""
        with self._connected():
            dist.all_reduce(torch.zeros(1))  # all have come
        result = [work() if self.first else None]
        with self._connected():
            dist.broadcast_object_list(result, src=0)
        return result[0]  # type: ignore[return-value]

    def total(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each sum goes from rank to rank, every one adding its own, and then from the last one to all."""
        last = self.size - 1
        everywhere = self._of_all({key: (tuple(H.shape), H.device.type) for key, H in sums.items()})
        wanted = {key: value for headers in everywhere for key, value in headers.items()}
        totals = {
            key: sums[key].contiguous() if key in sums else torch.zeros(shape, dtype=torch.float64, device=device)
            for key, (shape, device) in wanted.items()
        }  # fmt: skip
        for H in totals.values():
            if self.rank > 0:
                before = torch.empty_like(H)
                with self._connected():
                    dist.recv(before, self.rank - 1)
                H += before
            if self.rank < last:
                with self._connected():
                    dist.send(H, self.rank + 1)
        with self._connected():
            for H in totals.values():
                dist.broadcast(H, last)
        return totals

    def joined(self, pieces: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Piece by piece, through the memory of the CPUs."""
        headers = {key: [(tuple(p.shape), p.dtype) for p in parts] for key, parts in pieces.items()}
        everywhere = self._of_all(headers)
        if not self.first:
            with self._connected():
                for piece in (piece for parts in pieces.values() for piece in parts if piece.numel()):
                    dist.send(_bytes(piece.detach().cpu().contiguous()), 0)
            return {}
        all_pieces = {key: [piece.detach().cpu() for piece in parts] for key, parts in pieces.items()}
        for rank, theirs in list(enumerate(everywhere))[1:]:
            for key, shapes in theirs.items():
                arrived = [self._received(shape, dtype, rank) for shape, dtype in shapes]
                all_pieces.setdefault(key, []).extend(arrived)
        return {key: torch.cat(parts) for key, parts in all_pieces.items()}

    def exchanged(self, found: dict[str, T]) -> dict[str, T]:
        """From each rank in turn to all others, pickled."""
        everything: dict[str, T] = {}
        for rank in range(self.size):
            box: list[Any] = [found if rank == self.rank else None]
            with self._connected():
                dist.broadcast_object_list(box, src=rank)
            everything |= box[0]
        return everything

    def first_to_say(self, message: str) -> bool:
        """Asked of the store by which the processes met."""
        try:
            return self._store.add(f"said/{message}", 1) == 1
        except RuntimeError:  # it has gone with the rank that failed
            return True

    def close(self) -> None:
        """Wait for all, and leave the process group."""
        self.from_first(lambda: None)
        dist.destroy_process_group()

    def _of_all(self, value: T) -> list[T]:
        """The small ``value`` of every rank."""
        values: list[Any] = [None] * self.size
        with self._connected():
            dist.all_gather_object(values, value)
        return values

    def _received(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        piece = torch.empty(shape, dtype=dtype)
        if piece.numel():
            with self._connected():
                dist.recv(_bytes(piece), rank)
        return piece

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Within, a lost connection becomes a RankError, once the launcher has had time to end this process.

        It names the process that failed first, which it would not if this one came before it.
        """
        try:
            yield
        except RuntimeError as error:
            time.sleep(GRACE)
            raise RankError(
                f"the connection to another process of the run is lost ({str(error).splitlines()[0]}). What that one "
                "or its launcher said tells why; run the same command again to resume."
            ) from error


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous ``tensor``, whatever its dtype."""
    return tensor.reshape(-1).view(torch.uint8)
