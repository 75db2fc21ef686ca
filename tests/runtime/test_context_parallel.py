"""Emitted models under context parallelism: what they send, recompute, refuse and compile."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from cpgen.costs import ALL_GATHER, Attention, cost
from cpgen.plan import Probe
from cpgen.strategy import resolve
from cpgen.verify.pool import WorkerPool

from .emitted import TINY, Emitted, emit
from .model_cases import (
    compiled,
    copied,
    draws_after_dropout,
    interleaved,
    message_for,
    mixed_precision,
    refused_processor,
    refused_when_compiled,
    replaced_module,
    sharing,
    traffic,
    under_autocast,
    with_image_prompt,
    with_lora,
    with_pair_mask,
)

WAN, FLUX = "WanTransformer3DModel", "FluxTransformer2DModel"
TOLERANCE = 1e-9  # float64
COMPILED = 1e-5  # some tables are float32 inside, and a compiled graph rounds them in another order


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Emitted:
    return emit(tmp_path_factory.mktemp("tiny"), TINY, 2)


def sized(probe: Probe, **shapes: tuple[int, ...]) -> Probe:
    """`probe` with other shapes for some of its inputs."""
    inputs = {
        name: spec | {"shape": list(shapes[name])} if name in shapes else spec for name, spec in probe.inputs.items()
    }
    return replace(probe, inputs=inputs)


# Traffic, against cpgen.costs. Even lengths, so that nothing is padded.

WAYS = [  # strategy, its options, cp
    ("ulysses", {}, 2),
    ("ulysses", {}, 4),
    ("allgather", {}, 2),
    ("allgather", {}, 4),
    ("ring", {}, 2),
    ("ring", {}, 4),
    ("hybrid", {"ulysses_degree": 2}, 4),
    ("hybrid", {"ulysses_degree": 2, "outer": "ring"}, 4),
]


def expected_traffic(
    strategy: str, options: dict[str, Any], cp: int, layers: int, call: Attention
) -> tuple[dict[str, int], Fraction, dict[str, int], Fraction]:
    """Collectives and bytes sent by a rank's attention in forward and in backward."""
    found = cost(resolve(strategy, cp, options.get("ulysses_degree"), options.get("outer"), False, None), call)
    counts = [{kind: layers * n for kind, n in each.collectives.items()} for each in (found.forward, found.backward)]
    return counts[0], layers * found.forward.sent, counts[1], layers * found.backward.sent


@pytest.mark.parametrize(("strategy", "options", "cp"), WAYS)
def test_wan_sends_what_the_table_says(
    tmp_path: Path, pool: WorkerPool, strategy: str, options: dict[str, Any], cp: int
) -> None:
    emitted = emit(tmp_path, WAN, cp, strategy, **options)
    probe = sized(emitted.probe("text-to-video"), hidden_states=(2, 4, 2, 4, 8))  # 16 tokens
    calls, bytes_, calls_back, bytes_back = expected_traffic(strategy, options, cp, 2, Attention(16, 2, 4, 4, 12, 4))
    calls[ALL_GATHER] = calls.get(ALL_GATHER, 0) + 1  # the region's exit
    exit_bytes = 2 * 16 * 16 // cp * 4 * (cp - 1)  # the output: 4 channels of 1 x 2 x 2 patches
    for forward, sent, backward, sent_back in pool.run(traffic, emitted, probe, world_size=cp):
        # Cross-attention on whole text, and the region's entry, send nothing.
        assert (forward, sent) == (calls, bytes_ + exit_bytes)
        assert (backward, sent_back) == (calls_back, bytes_back)


@pytest.mark.parametrize("strategy", ["ulysses", "allgather", "ring"])
def test_joint_attention_costs_as_much_as_self_attention(tmp_path: Path, pool: WorkerPool, strategy: str) -> None:
    emitted = emit(tmp_path, FLUX, 2, strategy)
    probe = emitted.probe("guidance-and-controlnet")  # 16 + 8 tokens, 2 double and 2 single blocks
    calls, bytes_, calls_back, bytes_back = expected_traffic(strategy, {}, 2, 4, Attention(24, 1, 4, 4, 16, 4))
    calls[ALL_GATHER] = calls.get(ALL_GATHER, 0) + 1
    for forward, sent, backward, sent_back in pool.run(traffic, emitted, probe, world_size=2):
        assert (forward, sent) == (calls, bytes_ + 8 * 8 * 4)
        assert (backward, sent_back) == (calls_back, bytes_back)


# Recomputation


def lengths(tiny: Emitted, *sizes: tuple[int, int]) -> tuple[Probe, ...]:
    return tuple(sized(tiny.probe("masked-text"), hidden_states=(2, 4, h, w)) for h, w in sizes)


def test_recomputation_after_another_forward_sees_its_own_lengths(tiny: Emitted, pool: WorkerPool) -> None:
    # 35 and 36 tokens: on rank 0 both are 18, so the local length cannot tell them apart.
    for error in pool.run(interleaved, tiny, lengths(tiny, (5, 7), (6, 6)), "model", world_size=2):
        assert error <= TOLERANCE


def test_checkpointing_from_outside_is_exact_where_lengths_differ(tiny: Emitted, pool: WorkerPool) -> None:
    for error in pool.run(interleaved, tiny, lengths(tiny, (5, 7), (4, 4)), "outside", world_size=2):
        assert error <= TOLERANCE


def test_checkpointing_from_outside_is_refused_where_it_would_be_ambiguous(tiny: Emitted, pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="recomputes a block with 18 local tokens, which fits 2") as caught:
        pool.run(interleaved, tiny, lengths(tiny, (5, 7), (6, 6)), "outside", world_size=2)
    assert "enable_gradient_checkpointing" in str(caught.value)


def test_two_models_share_modules(tiny: Emitted, pool: WorkerPool) -> None:
    for error in pool.run(sharing, tiny, lengths(tiny, (5, 7), (6, 6)), world_size=2):
        assert error <= TOLERANCE


# What must be refused


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_processor_without_context_parallel_calls_is_refused(tiny: Emitted, pool: WorkerPool, when: str) -> None:
    for message in pool.run(refused_processor, tiny, tiny.probe(), when, world_size=2):
        assert "Foreign" in message
        assert "TinyAttnProcessor, TinyJointAttnProcessor" in message


def test_a_foreign_processor_is_refused_while_compiling(tiny: Emitted, pool: WorkerPool) -> None:
    for message in pool.run(refused_when_compiled, tiny, tiny.probe(), world_size=2):
        assert "_Foreign" in message
        assert "it ran" not in message


def test_an_attention_module_put_in_later_is_refused(tiny: Emitted, pool: WorkerPool) -> None:
    for message in pool.run(replaced_module, tiny, tiny.probe(), world_size=2):
        assert "'0.attn1' was replaced after parallelize" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_states": (2, 4, 1, 1)}, ["'hidden_states'", "'latent' has 1 tokens on dim 1", "degree 2"]),
        ({"encoder_hidden_states": (2, 1, 16), "encoder_attention_mask": (2, 1)}, ["'text' has 1 tokens"]),
        ({"encoder_attention_mask": (2, 5)}, ["attention mask has shape (2, 1, 1, 40)", "42 queries and 42 keys"]),
    ],
)
def test_bad_inputs_name_stream_dim_sizes_and_entry(
    tiny: Emitted, pool: WorkerPool, changes: dict[str, tuple[int, ...]], expected: list[str]
) -> None:
    for message in pool.run(message_for, tiny, tiny.probe("masked-text"), changes, world_size=2):
        assert message.startswith("TinyTransformer2DModel: ")
        for part in expected:
            assert part in message


def test_wan_timesteps_that_are_not_one_a_token_are_refused(tmp_path: Path, pool: WorkerPool) -> None:
    emitted = emit(tmp_path, WAN, 2)
    probe = emitted.probe("timestep-per-token")
    for message in pool.run(message_for, emitted, probe, {"timestep": (2, 9)}, world_size=2):
        assert "plan entry 'timestep_proj' has 9 tokens on dim 1, but stream 'latent' has 18" in message


@pytest.mark.parametrize(("mode", "refused"), [("extract", True), ("cached", True), (None, False)])
def test_flux2_with_a_cache_of_reference_tokens_is_refused(
    tmp_path: Path, pool: WorkerPool, mode: str | None, refused: bool
) -> None:
    emitted = emit(tmp_path, "Flux2Transformer2DModel", 2)
    cached = {"kv_cache_mode": {"value": mode}, "num_ref_tokens": {"value": 4}}
    probe = emitted.probe()
    probe = replace(probe, inputs=probe.inputs | cached)
    for message in pool.run(message_for, emitted, probe, {}, world_size=2):
        assert ("Flux2Transformer2DModel: a forward with `kv_cache_mode is not None`" in message) == refused


# What must keep working


def test_a_copy_of_a_bound_model_computes_the_same(tiny: Emitted, pool: WorkerPool) -> None:
    for difference in pool.run(copied, tiny, tiny.probe(), world_size=2):
        assert difference <= TOLERANCE


def test_lora_adapters_train(tiny: Emitted, pool: WorkerPool) -> None:
    for error in pool.run(with_lora, tiny, tiny.probe(), world_size=2):
        assert error <= TOLERANCE


def test_flux_image_prompts(tmp_path: Path, pool: WorkerPool) -> None:
    emitted = emit(tmp_path, FLUX, 2)
    for forward, backward in pool.run(with_image_prompt, emitted, emitted.probe("joint"), world_size=2):
        assert forward <= TOLERANCE
        assert backward <= TOLERANCE


def test_bfloat16(tiny: Emitted, pool: WorkerPool) -> None:
    for error in pool.run(mixed_precision, tiny, tiny.probe(), world_size=2):
        assert error < 0.05


def test_dropout_leaves_the_random_state_of_peers_equal(tmp_path: Path, pool: WorkerPool) -> None:
    # 7 + 45 tokens: the ranks' parts differ in length, so they draw unequally much.
    emitted = emit(tmp_path, "CogVideoXTransformer3DModel", 2)
    probe = emitted.probe("masked")
    probe = replace(probe, config=probe.config | {"dropout": 0.3})
    results = pool.run(draws_after_dropout, emitted, probe, world_size=2)
    assert results[0] == results[1]
    assert results[0][0] != results[0][1] and results[0][2]


@pytest.mark.parametrize("strategy", ["ulysses", "allgather", "ring"])
def test_a_mask_of_pairs_without_batch(tmp_path: Path, pool: WorkerPool, strategy: str) -> None:
    emitted = emit(tmp_path, FLUX, 2, strategy)
    for difference in pool.run(with_pair_mask, emitted, emitted.probe("joint"), 22, world_size=2):
        assert difference <= TOLERANCE


@pytest.mark.parametrize("strategy", ["ulysses", "allgather", "ring"])
def test_autocast(tmp_path: Path, pool: WorkerPool, strategy: str) -> None:
    # HunyuanVideo's query and key are float32 under autocast, its value bfloat16.
    emitted = emit(tmp_path, "HunyuanVideoTransformer3DModel", 2, strategy)
    for error in pool.run(under_autocast, emitted, emitted.probe(), world_size=2):
        assert error < 0.02  # of bfloat16's 2**-8, some roundings fall the other way


# Compilation


@pytest.mark.parametrize("strategy", ["ulysses", "allgather", "ring"])
def test_a_second_size_compiles_to_one_graph_too(tmp_path: Path, pool: WorkerPool, strategy: str) -> None:
    emitted = emit(tmp_path, TINY, 2, strategy)
    probe = emitted.probe("one-block-each")
    sizes = tuple(sized(probe, hidden_states=(1, 4, h, w)) for h, w in ((4, 6), (3, 9)))
    for forward, backward, graphs in pool.run(compiled, emitted, probe, "aot_eager", sizes, world_size=2):
        assert forward <= COMPILED
        assert backward <= COMPILED
        assert graphs <= 3  # one for each size, or fewer once sizes are dynamic


def test_with_gradient_checkpointing_it_is_one_graph_too(tiny: Emitted, pool: WorkerPool) -> None:
    for forward, backward, graphs in pool.run(
        compiled, tiny, tiny.probe("one-block-each"), "aot_eager", (), True, world_size=2
    ):
        assert forward <= COMPILED
        assert backward <= COMPILED
        assert graphs == 1


def test_inductor(tmp_path: Path, pool: WorkerPool) -> None:
    emitted = emit(tmp_path, TINY, 2)
    for forward, backward, graphs in pool.run(
        compiled, emitted, emitted.probe("one-block-each"), "inductor", world_size=2
    ):
        assert forward <= COMPILED
        assert backward <= COMPILED
        assert graphs == 1
