"""Files that are damaged, and files whose checksums are right and which lie: refused soon, or harmless."""

import json
import pathlib
import random
import time

from stores import test_hostile_files as hostile

import tikv
from campaign.progress import Progress, Settings
from tikv.stores import files

DAMAGED, CRAFTED = 3_000, 300
GOAL, UNIT = DAMAGED + CRAFTED, "files"
SECONDS = 2.0  # that a refusal may take on a machine that does something else as well
KINDS = ("store", "pool", "pool of groups along tokens")


def contents(store) -> list[bytes]:
    """What a loaded store or pool holds, to be compared with what another does."""
    if isinstance(store, tikv.KVCacheStore):
        found = [a for layer in range(store.num_layers) for a in store.tokens(layer)]
        return [repr(store).encode(), *(a.copy_to_host().tobytes() for a in found)]
    for seq in store.sequences:
        if "swapped" in repr(store):
            try:
                store.swap_in(seq)
            except tikv.PositionError:
                continue
    found = [a for seq in store.sequences for layer in range(store.num_layers) for a in store.tokens(layer, seq)]
    return [store.context_lens.tobytes(), *(a.copy_to_host().tobytes() for a in found)]


def damaged(chance: random.Random, whole: bytes) -> bytes:
    """The file after something that disks, networks and people do to files."""
    data = bytearray(whole)
    at = chance.randrange(len(data)) if chance.random() < 0.5 else chance.randrange(min(len(data), 64))
    what = chance.choice(("bit", "bytes", "zeros", "cut", "longer", "gap", "twice"))
    some = chance.randint(1, 64)
    if what == "bit":
        data[at] ^= 1 << chance.randrange(8)
    elif what == "bytes":
        data[at : at + some] = chance.randbytes(min(some, len(data) - at))
    elif what == "zeros":
        data[at : at + some] = bytes(min(some, len(data) - at))
    elif what == "cut":
        del data[at:]
    elif what == "longer":
        data += chance.randbytes(some)
    elif what == "gap":
        del data[at : at + some]
    else:
        data[at:at] = data[at : at + some]
    return bytes(data)


def crafted(chance: random.Random, whole: bytes) -> bytes:
    """The file with other facts, or another description, and checksums that agree; or one of a list of such files."""
    if chance.random() < 0.15:
        return hostile.crafted(hostile.HEADERS[chance.choice(list(hostile.HEADERS))])
    first = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:first])
    facts = json.loads(header["__metadata__"]["facts"])
    if chance.random() < 0.8:
        for _ in range(chance.randint(1, 3)):
            facts = hostile.changed(facts, chance.choice(list(hostile.places(facts))), chance.choice(hostile.JUNK))
        text = json.dumps(facts)
        checksums = json.loads(header["__metadata__"]["crc32"]) | {"": files._checksum_of_text(text)}
        header["__metadata__"] |= {"facts": text, "crc32": json.dumps(checksums)}
    else:
        header = hostile.changed(header, chance.choice(list(hostile.places(header))), chance.choice(hostile.JUNK))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[first:]


def run(settings: Settings, progress: Progress) -> None:
    path = settings.folder / "file.safetensors"
    wholes, held = {}, {}
    for kind in KINDS:
        make, load = hostile.KINDS[kind]
        make(path)
        wholes[kind], held[kind] = path.read_bytes(), contents(load(path))
    counts = {"refused": 0, "unharmed": 0, "another store": 0}
    slowest = 0.0
    number = settings.only or 0
    while not progress.over:
        chance = random.Random(f"{settings.seed} {number}")
        kind, lies = KINDS[number % len(KINDS)], number % (GOAL // CRAFTED) == 0
        data = (crafted if lies else damaged)(chance, wholes[kind])
        path.write_bytes(data)
        begin = time.perf_counter()
        try:
            outcome = outcome_of(path, kind, held[kind], lies)
            counts[outcome] += 1
            if outcome == "refused":
                slowest = max(slowest, time.perf_counter() - begin)
                assert time.perf_counter() - begin < SECONDS, "the refusal took too long"
        except Exception as error:
            progress.fail(number, f"a {'crafted' if lies else 'damaged'} {kind}", error)
        progress.count()
        number += 1
        if settings.only is not None:
            break
    told = ", ".join(f"{n} {what}" for what, n in counts.items())
    progress.remarks = f"files; {told}; slowest refusal {slowest * 1e3:.0f} ms"


def outcome_of(path: pathlib.Path, kind: str, held: list[bytes], lies: bool) -> str:
    """Load it: refused, or what it was before; a file that lies may be another store, which then works."""
    try:
        store = hostile.KINDS[kind][1](path)
    except tikv.CacheFileError as error:
        if len(str(error)) > 1000 + len(str(path)):
            raise AssertionError("an endless message") from error
        return "refused"
    found = contents(store)
    if found == held:
        return "unharmed"
    assert lies, "damage that was not noticed"
    return "another store"
