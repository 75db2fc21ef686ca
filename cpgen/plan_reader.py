"""Values out of a plan's YAML: each is checked, and what is wrong becomes a finding with its place."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import Any

from cpgen.diagnostics import Finding, did_you_mean
from cpgen.yamldoc import Path, YamlDocument


def is_name(text: object) -> bool:
    """Whether `text` can stand as a name in generated code: an ASCII identifier, not a keyword, not dunder."""
    return (
        isinstance(text, str)
        and text.isascii()
        and text.isidentifier()
        and not keyword.iskeyword(text)
        and not text.startswith("__")
    )


class Reader:
    """Reads a document by paths, and collects findings instead of raising: what can't be read becomes a stand-in."""

    def __init__(self, document: YamlDocument) -> None:
        self._document = document
        self.findings: list[Finding] = []

    def _mapping(
        self, path: Path, required: tuple[str, ...] = (), optional: tuple[str, ...] = (), *, any_key: bool = False
    ) -> dict[str, Any]:
        value = self._value(path)
        if not isinstance(value, dict):
            if path == () or self._exists(path):
                self._find("CP105", "expected a mapping" if path else "a plan is a mapping", path)
            return {}
        if not any_key:
            for key in value:
                if key not in required + optional:
                    hint = did_you_mean(key, required + optional)
                    note = f"keys here: {', '.join(required + optional)}"
                    self._find("CP103", f"unknown key '{key}'", (*path, key), key=True, hint=hint, note=note)
            for key in required:
                if key not in value:
                    self._find("CP107", f"missing key '{key}'", path, key=True)
        return value

    def _each(self, parent: dict[str, Any], path: Path, read: Callable[[Path], Any]) -> tuple[Any, ...]:
        if path[-1] not in parent:
            return ()
        return tuple(read((*path, key)) for key in self._mapping(path, any_key=True))

    def _indices(self, value: Any, path: Path) -> range:
        if not isinstance(value, list):
            self._find("CP105", "expected a list", path)
            return range(0)
        return range(len(value))

    def _name(self, parent: dict[str, Any], path: Path) -> str:
        value = parent.get(str(path[-1]))
        if path[-1] in parent and not is_name(value):
            self._find(
                "CP105", f"{value!r} is not a name", path, note="a plan's names end up in code: identifiers only"
            )
            return ""
        return str(value or "")

    def _names(self, parent: dict[str, Any], path: Path, *, dotted: bool = False) -> tuple[str, ...]:
        """A list of names; `dotted` ones may be paths of names, such as blocks.image."""
        if path[-1] not in parent:
            return ()
        names: list[str] = []
        for i in self._indices(parent[str(path[-1])], path):
            value = self._value((*path, i))
            if value in names:
                self._find("CP105", f"'{value}' is named twice", (*path, i))
            elif is_name(value) or (dotted and isinstance(value, str) and all(map(is_name, value.split(".")))):
                names.append(value)
            else:
                self._find("CP105", f"{value!r} is not a name", (*path, i))
        return tuple(names)

    def _typed(
        self, entry: dict[str, Any], path: Path, kind: type, default: Any, check: Callable[[Any], Any] | None = None
    ) -> Any:
        if path[-1] not in entry:
            return default
        value = entry[str(path[-1])]
        if type(value) is not kind or (check is not None and not check(value)):
            self._find("CP105", f"{value!r} is not a valid {path[-1]} ({kind.__name__})", path)
            return default
        return value

    def _choice(self, entry: dict[str, Any], path: Path, choices: tuple[str, ...]) -> str:
        value = entry.get(str(path[-1]))
        if path[-1] in entry and value not in choices:
            hint = did_you_mean(str(value), choices)
            self._find("CP105", f"{value!r} is not one of {', '.join(choices)}", path, hint=hint)
        return str(value)

    def _value(self, path: Path) -> Any:
        value = self._document.value
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def _exists(self, path: Path) -> bool:
        return self._document.at(path) is not self._document.at(path[:-1])

    def _find(self, code: str, message: str, path: Path, *, key: bool = False, **parts: str | None) -> None:
        place = self._document.key(path) if key else self._document.at(path)
        self.findings.append(Finding(code, message, place, **parts))
