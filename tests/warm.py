"""What the processes of a cluster have done when they begin: imports, and kernels at hand.

A process that is imported into once forks them all, so it must not start threads.
"""

from __future__ import annotations

import gc

import torch
import torch.nn.parallel

import sparsewire.adapters.attach
import sparsewire.functional  # noqa: F401
from sparsewire import kernels

torch.set_num_threads(1)
kernels.prepare("cpu")
gc.freeze()  # a process must not look through all that is imported when it ends
