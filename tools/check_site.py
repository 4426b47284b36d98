"""Check a built site: every link, anchor and picture within it exists. `make docs` runs it after the build."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what an element links to, and by what name it can be linked to."""
        attributes = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := attributes.get(name)))
        self.links += [value for name in ("href", "src") if (value := attributes.get(name))]


def broken_links(root: Path) -> Iterator[str]:
    """A line for every link from one page of a site to a file or an anchor of it that is not there."""
    pages = {file.resolve(): Page(file.read_text("utf-8")) for file in sorted(root.rglob("*.html"))}
    if not pages:
        yield f"{root} has no pages"
    for file, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            if not target.exists():
                yield f"{file.relative_to(root.resolve())}: {link} does not exist"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{file.relative_to(root.resolve())}: {link} has no such anchor"


if __name__ == "__main__":
    broken = list(broken_links(Path(sys.argv[1])))
    print(*broken, sep="\n", file=sys.stderr)
    sys.exit(bool(broken))
