"""Threads that share work cut in pieces of fixed sizes, so that results have the same bits for any number of threads.

BLAS splits its sums by the number of its threads, and where it does so is not documented. Here every BLAS call runs on
one thread, and several calls run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

A = TypeVar("A")
B = TypeVar("B")


class Team:
    """The calling thread and ``size − 1`` others, each with torch on one thread.

    A team's tasks never use more threads than it has: teams within teams are parts of it.
    """

    def __init__(self, size: int, pool: Executor) -> None:
        self.size = size
        self._pool = pool

    def run(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Do all tasks, which must not depend on each other. Raises what any of them raises, once all threads rest."""
        left = iter(tasks)

        def work() -> None:
            for task in left:  # a list's iterator gives each task to one thread
                task()

        others = [self._pool.submit(work) for _ in range(min(self.size, len(tasks)) - 1)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()

    def both(self, first: Callable[[Team], A], second: Callable[[Team], B]) -> tuple[A, B]:
        """The results of both, each done by half of the team; one after the other by a team of one."""
        if self.size == 1:
            return first(self), second(self)
        half = self.size // 2
        other = self._pool.submit(second, Team(half, self._pool))
        try:
            mine = first(Team(self.size - half, self._pool))
        finally:
            wait([other])
        return mine, other.result()

    def add_product_(self, C: Tensor, A: Tensor, B: Tensor, alpha: float = 1) -> None:
        """``C += alpha · A B`` (m, n), cut along its longer side."""
        m, n = C.shape
        if not C.is_cpu:
            C.addmm_(A, B, alpha=alpha)
        elif m >= n:
            self.run([partial(C[a:b].addmm_, A[a:b], B, alpha=alpha) for a, b in pieces(m)])
        else:
            self.run([partial(C[:, a:b].addmm_, A, B[:, a:b], alpha=alpha) for a, b in pieces(n)])


def pieces(n: int) -> list[tuple[int, int]]:
    """Ranges that n rows are cut into, by n alone: small enough to share, large enough for fast products."""
    return cut(n, 512 if n > 1024 else 256)


def cut(n: int, step: int) -> list[tuple[int, int]]:
    """Ranges of ``step`` of n rows; the last may be shorter."""
    return [(a, min(a + step, n)) for a in range(0, n, step)]


@contextmanager
def team() -> Iterator[Team]:
    """As many threads as torch uses; the calling thread has torch on one thread meanwhile."""
    size = torch.get_num_threads()
    torch.set_num_threads(1)  # holds for the thread that calls it
    try:
        with ThreadPoolExecutor(max(size - 1, 1), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Team(size, pool)
    finally:
        torch.set_num_threads(size)
