"""The base of all documents: from JSON and back, and as tables for people."""
from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from typing import Any, TypeVar

from . import tables

T = TypeVar("T", bound="Document")


class Document:
    """An object of a JSON document. Its fields have the names of JSON, but `class_` for `class` and `fp8_tensor` for `fp8-tensor`."""

    @classmethod
    def from_dict(cls: type[T], data: dict[str, Any]) -> T:
        """The document of what json.loads() returns. Fields that the class does not know are left out."""
        hints = _hints(cls)
        values = {}
        for one in _fields(cls):
            if tables.json_name(one) in data:
                values[one.name] = _decoded(hints[one.name], data[tables.json_name(one)])
        return cls(**values)

    @classmethod
    def from_json(cls: type[T], text: str) -> T:
        return cls.from_dict(json.loads(text))

    @classmethod
    def read(cls: type[T], path: str | os.PathLike[str]) -> T:
        with open(path, encoding="utf-8") as file:
            return cls.from_dict(json.load(file))

    def to_dict(self) -> dict[str, Any]:
        """What json.dumps() takes. A field that may be missing is left out where it is None."""
        result = {}
        for one in _fields(type(self)):
            value = getattr(self, one.name)
            if value is not None or one.default is dataclasses.MISSING:
                result[tables.json_name(one)] = _encoded(value)
        return result

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    def tables(self) -> list[tables.Table]:
        """The document as people read it: its figures, then its lists."""
        return tables.tables_of(self)

    def __repr__(self) -> str:
        return "\n\n".join(table.text() for table in self.tables()) or type(self).__name__ + "()"

    def _repr_html_(self) -> str:
        return "\n".join(table.html() for table in self.tables())


def _fields(cls: type[Document]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]  # every class that derives from Document is a dataclass


_KNOWN_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a class's fields, read once."""
    if cls not in _KNOWN_HINTS:
        _KNOWN_HINTS[cls] = typing.get_type_hints(cls)
    return _KNOWN_HINTS[cls]


def _decoded(kind: Any, value: Any) -> Any:
    """A JSON value as the type of its field has it: only objects and what holds them change."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            if _takes(one, value):
                return _decoded(one, value)
    if origin is list and isinstance(value, list):
        return [_decoded(inner[0], item) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _decoded(inner[1], item) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Document) and isinstance(value, dict):
        return kind.from_dict(value)
    return value


def _takes(kind: Any, value: Any) -> bool:
    """Whether a value of several types is of this one, as far as decoding goes."""
    origin = typing.get_origin(kind)
    if isinstance(value, dict):
        return origin is dict or (isinstance(kind, type) and issubclass(kind, Document))
    return isinstance(value, list) and origin is list


def _encoded(value: Any) -> Any:
    if isinstance(value, Document):
        return value.to_dict()
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    return value
