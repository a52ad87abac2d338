"""What a page of a run must be: well-formed, whole in itself, and readable without a script."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"meta", "br", "hr", "img", "input", "link", "col", "wbr"}
_LOADED = {"src", "href", "xlink:href", "srcset", "data", "poster", "background", "action", "formaction", "ping"}


class Page(HTMLParser):
    """Reads a page; an element that is not closed where it should be is an AssertionError."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[str] = []
        self.headings: list[str] = []
        self.tags: list[str] = []
        self.references: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.references += [(name, value or "") for name, value in attrs if name in _LOADED]
        if tag == "h2":
            self.headings.append("")
        if tag not in _VOID and self.get_starttag_text()[-2:] != "/>":  # type: ignore[index]
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "h2":
            self.headings[-1] += data
        if "style" not in self._open:
            self.text.append(data)

    @property
    def words(self) -> str:
        """All that is to be read."""
        return " ".join(" ".join(self.text).split())


def check_page(text: str) -> Page:
    """``text`` as a page that asks nobody for anything."""
    page = Page(text)
    assert all(value.startswith(("#", "data:image/png;base64,")) for _, value in page.references)
    assert not {"script", "link", "iframe", "object", "embed", "img", "base", "form"} & set(page.tags)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(set(ids)) == len(ids), "two pictures have one id"
    assert not any(name.startswith("on") for name, _ in page.attributes)
    styles = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    styles += "".join(value for name, value in page.attributes if name == "style")
    for loaded in ("@import", "url(", "image(", "src("):
        assert loaded not in styles, loaded
    assert not re.search(r"https?:|//", styles)
    assert "default-src 'none'" in text
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    for number in re.findall(r'(?:d|x|y|viewBox|width)="([^"]*)"', text):
        assert "nan" not in number, number
        assert "inf" not in number, number
    return page
