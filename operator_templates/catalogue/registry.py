"""The whole catalogue. A new family is one module with a `TEMPLATES` list, named here."""

from __future__ import annotations

import functools

from operator_templates.catalogue import (
    activation,
    attention,
    convolution,
    elementwise,
    indexing,
    loss,
    matmul,
    norm,
    pooling,
    reduction,
    resize,
    scan,
    shape,
    softmax,
)
from operator_templates.template import Template

_MODULES = (
    elementwise,
    activation,
    reduction,
    norm,
    softmax,
    matmul,
    convolution,
    pooling,
    loss,
    scan,
    indexing,
    shape,
    resize,
    attention,
)


@functools.cache
def all_templates() -> dict[str, Template]:
    """Every template by key, in catalogue order.

    Raises:
        ValueError: two templates share a key; give one of them a `variant`.
    """
    templates: dict[str, Template] = {}
    for module in _MODULES:
        for template in module.TEMPLATES:
            if template.key in templates:
                raise ValueError(f"two templates are called {template.key!r}; give one a variant")
            templates[template.key] = template
    return templates


@functools.cache
def families() -> dict[str, tuple[Template, ...]]:
    """The templates of each family, in catalogue order."""
    grouped: dict[str, tuple[Template, ...]] = {}
    for template in all_templates().values():
        grouped[template.family] = (*grouped.get(template.family, ()), template)
    return grouped
