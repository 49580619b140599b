"""Habits of wording that make a reader stop: each was found in these pages, docstrings and messages, and is refused."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
HABITS = {
    # A Python reader takes none for None.
    r"\b(?:is|are|was|were) none\b": "say what it is not, or that it does not exist",
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b|matter\b|such\b|fault\b|concern\b)[a-z]+": "say: is not a ...",
    r"\ba (?:launch|row|call|token|layer|block|page|sequence|group|collective|method) an? \w+": "say: for each, or per",
    r"\b(?:one|once|nats|milliseconds) an? (?:token|layer|head|row|rank|process|sequence|call|page)\b": "say: per",
    r"\bheads? an? (?:KV|key) head\b": "say: per KV head",
    r"\bturned (?:keys|rows|values)\b": "say: rotated",
    r"\bthat there is not\b": "say: that does not exist",
    r"\bBy that name\b": "name it",
    r"\bwhat lies where\b": "say: where the tokens, slots or arrays lie",
    r"\b(?:tokens|heads|layers|a cache) cut\b": "say: sharded, or split",
    r"\bby turns\b": "say: in alternation, or alternating",
    r"\bfor ever\b": "say: for good, or forever",
    r"\b(?:is|are) not offered\b": "say: is not supported",
    r"\bleaves? nothing of\b": "say: leave no room in",
    r"\bother ones\b": "say: different ones",
    r"\b(?:none|memory|array|buffer|one|nothing)s? of ours\b": "name it",
    r"\bwho(?:ever)? (?:writes|reads|lacks)\b": "name the subject",
    r"(?:\bof(?: [\w`'-]+){1,3} ){3}of\b": "say it with fewer of",
    r"\bof it (?:the|a)\b": "say: the ... in it",
    r"\b[Tt]he next table (?:is|drops|are) (?!from\b)": "say: the next table shows",
    r"\bbehind (?:a prompt|[\d,]+ tokens)\b": "say: after",
    r"\bnext to nothing\b": "say: almost no ...",
    r"\bcomputing time\b": "say: CPU time",
    r"\bcalls? in a row\b": "say: consecutive calls, or calls that follow each other",
    r"\b[Hh]ow (?:time|it) is (?:taken|said)\b": "say: ... says how time is measured",
    r"\banew\b|\bcalled? afresh\b": "say: again",
    r"\b(?:stands?|goes) by itself\b": "say: alone",
    r"\b(?:one behind (?:the other|another)|behind one another)\b": "say: one after the other, or concatenated",
    r"\bby the name that errors give\b": "say: under the name that errors give",
    r"\bor as (?:transformers'|torch's)\b": "say: or the same as with ...",
    r"\bNot offered\b": "say what raises, or: is not supported",
    r"\bas (?:JSON|files) ha(?:s|ve) them\b": "say: in JSON's types, or: by their names in files",
    r"\bas (?:it|they) came\b": "say: unchanged, or: unquantised",
    r"\bWhatever is raised\b": "say: after any error",
    r"\bbehind (?:the (?:sinks|window|end|keys|prompt|first))\b": "say: after",
    r"\b(?:which|that) (?:is|are) there\b": "say: exists",
    r"\bfades? to\b": "say: is rescaled to",
    r"\bturned (?:back|into numbers)\b|\bmade numbers\b": "say: rotated back, dequantised or converted",
    r"\b(?:is|are) no matter\b|\bto be had\b|\bgoes? on running\b": "say: does not matter, available, continues",
    r"\bfor each (?:head|layer|sequence|row|rank) its own\b": "say: each ... has its own",
    r"\bwhat stands\b|\bdoes so if\b|\bthere an?\b": "put the subject first: ... is in, ... if, a ... there",
    r"\b(?:us|ms|microseconds|milliseconds) gives?\b": "say: takes ... us",
    r"\bsome (?:ten|hundred|thousand)\b": "say: a few hundred, or about ...",
    r"\bhas another (?:ending|dtype|shape|length)\b": "say: has the wrong ..., or a different ...",
}
LONGEST_HEADING = 80

# Words that say that a value exists, and not what it is: a noun does, such as `layer`, `launches`, `scales` or `slots`.
VAGUE = {"found", "given", "own", "left", "kept", "wanted", "told", "came", "some", "these", "turned", "chosen"}
# How many locals, parameters and attributes still have such a name, by folder; "" is tikv/ itself. Only ever fewer.
MOST_VAGUE = {
    "": 0,
    "arrays": 0,
    "compat": 4,  # left and right are the sides of a window, as flash-attn names them
    "distributed": 0,
    "graphs": 0,
    "integrations": 0,
    "kernels": 0,
    "launch": 0,
    "ops": 0,
    "runtime": 0,
    "stores": 0,
    "tools": 0,
}


def pages() -> Iterator[tuple[str, str]]:
    """The manual's pages, without what commands write into them, and the changes of the newest release."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = re.sub(r"^```text\n.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        text = re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", text, flags=re.S)
        yield path.relative_to(ROOT).as_posix(), text.partition("| family | class |")[0]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    yield "CHANGELOG.md", "\n".join(text.split("\n## [")[1:3])


def sources() -> Iterator[tuple[str, str]]:
    """What a caller may read of the library, its benches and its examples: all docstrings and texts."""
    folders = [ROOT / name for name in ("tikv", "benches", "examples")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        joined = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                yield f"{path.relative_to(ROOT).as_posix()}:{node.lineno}", "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in joined:
                yield f"{path.relative_to(ROOT).as_posix()}:{node.lineno}", node.value


def habits_of(texts: Iterator[tuple[str, str]]) -> list[str]:
    found = []
    for where, text in texts:
        running = " ".join(text.split())
        for habit, instead in HABITS.items():
            found += [f"{where}: {match[0]!r}: {instead}" for match in re.finditer(habit, running)]
    return found


@pytest.mark.parametrize("texts", [pages, sources])
def test_no_habit_makes_a_reader_stop(texts):
    assert habits_of(texts()) == []


def vague_names(tree: ast.AST) -> list[tuple[int, str]]:
    """The lines and names of locals, parameters and attributes, where they get their values, that `VAGUE` has."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id if isinstance(node, ast.Name) else node.attr))
    return sorted((line, name) for line, name in names if name.strip("_") in VAGUE)


def test_few_names_are_vague():
    package, vague = ROOT / "tikv", {}
    for path in sorted(package.rglob("*.py")):
        folder, _, _ = path.relative_to(package).as_posix().rpartition("/")
        names = vague_names(ast.parse(path.read_text(encoding="utf-8")))
        vague.setdefault(folder.partition("/")[0], []).extend((f"{path.name}:{line}", name) for line, name in names)
    assert vague.keys() == MOST_VAGUE.keys()
    assert {folder: names for folder, names in vague.items() if len(names) > MOST_VAGUE[folder]} == {}


def test_a_vague_name_is_found():
    source = (
        "def f(given, *, own=1):\n    found, self._kept = given, self.left\n    return g(told=[some for some in own])"
    )
    names = ["given", "own", "found", "_kept", "some"]
    assert sorted(name for _, name in vague_names(ast.parse(source))) == sorted(names)
    assert vague_names(ast.parse("def f(layer): founder, layer.most = found, layer.kept")) == []


def test_a_heading_is_one_short_line():
    """A heading that was joined with the paragraph below it is found by its length."""
    headings = [(where, line) for where, text in pages() for line in re.findall(r"^#+ .*", text, flags=re.M)]
    assert len(headings) > 100
    assert [found for found in headings if len(found[1]) > LONGEST_HEADING] == []


@pytest.mark.parametrize(
    "text",
    [
        "``seq`` is none.", "which is no array", "a launch a layer", "4 query heads a KV head", "timed by turns",
        "kept for ever", "in each head other ones", "a file that is none of ours", "who writes into a page gets a copy",
        "the dtype of the rows of a store of the layers of the model", "Give one a layer.",
        "the option is not offered", "sinks leave nothing of the window",
        "nats a token", "turned keys", "a sequence that there is not",
        "By that name, queries see all", "to see what lies where", "with tokens cut",
        "The next table is decode attention", "the computing time of a thread", "arithmetic that is next to nothing",
        "in calls in a row", "How time is taken is said in gpu.py", "a kernel is compiled anew", "of it the cache",
        "Not offered: see `save`.", "the arguments, as JSON has them", "sinks stay as they came",
        "copies are made anew", "Whatever is raised, the pool stays.",
        "rows that lie one behind the other", "a call, by the name that errors give",
        "tokens behind the sinks", "every key which is there", "sums fade to the new maxima",
        "keys are made numbers first", "what was running goes on running", "the path has another ending",
    ],
)  # fmt: skip
def test_a_habit_is_found(text):
    assert habits_of([("here", text)])


@pytest.mark.parametrize("text", ["there is no GPU", "it is no longer held", "tokens a second", "bits of a row of K"])
def test_plain_words_are_left_alone(text):
    assert habits_of([("here", text)]) == []
