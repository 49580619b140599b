"""Look for what is missing in the site that mkdocs made: `python docs/check_site.py SITE [--browser]`.

mkdocs itself checks the links of Markdown alone: not what pages say by HTML of their own, and not what the docstrings
should have given. With `--browser` each page is also opened in Chromium, as wide as a screen and as a phone: its
pictures have to be drawn, nothing may be wider than the page, and the search has to find a method by its name.
It needs playwright from the index of packages, and Debian's chromium.
"""

import argparse
import ast
import functools
import http.server
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = HERE.parent / "tikv"
# Not private, since other modules call it, and nothing that a program needs.
INTERNAL = re.compile(re.search(r'"!(\^\([^"]+)"', (HERE.parent / "mkdocs.yml").read_text("utf-8"))[1])
WIDTHS = {"a screen": (1280, 900), "a phone": (390, 844)}


def dangling(site: Path) -> Iterator[str]:
    """Links and pictures that lead to no file of the site."""
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:src|srcset|href)="([^"#?]+)[^"]*"', page.read_text("utf-8")):
            if not re.match(r"\w+:|/", link) and not (page.parent / link).exists():
                yield f"{page.relative_to(site)}: nothing is at {link}"


def public_names() -> dict[str, str]:
    """The classes and functions that `import tikv` gives, and the modules that define them."""
    tree = ast.parse((SOURCES / "__init__.py").read_text("utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not find_module(f"{node.module}.{alias.name}")
    }


def find_module(name: str) -> Path | None:
    """The file of a module, if it is one."""
    path = SOURCES.parent / name.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def methods(module: str, name: str) -> set[str]:
    """The public methods and properties that the sources of a class, and of those it inherits from, have."""
    tree = ast.parse(find_module(module).read_text("utf-8"))
    homes = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tikv.")
        for alias in node.names
    }
    found: set[str] = set()
    for cls in tree.body:
        if isinstance(cls, ast.ClassDef) and cls.name == name:
            found |= {node.name for node in cls.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
            bases = [base.id for base in cls.bases if isinstance(base, ast.Name)]
            for base in bases:
                found |= methods(homes.get(base, module), base)
    if not any(isinstance(cls, ast.ClassDef) and cls.name == name for cls in tree.body) and name in homes:
        return methods(homes[name], name)
    return found


def undescribed(site: Path) -> Iterator[str]:
    """Public names, and methods of theirs, that no page describes, and internal ones that one does."""
    described = set()
    for page in site.glob("api/*.html"):
        described |= set(re.findall(r'<h\d id="(tikv\.[\w.]+)"', page.read_text("utf-8")))
    names = public_names()
    wanted = {f"tikv.{name}" for name in names}
    for name, module in names.items():
        wanted |= {f"tikv.{name}.{method}" for method in methods(module, name) if not INTERNAL.match(method)}
    assert {"tikv.KVCacheStore.attend", "tikv.PagedKVCacheStore.fork", "tikv.copy_kv"} <= wanted
    assert len(wanted) > 150, "the public names were not found"
    yield from (f"no page describes {name}" for name in sorted(wanted - described))
    inside = sorted(name for name in described if INTERNAL.match(name.rpartition(".")[2]))
    yield from (f"a page describes {name}, which is internal" for name in inside)


def cut(site: Path) -> Iterator[str]:
    """What a page does not show whole: a result in pieces, errors that are told in prose, a constructor."""
    for page in site.glob("api/*.html"):
        for results in re.findall(r"Returns:</span>.*?</ul>", page.read_text("utf-8"), re.DOTALL):
            if results.count("<li") > 1:
                yield f"{page.relative_to(site)}: the lines of a result are shown as several results"
    store = (site / "api/store.html").read_text("utf-8")
    if "doc-signature" not in store.partition('id="tikv.KVCacheStore"')[2].partition("Parameters")[0]:
        yield "api/store.html: the constructor's signature does not stand first"
    if "<strong>Raises:</strong> As" not in store:
        yield "api/store.html: the errors of extend, which are told in prose, are missing"


def seen(site: Path) -> Iterator[str]:
    """What Chromium shows otherwise than a reader should see it."""
    from playwright.sync_api import sync_playwright

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    server.handle_error = lambda *_: None  # a tab that leaves a page does not wait for the rest of it
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))
    assert len(pages) > 25, "the site's pages were not found"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for device, (width, height) in WIDTHS.items():
            tab = browser.new_page(viewport={"width": width, "height": height})
            for page in pages:
                tab.goto(home + page)
                for picture in tab.evaluate(
                    "[...document.images].filter(image => !image.naturalWidth).map(image => image.src.slice(0, 80))"
                ):
                    yield f"{page}, on {device}: {picture} is not drawn"
                programs = "[...document.querySelectorAll('.highlight:not(.doc-signature) code:has(span.n)')]"
                if width >= 1280 and tab.evaluate(f"{programs}.some(code => code.scrollWidth > code.clientWidth)"):
                    yield f"{page}, on {device}: a line of a program does not fit"
                if (reaches := tab.evaluate("document.scrollingElement.scrollWidth")) > width:
                    yield f"{page}, on {device}: it is {reaches} wide and has {width}"
        tab.goto(f"{home}index.html")
        tab.click("label.md-header__button[for=__search]")
        tab.locator("input.md-search__input").press_sequentially("attend")
        found = tab.locator('.md-search-result__item a[href*="#tikv.KVCacheStore.attend"]')
        found.first.wait_for(state="attached", timeout=10_000)
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", action="store_true")
    given = parser.parse_args()
    missing = [
        *dangling(given.site),
        *undescribed(given.site),
        *cut(given.site),
        *(seen(given.site) if given.browser else ()),
    ]
    print(*missing, sep="\n", end="\n" if missing else "")
    sys.exit(bool(missing))
