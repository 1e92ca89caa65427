"""Sphinx extension of the book: stages chapters, hides directives, mends links, brings MathJax.

The chapters live beside the book, in `chapters/`, and Sphinx reads only what lies below its source
folder. So `setup` copies the chapters that `_toc.yml` lists into `book/chapters` (ignored by git);
symbolic links would break on Windows.
"""

import filecmp
import importlib.util
import json
import re
import shutil
from pathlib import Path

import yaml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging

log = logging.getLogger(__name__)
MATHJAX = "tex-svg-full.js"
DIRECTIVE = re.compile(r"^\s*#\|.*\n?", re.MULTILINE)
CHAPTER = re.compile(r"(\d+)([a-z]?)_")
LINK = re.compile(r"(\]\()(\.\./[^)\s]+)")


def listed_chapters(toc: Path) -> list[str]:
    """File names of the notebooks that the table of contents lists, in reading order."""
    parts = yaml.safe_load(toc.read_text(encoding="utf-8"))["parts"]
    files = [chapter["file"] for part in parts for chapter in part["chapters"]]
    return [Path(file).name + ".ipynb" for file in files if file.startswith("chapters/")]


def stage_chapters(book: Path) -> None:
    """Copy the listed chapters that changed into `book/chapters`; drop what is no longer listed.

    Raises ExtensionError when a listed chapter does not exist; warns of a chapter nobody lists.
    """
    source, staged = book.parent / "chapters", book / "chapters"
    listed = listed_chapters(book / "_toc.yml")
    missing = [name for name in listed if not (source / name).is_file()]
    if missing:
        raise ExtensionError(
            f"book/_toc.yml lists chapters that are not in {source}: {', '.join(missing)}. "
            "Write them or take them out of book/_toc.yml."
        )
    for path in sorted(source.glob("*.ipynb")):
        if path.name not in listed:
            log.warning("chapters/%s is not listed in book/_toc.yml", path.name)
    staged.mkdir(exist_ok=True)
    for path in staged.glob("*.ipynb"):
        if path.name not in listed:
            path.unlink()
    for name in listed:
        if not (staged / name).is_file() or not filecmp.cmp(source / name, staged / name, False):
            shutil.copyfile(source / name, staged / name)


def mend_link(match: re.Match[str], docname: str) -> str:
    """Turn a link that is right in the repository into one that is right in the staged copy."""
    opening, target = match.groups()
    if not docname.startswith("chapters/"):  # a page of the book that points to a chapter
        return opening + target.removeprefix("../" if target.startswith("../chapters/") else "")
    if target.startswith("../book/"):
        return opening + "../" + target.removeprefix("../book/")
    return f"{opening}path:../{target}"  # a file of the repository: offered for download


def read_notebook(text: str, docname: str) -> str:
    """The notebook as the book shows it: numbered title, no `#|` lines, no cell left empty."""
    notebook = json.loads(text)
    # Notebooks that were written as text and not saved by Jupyter do not say what to highlight.
    language = {"name": "python", "pygments_lexer": "ipython3"}
    notebook.setdefault("metadata", {}).setdefault("language_info", language)
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = DIRECTIVE.sub("", source).strip("\n")
        else:
            source = LINK.sub(lambda match: mend_link(match, docname), source)
        cell["source"] = source
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["source"].strip()]
    first = notebook["cells"][0]
    number = CHAPTER.match(Path(docname).name)
    if number and not re.match(r"#\s*\d", first["source"]):
        digits, letter = number.groups()
        first["source"] = re.sub(r"^#\s+", f"# {int(digits)}{letter} · ", first["source"])
    return json.dumps(notebook)


def on_source_read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Rewrite a page's source before it is parsed."""
    if app.env.doc2path(docname).endswith(".ipynb"):
        source[0] = read_notebook(source[0], docname)
    else:
        source[0] = LINK.sub(lambda match: mend_link(match, docname), source[0])


def copy_mathjax(app: Sphinx) -> None:
    """Put MathJax's single-file build, fonts included, into the site's static files."""
    if app.builder.format != "html":
        return
    # The wheel's module name has a hyphen, so that no import statement can name it.
    module = importlib.util.find_spec("sphinx-mathjax-offline")
    if module is None or module.origin is None:
        raise ExtensionError("MathJax is missing: pip install -r requirements.txt")
    target = Path(app.outdir) / "_static" / "mathjax"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(module.origin).parent / "static" / "mathjax" / MATHJAX, target / MATHJAX)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx before it looks for pages."""
    stage_chapters(Path(app.srcdir))
    app.connect("source-read", on_source_read)
    app.connect("builder-inited", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
