"""`cpgen export`: the files are those of save_pretrained, made without a process group, a file at a time."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

import cpgen.runtime.export as runtime_export
from cpgen.runtime.checkpoint import save_checkpoint
from cpgen.runtime.checkpoint_content import read_metadata, storage_entries
from cpgen.verify.pool import WorkerPool
from tests.runtime import export_cases as cases
from tests.runtime.emitted import emit
from tests.unit.projects import run


@pytest.fixture(scope="module")
def saved(root, pool: WorkerPool, tmp_path_factory):
    """checkpoints/ with steps 1 and 2, saved at dp 2, cp 2, and what save_pretrained wrote after step 2."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(cases.save_both, root, "wan", 2, str(folder), [1, 2], {}, None)
    return folder


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def same_files(one: Path, other: Path) -> bool:
    return names(one) == names(other) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names(one)
    )


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_files_are_those_of_save_pretrained(saved, tmp_path, size):
    assert not dist.is_initialized()
    ran = run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "new/model"), "--max-shard-size", size)
    assert ran.exit == 0, ran.err
    assert same_files(tmp_path / "new/model", saved / size)
    assert sorted(ran.out.splitlines()) == [f"{tmp_path}/new/model/{name}" for name in names(saved / size)]
    assert ran.err == f"wrote {tmp_path}/new/model from {saved}/checkpoints/step_2\n"
    assert names(tmp_path / "new") == ["model"]  # nothing staged is left
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "new/model").state_dict()
    expected = WanTransformer3DModel.from_pretrained(saved / size).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "cp", "options", "dtype", "world_size"),
    [
        ("wan", 2, {"data_parallel": "ddp"}, torch.bfloat16, 2),
        ("wan", 1, {"param_dtype": torch.bfloat16}, torch.float16, 4),
        ("tiny", 1, {}, torch.bfloat16, 4),
        ("tiny", 1, {"data_parallel": "none"}, None, 1),
    ],
)
def test_dtype_and_other_meshes(root, pool: WorkerPool, tmp_path, kind, cp, options, dtype, world_size):
    pool.run(cases.save_both, root, kind, cp, str(tmp_path), [1], options, dtype, world_size=world_size)
    chosen = [] if dtype is None else ["--dtype", str(dtype).removeprefix("torch.")]
    ran = run("export", str(tmp_path / "checkpoints/step_1"), "--to", str(tmp_path / "out"), *chosen)
    assert ran.exit == 0, ran.err
    assert same_files(tmp_path / "out", tmp_path / "5GB")


def test_a_tensor_parallel_run(pool: WorkerPool, tmp_path):
    emitted = emit(tmp_path / "packages", "WanTransformer3DModel", 2, tp=2)
    pool.run(cases.save_both_emitted, emitted, str(tmp_path))
    assert run("export", str(tmp_path / "checkpoints"), "--to", str(tmp_path / "out")).exit == 0
    assert same_files(tmp_path / "out", tmp_path / "expected")


def test_an_earlier_step(saved, tmp_path):
    assert run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "one"), "--step", "1").exit == 0
    assert run("export", str(saved / "checkpoints/step_1"), "--to", str(tmp_path / "two")).exit == 0
    assert same_files(tmp_path / "one", tmp_path / "two")
    assert not same_files(tmp_path / "one", saved / "5GB")


def test_no_more_than_a_file_is_in_memory(saved, tmp_path, monkeypatch):
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = runtime_export._read

    def watched(*arguments):
        nonlocal most
        tensor = read(*arguments)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(one.nbytes for one in (ref() for ref in alive) if one is not None))
        return tensor

    monkeypatch.setattr(runtime_export, "_read", watched)
    assert (
        run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "out"), "--max-shard-size", "20KB").exit == 0
    )
    total = sum(
        tensor.nbytes for tensor in WanTransformer3DModel.from_pretrained(tmp_path / "out").state_dict().values()
    )
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and total > 60_000
    assert most <= 20_000


def test_force_replaces_the_weights_and_nothing_else(saved, tmp_path):
    shutil.copytree(saved / "20KB", tmp_path / "out")
    (tmp_path / "out/notes").mkdir()
    (tmp_path / "out/notes/mine.txt").write_text("mine")
    (tmp_path / "out/diffusion_pytorch_model.fp16.safetensors").write_text("mine")
    refused = run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "out"))
    assert refused.exit == 2 and "is not empty" in refused.err and "--force" in refused.err and refused.out == ""
    assert (tmp_path / "out/diffusion_pytorch_model.safetensors.index.json").exists()
    assert run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "out"), "--force").exit == 0
    assert (tmp_path / "out/notes/mine.txt").read_text() == "mine"
    assert names(tmp_path / "out") == sorted(
        ["notes", "diffusion_pytorch_model.fp16.safetensors", *names(saved / "5GB")]
    )
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("failing", ["write", "swap"])
def test_a_failure_leaves_what_was_there(saved, tmp_path, monkeypatch, failing):
    shutil.copytree(saved / "20KB", tmp_path / "out")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    if failing == "write":
        monkeypatch.setattr(runtime_export, "write_tensors", full)
    else:
        monkeypatch.setattr("cpgen.export.swap", full)
    ran = run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "out"), "--force")
    assert ran.exit == 2 and "error[CP204]" in ran.err and "No space left on device" in ran.err
    assert same_files(tmp_path / "out", saved / "20KB") and names(tmp_path) == ["out"]


def test_interrupted(saved, tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime_export, "write_tensors", interrupt)
    ran = run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "out"))
    assert ran.exit == 130 and names(tmp_path) == []


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    shutil.copytree(saved / "checkpoints/step_2", tmp_path / "step_2")
    return tmp_path / "step_2"


def damage_weights(copy: Path) -> str:
    index, place = storage_entries(read_metadata(copy), "model.")[-1]
    file = copy / place.relative_path
    content = bytearray(file.read_bytes())
    content[content.index(b"archive/data/0", place.offset) + 76] ^= 0xFF  # name and padding come first
    file.write_bytes(content)
    return f"{file.name} is damaged at {index.fqn}"


def lose_a_file(copy: Path) -> str:
    (copy / "__1_0.distcp").unlink()
    return "__1_0.distcp is damaged at model."


def damage_metadata(copy: Path) -> str:
    (copy / ".metadata").write_bytes(b"no pickle")
    return ".metadata is damaged"


def damage_description(copy: Path) -> str:
    (copy / "model.json").write_text('{"config": {}}')
    return "model.json is damaged"


def foreign_description(copy: Path) -> str:
    content = json.loads((copy / "model.json").read_text())
    content["tensors"].pop()
    (copy / "model.json").write_text(json.dumps(content))
    return "names other tensors than the checkpoint holds"


def no_description(copy: Path) -> str:
    (copy / "model.json").unlink()
    return "does not say which model it holds"


def incomplete(copy: Path) -> str:
    (copy / ".metadata").unlink()
    return "holds no complete checkpoint"


@pytest.mark.parametrize(
    "damage",
    [
        damage_weights,
        lose_a_file,
        damage_metadata,
        damage_description,
        foreign_description,
        no_description,
        incomplete,
    ],
)
def test_what_can_not_be_exported(copy, tmp_path, damage):
    message = damage(copy)
    ran = run("export", str(copy), "--to", str(tmp_path / "out"))
    assert ran.exit == 2 and message in ran.err and "Traceback" not in ran.err and ran.out == ""
    assert ran.err.startswith("error[CP409]: ")
    assert names(tmp_path) == ["step_2"]


def test_a_checkpoint_without_a_description_and_a_config(saved, copy, tmp_path):
    no_description(copy)
    for config in (saved / "5GB", saved / "5GB/config.json"):
        ran = run("export", str(copy), "--to", str(tmp_path / "out"), "--config", str(config), "--force")
        assert ran.exit == 0, ran.err
        assert same_files(tmp_path / "out", saved / "5GB")
    assert (
        run("export", str(copy), "--to", str(tmp_path / "half"), "--config", str(config), "--dtype", "bfloat16").exit
        == 0
    )
    expected = WanTransformer3DModel.from_pretrained(saved / "5GB", torch_dtype=torch.bfloat16).state_dict()
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "half").state_dict()
    from safetensors.torch import load_file

    written = load_file(tmp_path / "half/diffusion_pytorch_model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {n: t.dtype for n, t in expected.items()}
    assert all(torch.equal(written[name], expected[name]) for name in expected) and loaded.keys() == expected.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't be read"),
        ("[]", "it has no _class_name"),
        ('{"_class_name": "Nothing"}', "diffusers has no Nothing"),
    ],
)
def test_a_config_that_is_none(copy, tmp_path, text, message):
    no_description(copy)
    (tmp_path / "config.json").write_text(text)
    arguments = ("--config", str(tmp_path / "config.json"), "--dtype", "bfloat16")
    ran = run("export", str(copy), "--to", str(tmp_path / "out"), *arguments)
    assert ran.exit == 2 and message in ran.err and not (tmp_path / "out").exists()


def test_a_module_that_is_not_diffusers_has_no_description(tmp_path):
    save_checkpoint(tmp_path / "runs", torch.nn.Linear(2, 2), step=1)
    ran = run("export", str(tmp_path / "runs"), "--to", str(tmp_path / "out"))
    assert ran.exit == 2 and "does not say which model it holds" in ran.err and "--config FILE" in ran.err


def test_bad_places(saved, tmp_path):
    (tmp_path / "file").write_text("")
    ran = run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "file"))
    assert ran.exit == 2 and "is not a directory" in ran.err
    ran = run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "file/below"))
    assert ran.exit == 2 and "cannot write" in ran.err
    ran = run("export", str(saved / "checkpoints"), "--to", str(tmp_path / "out"), "--max-shard-size", "5 parsecs")
    assert ran.exit == 2 and "max_shard_size='5 parsecs'" in ran.err
    assert names(tmp_path) == ["file"]
    before = sorted(saved.rglob("*"))
    for place in (saved, saved / "checkpoints", f"{saved}/checkpoints/..", saved.parent):
        ran = run("export", str(saved / "checkpoints"), "--to", str(place), "--force")
        assert ran.exit == 2 and "holds the checkpoint" in ran.err
    assert sorted(saved.rglob("*")) == before


def test_layers_without_their_adapters(tmp_path):
    model = torch.nn.ModuleDict({"base_layer": torch.nn.Linear(2, 2)})
    save_checkpoint(tmp_path / "runs", model, step=1)
    (tmp_path / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    config = ["--config", str(tmp_path / "config.json")]
    ran = run("export", str(tmp_path / "runs"), "--to", str(tmp_path / "out"), *config)
    assert ran.exit == 2 and "holds peft's layers without their adapters" in ran.err
    assert not (tmp_path / "out").exists()
