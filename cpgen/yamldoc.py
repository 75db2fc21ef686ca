"""YAML with positions: plain values, and for each of them the place it was written at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from cpgen.diagnostics import CpgenError, Finding, Location, fail

Path = tuple[str | int, ...]
_MAX_BYTES = 1_000_000
_MAX_DEPTH = 40
_MAX_INT = 2**63
_TAGS = "tag:yaml.org,2002:"
_KINDS: dict[type[yaml.Node], set[str]] = {
    yaml.MappingNode: {"map"},
    yaml.SequenceNode: {"seq"},
    yaml.ScalarNode: {"str", "int", "float", "bool", "null"},
}


@dataclass
class YamlDocument:
    """`value` holds dicts (str keys), lists and scalars. Look-ups by path give where a key or a value stands."""

    name: str
    value: Any
    _keys: dict[Path, Location] = field(default_factory=dict)
    _values: dict[Path, Location] = field(default_factory=dict)

    def key(self, path: Path) -> Location | None:
        """Where the last key of `path` is written, or its value if that is a list's element."""
        return self._keys.get(path) or self.at(path)

    def at(self, path: Path) -> Location | None:
        """Where the value at `path` is written, or its nearest parent."""
        while path and path not in self._values:
            path = path[:-1]
        return self._values.get(path)

    def keys_below(self, path: Path) -> dict[Path, Location]:
        """Where the keys inside the value at `path` are written, by their paths from there."""
        depth = len(path)
        return {key[depth:]: at for key, at in self._keys.items() if key[:depth] == path and len(key) > depth}

    def overlaid(self, path: Path, keys: tuple[str, ...]) -> YamlDocument:
        """The document with these of its own keys taken from the mapping at `path`, with their places there."""

        def moved(places: dict[Path, Location]) -> dict[Path, Location]:
            kept = {place: where for place, where in places.items() if place[:1] not in [(key,) for key in keys]}
            inner = {place[len(path) :]: where for place, where in places.items() if place[: len(path)] == path}
            return kept | {place: where for place, where in inner.items() if place and place[0] in keys}

        overlay = self.value
        for step in path:
            overlay = overlay[step]
        value = {**self.value, **{key: overlay[key] for key in keys}}
        return YamlDocument(self.name, value, moved(self._keys), moved(self._values))

    def completed(self, other: YamlDocument, keys: tuple[str, ...]) -> YamlDocument:
        """The document with these keys of another, which it does not have itself, with their places there."""

        def taken(places: dict[Path, Location]) -> dict[Path, Location]:
            return {place: where for place, where in places.items() if place and place[0] in keys}

        value = {**self.value, **{key: other.value[key] for key in keys}}
        return YamlDocument(self.name, value, self._keys | taken(other._keys), self._values | taken(other._values))


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Read one YAML document. `name` is the file's name in messages.

    Raises CpgenError for broken YAML, duplicate or non-string keys, aliases, tags, or more than 1 MB.
    """
    lines = text.splitlines()

    def place(mark: Any, end: Any = None) -> Location:
        line_text = lines[mark.line] if mark.line < len(lines) else ""
        width = end.column - mark.column if end is not None and end.line == mark.line else 1
        return Location(name, mark.line + 1, mark.column + 1, max(1, width), line_text)

    if len(text.encode()) > _MAX_BYTES:
        raise fail("CP101", f"{name} is larger than {_MAX_BYTES:,} bytes: not a plan")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise fail("CP101", "nested too deeply", place(event.start_mark))
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise fail("CP101", "YAML anchors and aliases are not allowed in a plan", place(_mark(event)))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.problem, error.context) if part)
        raise fail("CP101", f"broken YAML: {reason}", place(mark) if mark else None) from None
    except yaml.YAMLError as error:
        raise fail("CP101", f"broken YAML in {name}: {error}") from None
    document = YamlDocument(name, None)
    findings: list[Finding] = []
    if root is None:
        document._values[()] = Location(name, 1, 1, 1, lines[0] if lines else "")
    else:
        document.value = _build(root, (), document, findings, place)
    if findings:
        raise CpgenError(findings)
    return document


def _mark(event: yaml.Event) -> Any:
    return event.start_mark  # typed as optional, which the C parser's are


def _build(node: yaml.Node, path: Path, document: YamlDocument, findings: list[Finding], place: Any) -> Any:
    document._values[path] = place(node.start_mark, node.end_mark)
    tag = node.tag.removeprefix(_TAGS)
    if tag not in _KINDS[type(node)]:
        findings.append(Finding("CP101", f"a {tag} value is not allowed in a plan", document.at(path)))
        return None
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = place(key_node.start_mark, key_node.end_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                findings.append(Finding("CP101", "a key must be plain text", where))
                continue
            key = key_node.value
            if key in mapping:
                findings.append(
                    Finding("CP102", f"duplicate key '{key}'", where, note="the first one would be lost: remove one")
                )
                continue
            document._keys[(*path, key)] = where
            mapping[key] = _build(value_node, (*path, key), document, findings, place)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_build(child, (*path, i), document, findings, place) for i, child in enumerate(node.value)]
    try:
        value = _scalar(node)
        if type(value) is int and abs(value) > _MAX_INT:
            raise ValueError
    except ValueError:
        findings.append(Finding("CP101", f"not a valid {tag}: {_shortened(node.value)}", document.at(path)))
        return None
    return value


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _scalar(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()
