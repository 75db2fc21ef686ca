import pytest
import torch
from diffusers import WanTransformer3DModel

from cpgen.verify.pool import WorkerError, WorkerPool
from tests.runtime import training_cases as cases
from tests.runtime.training_models import wan_model


def worst_relative_difference(gradients, reference):
    assert gradients.keys() == reference.keys()
    floor = 1e-5 * max(gradient.norm() for gradient in reference.values())
    return max(float((gradients[n] - reference[n]).norm() / max(reference[n].norm(), floor)) for n in reference)


@pytest.mark.parametrize("kind", ["tiny", "wan"])
@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
@pytest.mark.parametrize(
    ("cp", "axes", "world_size", "data_ranks"),
    [
        (1, {}, 4, 4),
        (2, {}, 4, 2),
        (2, {}, 2, 1),  # context parallelism alone
        (1, {"dp_replicate": 2}, 4, 4),
        (2, {"dp_replicate": 2}, 4, 2),
        (1, {"dp_replicate": 4, "dp_shard": 1}, 4, 4),
        (1, {}, 1, 1),
    ],
)
def test_gradients_are_those_of_one_process(pool: WorkerPool, root, kind, mode, cp, axes, world_size, data_ranks):
    options = {"data_parallel": mode}
    results = pool.run(cases.data_parallel_gradients, root, kind, cp, axes, options, world_size=world_size)
    reference = cases.single_process_gradients(kind, data_ranks)
    for size, gradients in results:
        assert size == data_ranks
        assert worst_relative_difference(gradients, reference) < 1e-6


@pytest.mark.parametrize(
    ("kind", "axes", "options"),
    [
        ("tiny", {}, {"cpu_offload": True}),
        ("tiny", {"pp": 2}, {}),
        ("wan", {}, {"checkpointing": True}),
        ("wan", {}, {"reshard_after_forward": True}),
    ],
)
def test_gradients_with_options(pool: WorkerPool, root, kind, axes, options):
    results = pool.run(cases.data_parallel_gradients, root, kind, 2, axes, options)
    for size, gradients in results:
        assert worst_relative_difference(gradients, cases.single_process_gradients(kind, size)) < 1e-6


def test_none_leaves_gradients_local(pool: WorkerPool, root):
    results = pool.run(cases.data_parallel_gradients, root, "tiny", 2, {}, {"data_parallel": "none"})
    first, second = (gradients["proj_in.weight"] for _, gradients in (results[0], results[2]))
    assert not torch.allclose(first, second)


def stays_in_fp32(name):
    return any(part in WanTransformer3DModel._keep_in_fp32_modules for part in name.split("."))


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_mixed_precision_computes_what_diffusers_half_precision_model_does(pool: WorkerPool, root, tmp_path, mode):
    wan_model().save_pretrained(tmp_path)
    [(expected, expected_gradients, dtypes)] = pool.run(cases.half_precision_reference, str(tmp_path), world_size=1)
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert {"scale_shift_table", "blocks.0.scale_shift_table", "blocks.0.norm2.weight"} <= kept  # bare ones too
    assert kept == {name for name in dtypes if stays_in_fp32(name)}

    results = pool.run(cases.compute_dtypes, root, mode, torch.float32, world_size=2)
    for seen, output, gradients in results:
        assert seen == dtypes
        assert torch.equal(output, expected)
        # FSDP's hooks change the order in which gradients of the text, used by every block, are added up in bf16.
        assert worst_relative_difference(gradients, {n: g.float() for n, g in expected_gradients.items()}) < 2**-6


def test_mixed_precision_with_gradient_checkpointing(pool: WorkerPool, root):
    options = {"param_dtype": torch.bfloat16}
    plain = pool.run(cases.data_parallel_gradients, root, "wan", 2, {}, options)
    recomputed = pool.run(cases.data_parallel_gradients, root, "wan", 2, {}, {**options, "checkpointing": True})
    for (_, expected), (_, gradients) in zip(plain, recomputed, strict=True):
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_output_dtype(pool: WorkerPool, root):
    dtypes = pool.run(cases.cpu_dtype_of_output, root, world_size=2)
    assert dtypes == [(torch.float32, torch.float32, torch.bfloat16)] * 2


@pytest.mark.parametrize(
    ("axes", "requested", "gathered"),
    [
        ({}, None, [False, True, True, True]),  # the last block of each list, and the root
        ({}, True, [False, False, False, False]),
        ({}, False, [True, True, True, True]),
        ({"pp": 2}, None, [True, True, True, True]),
    ],
)
def test_what_is_freed_after_forward(pool: WorkerPool, root, axes, requested, gathered):
    assert pool.run(cases.gathered_after_forward, root, axes, requested) == [gathered] * 4


def test_two_precisions_on_one_module_are_refused(pool: WorkerPool, root):
    with pytest.raises(WorkerError, match=r"norm_scale.*param_dtype=None"):
        pool.run(cases.mixed_parameters_on_one_module, root, world_size=1)


def test_parameters_of_two_dtypes_train_in_no_unit(pool: WorkerPool, root):
    pool.run(cases.dtypes_in_one_unit, root, True, world_size=2)
    with pytest.raises(WorkerError, match=r"TinyBlock trains parameters of several dtypes \(.*gate in torch.bfloat16"):
        pool.run(cases.dtypes_in_one_unit, root, False, world_size=2)


@pytest.mark.parametrize(
    ("package", "model", "options", "message"),
    [
        ("tiny_cp2", "tiny", {}, "cp size 1, but this package was emitted for cp degree 2"),
        ("tiny_cp1", "wan", {}, "TinyTransformer, not .*WanTransformer3DModel"),
        ("tiny_cp1", "tiny", {"data_parallel": "zero"}, "'zero' is not one of 'fsdp', 'ddp', 'none'"),
        ("tiny_cp1", "tiny", {"data_parallel": "none", "param_dtype": torch.bfloat16}, "would ignore param_dtype"),
        ("tiny_cp1", "tiny", {"twice": True}, "parallelized already"),
    ],
)
def test_errors(pool: WorkerPool, root, package, model, options, message):
    with pytest.raises(WorkerError, match=message) as caught:
        pool.run(cases.parallelize_error, root, package, model, options, world_size=2)
    assert {kind for kind, _, _ in caught.value.failures.values()} == {"ValueError"}
