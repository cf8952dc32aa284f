"""Pictures of topologies: densities of cells by hand, text without colours, files that hold the very pixels."""

from __future__ import annotations

import base64
import io
import re
import zlib
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from sparsam.report import ReportError
from sparsam.report.topology import Pictures, cells, write_picture

CHECKS = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)


def drawn(topologies, **options):
    console = Console(file=io.StringIO(), width=100, **options)
    console.print(Pictures(topologies))
    return console.file.getvalue()


def test_a_cell_shows_its_density():
    assert cells(CHECKS, 2, 2).tolist() == [[0.75, 0.0], [0.0, 1.0]]
    assert torch.equal(cells(CHECKS, 9, 9), CHECKS.float())
    assert cells(torch.ones(64, 16, dtype=torch.bool), 16, 30).shape == (16, 4)
    assert cells(torch.ones(1, 4096, dtype=torch.bool), 16, 30).shape == (1, 30)


def test_without_colours_two_rows_share_a_line_of_shades():
    lines = drawn({"fc": CHECKS}).splitlines()
    assert lines[0].strip() == "fc"
    assert lines[1].strip() == "4 × 4, 43.8 %"
    assert [line.rstrip() for line in lines[2:4]] == ["█▒", "  ██"]
    assert "outputs downwards" in drawn({"fc": CHECKS})


def test_a_coarse_picture_names_its_brightest_cell():
    sparse = torch.zeros(240, 300, dtype=torch.bool)
    sparse[:10, :5] = True
    assert "240 × 300, 0.0694 %, at most 50 %" in drawn({"fc": sparse})


def test_colours_are_used_where_there_are_some():
    shown = drawn({"fc": CHECKS}, force_terminal=True, color_system="truecolor", no_color=False)
    assert shown.count("▀") == 8
    assert "38;2;52;226;204" in shown


def test_whole_outputs_are_a_strip():
    lines = drawn({"fc": torch.tensor([[True], [False], [True]])}).splitlines()
    assert lines[2].rstrip() == "█ █"


@pytest.mark.parametrize("ending", ["svg", "html"])
def test_a_file_holds_every_layer(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    write_picture(path, {"blocks.0.<up>": CHECKS, "fc": CHECKS[:2], "out": CHECKS[:, :1]}, "a run: <first>")
    text = path.read_text()
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    images = [node for node in svg.iter() if node.tag.endswith("image")]
    words = [node.text for node in svg.iter() if node.tag.endswith("text")]
    assert len(images) == 3
    assert {"a run: <first>", "blocks.0.<up>", "4 × 4, 43.8 %"} <= set(words)
    assert not re.search(r"(?:src|href)=\"http", text)
    png = base64.b64decode(images[0].get("href").removeprefix("data:image/png;base64,"))
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(png[16:20]) == int.from_bytes(png[20:24]) == 4
    start = png.index(b"IDAT") + 4
    lines = torch.tensor(list(zlib.decompress(png[start : png.index(b"IEND") - 8]))).view(4, 13)
    assert lines[:, 0].tolist() == [0] * 4
    dark = lines[:, 1:].view(4, 4, 3)[..., 0] < 100
    assert torch.equal(dark, CHECKS)


def test_what_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ReportError, match=r"x\.png: expected a picture file that ends in \.svg or \.html\. Change"):
        write_picture(tmp_path / "x.png", {"fc": CHECKS}, "")
    with pytest.raises(ReportError, match=r"x\.svg: expected to write the picture, got: No such file or directory\."):
        write_picture(tmp_path / "nowhere" / "x.svg", {"fc": CHECKS}, "")
