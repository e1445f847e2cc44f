"""Random changes of model files that know where header, entries and arrays are."""

import json
import re
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import safe_open

from kexpfam import storage

__all__ = ["forge", "mutated", "rewrite"]

# Values that replace one value of a structure.
VALUES = (
    *("null", "-1", "1e400", "[]", "{}", '"$jax"', '"x"', '{"$tuple":[]}', "9" * 5000),
    '"kexpfam.model.density:Density"',
)


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """Return the file after one random change that knows where header, entries and arrays are."""
    length = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + length], content[8 + length :]
    sealed = lambda text, rest=body: len(text).to_bytes(8, "little") + text + rest
    entries = json.loads(header)
    names = [name for name in entries if name != "__metadata__"]
    kind, first, second = rng.integers(10), *rng.integers(len(content), size=2)
    low, high = sorted((int(first), int(second)))
    if kind == 0:  # flipped bits
        changed = bytearray(content)
        changed[low] ^= 1 << int(rng.integers(8))
        return bytes(changed)
    if kind == 1:
        return content[:low]
    if kind == 2:
        return content[:low] + content[high:]
    if kind == 3:  # two ranges swapped
        size = int(rng.integers(1, 64))
        return (
            content[:low]
            + content[high : high + size]
            + content[low + size : high]
            + content[low : low + size]
        )
    if kind == 4:  # random bytes
        return content[:low] + rng.bytes(int(rng.integers(1, 32))) + content[high:]
    if kind == 5:  # another length of the header
        lengths = [0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1]
        return lengths[rng.integers(len(lengths))].to_bytes(8, "little") + content[8:]
    if kind == 6:  # an entry of the metadata changed, removed or written twice
        name = str(rng.choice(list(entries["__metadata__"])))
        value = str(rng.choice(["", "0", "1", "9" * 50, "null", "{}", "[", '{"$class":"kexpfam:load"}']))
        changes = [{name: value}, {name: value} | entries["__metadata__"]]
        return sealed(
            json.dumps(
                entries | {"__metadata__": entries["__metadata__"] | changes[rng.integers(2)]}
            ).encode()
        )
    name = str(rng.choice(names))
    if kind == 7:  # another type, shape or range of an array
        field, value = [
            ("dtype", "I64"),
            ("dtype", "BF16"),
            ("shape", [2**40, 2**40]),
            ("shape", []),
            ("data_offsets", [0, 2**50]),
        ][rng.integers(5)]
        return sealed(json.dumps(entries | {name: entries[name] | {field: value}}).encode())
    if kind == 8:  # a key written twice
        text = json.dumps(entries)
        return sealed(
            (text[:-1] + f", {json.dumps(name)}: {json.dumps(entries[str(rng.choice(names))])}}}").encode()
        )
    other = str(rng.choice(names))  # two arrays exchanged
    return sealed(json.dumps(entries | {name: entries[other], other: entries[name]}).encode())


def forge(file: Path, rng: np.random.Generator) -> None:
    """Change one value of the structure at random and make the checksum match."""
    with safe_open(file, framework="np") as content:
        text = content.metadata()["structure"]
    places = [match.span() for match in re.finditer(r'"[^"]*"|[0-9.e+-]+|null|true|false', text)]
    low, high = places[rng.integers(len(places))]
    rewrite(file, structure=text[:low] + VALUES[rng.integers(len(VALUES))] + text[high:])


def rewrite(file: Path, **changes: str | None) -> None:
    """Change entries of the header and make the checksum match, as a program of an attacker would."""
    with safe_open(file, framework="np") as content:
        header = content.metadata()
        names = content.keys()
        tensors = {name: content.get_tensor(name) for name in names}
    del header["checksum"]
    header = {key: value for key, value in (header | changes).items() if value is not None}
    header["checksum"] = storage._checksum(header, tensors)
    safetensors.numpy.save_file(tensors, file, metadata=header)
