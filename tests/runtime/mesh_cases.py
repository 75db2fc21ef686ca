"""Many ranks as threads of one process, with values: layouts of more axes than four workers can hold."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed import multi_threaded_pg

from cpgen.probes import build_inputs
from cpgen.runtime.mesh import data_rank
from cpgen.verify.float64 import to_float64

from .emitted import TINY, TINY_PLAN, Emitted, emit, gradients, loss_of, reference_and_model, worst

LAYERS = """
tensor_parallel:
  joint_blocks:
    attn: {style: heads, attributes: [heads], inputs: [hidden_states, text]}
    attn.to_q: column
    attn.to_k: column
    attn.to_v: column
    attn.to_out: row
    ff.1: column
    ff.3: row
  blocks:
    attn1: {style: heads, attributes: [heads], inputs: [hidden_states]}
    attn1.to_q: column
    attn1.to_k: column
    attn1.to_v: column
    attn1.to_out: row
    attn2: {style: heads, attributes: [heads], inputs: [hidden_states, context]}
    attn2.to_q: column
    attn2.to_k: column
    attn2.to_v: column
    attn2.to_out: row
    ff.1: column
    ff.3: row
"""
# One from each place: ahead of the region, in it (cut over tp by columns, by rows, and whole), behind it, and what
# enters it from outside. To gather each one over all ranks takes long.
COMPARED = (
    "proj_in.weight",
    "time_proj.weight",
    "text_proj.weight",
    "joint_blocks.0.attn.to_q.weight",
    "joint_blocks.0.attn.to_out.weight",
    "joint_blocks.0.norm.weight",
    "blocks.0.ff.1.bias",
    "context_proj.weight",
    "proj_out.weight",
)


def emit_with_layers(out: Path, cp: int, strategy: str = "ulysses", **options: Any) -> Emitted:
    """The project's small model with a tensor-parallel plan."""
    plan = out / "tiny.yaml"
    plan.write_text(TINY_PLAN.read_text("utf-8").replace("\nprobes:", f"{LAYERS}\nprobes:"), "utf-8")
    return emit(out / "packages", TINY, cp, strategy, plan=plan, **options)


def trained_on_threads(
    emitted: Emitted, world_size: int, axes: dict[str, int], mode: str
) -> list[tuple[tuple[int, int], float]]:
    """For each rank its data rank, and the error of gradients against their mean over data ranks in one process, in
    float64."""
    probe = replace(emitted.probe(), config=emitted.probe().config | {"num_joint_layers": 1, "num_layers": 1})
    reference, model, package = reference_and_model(emitted, probe)
    copies = [copy.deepcopy(model) for _ in range(world_size)]

    def loss(each: nn.Module, seed: int) -> Tensor:
        return loss_of(each(**to_float64(build_inputs(probe, seed)), return_dict=False)[0])

    def train(rank: int) -> tuple[tuple[int, int], dict[str, Tensor]]:
        mesh = package.build_mesh("cpu", **axes)
        wrapped = package.parallelize(copies[rank], mesh, data_parallel=mode, reduce_dtype=torch.float64)
        loss(wrapped, data_rank(mesh)[0]).backward()
        return data_rank(mesh), {name: _whole(wrapped.get_parameter(name).grad) for name in COMPARED}

    results = on_threads(train, world_size)
    data_ranks = results[0][0][1]
    for seed in range(data_ranks):
        (loss(reference, seed) / data_ranks).backward()
    expected = {name: gradient for name, gradient in gradients(reference).items() if name in COMPARED}
    return [(place, worst(found, expected)) for place, found in results]


def on_threads(function: Callable[[int], Any], world_size: int) -> list[Any]:
    """What `function(rank)` returns on each of so many ranks, in a process group of threads."""
    results: list[Any] = [None] * world_size
    store = dist.HashStore()  # type: ignore[attr-defined]

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # wakes the others

    with _groups_of_threads():
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert not any(thread.is_alive() for thread in threads)
    return results


@contextmanager
def _groups_of_threads() -> Iterator[None]:
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        yield
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _clear_sharding_prop_cache()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
