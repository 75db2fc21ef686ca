import json
import shutil
import struct

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from cpgen.runtime.weight_files import INDEX, SINGLE
from cpgen.verify.pool import WorkerPool
from tests.runtime import training_models as models
from tests.runtime import weight_cases as cases
from tests.runtime.training_cases import half_precision_reference


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("kind", "cp", "options", "world_size"),
    [
        ("wan", 2, {}, 4),
        ("wan", 1, {"data_parallel": "ddp"}, 2),
        ("wan", 2, {"data_parallel": "none"}, 2),
        ("wan", 2, {"param_dtype": torch.bfloat16, "cpu_offload": True}, 2),
        ("tiny", 1, {}, 4),
    ],
)
def test_saved_files_are_those_of_diffusers(pool: WorkerPool, root, tmp_path, kind, cp, options, world_size):
    model = models.wan_model() if kind == "wan" else models.tiny_model()
    model.save_pretrained(tmp_path / "diffusers")
    pool.run(cases.save_weights, root, kind, cp, str(tmp_path / "ours"), options, {}, world_size=world_size)

    assert names(tmp_path / "ours") == names(tmp_path / "diffusers") == ["config.json", SINGLE]
    for name in names(tmp_path / "ours"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "diffusers" / name).read_bytes()
    assert names(tmp_path) == ["diffusers", "ours"]  # nothing staged is left
    if kind == "wan":
        loaded = WanTransformer3DModel.from_pretrained(tmp_path / "ours").state_dict()
        assert loaded.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("size", ["20KB", 9000, 1, "0.03MB"])
def test_sharded_files_are_those_of_diffusers(pool: WorkerPool, root, tmp_path, size):
    models.wan_model().save_pretrained(tmp_path / "diffusers", max_shard_size=size)
    pool.run(cases.save_weights, root, "wan", 2, str(tmp_path / "ours"), {}, {"max_shard_size": size}, world_size=2)
    assert INDEX in names(tmp_path / "ours")
    assert names(tmp_path / "ours") == names(tmp_path / "diffusers")
    for name in names(tmp_path / "ours"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "diffusers" / name).read_bytes()


def test_saving_again_leaves_nothing_of_the_old_set(pool: WorkerPool, root, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    arguments = (root, "wan", 2, str(tmp_path), {})
    pool.run(cases.save_weights, *arguments, {"max_shard_size": "20KB"}, world_size=2)
    assert INDEX in names(tmp_path)
    pool.run(cases.save_weights, *arguments, {}, world_size=2)
    assert names(tmp_path) == ["config.json", SINGLE, "notes.txt"]
    pool.run(cases.save_weights, *arguments, {"max_shard_size": "20KB"}, world_size=2)
    assert SINGLE not in names(tmp_path)


def test_save_in_another_dtype_keeps_fp32_modules(pool: WorkerPool, root, tmp_path):
    pool.run(cases.save_weights, root, "wan", 2, str(tmp_path), {}, {"dtype": torch.bfloat16}, world_size=2)
    reference = models.wan_model().state_dict()
    for name, tensor in load_file(tmp_path / SINGLE).items():
        kept = any(part in WanTransformer3DModel._keep_in_fp32_modules for part in name.split("."))
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(tensor, reference[name].to(tensor.dtype))


def test_failed_save_is_an_error_on_every_rank(pool: WorkerPool, root, tmp_path):
    (tmp_path / "model").write_text("")
    for error in pool.run(cases.save_weights_error, root, str(tmp_path / "model"), world_size=2):
        assert f"{tmp_path / 'model'} can't be written" in error
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("mode", ["fsdp", "ddp", "none"])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_load_equals_from_pretrained(pool: WorkerPool, root, tmp_path, mode, size):
    model = models.wan_model()
    model.save_pretrained(tmp_path, max_shard_size=size)
    with torch.no_grad():
        expected = model.eval()(**models.wan_batch(0), return_dict=False)[0]
    total = sum(parameter.numel() for parameter in model.parameters())
    results = pool.run(cases.load_weights, root, "wan", 2, str(tmp_path), {"data_parallel": mode})
    for state, others, held, output in results:
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
        assert torch.equal(others["rope.freqs_cos"], model.rope.freqs_cos)
        assert torch.allclose(output, expected, rtol=1e-6, atol=1e-6)
        assert held < 0.3 * total if mode == "fsdp" else held == total


def test_load_keeps_plain_tensors_and_reads_buffers(pool: WorkerPool, root, tmp_path):
    model = models.tiny_model()
    model.shift.fill_(0.75)
    model.save_pretrained(tmp_path)
    hidden_states, timestep, _ = models.tiny_batch(0)
    with torch.no_grad():
        expected = model(hidden_states, timestep)
    for state, others, _, output in pool.run(cases.load_weights, root, "tiny", 1, str(tmp_path), {}):
        assert torch.equal(state["shift"], torch.tensor([0.75]))
        assert torch.equal(others["positions"], model.positions)
        assert torch.equal(others["scale"], model.scale)
        assert torch.allclose(output, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"data_parallel": "none"}, {"param_dtype": torch.bfloat16}])
def test_load_in_half_precision_equals_from_pretrained(pool: WorkerPool, root, tmp_path, options):
    models.wan_model().save_pretrained(tmp_path)
    expected, _, dtypes = half_precision_reference(str(tmp_path))
    reference = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).state_dict()
    arguments = (root, "wan", 2, str(tmp_path), {"dtype": torch.bfloat16, **options})
    for state, _, _, output in pool.run(cases.load_weights, *arguments, world_size=2):
        assert {name: state[name].dtype for name in dtypes} == dtypes
        assert all(torch.equal(state[name], tensor) for name, tensor in reference.items())
        assert torch.equal(output, expected)


def edited(directory, edit):
    models.tiny_model().save_pretrained(directory)
    tensors = load_file(directory / SINGLE)
    edit(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def test_all_wrong_keys_are_listed_at_once(pool: WorkerPool, root, tmp_path):
    def edit(tensors):
        del tensors["proj_in.weight"], tensors["transformer_blocks.1.gate"]
        tensors["proj_out.bias"] = torch.zeros(7)
        tensors["lora.weight"] = torch.zeros(2)
        tensors["legacy.weight"] = torch.zeros(2)  # the class says to ignore it

    edited(tmp_path, edit)
    for error in pool.run(cases.load_error, root, "tiny_cp1", str(tmp_path), world_size=2):
        assert error.splitlines()[1:] == [
            "  missing: proj_in.weight",
            "  missing: transformer_blocks.1.gate",
            f"  shape of proj_out.bias: [7] in {SINGLE}, [3] in the model",
            "  unexpected: lora.weight",
        ]


def test_keys_to_ignore(pool: WorkerPool, root, tmp_path):
    edited(tmp_path, lambda tensors: tensors.update({"legacy.weight": torch.zeros(2)}))
    assert pool.run(cases.load_error, root, "tiny_cp1", str(tmp_path), world_size=2) == ["", ""]


def cut(directory):
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:-10])
    return f"{path} can't be read"


def foreign(directory):
    (directory / SINGLE).write_bytes(b"PK\x03\x04 a pickle in a zip")
    return f"{directory / SINGLE} can't be read"


def short_header(directory):
    (directory / SINGLE).write_bytes(struct.pack("<Q", 10**6) + b"{}")
    return f"{directory / SINGLE} can't be read"


def empty(directory):
    (directory / SINGLE).write_bytes(b"")
    return f"{directory / SINGLE} can't be read"


def no_config(directory):
    (directory / "config.json").unlink()
    return f"{directory / 'config.json'} can't be read"


def broken_config(directory):
    (directory / "config.json").write_text("{")
    return f"{directory / 'config.json'} can't be read"


def pickled_only(directory):
    (directory / SINGLE).rename(directory / "diffusion_pytorch_model.bin")
    return "diffusion_pytorch_model.bin is pickled, which is never read"


def nothing(directory):
    (directory / SINGLE).unlink()
    return f"has neither {SINGLE} nor {INDEX}"


@pytest.mark.parametrize("damage", [cut, foreign, short_header, empty, no_config, broken_config, pickled_only, nothing])
def test_damaged_directories(pool: WorkerPool, root, tmp_path, damage):
    models.tiny_model().save_pretrained(tmp_path)
    message = damage(tmp_path)
    for error in pool.run(cases.load_error, root, "tiny_cp1", str(tmp_path), world_size=2):
        assert message in error


def without_shard(directory, index):
    name = index["weight_map"]["proj_in.weight"]
    (directory / name).unlink()
    return f"{directory / name} can't be read"


def wrong_map(directory, index):
    other = next(name for name in index["weight_map"].values() if name != index["weight_map"]["proj_in.weight"])
    index["weight_map"]["proj_in.weight"] = other
    return f"{directory / other} lacks proj_in.weight"


def outside(directory, index):
    index["weight_map"]["proj_in.weight"] = "../elsewhere.safetensors"
    return "names files that are not safetensors files in"


def pickle_in_index(directory, index):
    index["weight_map"]["proj_in.weight"] = "pytorch_model.bin"
    return "names files that are not safetensors files in"


def no_map(directory, index):
    index.clear()
    return f"{directory / INDEX} is not an index"


@pytest.mark.parametrize("damage", [without_shard, wrong_map, outside, pickle_in_index, no_map])
def test_damaged_index(pool: WorkerPool, root, tmp_path, damage):
    models.tiny_model().save_pretrained(tmp_path, max_shard_size=1000)
    index = json.loads((tmp_path / INDEX).read_text())
    message = damage(tmp_path, index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    for error in pool.run(cases.load_error, root, "tiny_cp1", str(tmp_path), world_size=2):
        assert message in error


def test_not_a_directory(pool: WorkerPool, root, tmp_path):
    for error in pool.run(cases.load_error, root, "tiny_cp1", str(tmp_path / "repo/name"), world_size=2):
        assert "is not a directory; load_pretrained reads a local one" in error


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """single/ and sharded/: a model of 288 MB in float32; small/: one to warm up with."""
    folder = tmp_path_factory.mktemp("large")
    model = WanTransformer3DModel(**{**models.WAN, **cases.LARGE_WAN})
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="70MB")
    models.wan_model().save_pretrained(folder / "small")
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 4
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("files", ["single", "sharded"])
@pytest.mark.parametrize(("options", "size"), [({}, 288e6), ({"dtype": torch.bfloat16}, 146e6)])
def test_no_rank_needs_more_than_its_part_and_a_quarter(pool: WorkerPool, root, large, files, options, size):
    arguments = (root, str(large / files), str(large / "small"), options)
    for peak, model in pool.run(cases.load_peak, *arguments, False):
        assert model == pytest.approx(size, rel=0.01)
        assert model / 4 < peak < 1.25 * model / 4  # below it, something would not have been read yet


def test_the_measure_sees_whole_files(pool: WorkerPool, root, large):
    arguments = (root, str(large / "sharded"), str(large / "small"), {})
    for peak, model in pool.run(cases.load_peak, *arguments, True):
        assert peak > 1.25 * model / 4


# --- parameters of two names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}, {"data_parallel": "none"}])
def test_a_parameter_of_two_names_is_saved_as_both(pool: WorkerPool, root, tmp_path, options):
    # diffusers' own save_pretrained refuses it, and its from_pretrained looks for both names.
    model = cases.tied_model()
    with pytest.raises(RuntimeError, match="share memory"):
        model.save_pretrained(tmp_path / "diffusers")
    pool.run(cases.save_tied, root, str(tmp_path / "ours"), options, world_size=2)
    loaded = cases.TiedTransformer.from_pretrained(tmp_path / "ours").state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"data_parallel": "ddp"}, {"data_parallel": "none"}])
@pytest.mark.parametrize("without", ["", "proj_in.weight", "proj_out.weight"])
def test_a_parameter_of_two_names_is_loaded_as_one(pool: WorkerPool, root, tmp_path, options, without):
    model = cases.tied_model()
    model(torch.ones(2, 6)).square().mean().backward()
    tied_files(model, tmp_path, lambda state: state.pop(without, None))
    for tied, state, gradient in pool.run(cases.load_tied, root, str(tmp_path), options, world_size=2):
        assert tied
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
        assert torch.allclose(gradient, model.proj_in.weight.grad, rtol=1e-6)


def tied_files(model, directory, edit):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    edit(state)
    model.save_config(directory)
    save_file(state, directory / SINGLE, metadata={"format": "pt"})


def test_a_parameter_of_two_names_and_two_values(pool: WorkerPool, root, tmp_path):
    def edit(state):
        state["proj_out.weight"][5, 5] += 1  # a part of rank 1 only

    tied_files(cases.tied_model(), tmp_path, edit)
    for error in pool.run(cases.load_error, root, "tied", str(tmp_path), world_size=2):
        assert f"proj_in.weight and proj_out.weight are one parameter in the class, but two in {tmp_path}" in error


def test_a_parameter_of_two_names_under_neither(pool: WorkerPool, root, tmp_path):
    def edit(state):
        del state["proj_in.weight"], state["proj_out.weight"]

    tied_files(cases.tied_model(), tmp_path, edit)
    for error in pool.run(cases.load_error, root, "tied", str(tmp_path), world_size=2):
        assert error.splitlines()[1:] == ["  missing: proj_in.weight or proj_out.weight"]
