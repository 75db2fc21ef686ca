"""Imported by the server that forks a pool's workers, before any of them exists: what every case needs.

Importing must start no thread, since a fork has only the one that forked.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import diffusers.models.transformers  # noqa: F401
import torch.distributed.fsdp  # noqa: F401

import cpgen.verify.execute  # noqa: F401
