"""Strategies on whole models and by themselves: meshes, traffic, order of events, balance, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpgen.strategy import EXCHANGES, Exchange, resolve
from cpgen.verify.pool import WorkerError, WorkerPool
from cpgen.verify.run import PackageToVerify, verify

from .emitted import CAUSAL, TINY, emit
from .model_cases import compiled, interleaved
from .strategy_cases import (
    Odd,
    absorbed_row,
    causal_work,
    draws_in_attention,
    grouped_traffic,
    mesh_message,
    message_of_weights,
    odd_errors,
    on_mesh,
    refused_call,
    ring_message,
    ring_order,
)

TOLERANCE = 1e-9  # float64

WAYS: list[tuple[str, dict[str, Any], int]] = [
    ("ulysses", {}, 2),
    ("ulysses", {}, 4),
    *(
        (name, {"load_balance": balance}, cp)
        for name in ("allgather", "ring")
        for balance in (False, True)
        for cp in (2, 4)
    ),
    *(
        ("hybrid", {"ulysses_degree": 2, "outer": outer, "load_balance": balance}, 4)
        for outer in ("allgather", "ring")
        for balance in (False, True)
    ),
]


@pytest.mark.parametrize(("strategy", "options", "cp"), WAYS)
def test_causal_models(tmp_path: Path, pool: WorkerPool, strategy: str, options: dict[str, Any], cp: int) -> None:
    """Causal, block-causal, grouped-query and joint causal attention, in both layouts: every probe, every mode."""
    emitted = emit(tmp_path / f"{strategy}-cp{cp}", CAUSAL, cp, strategy, **options)
    package = PackageToVerify(emitted.name, tmp_path, emitted.plan, emitted.reference)
    results = verify([package], [cp], [strategy], pool=pool)
    assert len(results) == len(emitted.plan.probes)
    assert [result.error for result in results if not result.ok] == []


@pytest.mark.parametrize("options", [{"outer": "allgather"}, {"outer": "ring"}, {"ulysses_degree": 4}])
def test_hybrid_forms_of_the_small_model(tmp_path: Path, pool: WorkerPool, options: dict[str, Any]) -> None:
    emitted = emit(tmp_path / "hybrid-cp4", TINY, 4, "hybrid", **options)
    package = PackageToVerify(emitted.name, tmp_path, emitted.plan, emitted.reference)
    results = verify([package], [4], ["hybrid"], pool=pool)
    assert [result.error for result in results if not result.ok] == []


@pytest.mark.parametrize("outer", ["allgather", "ring"])
def test_hybrid_at_its_ends_is_the_plain_strategy(tmp_path: Path, outer: str) -> None:
    def text(strategy: str, **options: Any) -> str:
        emitted = emit(tmp_path / f"{strategy}{options}", TINY, 4, strategy, **options)
        return (Path(emitted.directory) / emitted.name / "transformer_tiny.py").read_text("utf-8")

    assert text("hybrid", ulysses_degree=1, outer=outer) == text(outer)
    assert text("hybrid", ulysses_degree=4, outer=outer) == text("ulysses")
    assert text("hybrid", ulysses_degree=2, outer=outer) not in (text(outer), text("ulysses"))


def test_every_form_of_exchange_comes_from_some_strategy() -> None:
    made = {
        resolve(name, cp, degree, outer, False, None).exchange
        for name, cp, degree, outer in [
            ("ulysses", 4, None, None),
            ("allgather", 4, None, None),
            ("ring", 4, None, None),
            ("hybrid", 4, 2, None),
            ("hybrid", 4, 2, "ring"),
        ]
    }
    assert made == set(EXCHANGES)
    assert resolve("hybrid", 8, None, None, False, 40).ulysses_degree == 4
    assert resolve("hybrid", 8, None, None, False, 3).ulysses_degree == 2
    assert resolve("hybrid", 7, None, "ring", False, 40).exchange == Exchange(False, "ring")
    assert resolve("hybrid", 1, None, None, False, 40).ulysses_degree == 1


# Meshes that a user built


@pytest.mark.parametrize(
    ("strategy", "options", "cp", "shape", "names"),
    [
        ("ulysses", {}, 4, (4,), ("cp",)),
        ("ring", {}, 4, (2, 2), ("cp_outer", "cp_ulysses")),
        ("hybrid", {"outer": "ring"}, 4, (4,), ("cp",)),
        ("hybrid", {}, 4, (2, 2), ("cp_outer", "cp_ulysses")),
        ("hybrid", {}, 4, (1, 2, 2, 1), ("dp_replicate", "cp_outer", "cp_ulysses", "tp")),
        ("ulysses", {}, 2, (2, 2), ("dp_shard", "cp")),
        ("ring", {}, 2, (2, 2), ("cp", "dp_replicate")),
    ],
)
@pytest.mark.parametrize("data_parallel", ["none", "fsdp", "ddp"])
def test_meshes_of_users(
    tmp_path: Path,
    pool: WorkerPool,
    strategy: str,
    options: dict[str, Any],
    cp: int,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    data_parallel: str,
) -> None:
    emitted = emit(tmp_path, TINY, cp, strategy, **options)
    for error in pool.run(on_mesh, emitted, emitted.probe(), shape, names, data_parallel, world_size=4):
        assert error <= TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "shape", "names", "expected"),
    [
        ("hybrid", (1, 4), ("cp_outer", "cp_ulysses"), "cp_ulysses size 4, but the Ulysses degree is 2"),
        ("hybrid", (2, 2), ("cp_ulysses", "cp_outer"), "cp_ulysses must come behind cp_outer"),
        ("ulysses", (2, 2), ("dp", "sp"), "the mesh has no axis 'cp'"),
        ("ulysses", (2, 2), ("dp_shard", "cp"), "the mesh has cp size 2, but this package was emitted for cp degree 4"),
    ],
)
def test_meshes_that_do_not_fit(
    tmp_path: Path, pool: WorkerPool, strategy: str, shape: tuple[int, ...], names: tuple[str, ...], expected: str
) -> None:
    emitted = emit(tmp_path, TINY, 4, strategy)
    for message in pool.run(mesh_message, emitted, emitted.probe(), shape, names, world_size=4):
        assert expected in message


@pytest.mark.parametrize(
    ("data_parallel", "differ_by", "found"),
    [("fsdp", 1, "'dp_cp'"), ("none", 1, "'cp'"), ("fsdp", 2, "'dp_cp'"), ("none", 2, ""), ("ddp", 4, "")],
)
def test_weights_that_differ_from_rank_to_rank(
    tmp_path: Path, pool: WorkerPool, data_parallel: str, differ_by: int, found: str
) -> None:
    """Groups of `differ_by` neighbours have the same weights. Without data parallelism only cp peers must."""
    emitted = emit(tmp_path, TINY, 2)
    for message in pool.run(message_of_weights, emitted, emitted.probe(), data_parallel, differ_by, world_size=4):
        assert (f"axis {found} hold different weights, at " in message) if found else message == ""


# Keys and values of fewer heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses", "outer", "there", "back"),
    [
        # A token's head is 8 bytes, a rank has 2 of 8 tokens. To each other rank go the query heads that it will hold,
        # and the one key head and value head that these read.
        (8, 1, 4, None, 3 * 2 * 8 * (2 + 1 + 1), 3 * 2 * 8 * 2),
        (8, 2, 4, None, 3 * 2 * 8 * (2 + 1 + 1), 3 * 2 * 8 * 2),
        (8, 4, 4, None, 3 * 2 * 8 * (2 + 1 + 1), 3 * 2 * 8 * 2),
        (8, 1, 1, "allgather", 3 * 2 * 8 * 2, 0),
        (8, 1, 1, "ring", 3 * 2 * 8 * 2, 0),
        (8, 2, 1, "ring", 3 * 2 * 8 * 4, 0),
    ],
)
def test_few_key_heads_cost_little(
    pool: WorkerPool, heads: int, kv_heads: int, ulysses: int, outer: str | None, there: int, back: int
) -> None:
    for sent in pool.run(grouped_traffic, heads, kv_heads, ulysses, outer, world_size=4):
        assert sent == (there, back)


# Tensors that are not alike


@pytest.mark.parametrize(
    ("ulysses", "outer"), [(4, None), (1, "allgather"), (1, "ring"), (2, "allgather"), (2, "ring")]
)
@pytest.mark.parametrize(
    "odd",
    [
        Odd(9, 5),
        Odd(5, 14),
        Odd(9, 9, batches=(2, 1, 1)),
        Odd(9, 6, batches=(1, 2, 2)),
        Odd(9, 6, heads=(4, 2, 2)),
        Odd(9, 6, heads=(4, 1, 4)),
        Odd(9, 6, heads=(6, 6, 2)),
    ],
)
def test_keys_unlike_queries(pool: WorkerPool, ulysses: int, outer: str | None, odd: Odd) -> None:
    """Keys of another stream, of fewer heads than queries or values, or of a batch that is broadcast."""
    if outer == "ring" and odd.heads[1] != odd.heads[2]:
        with pytest.raises(WorkerError, match="ring attention needs keys and values of one number of heads"):
            pool.run(odd_errors, odd, ulysses, outer, world_size=4)
        return
    for forward, backward in pool.run(odd_errors, odd, ulysses, outer, world_size=4):
        assert forward <= 1e-12
        assert backward <= 1e-12


@pytest.mark.parametrize(
    ("shapes", "mask", "method", "tokens", "expected"),
    [
        (((2, 4, 4), (2, 4, 4), (2, 4, 4)), None, "seq_to_heads", 8, "need 4 dims (BHSD)"),
        (((1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 4, 3)), None, "ring_attention", 8, "and the query's channels"),
        # Built from local lengths where each rank has one token: not one column for all keys.
        (((1, 1, 1, 2),) * 3, (1, 1), "ring_attention", 2, "a mask must be built from global lengths"),
        (((1, 1, 1, 2),) * 3, (1, 1), "gather_kv", 2, "a mask must be built from global lengths"),
    ],
)
def test_calls_that_are_refused(
    pool: WorkerPool,
    shapes: tuple[tuple[int, ...], ...],
    mask: tuple[int, ...] | None,
    method: str,
    tokens: int,
    expected: str,
) -> None:
    for message in pool.run(refused_call, shapes, mask, method, tokens, world_size=2):
        assert expected in message


def test_dropout_within_attention_leaves_the_random_state_of_peers_equal(tmp_path: Path, pool: WorkerPool) -> None:
    """Through dropout_p of the call, of which no module knows; and nothing is drawn where nothing drops out."""
    emitted = emit(tmp_path, TINY, 2, "allgather")
    for drops in (True, False):
        results = pool.run(draws_in_attention, emitted, emitted.probe(), drops, world_size=2)
        assert results[0][:2] == results[1][:2]
        inside = results[0][2] != results[1][2]
        assert inside == drops
        assert results[0][3] != drops


# Ring attention


def test_the_next_block_travels_while_one_computes(pool: WorkerPool) -> None:
    for events, _, _ in pool.run(ring_order, False, world_size=4):
        assert events == [*["send", "attend", "wait"] * 3, "attend"]
    for events, _, _ in pool.run(ring_order, True, world_size=4):
        # Blocks travel as in forward; what came with a block is waited for once its own part is computed.
        assert events[:3] == ["send", "attend", "wait"]
        assert events.count("send") == 6 and events.count("attend") == 4
        for step, event in enumerate(events):
            if event == "attend" and step < len(events) - 3:
                assert "send" in events[max(0, step - 3) : step]


@pytest.mark.parametrize("backward", [False, True])
def test_no_rank_holds_more_than_two_blocks_in_one_tensor(pool: WorkerPool, backward: bool) -> None:
    for _, largest, own in pool.run(ring_order, backward, world_size=4):
        assert largest == 2 * own  # a rank's keys and values; whole keys would be 4 times its own


@pytest.mark.parametrize(
    ("backend", "active", "options", "expected"),
    [
        ("flash", None, {}, "'flash' gives no log-sum-exp"),
        ("flex", None, {}, "backends that work here: native, _native_flash, _native_math"),
        (None, "flex", {}, "'flex' gives no log-sum-exp"),
        (None, None, {"dropout_p": 0.1}, "ring attention does not take dropout_p"),
        (None, None, {"attention_kwargs": {"x": 1}}, "ring attention does not take attention_kwargs"),
    ],
)
def test_what_ring_attention_refuses(
    pool: WorkerPool, backend: str | None, active: str | None, options: dict[str, Any], expected: str
) -> None:
    for message in pool.run(ring_message, backend, active, options, world_size=2):
        assert expected in message


def test_backends_that_ring_attention_takes(pool: WorkerPool) -> None:
    for backend in (None, "native", "_native_flash", "_native_math"):
        assert pool.run(ring_message, backend, None, {}, world_size=2) == ["", ""]


def test_a_row_of_large_negative_numbers_is_still_an_average(pool: WorkerPool) -> None:
    for least, most in pool.run(absorbed_row, world_size=3):
        assert least == pytest.approx(1, abs=1e-6) and most == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("strategy", ["ring", "hybrid"])
def test_recomputation_after_another_forward_sees_its_own_keys(tmp_path: Path, pool: WorkerPool, strategy: str) -> None:
    from .test_context_parallel import lengths

    tiny = emit(tmp_path, TINY, 4, strategy, **({"outer": "ring"} if strategy == "hybrid" else {}))
    for error in pool.run(interleaved, tiny, lengths(tiny, (5, 7), (6, 6)), "model", world_size=4):
        assert error <= TOLERANCE


@pytest.mark.parametrize("options", [{"strategy": "ring"}, {"strategy": "hybrid", "outer": "ring"}])
def test_inductor(tmp_path: Path, pool: WorkerPool, options: dict[str, Any]) -> None:
    emitted = emit(tmp_path, TINY, 4, **options)
    probe = emitted.probe("one-block-each")
    for forward, backward, graphs in pool.run(compiled, emitted, probe, "inductor", world_size=4):
        assert (forward <= 1e-5, backward <= 1e-5, graphs) == (True, True, 1)


@pytest.mark.parametrize("strategy", ["allgather", "ring"])
def test_causal_models_compile_to_one_graph(tmp_path: Path, pool: WorkerPool, strategy: str) -> None:
    emitted = emit(tmp_path, CAUSAL, 2, strategy, load_balance=True)
    for forward, backward, graphs in pool.run(compiled, emitted, emitted.probe("joint"), "aot_eager", world_size=2):
        assert (forward <= 1e-5, backward <= 1e-5, graphs) == (True, True, 1)


# Balance


@pytest.mark.parametrize("strategy", ["allgather", "ring"])
def test_head_tail_order_evens_causal_work(pool: WorkerPool, strategy: str) -> None:
    even = pool.run(causal_work, strategy, 64, True, world_size=4)
    uneven = pool.run(causal_work, strategy, 64, False, world_size=4)
    assert max(even) <= 1.2 * min(even)
    assert max(uneven) >= 3 * min(uneven)
    assert max(even) < 0.75 * max(uneven)
