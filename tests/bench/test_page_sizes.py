"""The benchmark of two page sizes: every length, beside equal sizes, and sizes that are none."""

from __future__ import annotations

import pytest

from kvflow.bench import page_sizes
from kvflow.bench.page_sizes import bench_page_sizes, sizes_of
from kvflow.protocols.errors import MisuseError


@pytest.mark.parametrize("text", ["16", "16:", "a:b", "16:16", "0:16", "16:24", "1:65537", "1:2:4"])
def test_sizes_that_are_none_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        MisuseError, match=f"^--page-sizes {text}: not two (different sizes of 1 to|numbers, as in)"
    ):
        sizes_of(text)
    assert (sizes_of("16:64"), sizes_of("64:16")) == ((16, 64), (64, 16))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
async def test_a_length_is_measured_beside_equal_sizes(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_sizes, "TOKENS", (16, 128))
    said: list[str] = []
    report = await bench_page_sizes(("local",), ("page_first",), sizes, 2, said.append)
    assert len(said) == 2 and set(report["local page_first"]) == {"16", "128"}
    for found in report["local page_first"].values():
        for way in (f"{sizes[0]}:{sizes[1]}", "16:16", "64:64"):
            assert min(found[way].values()) >= 0 and found[way]["gb_s"] > 0
        assert found["ratio to 16:16"]["q1"] > 0 and found["ratio to 64:64"]["q1"] > 0
