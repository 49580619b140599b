"""Look for what is missing in the site that mkdocs made: `python docs/check_site.py SITE`.

mkdocs itself checks the links of Markdown alone: not what pages say by HTML of their own, and not what the docstrings
of a class or of those it inherits from should have given.
"""

import ast
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
STORES = re.compile(r"^::: (tikv\.stores\.[\w.]+)\.(\w+Store)$", re.MULTILINE)


def dangling(site: Path) -> list[str]:
    """Links and pictures that lead to no file of the site."""
    found = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:src|srcset|href)="([^"#?]+)[^"]*"', page.read_text("utf-8")):
            if not re.match(r"\w+:|/", link) and not (page.parent / link).exists():
                found.append(f"{page.relative_to(site)}: {link}")
    return found


def methods(module: str, name: str) -> set[str]:
    """The public methods and properties that the sources of a class, and of those it inherits from, have."""
    tree = ast.parse((HERE.parent / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    homes = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tikv.")
        for alias in node.names
    }
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {node.name for node in cls.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    for base in cls.bases:
        if isinstance(base, ast.Name) and (HERE.parent / f"{homes[base.id].replace('.', '/')}.py").exists():
            found |= methods(homes[base.id], base.id)
    return found


def undescribed(site: Path) -> list[str]:
    """Methods of the stores, inherited ones too, that "All names" does not have."""
    every = (site / "api.html").read_text("utf-8")
    stores = STORES.findall((HERE / "api.md").read_text("utf-8"))
    assert len(stores) == 2, "the stores were not found in api.md"
    wanted = [f"{module}.{name}.{method}" for module, name in stores for method in sorted(methods(module, name))]
    assert len(wanted) > 60, "the stores' methods were not found"
    return [f"api.html: {name}" for name in wanted if f'id="{name}"' not in every]


if __name__ == "__main__":
    missing = dangling(Path(sys.argv[1])) + undescribed(Path(sys.argv[1]))
    print(*missing, sep="\n", end="\n" if missing else "")
    sys.exit(bool(missing))
