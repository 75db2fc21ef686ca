"""The mesh: its groups against lists of ranks, what it refuses, and gradients on layouts of many axes."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpgen.runtime.mesh import AXES, build_mesh, data_rank, replicate_mesh, seed_everything, shard_mesh, split_cp
from cpgen.verify.pool import WorkerPool
from tests.runtime import training_cases as cases
from tests.runtime.mesh_cases import emit_with_layers, trained_on_threads


@pytest.fixture
def fake_ranks():
    """Starts a process group of so many ranks that communicate nothing; this process is one of them."""

    def start(world_size: int, rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks(mesh):
    return mesh.mesh.tolist()


@pytest.mark.parametrize("rank", [0, 523, 1023])
def test_groups_of_1024_ranks(fake_ranks, rank):
    fake_ranks(1024, rank)
    mesh = build_mesh("cpu", cp=8, tp=2, dp_replicate=4, pp=2)

    assert mesh.mesh_dim_names == AXES
    assert mesh.shape == (2, 4, 8, 8, 2)  # dp_shard: 1024 / (2 * 4 * 8 * 2)
    index = {
        axis: rank // stride % size for axis, size, stride in zip(AXES, mesh.shape, (512, 128, 16, 2, 1), strict=True)
    }
    base = index["pp"] * 512 + index["tp"]
    replica = base + index["dp_replicate"] * 128
    assert ranks(mesh["tp"]) == [rank - index["tp"], rank - index["tp"] + 1]
    assert ranks(mesh["cp"]) == [replica + index["dp_shard"] * 16 + cp * 2 for cp in range(8)]
    assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [
        base + index["cp"] * 2 + shard * 16 for shard in range(32)
    ]
    assert dist.get_process_group_ranks(mesh["dp_shard_cp"].get_group()) == [replica + peer * 2 for peer in range(64)]
    assert dist.get_process_group_ranks(mesh["dp_cp"].get_group()) == [base + peer * 2 for peer in range(256)]
    assert data_rank(mesh) == (index["dp_replicate"] * 8 + index["dp_shard"], 32)
    assert shard_mesh(mesh).shape == (4, 64)
    assert ranks(shard_mesh(mesh)) == [[base + copy * 128 + peer * 2 for peer in range(64)] for copy in range(4)]
    assert ranks(replicate_mesh(mesh)) == [base + peer * 2 for peer in range(256)]


LAYOUTS = {
    "fsdp": ({"cp": 1}, (1, 1, 1024, 1, 1)),
    "fsdp-cp": ({"cp": 4}, (1, 1, 256, 4, 1)),
    "hsdp": ({"cp": 1, "dp_replicate": 16}, (1, 16, 64, 1, 1)),
    "hsdp-cp": ({"cp": 8, "dp_replicate": 4}, (1, 4, 32, 8, 1)),
    "ddp-cp": ({"cp": 16, "dp_replicate": 64, "dp_shard": 1}, (1, 64, 1, 16, 1)),
    "cp": ({"cp": 1024}, (1, 1, 1, 1024, 1)),
    "cp-tp": ({"cp": 128, "tp": 8}, (1, 1, 1, 128, 8)),
    "pp-cp": ({"cp": 8, "pp": 16}, (16, 1, 8, 8, 1)),
    "all": ({"cp": 4, "tp": 2, "dp_replicate": 8, "dp_shard": 4, "pp": 4}, (4, 8, 4, 4, 2)),
    "all-hybrid": ({"cp": 8, "ulysses": 4, "tp": 2, "dp_replicate": 4, "pp": 2}, (2, 4, 8, 2, 4, 2)),
}


@pytest.mark.parametrize("rank", [0, 677])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_group_of_a_layout_of_1024_ranks(fake_ranks, layout, rank):
    """A group is the ranks whose coordinates differ on its axes only, outermost axis first."""
    options, shape = LAYOUTS[layout]
    fake_ranks(1024, rank)
    mesh = build_mesh("cpu", **{"tp": 1, **options})
    names = AXES if len(shape) == 5 else ("pp", "dp_replicate", "dp_shard", "cp_outer", "cp_ulysses", "tp")
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (names, shape)
    everyone = torch.arange(1024).reshape(shape)
    [place] = (everyone == rank).nonzero().tolist()
    cp = names[3:-1]

    def along(*axes: str) -> list[int]:
        line = everyone[tuple(slice(None) if name in axes else at for name, at in zip(names, place, strict=True))]
        return line.flatten().tolist()

    groups = {name: (name,) for name in names} | {
        "cp": cp,
        "dp": ("dp_replicate", "dp_shard"),
        "dp_shard_cp": ("dp_shard", *cp),
        "dp_cp": ("dp_replicate", "dp_shard", *cp),
    }
    for name, axes in groups.items():
        assert dist.get_process_group_ranks(mesh[name].get_group()) == along(*axes), name
    replicas, shards = shape[1], len(along("dp_shard", *cp))
    wrapped = [along("dp_replicate", "dp_shard", *cp)[i * shards : (i + 1) * shards] for i in range(replicas)]
    assert ranks(shard_mesh(mesh)) == (wrapped[0] if replicas == 1 else wrapped)
    assert ranks(replicate_mesh(mesh)) == along("dp_replicate", "dp_shard", *cp)
    assert data_rank(mesh) == (place[1] * shape[2] + place[2], shape[1] * shape[2])
    if len(cp) == 2:
        assert [ranks(part) for part in split_cp(mesh, 4)] == [along(*cp), along("cp_outer"), along("cp_ulysses")]


def test_without_replicas_the_shard_mesh_is_flat(fake_ranks):
    fake_ranks(1024, 5)
    mesh = build_mesh("cpu", cp=4, tp=1)
    assert mesh.shape == (1, 1, 256, 4, 1)
    assert ranks(shard_mesh(mesh)) == list(range(1024))


def test_no_process_group():
    with pytest.raises(ValueError, match=r"init_process_group\(\).*torchrun"):
        build_mesh("cpu", cp=1, tp=1)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"cp": 3, "tp": 1},
            "4 does not factor into pp 1 x dp_replicate 1 x dp_shard ? x cp 3 x tp 1: 4 is not a multiple of 3",
        ),
        ({"cp": 2, "tp": 1, "dp_shard": 4}, "dp_shard 4 x cp 2 x tp 1: the product is 8"),
        ({"cp": 8, "tp": 1}, "4 is not a multiple of 8"),
        ({"cp": 0, "tp": 1}, "cp has size 0"),
        ({"cp": 1, "tp": 1, "dp_shard": -2}, "dp_shard has size -2"),
        ({"cp": 1, "tp": 1, "pp": -1}, "pp has size -1"),
        ({"cp": 1, "tp": 1, "dp_shard": 0}, "dp_shard has size 0; it must be a positive whole number (or -1"),
        ({"cp": 1, "tp": 1, "dp_shard": "2"}, "dp_shard has size '2'"),
        ({"cp": 2.0, "tp": 1}, "cp has size 2.0"),
        ({"cp": 1, "tp": True}, "tp has size True"),
        ({"cp": 1, "tp": 1, "dp_replicate": None}, "dp_replicate has size None"),
        ({"cp": 4, "tp": 1, "ulysses": 3}, "Ulysses degree is 3; it must be a whole number that divides cp size 4"),
        ({"cp": 4, "tp": 1, "ulysses": 0}, "Ulysses degree is 0"),
    ],
)
def test_a_world_that_does_not_factor(fake_ranks, axes, message):
    for rank in range(4):
        fake_ranks(4, rank)
        with pytest.raises(ValueError) as caught:
            build_mesh("cpu", **axes)
        assert message in str(caught.value)
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "names", "others"),
    [((2, 2), ("dp", "cp"), "dp"), ((2, 2), ("dp_shard", "sp"), "sp"), ((4,), None, "(without a name)")],
)
def test_axes_of_other_names_are_refused(fake_ranks, shape, names, others):
    """Taken for axes of peers, all ranks would train on the same data, each group with gradients of its own."""
    fake_ranks(4, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for use in (data_rank, shard_mesh, replicate_mesh, lambda mesh: seed_everything(0, mesh)):
        with pytest.raises(ValueError) as caught:
            use(mesh)
        assert f"the mesh has the axis {others}, and nothing says which data and weights its ranks share" in str(
            caught.value
        )


def test_a_mesh_of_some_of_the_axes(fake_ranks):
    fake_ranks(4, 3)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("cp", "dp_shard", "other"))
    assert data_rank(mesh) == (1, 2) and ranks(shard_mesh(mesh)) == [0, 1, 2, 3]
    alone = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    assert data_rank(alone) == (0, 1) and ranks(replicate_mesh(alone)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="none of the axes dp_shard, cp"):
        shard_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))


@pytest.mark.parametrize("seed", ["0", 1.0, None])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match="is not a whole number"):
        seed_everything(seed, SimpleNamespace(mesh_dim_names=(), shape=()))


def test_one_call_seeds_every_generator(fake_ranks):
    """The same again for the same data rank and for its peers, others for another seed and another data rank."""

    def draws(rank: int, seed: int) -> tuple[float, float, float]:
        fake_ranks(8, rank)
        seed_everything(seed, build_mesh("cpu", cp=2, tp=2, dp_replicate=2))
        dist.destroy_process_group()
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    first = draws(0, 7)
    assert first == draws(0, 7) == draws(1, 7) == draws(2, 7) == draws(3, 7)
    second, other = draws(4, 7), draws(0, 8)
    assert second == draws(7, 7)
    assert all(len(set(drawn)) == 3 for drawn in zip(first, second, other, strict=True))


def test_one_rank(fake_ranks):
    fake_ranks(1, 0)
    mesh = build_mesh("cpu", cp=1, tp=1)
    assert mesh.shape == (1, 1, 1, 1, 1) and data_rank(mesh) == (0, 1)
    assert ranks(shard_mesh(mesh)) == ranks(replicate_mesh(mesh)) == [0]


@pytest.mark.parametrize(
    ("world_size", "cp", "tp", "axes", "mode", "strategy", "options"),
    [
        (16, 2, 2, {"dp_replicate": 2, "dp_shard": 2}, "fsdp", "ulysses", {}),
        (4, 2, 2, {}, "ddp", "ulysses", {}),
        (8, 4, 1, {"dp_replicate": 2}, "fsdp", "hybrid", {"ulysses_degree": 2, "outer": "ring"}),
        (8, 2, 1, {"pp": 2}, "fsdp", "ulysses", {}),
    ],
    ids=["hsdp-cp-tp", "ddp-cp-tp", "hsdp-hybrid", "pp-fsdp-cp"],
)
def test_gradients_are_those_of_one_process(tmp_path, world_size, cp, tp, axes, mode, strategy, options):
    """Layouts that four workers can't hold. Ranks are threads here; those of four ranks are tested on gloo, too."""
    emitted = emit_with_layers(tmp_path, cp, strategy, tp=tp, **options)
    results = trained_on_threads(emitted, world_size, axes, mode)
    data_ranks = world_size // (cp * tp * axes.get("pp", 1))
    assert {place for place, _ in results} == {(rank, data_ranks) for rank in range(data_ranks)}
    assert max(error for _, error in results) < 1e-13  # float64


def test_peers_draw_the_same_and_data_ranks_differ(pool: WorkerPool):
    results = pool.run(cases.mesh_ranks, {"cp": 2, "tp": 1, "dp_replicate": 2, "dp_shard": 1})
    assert [result["data"] for result in results] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [result["groups"]["cp"] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["groups"]["dp"] for result in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    draws = [result["draw"] for result in results]
    assert draws[0] == draws[1] and draws[2] == draws[3]
    assert draws[0][0] != draws[2][0] and draws[0][1] != draws[2][1]


def test_data_is_split_over_both_data_axes(pool: WorkerPool):
    results = pool.run(cases.mesh_ranks, {"cp": 1, "tp": 1, "dp_replicate": 2})
    assert [result["data"] for result in results] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({result["draw"] for result in results}) == 4


def test_tensor_parallel_peers_draw_the_same(pool: WorkerPool):
    draws = [result["draw"] for result in pool.run(cases.mesh_ranks, {"cp": 1, "tp": 2})]
    assert draws[0] == draws[1] != draws[2] == draws[3]
