"""HTML as elements, which the standard library writes out: whatever a text holds, it stays a text.

No markup is ever put together from strings. What a browser would not show, such as controls, marks that turn the
direction of writing, and bytes that are no UTF-8, is shown by its number.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

from exporter.reports import visible

Node = Element | str | None


def el(tag: str, *children: Node, **attributes: str | None) -> Element:
    """An element with these children; None is left out. ``class_`` stands for ``class``, ``aria_label`` for
    ``aria-label``.
    """
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), visible(value))
    for child in children:
        if isinstance(child, str):
            _append_text(element, visible(child))
        elif child is not None:
            element.append(child)
    return element


def _append_text(element: Element, text: str) -> None:
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text


def with_code(text: str) -> Iterable[Node]:
    """A sentence in which commands stand between backticks."""
    return (el("code", part) if number % 2 else part for number, part in enumerate(text.split("`")) if part)


def document(root: Element) -> bytes:
    """The whole page."""
    text: bytes = tostring(root, encoding="utf-8", method="html")
    return b"<!DOCTYPE html>\n" + text
