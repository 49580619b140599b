"""Every measured figure in a sentence of the manual is in a file of figures, or is computed from some that are.

A paragraph names its tables in a comment: <!-- from figures_cpu.json: Chosen tokens; 0.43 = 29.8 / 68.9 -->. A title
may be shortened; without titles all tables of the file count. A comment below a heading serves the paragraphs that
have none of their own, and so does a table of a file that the section shows.
"""

import functools
import importlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
ABOUT_SPEED = [f"docs/{name}.md" for name in ("performance", "measured_models", "measured_operations")]
NUMBER = re.compile(r"(?<![\w.,^-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w^]|[.,]\d|-bit)")
SOURCE = re.compile(r"<!-- from (\S+?\.json)(?:: (.*?))? -->", re.DOTALL)
ONE = NUMBER.pattern
KIND = "new|query|KV|long|short|chosen|other|older|shared|random|more|further|consecutive|contiguous|full"
NOUN = (
    "tokens?|texts?|query|queries|rows?|heads?|layers?|sequences?|keys?|bits?|columns?|bytes|numbers?|tiles?|blocks?|pages?|"
    "warpgroups?|multiprocessors|threads|cores|families|rounds|ranks|GPUs?|processes|GiB|KiB|launches|calls|prompts|sinks|"
    "dtypes|widths|tensors|chosen|consecutive"
)
LIBRARY = "torch|cuDNN|NCCL|CPython|Python|transformers|NumPy|Taichi|Quadrants|capability|tikv|flash-attn3-jax"
# Numbers that say what was measured, not the result.
SHAPE = re.compile(
    rf"{ONE}(?:(?: x | / |, | to | and | or |, and ){ONE})* (?:(?:{KIND}) )*(?:{NOUN})\b(?: of {ONE})?"
    rf"|\b(?:[Pp]ages|heads|groups|window|blocks?|prompt|sequences) of {ONE}(?: or {ONE})?|{ONE}(?: x {ONE})+"
    rf"|\b(?:after|over|least) {ONE}(?=[.,;]| and| or|$)"
    rf"|\b(?:{LIBRARY}) {ONE}(?:(?: to | and ){ONE})?"
)
UNIT = (
    r"(?:(?:us|ms|ns|s|seconds|minutes|GB/s|TFLOP/s|tokens/s|[kMG]B|%|times)(?!\w)"
    r"|of it\b|of (?:[\w'-]+ ){0,3}(?:time|speed|rate)\b)"
)
# A list of results with one unit after it.
MEASURED = re.compile(rf"{ONE}(?:(?: \([^()]*\))?(?:,? (?:to|and|or) |, | / ){ONE})*(?= {UNIT})")
# What is said with a unit and was not measured.
EXCEPTIONS = {
    "a part of this in 20 seconds": "what the command plans",
    "or fewer if they would take more than 0.1 s": "what the command plans",
    "on CUDA to 8,192": "what the command times",
    "on CUDA to 2,048": "what the command times",
    "does not see by 0": "a factor",
    "belong to numbers 16 apart": "a format's order",
    "of which 9.8 us are not for tiles": "25.4 us without 9 tiles of 1.74 us",
    "360 instead of 377": "counted in the compiled kernel",
    "about 180 of which": "counted in the compiled kernel",
    "so 360 instructions": "counted in the compiled kernel",
    "can issue 670 instructions": "what the device issues in that time",
    "the first 512 of which": "columns",
    "at 0.84 of float16's rate": "3 times 4.5 of 16 bits",
    "x 128 x 2 bytes, or 1.07 GB": "bytes",
    "memory of 3900 GB/s, a link of 350 GB/s and 35 us": "what examples/cluster.py assumes",
    "predicts 310 us": "what examples/cluster.py computes",
    "at least 64 MB": "a limit in the source",
    "if there are 8 times as many keys": "a limit in the source",
}


class Paragraph(NamedTuple):
    """What stands between two empty lines or two points of a list, without comments, code and addresses."""

    text: str
    sources: tuple[tuple[str, str], ...]  # file, and what the comment names


@functools.cache
def paragraphs(page: str) -> list[Paragraph]:
    """Those of a page, with the sources of each."""
    text = PAGES[page].read_text(encoding="utf-8")
    text = re.sub(r"^<!-- output: .*? -->\n(?:\|.*\n)+", "", text, flags=re.MULTILINE)  # tests run the command
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = []
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        shown = tuple((mark[2], "") for mark in importlib.import_module("tables").MARKED.finditer(section))
        section = importlib.import_module("tables").MARKED.sub("", section).partition("\n")[2]
        for part in re.split(r"\n\s*\n|\n(?= *(?:-|\d+\.) )", section):
            sources = tuple((source[1], source[2] or "") for source in SOURCE.finditer(part))
            words = re.sub(r"<[^>]*>|`[^`]*`|\]\([^)]*\)", "", SOURCE.sub("", part))
            words = re.sub(r"\s+", " ", words).strip()
            if sources and not words:
                shown = sources
            elif words:
                found.append(Paragraph(words, sources or shown))
    return found


def plain(number: str) -> str:
    """Without separators."""
    return number.replace(",", "")


@functools.cache
def held(file: str, names: str) -> tuple[set[str], dict[str, str]]:
    """The numbers of the tables that a comment names, and how it computes others from them."""
    found = json.loads((DOCS / Path(file).name).read_text(encoding="utf-8"))
    parts = [part.strip() for part in re.sub(r"\s+", " ", names).split(";") if part.strip()]
    results = dict(map(plain, part.split(" = ")) for part in parts if " = " in part)
    titles = [part for part in parts if " = " not in part]
    if "runs" in found:
        return whole_models(found), results
    tables = [table for table in found["tables"] if not titles or any(table["title"].startswith(t) for t in titles)]
    missing = [title for title in titles if not any(table["title"].startswith(title) for table in tables)]
    assert not missing, f"{file} has no table {missing}"
    text = json.dumps([[table[key] for key in ("title", "columns", "rows")] for table in tables])
    numbers = {plain(number) for number in NUMBER.findall(re.sub(r"(?<=\d)x\b", "", text))}
    shares = " ".join(match[0] for match in re.finditer(rf"(?:{ONE} / )*{ONE}(?= %)", text))
    percent = {f"{float(plain(number)) / 100:.2f}" for number in NUMBER.findall(shares)}
    return numbers | percent, results


def whole_models(found: dict) -> set[str]:
    """The figures of whole models as a page may write them, and how they compare with transformers' own caches."""
    module = importlib.import_module("whole_models")
    numbers = set(map(plain, NUMBER.findall(json.dumps(found))))
    for part in module.parts(found):
        for field in ("prompt_ms", "token_ms", "later_ms", "peak_mb", "first_call_s"):
            figures = module.measured(part, field)
            for name, figure in figures.items():
                numbers |= set(map(plain, NUMBER.findall(module.spelled(figure, field))))
                for other in figures if name.startswith("TikvCache") else ():
                    if not other.startswith("TikvCache"):
                        for end in module.ratio(figure, [figures[other]]):
                            numbers |= {f"{end:.2f}", f"{end:.3f}"}
    return numbers


def rounds(said: str, exact: str | float) -> bool:
    """Whether a number is another one with fewer digits: 0.8, or 21,000."""
    digits = len(said.partition(".")[2]) or (len(said.rstrip("0")) - len(said) if len(said) > 4 else 0)
    return abs(float(exact) - float(said)) <= 0.5 * 10**-digits + 1e-9


def follows(result: str, how: str, numbers: set[str]) -> bool:
    """Whether a computed number is what its tables give; after " * " stand constants, such as bits of a number."""
    cells = NUMBER.findall(how.partition(" * ")[0])
    assert re.fullmatch(r"[\d. +*/()-]+", how), how
    return all(any(rounds(cell, each) for each in numbers) for cell in cells) and rounds(result, eval(how))


def without_file(paragraph: Paragraph, every: bool = False) -> list[str]:
    """The figures of a paragraph that its files do not have; `every`: all numbers but those of shapes."""
    every = every or any(file.startswith("whole_models") for file, _ in paragraph.sources)
    numbers, results = set(), {}
    for file, names in paragraph.sources:
        more, computed = held(file, names)
        numbers |= more
        results |= computed
    text = paragraph.text
    for phrase in EXCEPTIONS:
        text = text.replace(phrase, "")
    text = SHAPE.sub("", text)
    parts = [text] if every else [match[0] for match in MEASURED.finditer(text)]
    wrong = [f"{result} = {how}" for result, how in results.items() if not follows(result, how, numbers)]
    for number in (plain(found) for part in parts for found in NUMBER.findall(part)):
        if number not in results and not any(rounds(number, each) for each in numbers):
            wrong.append(number)
    return wrong


def test_a_figure_that_no_table_has_is_found():
    trees = ("figures_h200.json", "Windows and trees; 1.16 = 40.4 / 34.9")
    said = "64 new tokens take 41 us, 1.16 times as long, with 4 or 999 query heads, and 0.77 elsewhere."
    assert without_file(Paragraph(said, (trees,))) == []
    assert without_file(Paragraph(said, (trees,)), every=True) == ["0.77"]
    assert without_file(Paragraph(said, ())) == ["41", "1.16"]
    assert without_file(Paragraph("", (("figures_h200.json", "Windows; 1.2 = 40.4 / 34.9; 2 = 69.8 / 34.9"),))) == [
        "2 = 69.8 / 34.9"
    ]
    assert without_file(Paragraph("It takes 21,000 us.", (("figures_h200.json", "Latent"),))) == []
    with pytest.raises(AssertionError, match="no table"):
        without_file(Paragraph("", (("figures_h200.json", "Nothing"),)))


@pytest.mark.parametrize("page", PAGES)
def test_no_measured_figure_is_without_a_file(page):
    """Whole pages about speed; elsewhere what has a unit."""
    wrong = {
        paragraph.text[:60]: figures
        for paragraph in paragraphs(page)
        if (figures := without_file(paragraph, every=page in ABOUT_SPEED))
    }
    assert wrong == {}, "name the table in a comment (see above), or correct the sentence"


@pytest.mark.parametrize("phrase", EXCEPTIONS)
def test_each_exception_is_said_somewhere(phrase):
    assert any(phrase in paragraph.text for page in PAGES for paragraph in paragraphs(page))
