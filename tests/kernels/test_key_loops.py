"""Which keys the attention kernel loads, with and without a mask, and how splits share them."""

import pytest
import torch

from blend_kernels import attention_kernel, attention_launch
from blend_kernels.attention_launch import launch_attention, splits_of
from blend_kernels.checks import Rule, Work
from blend_kernels.tiles import Tile, split_count
from tests.kernels.dense import close, dense_attention
from tests.kernels.test_selective_attention import make, scattered

TILE = Tile(16, 16, 4, 1)
EXACT = Rule("exact", None, None, 0.2)


@pytest.fixture
def loads(monkeypatch, device):
    """Of every program in turn: the blocks that it loads, as (tensor, first key, masked)."""
    if device != "cpu":
        pytest.skip("only the interpreter runs a kernel step by step")
    programs = []
    load_keys, key_loops = attention_kernel.load_keys, attention_kernel.key_loops

    def begin(*args):
        programs.append([])
        return key_loops(*args)

    def load(ptr, i_key, *rest):
        programs[-1].append((int(ptr.handle.data.item()), int(i_key.handle.data.item()), bool(rest[-1])))
        return load_keys(ptr, i_key, *rest)

    monkeypatch.setattr(attention_kernel, "key_loops", begin)
    monkeypatch.setattr(attention_kernel, "load_keys", load)
    return programs


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_tile_loads_what_its_rows_see_and_masks_only_the_ragged_ends(window, splits, loads, device):
    q, k, v = make(device, heads=1, kv_heads=1, keys=300, rows=64, dim=16)
    positions = torch.cat([torch.arange(3, 19), scattered(48, 280, device) // 2 * 2 + 20]).sort().values
    launch_attention(Work(q, k, v, positions, EXACT._replace(window=window)), TILE, splits, False)
    assert len(loads) == 4 * splits
    tiles = positions.view(4, 16).flip(0).tolist()  # the last tile starts first
    for n, rows in enumerate(tiles):
        # programs of the interpreter run split after split of a tile
        mine = [load for program in loads[n * splits : (n + 1) * splits] for load in program]
        low = 0 if window is None else max(0, rows[0] - window + 1)
        seen = range(low // 16 * 16, rows[-1] + 1, 16)
        for tensor in (k, v):
            blocks = {key: masked for ptr, key, masked in mine if ptr == tensor.data_ptr()}
            assert sorted(blocks) == list(seen)
            assert len(mine) == 2 * len(seen)
            whole = [key for key in seen if key + 15 <= rows[0] and (window is None or key > rows[-1] - window)]
            assert [key for key in seen if not blocks[key]] == whole


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_rows_see_nothing_of_keys_that_only_later_tiles_see(device):
    q, k, v = make(device, heads=1, kv_heads=1, keys=200, rows=32, dim=16)
    positions = torch.cat([torch.arange(60, 76), torch.arange(150, 166)]).to(device)
    k[:, :, 76:], v[:, :, 76:] = float("nan"), float("nan")
    out, _ = launch_attention(Work(q, k, v, positions, EXACT), TILE, 1, False)
    assert out[:, :, :16].isfinite().all()
    close(out[:, :, :16], dense_attention(q[:, :, :16], k[:, :, :76], v[:, :, :76], positions[:16], scale=0.2).out)


def decode(device, window=None):
    q, k, v = make(device, keys=512, rows=1, kv_heads=1)
    return Work(q, k, v, torch.tensor([511], device=device), EXACT._replace(window=window))


def early_rows(device):
    q, k, v = make(device, keys=2000, rows=4)
    return Work(q, k, v, torch.arange(124, 128, device=device), EXACT)


@pytest.fixture
def partial(monkeypatch):
    """The log-sum-exp of every split, as the merge gets them: `[splits, batch, heads, rows]`."""
    found = []
    combine = attention_launch.combine_parts

    def spy(work, part, part_lse, out, lse):
        found.append(part_lse.clone())
        return combine(work, part, part_lse, out, lse)

    monkeypatch.setattr(attention_launch, "combine_parts", spy)
    return found


@pytest.mark.parametrize(
    "work",
    [decode, lambda device: decode(device, 128), early_rows],
    ids=["decode", "window", "early"],
)
def test_splits_share_the_keys_that_a_tile_sees(work, partial, device, poisoned):
    call = work(device)
    out, lse = launch_attention(call, TILE, 8, True)
    assert partial[0].isfinite().all()
    whole, whole_lse = launch_attention(call, TILE, 1, True)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=0)
    assert torch.equal(out, launch_attention(call, TILE, 8, True)[0])


@pytest.mark.parametrize("sunk", [False, True])
def test_more_splits_than_blocks_leave_the_last_ones_empty(sunk, partial, device, poisoned):
    q, k, v = make(device, rows=3)
    positions, sinks = torch.tensor([5, 17, 18], device=device), torch.randn(8, device=device)[::2] if sunk else None
    out, lse = launch_attention(Work(q, k, v, positions, EXACT, sinks), TILE, 8, True)
    # rows 1 and 2 see keys of two blocks of 16, row 0 of one
    assert partial[0].isfinite().sum(0)[0, 0].tolist() == [1, 2, 2]
    expected = dense_attention(q, k, v, positions, scale=0.2, sinks=sinks)
    close(out, expected.out)
    close(lse, expected.lse)


def test_splits_of_half_precision(device):
    q, k, v = make(device, rows=5, keys=129, dtype=torch.bfloat16)
    positions = scattered(5, 129, device)
    out, lse = launch_attention(Work(q, k, v, positions, EXACT), TILE, 4, True)
    expected = dense_attention(q, k, v, positions, scale=0.2)
    close(out, expected.out)
    close(lse, expected.lse, torch.bfloat16)


FEW, MANY = Tile(16, 64, 4, 3, resident=3), Tile(128, 128, 8, 2)


@pytest.mark.parametrize(
    ("programs", "keys", "tile"), [(8, 16_384, FEW), (8, 100_000, FEW), (1, 16_384, FEW), (16, 16_384, MANY)]
)
def test_splits_fill_the_gpu_in_one_round(programs, keys, tile):
    slots, steps = 132 * tile.resident, -(-keys // tile.keys)
    parts = split_count(programs, keys, tile, 132)
    assert programs * parts <= slots
    assert programs * -(-steps // -(-steps // parts)) >= 0.8 * slots or parts == 128


def test_what_fills_the_gpu_or_is_short_stays_whole():
    assert split_count(632, 16_384, MANY, 132) == 1
    assert split_count(67, 16_384, MANY, 132) == 1
    assert split_count(8, 64, FEW, 132) == 1
    assert split_count(8, 256, FEW, 132) == 1
    assert split_count(8, 16_384, FEW, 1) == 1


def test_a_call_counts_its_tiles_and_the_keys_of_a_window(monkeypatch, device):
    monkeypatch.setattr(attention_launch, "multiprocessors", lambda device: 132)
    tile = Tile(16, 16, 4, 1, resident=3)
    assert splits_of(decode("meta"), tile) == split_count(1, 512, tile, 132)
    assert splits_of(decode("meta", window=200), tile) == split_count(1, 200, tile, 132)
    assert splits_of(early_rows("meta"), tile) == split_count(2, 2000, tile, 132)


@pytest.mark.parametrize("splits", [1, 3])
def test_unchecked_positions_past_the_keys_read_none_of_what_follows(splits, device):
    q, k, v = make(device, rows=4)
    positions = torch.tensor([7, 62, 66, 71], device=device)
    out, _ = launch_attention(Work(q, k, v, positions, EXACT), TILE, splits, False)
    close(out, dense_attention(q, k, v, positions.clamp(max=62), scale=0.2).out)
