"""Tables of documents, as plain text for terminals and as HTML for notebooks."""
from __future__ import annotations

import dataclasses
import html
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .document import Document

MOST_ROWS = 30  # of a table; what is left out is counted
WIDEST = 80  # characters of a cell

# Columns of the items of a list, as heading and path; the others show their figures one by one.
COLUMNS = {
    "SearchPlan": {
        "TFLOPS/GPU": "tflops_per_gpu", "step s": "step_seconds", "GiB": "memory_gib", "GPUs": "plan.mesh.gpus", "TP": "plan.mesh.tp",
        "CP": "plan.mesh.cp", "DP": "plan.mesh.dp", "PP": "plan.mesh.pp", "VPP": "plan.mesh.vpp", "EP": "plan.mesh.ep",
        "ETP": "plan.mesh.etp", "MBS": "plan.mbs", "precision": "plan.precision", "recompute": "plan.recompute",
        "offload": "plan.offload", "interval": "interval", "hours": "hours", "dollars": "dollars",
    },
}


@dataclass
class Table:
    """A heading for each column, and a row of as many values for each line."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    left_out: int = 0  # rows that are not shown

    def text(self) -> str:
        cells = [self.columns] + [[shown(value) for value in row] for row in self.rows]
        left = [not all(row[i] is None or is_number(row[i]) for row in self.rows) for i in range(len(self.columns))]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(width) if to_left else cell.rjust(width)
                           for cell, width, to_left in zip(row, widths, left)).rstrip() for row in cells]
        return "\n".join([self.title] + lines + self._more())

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join("<tr>" + "".join(self._cell(value) for value in row) + "</tr>" for row in self.rows)
        more = "".join(f"<p>{line}</p>" for line in self._more())
        return f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"

    @staticmethod
    def _cell(value: Any) -> str:
        side = "right" if is_number(value) else "left"
        return f'<td style="text-align: {side}">{html.escape(shown(value))}</td>'

    def _more(self) -> list[str]:
        return [f"({self.left_out} more rows)"] if self.left_out else []


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_figure(value: Any) -> bool:
    """A value that fits a cell: no object, no list of objects."""
    if isinstance(value, list):
        return all(isinstance(item, (int, float, str)) for item in value)
    return isinstance(value, (bool, int, float, str))


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    text = ", ".join(shown(item) for item in value) or "none" if isinstance(value, list) else str(value)
    return text if len(text) <= WIDEST and "\n" not in text else text.split("\n")[0][: WIDEST - 3] + "..."


def values_of(document: Document) -> dict[str, Any]:
    """Its fields by their names in JSON."""
    return {json_name(one): getattr(document, one.name) for one in dataclasses.fields(document)}  # type: ignore[arg-type]


def json_name(one: dataclasses.Field[Any]) -> str:
    name: str = one.metadata.get("json", one.name)
    return name


def is_document(value: Any) -> bool:
    return dataclasses.is_dataclass(value)


def figures_of(document: Document) -> dict[str, Any]:
    """Its own figures, then those of the objects inside, by path. A document inside, such as a plan, is left out."""
    result = {name: value for name, value in values_of(document).items() if is_figure(value) and name != "schema"}
    for name, value in values_of(document).items():
        if is_document(value) and not hasattr(value, "schema"):
            result.update({f"{name}.{path}": figure for path, figure in figures_of(value).items()})
        elif isinstance(value, dict) and all(is_figure(item) for item in value.values()):
            result.update({f"{name}.{key}": item for key, item in value.items()})
    return result


def table_of_items(title: str, items: list[Any]) -> Table:
    """A row for each item of a list of objects. A column in which nothing stands is left out."""
    chosen = COLUMNS.get(type(items[0]).__name__)
    if chosen:
        rows = [{heading: operator.attrgetter(path)(item) for heading, path in chosen.items()} for item in items[:MOST_ROWS]]
    else:
        rows = [figures_of(item) for item in items[:MOST_ROWS]]
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) not in (None, []) for row in rows)]
    return Table(title, columns, [[row.get(name) for name in columns] for row in rows], max(0, len(items) - MOST_ROWS))


def lists_of(document: Document, path: str = "") -> list[Table]:
    result = []
    for name, value in values_of(document).items():
        if isinstance(value, list) and value and all(is_document(item) for item in value):
            result.append(table_of_items(path + name, value))
        elif is_document(value) and not hasattr(value, "schema"):
            result += lists_of(value, f"{path}{name}.")
    return result


def tables_of(document: Document) -> list[Table]:
    figures = [[name, value] for name, value in figures_of(document).items()]
    title = type(document).__name__
    return ([Table(title, ["figure", "value"], figures)] if figures else []) + lists_of(document)
