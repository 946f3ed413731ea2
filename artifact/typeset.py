"""Markdown to Typst: what the appendix is written in, set in small print.

Promise: headings, paragraphs, lists, code, tables and emphasis come out as such, and no character
of the text is taken for markup; anything else in the Markdown is refused by name.
Limit: not a general converter: no pictures, no nested lists, no HTML.
"""

from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

from toolchain.errors import InvalidData

_HEAD = """\
#set document(title: "Artifact appendix", date: none)
#set page(paper: "a4", margin: (x: 1.9cm, y: 1.5cm), numbering: "1")
#set text(font: "Libertinus Serif", size: 9pt)
#set par(justify: true, leading: 0.5em, spacing: 0.7em)
#set list(indent: 0pt, body-indent: 0.4em, spacing: 0.5em)
#set table(align: left, stroke: (x, y) => (top: if y < 2 { 0.4pt }, bottom: 0.2pt),
  inset: (x: 3pt, y: 2.1pt))
#show raw: set text(font: "DejaVu Sans Mono", size: 7.4pt)
#show table: set text(size: 7.8pt)
#show table: it => { show raw: set text(size: 6.4pt); it }
#show table: set par(justify: false)
#show table: it => block(above: 0.8em, below: 1em, it)
#show heading.where(level: 1): it => align(center, block(below: 1em, text(size: 12pt, it.body)))
#show heading.where(level: 2): it => block(above: 1em, below: 0.6em, text(size: 10.5pt, it.body))
"""
_COLUMNS = {4: "(auto, 1fr, auto, 3.2cm)", 6: "(auto, 1fr, auto, auto, auto, auto)"}
"""Widths of a table by its number of columns: the second one is prose."""


def to_typst(markdown: str) -> str:
    """Return a Typst document; raises InvalidData for Markdown that is not covered."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    return _HEAD + "".join(_blocks(tokens))


def _blocks(tokens: Sequence[Token]) -> Iterator[str]:
    cells: list[str] = []
    columns = 0
    for token in tokens:
        match token.type:
            case "heading_open":
                yield f"\n{'=' * int(token.tag[1:])} "
            case "heading_close" | "paragraph_close" | "bullet_list_close":
                yield "\n\n" if not token.hidden else "\n"
            case "list_item_open":
                yield "- "
            case "fence" | "code_block":
                yield f"\n#raw({_string(token.content.rstrip())}, block: true)\n"
            case "table_open":
                cells, columns = [], 0
            case "th_open":
                columns += 1
            case "inline":
                text = "".join(_inline(token.children or []))
                if columns:
                    cells.append(f"[{text}]")
                else:
                    yield text
            case "table_close":
                yield _table(cells, columns)
                columns = 0
            case (
                "paragraph_open" | "bullet_list_open" | "list_item_close" | "thead_open"
                | "thead_close" | "tbody_open" | "tbody_close" | "tr_open" | "tr_close"
                | "th_close" | "td_open" | "td_close"
            ):  # fmt: skip
                pass
            case other:
                raise InvalidData(f"appendix: Markdown {other!r} is not covered; say it otherwise")


def _table(cells: Sequence[str], columns: int) -> str:
    widths = _COLUMNS.get(columns, str(columns))
    head, body = cells[:columns], cells[columns:]
    return f"\n#table(columns: {widths}, table.header({', '.join(head)}), {', '.join(body)})\n"


def _inline(tokens: Sequence[Token]) -> Iterator[str]:
    for token in tokens:
        match token.type:
            case "text":
                yield f"#{_string(token.content)};"
            case "softbreak":
                yield " "
            case "code_inline":
                yield f"#raw({_string(token.content)});"
            case "strong_open":
                yield "#strong["
            case "em_open":
                yield "#emph["
            case "strong_close" | "em_close":
                yield "]"
            case "link_open" | "link_close":
                pass  # the text says it; paper has no links
            case other:
                raise InvalidData(f"appendix: Markdown {other!r} is not covered; say it otherwise")


def _string(text: str) -> str:
    """A Typst string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
