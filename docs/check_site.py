"""Look for what is missing in the site that mkdocs made: `python docs/check_site.py SITE`.

mkdocs itself checks the links of Markdown alone: not what pages say by HTML of their own, and not what the docstrings
of a class or of those it inherits from should have given.
"""

import ast
import re
import sys
from pathlib import Path

STORES = Path(__file__).parents[1] / "tikv" / "stores"
CLASSES = {"contiguous": "KVCacheStore", "paged": "PagedKVCacheStore"}


def dangling(site: Path) -> list[str]:
    """Links and pictures that lead to no file of the site."""
    found = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:src|srcset|href)="([^"#?]+)[^"]*"', page.read_text("utf-8")):
            if not re.match(r"\w+:|/", link) and not (page.parent / link).exists():
                found.append(f"{page.relative_to(site)}: {link}")
    return found


def methods(module: str, name: str) -> set[str]:
    """The public methods and properties of a class and of those below it in `tikv/stores`, as the sources have them."""
    tree = ast.parse((STORES / f"{module}.py").read_text("utf-8"))
    homes = {
        alias.name: node.module.rpartition(".")[2]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tikv.stores.")
        for alias in node.names
    }
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {node.name for node in cls.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id in homes:
            found |= methods(homes[base.id], base.id)
    return found


def undescribed(site: Path) -> list[str]:
    """Methods of the stores, inherited ones too, that "All names" does not have."""
    every = (site / "api.html").read_text("utf-8")
    wanted = [f"tikv.stores.{m}.{name}.{method}" for m, name in CLASSES.items() for method in sorted(methods(m, name))]
    assert len(wanted) > 60, "the stores' methods were not found"
    return [f"api.html: {name}" for name in wanted if f'id="{name}"' not in every]


if __name__ == "__main__":
    missing = dangling(Path(sys.argv[1])) + undescribed(Path(sys.argv[1]))
    print(*missing, sep="\n", end="\n" if missing else "")
    sys.exit(bool(missing))
