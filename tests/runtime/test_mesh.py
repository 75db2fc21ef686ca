import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpgen.runtime.mesh import AXES, build_mesh, data_rank, replicate_mesh, shard_mesh
from cpgen.verify.pool import WorkerError, WorkerPool
from tests.runtime import training_cases as cases


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
    ],
)
def test_a_world_that_does_not_factor(pool: WorkerPool, axes, message):
    with pytest.raises(WorkerError) as caught:
        pool.run(cases.mesh_error, axes)
    assert len(caught.value.failures) == 4
    assert {kind for kind, _, _ in caught.value.failures.values()} == {"ValueError"}
    assert message in str(caught.value)


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
