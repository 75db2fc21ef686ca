"""The section of a plan on tensor parallelism: which submodules of the blocks are cut, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from cpgen.diagnostics import did_you_mean
from cpgen.plan import TensorParallel
from cpgen.plan_reader import Reader, is_name
from cpgen.yamldoc import Path

# The keys that each style takes beside `style` and `optional`: those that it needs, and those that it may have.
STYLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "column": ((), ()),
    "row": ((), ("parts",)),
    "heads": (("attributes",), ("inputs", "masks", "shared")),
    "head_norm": (("dim",), ()),
    "norm_across_heads": ((), ()),
}
_ALL_KEYS = tuple(key for keys in STYLES.values() for key in (*keys[0], *keys[1]))
_MAX_NDIM = 8


def is_module_path(text: object) -> bool:
    """Whether `text` leads to a submodule: names and positions joined by dots, such as attn.to_out.0."""
    return isinstance(text, str) and all(is_name(step) or re.fullmatch(r"\d{1,4}", step) for step in text.split("."))


class TensorParallelReader(Reader):
    """Reads the section. What it names is in modules that exist only at run time: `fitting` looks for them there."""

    def _tensor_parallel(self, root: dict[str, Any], blocks: tuple[str, ...]) -> tuple[TensorParallel, ...]:
        if "tensor_parallel" not in root:
            return ()
        entries: list[TensorParallel] = []
        if root["tensor_parallel"] == {}:
            message = "an empty mapping: module list -> submodules; leave it out where the model takes no --tp"
            self._find("CP105", message, ("tensor_parallel",))
        for name in self._mapping(("tensor_parallel",), any_key=True):
            path: Path = ("tensor_parallel", name)
            if name not in blocks:
                hint, note = did_you_mean(name, blocks), f"blocks of this plan: {', '.join(blocks) or 'none'}"
                self._find("CP105", f"unknown module list '{name}'", path, key=True, hint=hint, note=note)
            of_list = [self._cut_module((*path, module)) for module in self._mapping(path, any_key=True)]
            if not any(entry.style == "column" for entry in of_list):
                self._find("CP107", f"no layer of {name} is cut column-wise", path, key=True)
            self._check_parts(of_list, path)
            entries += of_list
        return tuple(entries)

    def _check_parts(self, entries: list[TensorParallel], path: Path) -> None:
        columns = [entry.module for entry in entries if entry.style == "column"]
        for entry in entries:
            for index, part in enumerate(entry.parts):
                if part not in columns:
                    hint, note = did_you_mean(part, columns), f"cut column-wise: {', '.join(columns) or 'none'}"
                    where = (*path, entry.module, "parts", index)
                    self._find("CP105", f"'{part}' is not cut column-wise", where, hint=hint, note=note)

    def _cut_module(self, path: Path) -> TensorParallel:
        module, entry = str(path[-1]), self._value(path)
        if not is_module_path(module):
            note = "names and positions joined by dots, such as attn.to_out.0"
            self._find("CP105", f"'{module}' is not the path of a submodule", path, key=True, note=note)
        if isinstance(entry, dict):
            style = self._style(entry.get("style"), (*path, "style")) if "style" in entry else None
            required, more = STYLES[style] if style else ((), _ALL_KEYS)
            self._mapping(path, required=("style", *required), optional=("optional", *more))
        else:
            style = self._style(entry, path)
            for key in STYLES[style][0] if style else ():
                self._find("CP107", f"{style} needs '{key}': {{style: {style}, {key}: ...}}", path)
            entry = {}
        return TensorParallel(
            blocks=str(path[-2]),
            module=module,
            style=style or "",
            optional=self._typed(entry, (*path, "optional"), bool, False),
            parts=tuple(self._texts(entry, (*path, "parts"), is_module_path, "the path of a submodule")),
            attributes=tuple(self._texts(entry, (*path, "attributes"), is_name, "a name")),
            inputs=tuple(self._texts(entry, (*path, "inputs"), is_name, "a name")),
            masks=tuple(self._texts(entry, (*path, "masks"), is_name, "a name")),
            shared=tuple(self._texts(entry, (*path, "shared"), is_name, "a name")),
            dim=self._typed(entry, (*path, "dim"), int, None, lambda v: 0 <= v < _MAX_NDIM),
            location=self._document.key(path),
        )

    def _style(self, value: Any, path: Path) -> str | None:
        if isinstance(value, str) and value in STYLES:
            return value
        hint, note = did_you_mean(str(value), STYLES), f"styles: {', '.join(STYLES)}"
        self._find("CP105", f"unknown style {value!r}", path, hint=hint, note=note)
        return None

    def _texts(self, entry: dict[str, Any], path: Path, valid: Callable[[object], bool], kind: str) -> Iterator[str]:
        if path[-1] not in entry:
            return
        values = entry[str(path[-1])]
        indices = self._indices(values, path)
        if isinstance(values, list) and not values:
            self._find("CP105", f"an empty list of {path[-1]}", path)
        for index in indices:
            if valid(values[index]):
                yield values[index]
            else:
                self._find("CP105", f"{values[index]!r} is not {kind}", (*path, index))
