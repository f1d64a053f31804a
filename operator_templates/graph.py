"""A problem as a graph: sources (inputs) and nodes (operators), and its replay with one of them
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from operator_templates.template import Domain, Template
from operator_templates.values import Attributes, Call, Value


@dataclass(frozen=True, kw_only=True)
class Source:
    """An input of the problem. `below` bounds the integers of an index."""

    name: str
    domain: Domain
    value: Value
    below: int = 0


@dataclass(frozen=True, kw_only=True)
class Node:
    """An operator; `operands` are positions of earlier entries of the graph."""

    template: Template
    operands: tuple[int, ...]
    attributes: Attributes
    salt: str
    value: Value


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Entries in order of execution; the last one is the output."""

    entries: tuple[Source | Node, ...] = ()

    def with_entry(self, entry: Source | Node) -> tuple[Graph, int]:
        """A graph with one more entry, and that entry's position."""
        return Graph(entries=(*self.entries, entry)), len(self.entries)

    def value(self, position: int) -> Value:
        return self.entries[position].value

    @property
    def output(self) -> Value:
        return self.entries[-1].value

    def sources(self) -> Iterator[tuple[int, Source]]:
        return ((i, e) for i, e in enumerate(self.entries) if isinstance(e, Source))

    def nodes(self) -> Iterator[tuple[int, Node]]:
        return ((i, e) for i, e in enumerate(self.entries) if isinstance(e, Node))

    def users(self, position: int) -> list[int]:
        """The nodes that read an entry."""
        return [i for i, node in self.nodes() if position in node.operands]

    def call(self, node: Node) -> Call:
        inputs = tuple(self.value(o) for o in node.operands)
        return Call(inputs=inputs, attributes=node.attributes, salt=node.salt)

    def replay(self, *, without: int | None = None, redrawn: int | None = None) -> Value:
        """The output with one entry changed.

        Args:
            without: a node that passes its first operand through.
            redrawn: a source, or a node with parameters, whose random numbers are drawn anew.
        """
        values: list[Value] = []
        for position, entry in enumerate(self.entries):
            if isinstance(entry, Source):
                value = entry.value
                if position == redrawn:
                    value = entry.domain.value(value.shape, f"{entry.name}/again")
            else:
                inputs = tuple(values[o] for o in entry.operands)
                salt = f"{entry.salt}/again" if position == redrawn else entry.salt
                call = Call(inputs=inputs, attributes=entry.attributes, salt=salt)
                if position == without:
                    value = inputs[0]
                else:
                    value = replace(entry.value, lanes=entry.template.sample(call))
            values.append(value)
        return values[-1]
