"""Messages as text, for the story of a run."""

from __future__ import annotations

from kvflow.protocols.wire.messages import Bootstrap

_SAME_IN_ALL = {"source", "target", "layout", "address", "wire_version", "asked"}
_TOO_LONG = {"prompt_digest", "handoff", "checksum"}
_DULL = _SAME_IN_ALL | _TOO_LONG


def worded(message: object, dull: set[str] = _DULL) -> str:
    """Return a message as text, without its `dull` fields. None stands for a malformed frame."""
    if message is None:
        return "what is no message"
    fields: tuple[str, ...] = message.__struct_fields__  # type: ignore[attr-defined]
    shown = {name: getattr(message, name) for name in fields if name not in dull}
    if isinstance(message, Bootstrap):
        shown["pages"] = memoryview(message.pages).cast("i").tolist()
    said = ", ".join(f"{name}={value}" for name, value in shown.items())
    return f"{type(message).__name__}({said})"
