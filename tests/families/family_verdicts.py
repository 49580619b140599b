"""How a cache does in one family: run each setting, and say in words what came of it."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import family_settings as settings
import family_table as table
from family_settings import CODES_TOLERANCE, SETTINGS, TOLERANCE, Call, Reference, difference
from tiny_models import tiny_model

import tikv
from tikv.integrations.transformers.attention import attend as attention

ATTENTIONS = ("eager", "sdpa", "tikv")
CODED = ("steps", "left-padded", "chunks")  # the settings that are run with a cache of int8
SENSITIVE = 0.003  # logits that move by less with a token of the middle would show no fault


class Outcome(NamedTuple):
    """A word of the page, such as "yes", "refused" or "differs", and why."""

    word: str
    notes: list[str]


def told(error: BaseException) -> str:
    """An error in a line, with where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = place.filename.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]} ({file})"


def survey(cls: type) -> dict[str, Any]:
    """All that is found of a class: words and numbers, as they are kept in a file; `outcome` reads them."""
    begun = time.time()
    found: dict[str, Any] = {"class": cls.__name__}
    if cls.__name__ in table.NOT_RUN:
        return {**found, "not run": table.NOT_RUN[cls.__name__]}
    try:
        model = tiny_model(cls)
    except Exception as error:
        return {**found, "not built": told(error)}
    try:
        call = settings.call_of(model)
    except settings.NoCache as error:
        return {**found, "no cache": str(error)}
    try:
        found["attention"] = model.config._attn_implementation
        found["sensitivity"] = sensitivity(call)
    except Exception as error:
        return {**found, "not run": told(error)}
    found.update(survey_of_model(model, call))
    found["seconds"] = round(time.time() - begun, 1)
    return found


def survey_of_model(model: Any, call: Call) -> dict[str, Any]:
    """Each setting, under each attention, of the cache and of transformers' own."""
    want = Reference()
    own = Control(call, want)
    found: dict[str, Any] = {"control": {name: own.difference(name) for name in SETTINGS}}
    try:
        settings.tikv_cache(model)
    except tikv.TikvError as error:
        return {**found, "refused": told(error)}
    except Exception as error:
        return {**found, "differs": f"TikvCache(model.config) raises {told(error)}"}
    codes: dict[str, dict[str, Any]] = {}
    own_attention = model.config._attn_implementation
    for name in ATTENTIONS:
        try:
            with settings.attention(model, name), choices() as told_by:
                settings.tikv_cache(model)  # which says that the model has not this attention
                control = own if name == "tikv" else Control(call, want)
                found[name] = {setting: against(call, setting, want, control) for setting in SETTINGS}
                if name in ("tikv", own_attention):
                    codes[name] = {setting: _codes(call, setting) for setting in CODED}
            if told_by:
                found["chosen"] = sorted(told_by)
        except Exception as error:
            found.setdefault("attention refused", {})[name] = told(error)
    if len(codes) == 2:
        found["int8"] = {setting: _between(codes["tikv"][setting], codes[own_attention][setting]) for setting in CODED}
    return found


@contextlib.contextmanager
def choices() -> Iterator[set[str]]:
    """How models told attention "tikv" which keys they chose, as far as the rows of those alone were read."""
    told_by: set[str] = set()
    before = attention.chosen_keys

    def chosen_keys(module: Any, *args: Any) -> Any:
        *_, said, _ = args
        numbers = before(module, *args)
        if numbers is not None and getattr(module, "indexer", None) is not None:
            told_by.add({"indices": "indices", "block_indices": "blocks"}[said[0]] if said else "a mask")
        return numbers

    attention.chosen_keys = chosen_keys
    try:
        yield told_by
    finally:
        attention.chosen_keys = before


class Control:
    """Transformers' own cache in a model, under the attention that the model has when it is first asked."""

    def __init__(self, call: Call, want: Reference) -> None:
        self.call = call
        self.want = want
        self.kept: dict[str, tuple[Any, Any]] = {}

    def _of(self, setting: str) -> tuple[Any, Any]:
        if setting not in self.kept:
            self.kept[setting] = run(
                self.call, setting, lambda: settings.transformers_cache(self.call.model), self.want
            )
        return self.kept[setting]

    def difference(self, setting: str) -> float | str:
        """From no cache, or the error."""
        return self._of(setting)[0]

    def logits(self, setting: str) -> Any:
        """None where there is an error."""
        return self._of(setting)[1]


def run(call: Call, setting: str, make: Callable[[], Any], want: Reference) -> tuple[float | str, Any]:
    """The difference of a cache's logits from the reference, or the error in words; and the logits."""
    settings.forget(call.model)
    try:
        rows = list(SETTINGS[setting](call, make()))
    except settings.NotCroppable:
        return "not croppable", None
    except settings.NotOffered:
        return 0.0, []
    except Exception as error:
        return told(error), None
    logits = [row.logits for row in rows]
    try:
        return difference(logits, [want.of(row) for row in rows]), logits
    except Exception as error:
        return f"without a cache: {told(error)}", logits


def against(call: Call, setting: str, want: Reference, control: Control) -> list[Any]:
    """[ours from no cache, transformers' own from no cache, ours from transformers' own]; if right, the first."""
    make = settings.tikv_caches if setting == "two caches" else settings.tikv_cache
    ours, logits = run(call, setting, lambda: make(call.model), want)
    if isinstance(ours, float) and ours < TOLERANCE:
        return [ours]
    theirs, others = control.difference(setting), control.logits(setting)
    return [ours, theirs, None if logits is None or others is None else difference(logits, others)]


def sensitivity(call: Call) -> float:
    """How far the last logits move with a token of the middle: where they do not, no fault would be seen."""
    tokens = settings.tokens_of(call.model, 2)
    other = tokens.clone()
    other[:, settings.PROMPT] += 1
    return difference([call.logits(other)], [call.logits(tokens)])


def _codes(call: Call, setting: str) -> Any:
    """Logits of a cache of int8, or the error in words."""
    try:
        return [row.logits for row in SETTINGS[setting](call, settings.tikv_cache(call.model, dtype="int8"))]
    except Exception as error:
        return told(error)


def _between(got: Any, want: Any) -> float | str:
    if isinstance(want, str):
        return f"own: {want}"
    return got if isinstance(got, str) else difference(got, want)


def outcome(found: dict[str, Any]) -> Outcome:
    """What `survey` found, in words."""
    for word in ("not built", "no cache", "not run", "refused", "differs"):
        if word in found:
            return Outcome(word, [found[word]])
    wrong, notes = [], []
    for name in ATTENTIONS:
        for setting, numbers in found.get(name, {}).items():
            bad, text = _judged(name, setting, *numbers)
            (wrong if bad else notes).extend([text] if text else [])
    for setting, number in found.get("int8", {}).items():
        if isinstance(number, str) and number.startswith("own:"):
            continue  # told above
        if isinstance(number, str) or not number < CODES_TOLERANCE:
            wrong.append(f'int8 under "tikv", {setting}: {_number(number)} from int8 under its own')
    refused = found.get("attention refused", {})
    if "tikv" in refused:
        notes.append(f'attention "tikv" refused: {refused["tikv"]}')
    if not any(name in found for name in ATTENTIONS):
        return Outcome("not run", [str(refused)])
    if "chosen" in found:
        forms = " or ".join(found["chosen"])
        notes.append(f'attention "tikv" reads only chosen keys, which the model passes as {forms}')
    if found["sensitivity"] < SENSITIVE:
        notes.append(f"says little: the logits hardly depend on tokens before ({found['sensitivity']:.0e})")
    return Outcome("differs", _joined(wrong + notes)) if wrong else Outcome("yes", _joined(notes))


def _judged(attention: str, setting: str, ours: Any, theirs: Any = None, between: Any = None) -> tuple[bool, str]:
    """Whether a setting is wrong, and what to say of it."""
    if isinstance(ours, float) and ours < TOLERANCE:
        return False, ""
    if ours == "not croppable" == theirs:
        return False, "crop: a state cannot be taken back, as in transformers' own cache"
    if isinstance(ours, str) and isinstance(theirs, str):
        if setting == "generate":
            return False, ""
        return False, f"{setting}: transformers' own cache raises too: {theirs}"
    if isinstance(ours, str) and "OptionError" in ours and isinstance(theirs, float) and not theirs < TOLERANCE:
        return False, f"{setting}: refused; transformers' own cache differs by {theirs:.2g}"
    if isinstance(theirs, float) and not theirs < TOLERANCE and between is not None and between < TOLERANCE:
        return False, f"{setting}: the same as transformers' own cache, which differs by {theirs:.2g}"
    return True, f"{attention}, {setting}: {_number(ours)} from no cache"


def _number(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def _joined(notes: list[str]) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(notes))
