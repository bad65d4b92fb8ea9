"""Additions to SGLang's list of transfer backends. No file of SGLang is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import Any

from kvflow.connectors.sglang.queues import with_model
from kvflow.connectors.sglang.settings import Settings
from kvflow.connectors.sglang.version import NAME

GET_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
MAKERS = (
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager",
)
"""The methods in which SGLang makes a manager."""


def install() -> None:
    """Add the backend to SGLang's choices, to its enumeration, and to the lookup of classes.

    SGLang applies the hooks when all plugins have run.
    """
    from sglang.srt.arg_groups.choices import (
        DISAGG_TRANSFER_BACKEND_CHOICES,
        add_disagg_transfer_backend_choices,
    )
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([NAME])
    add_member(TransferBackend, NAME)
    HookRegistry.register(GET_CLASS, class_of, HookType.AROUND)
    for target in MAKERS:
        HookRegistry.register(target, with_model, HookType.AROUND)
    if Settings.needs_segment(os.environ):
        from kvflow.connectors.sglang.shared_pools import ALLOCATORS, allocate_in_segment

        for target in ALLOCATORS:
            HookRegistry.register(target, allocate_in_segment, HookType.AROUND)


def add_member(enumeration: type[Enum], value: str) -> None:
    """Add a member to a closed enumeration, in place, so that every importer has it. Idempotent."""
    known: dict[Any, Any] = enumeration._value2member_map_
    if value in known:
        return
    name = value.upper()
    member = object.__new__(enumeration)
    member._name_, member._value_ = name, value
    member.__objclass__ = enumeration  # type: ignore[attr-defined]
    member._sort_order_ = len(enumeration._member_names_)  # type: ignore[attr-defined]
    # `Enum` refuses to assign the name of a member, so the name is assigned first.
    type.__setattr__(enumeration, name, member)
    enumeration._member_names_.append(name)
    enumeration._member_map_[name] = member
    known[value] = member


def class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Return this backend's class of a type, or what `original` returns for another backend."""
    from sglang.srt.disaggregation.utils import KVClassType

    if transfer_backend.value != NAME or class_type == KVClassType.KVARGS:
        return original(transfer_backend, class_type)
    # These modules derive from SGLang's classes, so they load only where a class is needed.
    if class_type == KVClassType.BOOTSTRAP_SERVER:
        from kvflow.connectors.sglang.bootstrap import KvflowBootstrapServer

        return KvflowBootstrapServer
    if class_type == KVClassType.MANAGER:
        from kvflow.connectors.sglang.manager import KvflowManager

        return KvflowManager
    if class_type == KVClassType.SENDER:
        from kvflow.connectors.sglang.sender import KvflowSender

        return KvflowSender
    from kvflow.connectors.sglang.receiver import KvflowReceiver

    return KvflowReceiver
