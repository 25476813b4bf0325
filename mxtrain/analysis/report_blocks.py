"""The parts of a report, and their rendering as Markdown with figures beside it or as one HTML page."""

import base64
import html
from dataclasses import dataclass

STYLE = (
    "body{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em;line-height:1.45}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}"
    "td,th{border:1px solid #ccc;padding:.25em .6em;text-align:right;white-space:nowrap}"
    "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}img{max-width:100%}"
)


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Lines:
    """A list."""

    lines: list[str]


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Picture:
    name: str
    """Of its file, without a suffix"""
    alt: str
    svg: str

    @property
    def file(self) -> str:
        return f"{self.name}.svg"


Block = Heading | Text | Lines | Table | Picture


def markdown(blocks: list[Block]) -> str:
    """Return the report as Markdown, whose figures are the files beside it."""
    return "\n\n".join(map(_as_markdown, blocks)) + "\n"


def html_page(blocks: list[Block]) -> str:
    """Return the report as one HTML page that needs no other file."""
    title = next(block.text for block in blocks if isinstance(block, Heading))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(map(_as_html, blocks))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _as_markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Lines):
        return "\n".join(f"- {line}" for line in block.lines)
    if isinstance(block, Picture):
        return f"![{block.alt}]({block.file})"
    rule = ["---" if column < 2 else "---:" for column in range(len(block.header))]
    rows = [block.header, rule, *block.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _as_html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Lines):
        return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in block.lines)}</ul>"
    if isinstance(block, Picture):
        # As an image of its own: the ids inside of two inline pictures would be those of one document.
        data = base64.b64encode(block.svg.encode()).decode()
        return f'<p><img alt="{html.escape(block.alt)}" src="data:image/svg+xml;base64,{data}"></p>'
    return f"<table>{_row(block.header, 'th')}{''.join(_row(row, 'td') for row in block.rows)}</table>"


def _row(cells: tuple[str, ...], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
