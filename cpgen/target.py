"""The class to emit: from what the user typed after --model to a class in a source file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from cpgen.diagnostics import CpgenError, did_you_mean, fail
from cpgen.plan_reader import is_name
from cpgen.source import SourceModule, SourceTree, exported_models, read_source

RESERVED_FILES = {"__init__", "parallelize", "checkpoint", "_runtime"}


@dataclass(frozen=True)
class Target:
    """A model class in its file. `spec` is how to name it again; `kind` is "diffusers", "module" or "file"."""

    spec: str
    kind: str
    class_name: str
    module: SourceModule

    @property
    def node(self) -> ast.ClassDef:
        node = self.module.definitions[self.class_name]
        assert isinstance(node, ast.ClassDef)
        return node

    def neighbour(self, class_name: str) -> Target:
        """Another class of the same file, which must be there."""
        return replace(self, class_name=class_name)

    @property
    def file_stem(self) -> str:
        return self.module.path.stem


def find_target(spec: str, tree: SourceTree) -> Target:
    """Find `spec`: a class that diffusers exports, `package.module:Class`, or `path/to/file.py:Class`.

    Raises CpgenError for one that isn't there, with near matches.
    """
    place, colon, class_name = spec.rpartition(":")
    if not colon:
        exported = exported_models(tree)
        if spec not in exported:
            raise _not_exported(spec, exported)
        module = tree.find(exported[spec])
        if module is None:
            raise fail("CP303", f"no source for {exported[spec]}")
        return _checked(Target(spec, "diffusers", spec, module))
    if not is_name(class_name):
        raise fail("CP401", f"'{class_name}' is not a class name")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise fail("CP401", f"no file {place}")
        return _checked(Target(spec, "file", class_name, _file_module(path)))
    if not all(is_name(part) for part in place.split(".")):
        raise fail("CP401", f"'{place}' is neither a module's name nor a .py file")
    module = tree.find(place)
    if module is None:
        raise fail("CP401", f"no module {place} with Python source", note="looked for without importing it")
    return _checked(Target(spec, "module", class_name, module))


def _not_exported(spec: str, exported: Iterable[str]) -> CpgenError:
    begin_so = [name for name in exported if spec and name.lower().startswith(spec.lower())]
    own = "package.module:Class, or path/to/file.py:Class"
    if spec.endswith(".py"):
        own = f"{spec}:Class"
    elif all(is_name(part) for part in spec.split(".")) and "." in spec:
        own = ":".join(spec.rsplit(".", 1))
    return fail(
        "CP401",
        f"diffusers exports no model class '{spec}'",
        note=f"classes that begin so: {', '.join(begin_so)}" if begin_so else did_you_mean(spec, exported),
        help=f"name a class that diffusers exports; one of your own is --model {own}",
    )


def snake_case(class_name: str) -> str:
    """The default package name: WanTransformer3DModel -> wan_transformer_3d."""
    stem = class_name.removesuffix("Model")
    # A number belongs to the word before it (SD3, CogView4), except as a dimension (2D, 3D).
    words = re.findall(
        r"\d+D|[A-Z]+\d*(?=[A-Z][a-z])|[A-Z]?[a-z]+(?:\d+(?![\dD]))?|[A-Z]+(?:\d+(?![\dD]))?|\d+|_+", stem
    )
    words = [word for word in words if not word.startswith("_")]
    return "_".join(words).lower() or class_name.lower()


def _file_module(path: Path) -> SourceModule:
    parts = [path.stem]
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return SourceModule(".".join(parts), path, path.name, read_source(path, path.name))


def _checked(target: Target) -> Target:
    module = target.module
    if not isinstance(module.definitions.get(target.class_name), ast.ClassDef):
        classes = [name for name, node in module.definitions.items() if isinstance(node, ast.ClassDef)]
        raise fail(
            "CP401",
            f"{module.label} defines no class '{target.class_name}'",
            note=did_you_mean(target.class_name, classes) or f"classes there: {', '.join(classes) or 'none'}",
        )
    if not is_name(target.file_stem) or target.file_stem in RESERVED_FILES:
        raise fail("CP402", f"a package cannot hold a file called {module.path.name}", help="rename the source file")
    return target
