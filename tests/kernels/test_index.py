"""Block addresses: both sorted orders against a naive construction, and the way to and from a dense matrix."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import torch

from sparsam.kernels import blocks_from_dense, build_index, dense_from_blocks


def addresses(data, rows, cols):
    """Distinct addresses in any order, with dead slots among them."""
    cells = data.draw(st.permutations([(row, col) for row in range(rows) for col in range(cols)]))
    live = cells[: data.draw(st.integers(0, len(cells)))]
    slots = data.draw(st.permutations(live + [(-1, -1)] * data.draw(st.integers(0, 2))))
    return torch.tensor(slots, dtype=torch.int32).reshape(-1, 2).unbind(1)


@hypothesis.given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_index_holds_what_a_naive_sort_gives(data, rows, cols):
    row, col = addresses(data, rows, cols)
    index = build_index(row, col, rows, cols)
    slots = list(zip(row.tolist(), col.tolist(), strict=True))
    dead = [slot for slot, (r, _) in enumerate(slots) if r < 0]
    by_row = sorted((slot for slot in range(len(slots)) if slot not in dead), key=lambda slot: slots[slot])
    by_col = sorted(by_row, key=lambda slot: slots[slot][::-1])
    assert index.row_slots.tolist() == by_row + dead
    assert index.col_slots.tolist() == by_col + dead
    assert index.row_start.tolist() == [sum(0 <= r < block for r, _ in slots) for block in range(rows + 1)]
    assert index.col_start.tolist() == [sum(0 <= c < block for _, c in slots) for block in range(cols + 1)]
    assert {tensor.dtype for tensor in index} == {torch.int32}


@hypothesis.given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_blocks_go_to_a_dense_matrix_and_come_back(data, out_features, in_features):
    row, col = addresses(data, -(-out_features // 2), -(-in_features // 3))
    dense = torch.arange(1.0, out_features * in_features + 1).view(out_features, in_features)
    blocks = blocks_from_dense(dense, row, col, 2, 3)
    back = dense_from_blocks(blocks, row, col, out_features, in_features)
    alive = torch.zeros(out_features, in_features, dtype=torch.bool)
    for r, c in zip(row.tolist(), col.tolist(), strict=True):
        if r >= 0:
            alive[2 * r : 2 * r + 2, 3 * c : 3 * c + 3] = True
    assert torch.equal(back, dense * alive)
    assert torch.equal(blocks[row < 0], torch.zeros(int((row < 0).sum()), 2, 3))


def test_what_a_dead_slot_holds_reaches_no_weight():
    row, col = torch.tensor([-1, 0], dtype=torch.int32), torch.tensor([-1, 1], dtype=torch.int32)
    dense = dense_from_blocks(torch.tensor([[[7.0]], [[3.0]]]), row, col, 1, 2)
    assert dense.tolist() == [[0.0, 3.0]]
