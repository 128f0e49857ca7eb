"""The attention kernel's tiles: which keys they load, with and without a mask, and how parts of the keys are merged."""

import pytest
import torch

from blend_kernels import Positions, attention_kernel, attention_launch
from blend_kernels.attention_launch import launch_attention
from blend_kernels.tiles import Shape, Tile, best_tile, chunks, split_count
from blend_kernels.work import Rule, Work
from tests.kernels.dense import close, dense_attention
from tests.kernels.test_selective_attention import make, scattered

TILE = Tile(16, 16, 4, 1)
PLAIN = Rule(None, None, 0.2)
RULES = [PLAIN, Rule(30, None, 0.2), Rule(50, 4.0, 0.2)]


def run(device, tile, splits, rule=PLAIN, sinks=None, dtype=torch.float32, keys=129, positions=None):
    positions = scattered(33, keys, device) if positions is None else positions
    q, k, v = make(device, keys=keys, rows=len(positions), dtype=dtype)
    out, lse = launch_attention(Work(q, k, v, Positions(positions), rule, sinks), tile, splits)
    expected = dense_attention(q, k, v, positions, *rule, sinks)
    close(out, expected.out)
    close(lse, expected.lse, dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("tile", "splits"),
    [(TILE, 1), (Tile(64, 16, 4, 1), 1), (Tile(32, 16, 4, 1), 2), (Tile(32, 16, 4, 1), 7), (Tile(16, 128, 4, 1), 1)],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_tiles_and_splits(device, tile, splits, rule, with_sinks, poisoned):
    run(device, tile, splits, rule, torch.randn(4, device=device) if with_sinks else None)


DESCRIPTORS = Tile(32, 16, 4, 1, tma=True)


@pytest.mark.parametrize(
    ("tile", "splits", "rule", "dtype"),
    [
        (DESCRIPTORS, 1, RULES[1], torch.float32),
        (DESCRIPTORS, 1, RULES[1], torch.bfloat16),
        (TILE, 4, PLAIN, torch.bfloat16),
    ],
    ids=["descriptors", "descriptors, bfloat16", "splits, bfloat16"],
)
def test_descriptors_and_half_precision(tile, splits, rule, dtype, device):
    run(device, tile, splits, rule, dtype=dtype)


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
    launch_attention(Work(q, k, v, Positions(positions), PLAIN._replace(window=window)), TILE, splits)
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
    out, _ = launch_attention(Work(q, k, v, Positions(positions), PLAIN), TILE, 1)
    close(out[:, :, :16], dense_attention(q[:, :, :16], k[:, :, :76], v[:, :, :76], positions[:16], scale=0.2).out)


@pytest.fixture
def merged(monkeypatch):
    """The log-sum-exp of every part that is merged, `[splits, batch, rows, heads]`."""
    noted, merge = [], attention_launch.merge_parts.run

    def note(parts, part_lse, *args, **options):
        noted.append(part_lse.clone())
        return merge(parts, part_lse, *args, **options)

    monkeypatch.setattr(attention_launch.merge_parts, "run", note)
    return noted


@pytest.mark.parametrize(
    ("positions", "keys", "window"), [([511], 512, None), ([511], 512, 128), ([124, 125, 126, 127], 2000, None)]
)
def test_splits_share_the_keys_that_a_tile_sees(positions, keys, window, merged, device, poisoned):
    rule = PLAIN._replace(window=window)
    run(device, TILE, 8, rule, keys=keys, positions=torch.tensor(positions, device=device))
    assert merged[0].isfinite().all()


@pytest.mark.parametrize("with_sinks", [False, True])
def test_more_splits_than_blocks_leave_the_last_ones_empty(with_sinks, merged, device, poisoned):
    sinks = torch.randn(8, device=device)[::2] if with_sinks else None
    run(device, TILE, 8, sinks=sinks, keys=63, positions=torch.tensor([5, 17, 18], device=device))
    # rows 1 and 2 see keys of two blocks of 16, row 0 of one
    assert merged[0].isfinite().sum(0)[0, :, 0].tolist() == [1, 2, 2]


@pytest.mark.parametrize("splits", [1, 3])
def test_positions_past_the_keys_read_none_of_what_follows(splits, device):
    q, k, v = make(device, rows=4)
    positions = torch.tensor([7, 62, 66, 71], device=device)
    out, _ = launch_attention(Work(q, k, v, Positions(positions), PLAIN), TILE, splits)
    close(out, dense_attention(q, k, v, positions.clamp(max=62), scale=0.2).out)


@pytest.mark.parametrize(
    ("programs", "keys", "parts"), [(8, 16_384, 33), (1, 100_000, 128), (16, 16_384, 16), (8, 256, 1), (632, 16_384, 1)]
)
def test_parts_fill_the_gpu_twice_and_are_not_short(programs, keys, parts):
    assert split_count(programs, keys, 132) == parts


@pytest.mark.parametrize(
    ("dim", "cut"), [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (112, (64, 64)), (192, (128, 64)), (8, (16, 0))]
)
def test_head_dims_are_cut_with_little_padding(dim, cut):
    assert chunks(dim) == cut
    assert sum(cut) >= dim


@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [32, 80, 128, 192, 256])
@pytest.mark.parametrize("windowed", [False, True])
def test_every_kind_of_work_has_a_tile_that_suits_it(major, dtype, dim, windowed):
    for lines in (1, 20, 64, 128, 5000):
        tile = best_tile(major, Shape(dtype, dim, dim, lines, windowed, tma=True))
        assert not tile.tma or (major in (9, 10) and not chunks(dim).second)
        assert tile.rows < 2 * max(16, lines) or dtype == torch.float32
