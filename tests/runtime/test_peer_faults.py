"""What finetrainers, diffusers, cache-dit, torch and users' reports get wrong, each with the test that fails on it.

`TESTS` is the table. What had no test elsewhere is tested here, as a user meets it: emit a package, make the mesh,
parallelize, train, save. Weights after some steps of SGD are compared with those of the unmodified class in one
process, in float64: a gradient that is scaled, left unsynchronised, or of other data or noise, gives others.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpgen.runtime.mesh import build_mesh
from cpgen.verify.models import load_reference
from cpgen.verify.pool import WorkerPool

from . import peer_fault_cases as cases
from .emitted import CAUSAL, TINY, TINY_PLAN, Emitted, emit
from .peer_fault_cases import SAMPLES, Trained

TOLERANCE = 1e-9  # float64
HERE = "test_peer_faults"

TESTS = {
    # finetrainers (ptd): what its code lacks or does
    "no uneven lengths": f"{HERE}.test_training_is_that_of_one_process",
    "no uneven heads": f"{HERE}.test_one_block_is_the_first_and_the_last",
    "FSDP's mean over a mesh with cp: every gradient is 1/cp": f"{HERE}.test_training_is_that_of_one_process",
    "CP without dp_shards: no gradient is synchronised": f"{HERE}.test_every_rank_has_the_same_weights",
    "CP + FSDP with dp_degree 1: KeyError on the mesh": f"{HERE}.test_training_is_that_of_one_process",
    "causal (head-tail) unshard: wrong shape, or IndexError": f"{HERE}.test_head_tail_order_for_any_batch",
    "data split over dp_replicate only": f"{HERE}.test_data_ranks_see_each_sample_once",
    "dp_shards=-1, the default, fails its own check": f"{HERE}.test_the_default_mesh",
    "gather's expected_dims is never read": f"{HERE}.test_another_ndim_than_the_plans_is_an_error",
    "block names from a fixed list": f"{HERE}.test_every_block_is_a_unit_and_no_rank_holds_more_than_its_part",
    "no Ulysses, K/V all-gather or hybrid": "test_models.test_probes",
    "ring is an all-gather": "test_strategies.test_no_rank_holds_more_than_two_blocks_in_one_tensor",
    "no GQA, no causal": "test_strategies.test_causal_models",
    "layouts: BSHD only": "test_exchange.test_attention_is_that_of_one_process",
    "tensor parallelism: an axis of the mesh only": "test_mesh.test_gradients_are_those_of_one_process",
    "no fullgraph compile of the whole model": "test_models.test_each_compiles_to_one_graph",
    "checkpoints are synchronous": "test_checkpointer.test_training_goes_on_while_the_write_is_blocked",
    "checkpoints: latest or step, purge limit": "test_checkpointer.test_every_and_keep_and_force",
    "checkpoints: a given step": "test_checkpointer.test_a_given_step",
    "checkpoints: the whole state on rank 0": "test_checkpointer.test_the_callback_gets_the_whole_model_on_rank_0",
    # diffusers
    "Wan's plan with return_dict=True raises": f"{HERE}.test_return_dict",
    "another ndim than the plan's is not split": f"{HERE}.test_another_ndim_than_the_plans_is_an_error",
    "gather and split in mid-network (Helios): gradients": "test_exchange.test_gather_in_mid_network",
    "LTX with a text mask; its backward; timestep per token; Flux and ControlNet": "test_models.test_probes",
    "unsharded tensors meet shards": "test_broken_plans.test_verify_reports_it",
    "a host without GPU": f"{HERE}.test_the_default_mesh",
    # cache-dit
    "text split for a local cross-attention (WanVACE)": "test_broken_plans.test_verify_reports_it",
    "a mask that is not in the order of the tokens (Chroma)": "test_exchange.test_attention_is_that_of_one_process",
    "slices by local lengths (HunyuanVideo, Helios)": "test_broken_plans.test_verify_reports_it",
    "the first block is also the last": f"{HERE}.test_one_block_is_the_first_and_the_last",
    # torch's _context_parallel
    "an indivisible length comes back wrong": "test_exchange.test_parts_cover_the_length_evenly",
    # reported by users of these and others
    "gradients low by cp": f"{HERE}.test_training_is_that_of_one_process",
    "CP peers draw other noise": f"{HERE}.test_peers_see_the_same_samples_and_noise",
    "CP peers that came to draw other noise are not noticed": (
        "test_checkpointer.test_peers_that_draw_apart_are_warned_of"
    ),
    "FSDP shards over cp only": f"{HERE}.test_every_block_is_a_unit_and_no_rank_holds_more_than_its_part",
    "FSDP over cp only, by a mesh with names of one's own": "test_mesh.test_axes_of_other_names_are_refused",
    "CP can't share the mesh with FSDP": "test_strategies.test_meshes_of_users",
    "saving under FSDP": f"{HERE}.test_weights_saved_under_fsdp_load_into_the_unmodified_class",
    "from DCP to files that load": "test_export.test_files_are_those_of_save_pretrained",
    "a ring's backward with stale keys": f"{HERE}.test_backward_after_another_forward",
    "a ring's recomputation with stale keys": (
        "test_strategies.test_recomputation_after_another_forward_sees_its_own_keys"
    ),
    "stale parameters after CPU offload": f"{HERE}.test_training_is_that_of_one_process",
    "512 + 257 text and image tokens (Wan); text and rope lengths, masks (Qwen)": "test_models.test_probes",
    "a plan that does not fit the model": "test_broken_plans.test_verify_reports_it",
    "order of a joint sequence (CogVideoX)": "test_broken_plans.test_verify_reports_it",
    "compile with Ulysses: wrong images": "test_context_parallel.test_a_second_size_compiles_to_one_graph_too",
}


def test_the_table_names_tests_that_exist() -> None:
    for fault, test in TESTS.items():
        module, _, name = test.partition(".")
        tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, fault


# --- training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    cp: int
    axes: dict[str, int]
    options: dict[str, Any]
    world_size: int = 4


LAYOUTS = {
    "fsdp-cp": Layout(2, {}, {}),
    "fsdp-cp-one-data-rank": Layout(2, {}, {}, 2),
    "cp-alone": Layout(4, {}, {}),
    "cp-alone-ddp": Layout(4, {"dp_shard": 1}, {"data_parallel": "ddp"}),
    "ddp-cp": Layout(2, {"dp_replicate": 2, "dp_shard": 1}, {"data_parallel": "ddp"}),
    "hsdp-cp": Layout(2, {"dp_replicate": 2, "dp_shard": 1}, {}),
    "hsdp": Layout(1, {"dp_replicate": 2}, {}),
    "fsdp-cp-offload": Layout(2, {}, {"cpu_offload": True}),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Emitted]:
    root = tmp_path_factory.mktemp("packages")
    return {cp: emit(root / f"cp{cp}", TINY, cp) for cp in (1, 2, 4)}


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request: pytest.FixtureRequest, pool: WorkerPool, packages: dict[int, Emitted]) -> list[Trained]:
    layout = LAYOUTS[request.param]
    ranks: list[Trained] = pool.run(
        cases.train, packages[layout.cp], layout.axes, layout.options, world_size=layout.world_size
    )
    assert {rank.place[1] for rank in ranks} == {layout.world_size // layout.cp}
    return ranks


def by_data_rank(trained: list[Trained]) -> list[Trained]:
    """The first rank of each."""
    found: dict[int, Trained] = {}
    for rank in trained:
        found.setdefault(rank.place[0], rank)
    return [found[number] for number in range(trained[0].place[1])]


def test_training_is_that_of_one_process(trained: list[Trained], packages: dict[int, Emitted]) -> None:
    firsts = by_data_rank(trained)
    losses, weights = cases.train_in_one_process(packages[1], firsts)
    assert [sum(each) / len(firsts) for each in zip(*(rank.losses for rank in firsts), strict=True)] == pytest.approx(
        losses, rel=TOLERANCE
    )
    assert weights.keys() == trained[0].weights.keys()
    for name, expected in weights.items():
        assert (trained[0].weights[name] - expected).norm() <= TOLERANCE * expected.norm(), name


def test_every_rank_has_the_same_weights(trained: list[Trained]) -> None:
    for rank in trained[1:]:
        assert all(torch.equal(rank.weights[name], weight) for name, weight in trained[0].weights.items())


def test_peers_see_the_same_samples_and_noise(trained: list[Trained]) -> None:
    firsts = by_data_rank(trained)
    for rank in trained:
        first = firsts[rank.place[0]]
        assert rank.seen == first.seen and rank.losses == first.losses
        for mine, theirs in zip(rank.noise + rank.timesteps, first.noise + first.timesteps, strict=True):
            assert torch.equal(mine, theirs)


def test_data_ranks_see_each_sample_once(trained: list[Trained]) -> None:
    firsts = by_data_rank(trained)
    seen = [index for rank in firsts for step in rank.seen for index in step]
    assert len(set(seen)) == len(seen) == cases.STEPS * len(firsts) <= SAMPLES
    noise = [float(each.flatten()[0]) for rank in firsts for each in rank.noise]
    assert len(set(noise)) == len(noise)


@pytest.mark.parametrize("layout", ["fsdp-cp", "cp-alone-ddp", "hsdp-cp", "hsdp"])
def test_gradients_add_up_over_micro_batches(pool: WorkerPool, packages: dict[int, Emitted], layout: str) -> None:
    cp, axes, options = LAYOUTS[layout].cp, LAYOUTS[layout].axes, LAYOUTS[layout].options
    for errors in pool.run(cases.accumulate, packages[cp], axes, options):
        assert max(errors) <= TOLERANCE


def test_weights_saved_under_fsdp_load_into_the_unmodified_class(
    pool: WorkerPool, packages: dict[int, Emitted], tmp_path: Path
) -> None:
    trained = pool.run(cases.train, packages[2], {}, {}, str(tmp_path))[0]
    plain = load_reference(packages[2].reference).from_pretrained(tmp_path, torch_dtype=torch.float64)
    state = plain.state_dict()
    assert state.keys() == trained.weights.keys()
    assert all(torch.equal(state[name], weight) for name, weight in trained.weights.items())


@pytest.mark.parametrize(("cp", "axes", "replicas"), [(2, {}, 1), (4, {}, 1), (2, {"dp_replicate": 2}, 2)])
def test_every_block_is_a_unit_and_no_rank_holds_more_than_its_part(
    pool: WorkerPool, packages: dict[int, Emitted], cp: int, axes: dict[str, int], replicas: int
) -> None:
    """Over dp_shard and cp together, also of blocks in a list of an unusual name (joint_blocks)."""
    results = pool.run(cases.held, packages[cp], axes)
    assert [loose for loose, _, _ in results] == [[]] * 4
    total = results[0][2]
    assert sum(local for _, local, _ in results) == replicas * total
    assert max(local for _, local, _ in results) < 1.1 * total * replicas / 4  # 4 does not divide every parameter


# --- forward and backward ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ring", "allgather", "ulysses"])
def test_backward_after_another_forward(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    """Three micro-batches, one of another size, run forward before the first runs backward."""
    emitted = emit(tmp_path, TINY, 4, strategy)
    for forward, backward in pool.run(cases.forward_and_backward, emitted, emitted.probe(), (2, 1, 2)):
        assert forward <= TOLERANCE and backward <= TOLERANCE


@pytest.mark.parametrize("batch", [1, 3])
def test_head_tail_order_for_any_batch(pool: WorkerPool, tmp_path: Path, batch: int) -> None:
    emitted = emit(tmp_path, CAUSAL, 4, "allgather", load_balance=True)
    for forward, backward in pool.run(cases.forward_and_backward, emitted, emitted.probe(), (batch,)):
        assert forward <= TOLERANCE and backward <= TOLERANCE


def test_return_dict(pool: WorkerPool, packages: dict[int, Emitted]) -> None:
    probe = packages[2].probe()
    for forward, backward in pool.run(cases.forward_and_backward, packages[2], probe, (), True, world_size=2):
        assert forward <= TOLERANCE and backward <= TOLERANCE


def test_one_block_is_the_first_and_the_last(pool: WorkerPool, packages: dict[int, Emitted]) -> None:
    """5 heads on 4 ranks, too."""
    probe = packages[4].probe("one-block-each")
    for forward, backward in pool.run(cases.forward_and_backward, packages[4], probe):
        assert forward <= TOLERANCE and backward <= TOLERANCE


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        (
            "hidden_states: {dim: 1, ndim: 3, stream: latent}",
            "hidden_states: {dim: 1, ndim: 4, stream: latent}",
            "'hidden_states' says ndim 4",
        ),
        (
            "rope[*]: {dim: 0, ndim: 2, stream: latent}",
            "rope[*]: {dim: 0, ndim: 3, stream: latent}",
            "'rope[0]' says ndim 3",
        ),
        ("{after: proj_out, dim: 1, ndim: 3,", "{after: proj_out, dim: 1, ndim: 2,", "'hidden_states' says ndim 2"),
    ],
    ids=["shard", "shard-of-a-tuple", "gather"],
)
def test_another_ndim_than_the_plans_is_an_error(
    pool: WorkerPool, tmp_path: Path, right: str, wrong: str, found: str
) -> None:
    text = TINY_PLAN.read_text("utf-8")
    assert text.count(right) == 1
    plan = tmp_path / "tiny.yaml"
    plan.write_text(text.replace(right, wrong), "utf-8")
    emitted = emit(tmp_path / "packages", TINY, 2, plan=plan)
    for message in pool.run(cases.message_of_forward, emitted, world_size=2):
        assert message.startswith(f"TinyTransformer2DModel: plan entry {found}, ")


# --- mesh --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [1, 2, 8])
def test_the_default_mesh(monkeypatch: pytest.MonkeyPatch, cp: int) -> None:
    """On a host without GPU, with nothing given: dp_shard takes what is left."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)  # type: ignore[no-untyped-call]
    try:
        mesh = build_mesh(cp=cp, tp=1)
        assert mesh.device_type == "cpu"
        assert tuple(mesh.shape) == (1, 1, 8 // cp, cp, 1)
    finally:
        dist.destroy_process_group()
