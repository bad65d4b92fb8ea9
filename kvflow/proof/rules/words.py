"""Messages as text, for the story of a run."""

from __future__ import annotations

from kvflow.protocols.wire.messages import Bootstrap

# Fields that are the same in all messages, or too long to read.
_DULL = {"source", "target", "layout", "address", "wire_version", "asked"}
_DULL |= {"prompt_digest", "handoff", "checksum"}


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
