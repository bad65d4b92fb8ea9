"""Fakes behind real HTTP, for every module of this folder."""

from tests.fakes.fixtures import client, decode, front, meeting, met, prefill, spare

__all__ = ["client", "decode", "front", "meeting", "met", "prefill", "spare"]
