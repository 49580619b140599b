"""A hook of mkdocs: each notebook in docs/ becomes a page with the outputs that it was saved with."""

import base64
import json
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Beside a notebook, which can be downloaded, put its page."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            name = file.src_uri.removesuffix(".ipynb")
            files.append(File.generated(config, f"{name}.md", content=page(json.loads(file.content_string))))
    return files


def page(notebook: Any) -> str:
    """Its cells and their outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts.extend(shown(output) for output in cell.get("outputs", ()))
    return "\n\n".join(parts) + "\n"


def shown(output: Any) -> str:
    """What a cell printed, or the picture that it ends with."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text'])}```"
    picture, text = ("".join(output["data"][kind]) for kind in ("text/html", "text/plain"))
    # As an image of its own: the style of a picture within the page would hold for the whole page.
    encoded = base64.b64encode(picture.encode()).decode()
    return f'<img alt="{text}" src="data:image/svg+xml;base64,{encoded}">'
