"""Check that every internal link of the built site has an existing file and anchor."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["Page", "broken_links"]


class Page(HTMLParser):
    """The links and the places of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Keep what an element is called and where it leads."""
        for name, value in attributes:
            if name == "id" and value:
                self.places.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)


def broken_links(site: Path) -> list[str]:
    """Return page and target of every broken link and of every resource loaded from another host."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.exists() or (place and target in pages and place not in pages[target].places):
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    if found:
        sys.exit("links that lead nowhere:\n" + "\n".join(found))
