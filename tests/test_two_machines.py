"""The commands of examples/two_machines run as printed, on two addresses of one machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvflow.demo_model import DEMO_MODEL_DIR
from tests.shells import ALONE, NETWORK, ROOT, STOP, has_namespaces, shell

PAGE = (ROOT / "examples/two_machines/README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("processes")
def test_the_steps_run_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("mooncake")
    if not has_namespaces():
        pytest.skip("no network namespace can be made here")
    (tmp_path / "M").symlink_to(DEMO_MODEL_DIR)
    # What servers log is not the answer.
    quiet = [re.sub(r" &$", " >&2 &", block, flags=re.MULTILINE) for block in BLOCKS]
    done = shell(NETWORK + STOP + "\n".join(quiet), tmp_path, 300, *ALONE)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in re.sub(r"\}\{", "}\n{", done.stdout).splitlines() if line.startswith("{")]
    workers, completion, to_decode, to_prefill = answers
    assert workers["stats"] == {"prefill_count": 1, "decode_count": 1, "regular_count": 0}
    assert completion["choices"][0]["text"]
    assert [(one["role"], one["switched"]) for one in (to_decode, to_prefill)] == [("decode", True), ("prefill", True)]
    assert "Traceback" not in done.stderr
    print(done.stdout)
