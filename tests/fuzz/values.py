"""Hostile values: of JSON, of protobuf messages, and of bytes."""

import json
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

SMALL = [0, -1, 1, 2, 3, 63, 64, 65, 255, 256]
NUMBERS = [*SMALL, 2**20, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**400]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "x", " ", "\x00", "é", "\ud800", "\U0001f600" * 50, "a" * 300, "a" * 50_000]
TEXTS += ["../..", "a:b", "null", "%s%n"]
DEEP = "deep"
"""Stands for a nesting that only `encode_json` makes: Python's own encoder does not go that deep."""

LIMITS = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
    FieldDescriptor.TYPE_INT32: 2**31 - 1,
    FieldDescriptor.TYPE_SINT32: 2**31 - 1,
    FieldDescriptor.TYPE_INT64: 2**63 - 1,
}


def hostile(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(10 if depth < 3 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 3:
        return rng.choice(FLOATS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice([None, True, False, [], {}])
    if kind < 8:
        return [hostile(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 5]))]
    if kind < 9:
        return {rng.choice(TEXTS[:8]): hostile(rng, depth + 1) for _ in range(rng.randrange(4))}
    return DEEP


def mutate_json(rng: random.Random, value: Any) -> Any:
    """Return `value` with one to three places changed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(value))
        if not places:
            return hostile(rng)
        holder, key = rng.choice(places)
        action = rng.randrange(8)
        if action == 0 and isinstance(holder, dict):
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[rng.choice([*TEXTS[:8], f"{key}s"])] = holder.pop(key)
        elif action == 2 and isinstance(holder[key], list) and holder[key]:
            holder[key] *= rng.choice([2, 50, 1000])
        else:
            holder[key] = hostile(rng)
    return value


def encode_json(rng: random.Random, value: Any) -> bytes:
    """Return a body: mostly the JSON of `value`, now and then with a few bytes spoiled."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.8)
    depth = rng.choice([50, 5000])
    data = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, data) if rng.random() < 0.15 else data


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with some bytes changed, lost, repeated or cut off."""
    spoiled = bytearray(data or b"\x00")
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(spoiled))
        action = rng.randrange(5)
        if action == 0:
            spoiled[at] = rng.randrange(256)
        elif action == 1 and len(spoiled) > 1:
            del spoiled[at]
        elif action == 2:
            spoiled[at:at] = rng.randbytes(rng.choice([1, 4, 64]))
        elif action == 3:
            spoiled[at:at] = spoiled[at : at + 100]
        else:
            del spoiled[max(at, 1) :]
    return bytes(spoiled)


def mutate_message(rng: random.Random, message: Message, rounds: int = 3) -> None:
    """Set some fields of a message, nested ones too, to values that its types allow."""
    for _ in range(rng.randint(1, rounds) if message.DESCRIPTOR.fields else 0):
        field = rng.choice(list(message.DESCRIPTOR.fields))
        if rng.random() < 0.15:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            for _ in range(rng.choice([1, 3, 200])):
                entries[rng.choice([0, 1, 7, 2**32 - 1, rng.randrange(2**32)])] = rng.choice(FLOATS)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            mutate_message(rng, inner.add() if field.is_repeated else inner, rounds)
            if not field.is_repeated:
                inner.SetInParent()
        elif field.is_repeated:
            values = (scalar(rng, field) for _ in range(rng.choice([1, 3, 64, 3000])))
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, scalar(rng, field))


def scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice([text for text in TEXTS if "\ud800" not in text])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice([0, 1, 100]))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice([0, 1, 2, 3, 99, -1])
    top = LIMITS.get(field.type, 2**31 - 1)
    low = 0 if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64) else -top - 1
    return rng.choice([number for number in (*NUMBERS, top) if low <= number <= top])


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs)[:50]:
        yield value, key
        yield from _places(inner)
