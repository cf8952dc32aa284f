"""The description of a cluster, and each line that refuses one."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsam.plan.cluster import read_cluster

ROOT = Path(__file__).parents[2]
GOOD = {
    "version": "1",
    "nodes": "2",
    "ranks_per_node": "4",
    "device": "measured here",
    "memory_gib": "16",
    "links": "{inside: {alpha_seconds: 0, bits_per_second: 8e9}, between: {alpha_seconds: 1e-3, bits_per_second: 8e6}}",
}
FOUR = "{alpha_seconds: 1e-3, bits_per_second: 8e6}"
# what changes -> the one line
REFUSED = {
    "misspelt": ({"node": "2"}, "c.yaml: node: there is no such key; did you mean 'nodes'?"),
    "missing": ({"nodes": None}, "c.yaml: nodes: expected this key, it is missing."),
    "version": ({"version": "2"}, "c.yaml: version: expected 1, got 2."),
    "none": ({"nodes": "0"}, "c.yaml: nodes: expected at least 1, got 0."),
    "text": ({"memory_gib": "much"}, "c.yaml: memory_gib: expected a number, got 'much'."),
    "device": ({"device": "{flops_per_second: 1e12}"}, "device.memory_bytes_per_second: expected this key, it is mis"),
    "device by name": ({"device": "fast"}, "c.yaml: device: expected measured here, got 'fast'."),
    "unconnected": ({"links": "{inside: " + FOUR + "}"}, "c.yaml: links.between: expected the link between 2 nodes"),
    "unconnected inside": (
        {"links": "{between: " + FOUR + "}"},
        "c.yaml: links.inside: expected the link between 4 ranks of a node, got none.",
    ),
    "half a link": (
        {"links": "{inside: {alpha_seconds: 1}, between: " + FOUR + "}"},
        "c.yaml: links.inside: expected alpha_seconds and bits_per_second, or measured, not a mixture.",
    ),
    "few sizes": (
        {"links": "{inside: {measured: {ranks: 2, bytes: [1, 2, 3], seconds: [1, 2, 3, 4]}}, between: " + FOUR + "}"},
        "c.yaml: links.inside.measured.bytes: expected at least 4 in the list, got 3.",
    ),
    "times": (
        {
            "links": "{inside: {measured: {ranks: 2, bytes: [1, 2, 3, 4], seconds: [1, 2, 3, 4, 5]}}, between: "
            + FOUR
            + "}"
        },
        "c.yaml: links.inside.measured: expected a time for each size, got 4 and 5.",
    ),
    "equal sizes": (
        {
            "links": "{inside: {measured: {ranks: 2, bytes: [1, 1, 1, 1], seconds: [1, 2, 3, 4]}}, between: "
            + FOUR
            + "}"
        },
        "c.yaml: links.inside.measured: expected four different sizes of at least a byte and times above 0.",
    ),
    "endless": ({"memory_gib": ".inf"}, "c.yaml: memory_gib: expected a finite number, got inf."),
    "slowest": ({"slowest": "0.5"}, "c.yaml: slowest: expected at least 1, got 0.5."),
}


def written(folder: Path, changes: dict[str, str | None]) -> Path:
    path = folder / "c.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in (GOOD | changes).items() if value is not None))
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case, tmp_path):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        read_cluster(written(tmp_path, changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [", "c.yaml: expected YAML, it does not parse"),
        ("", "c.yaml: expected keys like `nodes: 4`, got nothing."),
        ("nodes: 1\nnodes: 2", "the key 'nodes' is given twice"),
    ],
)
def test_what_is_no_description(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_cluster(tmp_path / "c.yaml")


def test_a_path_without_a_file(tmp_path):
    with pytest.raises(ValueError, match="found nothing there"):
        read_cluster(tmp_path / "c.yaml")
    with pytest.raises(ValueError, match="it cannot be read"):
        read_cluster(tmp_path)


def test_links_and_prices(tmp_path):
    path = written(tmp_path, {"price_per_hour": "3.6", "power": "{watts: 1000, price_per_kwh: 0.36}"})
    cluster = read_cluster(path)
    network = cluster.network
    assert network.ranks == 8
    assert network.inside.seconds(1e9) == pytest.approx(1.0)
    assert network.between.seconds(1e6) == pytest.approx(1.001)
    assert cluster.price_per_rank_second == pytest.approx(0.0011)
    assert read_cluster(written(tmp_path, {})).price_per_rank_second is None


def test_a_link_from_what_was_measured(tmp_path):
    """4 ranks: 6 messages of a quarter each; alpha 1 ms and 8 Mbit/s give 6 ms + 1.5 us a byte."""
    sizes = [1000, 10_000, 100_000, 1_000_000]
    times = [0.006 + 1.5e-6 * n for n in sizes]
    measured = f"{{measured: {{ranks: 4, bytes: {sizes}, seconds: {times}}}}}"
    path = written(tmp_path, {"links": f"{{inside: {measured}, between: {measured}}}"})
    link = read_cluster(path).network.inside
    assert (link.alpha, link.beta) == (pytest.approx(1e-3), pytest.approx(1e-6))


def test_a_single_rank_needs_no_links(tmp_path):
    network = read_cluster(written(tmp_path, {"nodes": "1", "ranks_per_node": "1", "links": None})).network
    assert (network.ranks, network.inside.seconds(1e9)) == (1, 0.0)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "clusters").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_read(path):
    assert read_cluster(path).network.ranks > 1


def test_a_section_can_be_that_of_another_with_changes(tmp_path):
    links = "{inside: &link " + FOUR + ", between: {<<: *link, alpha_seconds: 0.5}}"
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in {**GOOD, "links": links}.items()))
    network = read_cluster(path).network
    assert (network.inside.alpha, network.between.alpha) == (1e-3, 0.5)
    assert network.inside.beta == network.between.beta
