"""The book: what it lists and cites, that it builds cleanly, and that its pages stand alone.

The build runs once, into a temporary folder, with a proxy that leads nowhere, so that a build that
needs the network fails.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("jupyter_book")

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
CITATION = re.compile(r"\{cite(?::[a-z]+)?\}`([^`]+)`")


def load_extension() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mdsd_book", BOOK / "sphinx_ext" / "mdsd_book.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


extension = load_extension()


# ---------------------------------------------------------------- the sources


def markdown_sources() -> Iterator[tuple[str, str]]:
    """Name and text of each markdown page and each markdown cell of the book."""
    for page in BOOK.glob("*.md"):
        yield page.name, page.read_text(encoding="utf-8")
    for path in CHAPTERS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                yield path.name, "".join(cell["source"])


def bibliography() -> set[str]:
    entries = (BOOK / "references.bib").read_text(encoding="utf-8")
    keys = re.findall(r"^@\w+\{([^,\s]+),", entries, re.M)
    assert len(keys) == len(set(keys)), "a key stands twice in references.bib"
    return set(keys)


def test_contents_list_every_chapter_and_no_other():
    assert sorted(extension.listed_chapters(BOOK / "_toc.yml")) == [p.name for p in CHAPTERS]


def test_contents_follow_the_numbers():
    listed = extension.listed_chapters(BOOK / "_toc.yml")
    assert listed == sorted(listed)


def test_every_citation_has_an_entry():
    known = bibliography()
    cited = {
        (name, key.strip())
        for name, text in markdown_sources()
        for keys in CITATION.findall(text)
        for key in keys.split(",")
    }
    assert cited
    assert not {(name, key) for name, key in cited if key not in known}


# ---------------------------------------------------------------- the extension


def notebook(*cells: tuple[str, str]) -> str:
    return json.dumps({"cells": [{"cell_type": kind, "source": source} for kind, source in cells]})


def shown(text: str, docname: str = "chapters/04_mla") -> list[str]:
    return [cell["source"] for cell in json.loads(extension.read_notebook(text, docname))["cells"]]


def test_directives_are_hidden_and_empty_cells_dropped():
    text = notebook(
        ("markdown", "# Attention\n\n> One line."),
        ("code", "#| default_exp model.mla"),
        ("code", "#| export\nx = 1  #| not a directive"),
    )
    assert shown(text) == ["# 4 · Attention\n\n> One line.", "x = 1  #| not a directive"]


@pytest.mark.parametrize(
    ("docname", "title"),
    [("chapters/02b_tokens", "# 2b · T"), ("chapters/10_x", "# 10 · T"), ("other", "# T")],
)
def test_titles_carry_the_number_of_the_file(docname, title):
    assert shown(notebook(("markdown", "# T")), docname) == [title]


def test_a_title_with_a_number_is_left_alone():
    assert shown(notebook(("markdown", "# 4 Attention"))) == ["# 4 Attention"]


@pytest.mark.parametrize(
    ("docname", "link", "mended"),
    [
        ("chapters/04_mla", "[a](05_moe.ipynb)", "[a](05_moe.ipynb)"),
        ("chapters/04_mla", "[a](../book/notation.md)", "[a](../notation.md)"),
        ("chapters/04_mla", "[a](../data/README.md)", "[a](path:../../data/README.md)"),
        ("intro", "[a](../chapters/05_moe.ipynb)", "[a](chapters/05_moe.ipynb)"),
    ],
)
def test_links_are_mended(docname, link, mended):
    assert extension.LINK.sub(lambda m: extension.mend_link(m, docname), link) == mended


def small_book(folder: Path, listed: str) -> Path:
    book = folder / "book"
    book.mkdir()
    (folder / "chapters").mkdir()
    (folder / "chapters" / "00_a.ipynb").write_text("{}", encoding="utf-8")
    toc = {"parts": [{"chapters": [{"file": f"chapters/{listed}"}, {"file": "notation"}]}]}
    (book / "_toc.yml").write_text(yaml.safe_dump(toc), encoding="utf-8")
    return book


def test_staging_copies_what_is_listed_and_drops_the_rest(tmp_path):
    book = small_book(tmp_path, "00_a")
    (book / "chapters").mkdir()
    (book / "chapters" / "99_old.ipynb").write_text("{}", encoding="utf-8")
    extension.stage_chapters(book)
    assert [path.name for path in (book / "chapters").iterdir()] == ["00_a.ipynb"]


def test_a_missing_chapter_is_named(tmp_path):
    book = small_book(tmp_path, "01_b")
    with pytest.raises(extension.ExtensionError, match=r"01_b\.ipynb.*take them out"):
        extension.stage_chapters(book)


# ---------------------------------------------------------------- the pages


class Page(HTMLParser):
    """What a page loads, where it leads, and which of its images have no words."""

    LOADS = ("script", "img", "iframe", "source", "video", "audio", "embed")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.wordless: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in self.LOADS and values.get("src"):
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") not in ("next", "prev", "index", "search"):
            self.loaded.append(values.get("href", ""))
        if tag == "a":
            self.links.append(values.get("href", ""))
        # An empty alt is for decoration; in a chapter every picture says something.
        if tag == "img" and not values.get("alt", "").strip():
            self.wordless.append(values.get("src", "?")[:60])


def is_foreign(url: str) -> bool:
    return url.startswith("//") or urlsplit(url).scheme in ("http", "https", "ftp")


def missing_target(url: str, page: Path) -> bool:
    """Whether a local `url` on `page` leads to no file."""
    parts = urlsplit(url)
    if parts.scheme or url.startswith("//") or not parts.path:
        return False
    return not (page.parent / unquote(parts.path)).exists()


def test_a_page_that_loads_from_elsewhere_is_noticed():
    page = Page(
        '<link rel="stylesheet" href="https://a.b/c.css"><script src="//a.b/c.js"></script>'
        '<img src="x.png"><img src="y.png" alt="a curve"><a href="https://arxiv.org">paper</a>'
    )
    assert [url for url in page.loaded if is_foreign(url)] == ["https://a.b/c.css", "//a.b/c.js"]
    assert page.wordless == ["x.png"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built pages."""
    out = tmp_path_factory.mktemp("book")
    nowhere = "http://127.0.0.1:9"
    main = "from jupyter_book.cli.main import main; main(prog_name='jupyter-book')"
    options = ["--path-output", str(out), "-W", "-n", "--keep-going"]
    built = subprocess.run(
        [sys.executable, "-c", main, "build", "book", *options],
        cwd=ROOT,
        env=os.environ | {"http_proxy": nowhere, "https_proxy": nowhere, "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-4000:]
    return out / "_build" / "html"


@pytest.fixture(scope="module")
def pages(site):
    found = [p for p in site.rglob("*.html") if "_static" not in p.parts]  # these are templates
    return {path: Page(path.read_text(encoding="utf-8")) for path in found}


@pytest.mark.slow
def test_every_chapter_has_a_page(site):
    assert {p.stem for p in (site / "chapters").glob("*.html")} == {p.stem for p in CHAPTERS}


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site, pages):
    foreign = {url for page in pages.values() for url in page.loaded if is_foreign(url)}
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        urls = re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", text)
        foreign |= {url for url in urls if "w3.org" not in url}  # a namespace, not an address
    assert not foreign


@pytest.mark.slow
def test_every_local_link_leads_somewhere(site, pages):
    broken = {
        (path.relative_to(site).as_posix(), url)
        for path, page in pages.items()
        for url in (*page.loaded, *page.links)
        if missing_target(url, path)
    }
    assert not broken


@pytest.mark.slow
def test_no_directive_is_shown(site):
    comment = re.compile(r'<span class="c1?">#\|')  # in code; the prose may speak of them
    shown = [p.name for p in site.rglob("*.html") if comment.search(p.read_text("utf-8"))]
    assert not shown


@pytest.mark.slow
def test_every_image_has_words(site, pages):
    wordless = {p.relative_to(site).as_posix(): x.wordless for p, x in pages.items() if x.wordless}
    assert not wordless


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium of the system's."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_pages_open_from_the_file_system(site, browser, width, scheme):
    """No request leaves the disk, no script fails, no page is wider than the window."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    tab = context.new_page()
    foreign, errors = [], []
    tab.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else foreign.append(r))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("requestfailed", lambda request: errors.append(request.url))
    for path in [site / "notation.html", *sorted((site / "chapters").glob("*.html"))]:
        tab.goto(path.as_uri(), wait_until="load")
        if tab.locator(".math").count():
            tab.wait_for_selector("mjx-container svg", state="attached")
        overflow = tab.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow <= 0, f"{path.name} is {overflow} pixels too wide at {width}"
    assert not foreign
    assert not errors
    context.close()
