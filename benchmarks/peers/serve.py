"""What the scripts of this directory share: problems come in as lines on stdin, times go out on a pipe.

Arguments: the number of threads, and the file descriptor to answer on.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Prepare = Callable[[Tensor, Tensor, Tensor, float], Callable[[], Tensor]]
"""``prepare(W, H_in, scale, percdamp)`` returns the call that is timed; that one returns the (m, n) weight."""


def serve(package: str, prepare: Prepare) -> None:
    """Answer every request until stdin ends. One line first: the version of ``package``.

    Request: folder of the ``.npy`` files, percdamp, and where to write the weight. Answer: seconds.
    """
    answers = os.fdopen(int(sys.argv[2]), "w")
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({"version": version(package)}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        W, H_in, scale = (
            torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("W", "H_in", "scale")
        )
        call = prepare(W, H_in, scale, request["percdamp"])
        started = time.perf_counter()
        weight = call()
        seconds = time.perf_counter() - started
        np.save(request["weight"], weight.float().numpy())
        del W, H_in, scale, call, weight
        gc.collect()  # the process waits while others are measured
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)
