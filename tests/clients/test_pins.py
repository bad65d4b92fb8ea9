"""What tests of the clients state twice, without any client."""

from __future__ import annotations

import re

from tests.clients.programs import served
from tests.clients.servers import ROOT
from tests.e2e import agent_model


def test_the_programs_expect_what_the_agent_says() -> None:
    for name in ("CITY", "REASONING", "TEXT", "REPLY"):
        assert getattr(served, name) == getattr(agent_model, name)


def test_the_page_has_the_versions_that_were_tested() -> None:
    page = (ROOT / "docs/serve.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([\d., ]+) \|", page, re.MULTILINE))
    assert len(rows) == 7
    pins = "".join(
        (ROOT / f".ci/{name}-requirements.txt").read_text()
        for name in ("clients", "clients-openai-2")
    )
    for client, versions in rows.items():
        found = re.findall(rf"^{client}==(.+)$", pins, re.MULTILINE)
        assert ", ".join(found) == versions, client
