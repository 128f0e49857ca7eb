"""Jit kernel of `place_layer`."""

import triton
import triton.language as tl

# mypy: ignore-errors
# (jit functions are Triton's language, not Python's: their arguments have no Python types)


@triton.jit
def fractions_of_turns(freq_ptr, P: tl.constexpr, PAIRS: tl.constexpr):
    # [P]: turns per position as a 64-bit fraction of a turn, so that the product with a position wraps exactly at whole turns
    o_pair = tl.arange(0, P)
    b_turn = tl.load(freq_ptr + o_pair, mask=o_pair < PAIRS, other=0.0).to(tl.float64) * 0.15915494309189535
    b_turn = b_turn - tl.floor(b_turn + 0.5)
    return (b_turn * 1.8446744073709552e19).to(tl.int64)


@triton.jit
def sine_cosine(b_part):
    # of b_part / 2**32 turns: the nearest quarter turn, and Cephes' polynomials (sinf, cosf) on the remaining +-pi/4
    b_quarter = (b_part + 536870912) >> 30
    b_x = (b_part - (b_quarter << 30)).to(tl.float32) * 1.4629180792671596e-09
    b_z = b_x * b_x
    b_sin = ((-1.9515295891e-4 * b_z + 8.3321608736e-3) * b_z - 1.6666654611e-1) * b_z * b_x + b_x
    b_cos = (
        ((2.443315711809948e-5 * b_z - 1.388731625493765e-3) * b_z + 4.166664568298827e-2) * b_z * b_z - 0.5 * b_z + 1.0
    )
    m_odd = (b_quarter & 1) == 1
    b_s, b_c = tl.where(m_odd, b_cos, b_sin), tl.where(m_odd, b_sin, b_cos)
    return tl.where(((b_quarter + 1) & 2) == 2, -b_c, b_c), tl.where((b_quarter & 2) == 2, -b_s, b_s)


@triton.jit
def sine_cosine_at(b_position, b_turn):
    return sine_cosine(((b_position[:, None] * b_turn[None, :]) >> 32).to(tl.int32))


@triton.jit
def turn_pairs(b_first, b_second, b_cos, b_sin):
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def load_states(
    p_head,
    p_scale,
    o_row,
    o_scale,
    o_dim,
    m_x,
    n_half,
    n_groups,
    DIM: tl.constexpr,
    PACKING: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
):
    # [B, columns]: of the chunk's dtype if plain, else decoded to fp32
    o_x = o_row * DIM + o_dim
    if PACKING == "int4":
        # number i of a head is the lower half of byte i, or the upper half of byte i - n_half
        m_upper = o_x >= n_half
        o_x = tl.where(m_upper, o_x - n_half, o_x)
    p_x = tl.max_contiguous(tl.multiple_of(p_head + o_x, [1, BYTES]), [1, VECTOR])
    b_x = tl.load(p_x, mask=m_x, other=0)
    if PACKING == "int4":
        b_x = tl.where(m_upper, b_x >> 4, b_x & 15)
    if PACKING != "plain":
        SCALES: tl.constexpr = 1 if VECTOR < 2 else VECTOR // 2
        p_centre = tl.max_contiguous(tl.multiple_of(p_scale + o_scale + o_dim, [1, 2 * SCALES]), [1, SCALES])
        b_centre = tl.load(p_centre, mask=m_x, other=0.0).to(tl.float32)
        b_step = tl.load(p_centre + n_groups * DIM, mask=m_x, other=0.0).to(tl.float32)
        if PACKING == "int4":
            b_centre = b_centre - 7.5 * b_step
        b_x = b_centre + b_x.to(tl.float32) * b_step
    return b_x


@triton.jit
def load_gained(
    p_head,
    p_scale,
    p_gain,
    o_row,
    o_scale,
    o_dim,
    m_x,
    n_half,
    n_groups,
    DIM: tl.constexpr,
    PACKING: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    GAINED: tl.constexpr,
):
    b_x = load_states(
        p_head, p_scale,
        o_row, o_scale, o_dim, m_x,
        n_half, n_groups,
        DIM, PACKING, VECTOR, BYTES,
    )  # fmt: skip
    if GAINED:
        b_x = b_x.to(tl.float32) + tl.load(p_gain + o_dim, mask=m_x, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def place_neighbours(
    p_head,
    p_scale,
    p_gain,
    p_out,
    o_row,
    o_scale,
    m_row,
    n_half,
    n_groups,
    b_cos,
    b_sin,
    b_gain_cos,
    b_gain_sin,
    B: tl.constexpr,
    P: tl.constexpr,
    PAIRS: tl.constexpr,
    OFFSET: tl.constexpr,
    DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    PACKING: tl.constexpr,
    GAIN: tl.constexpr,
):
    # [B, 2P] in memory order, members of a pair side by side
    o_dim = OFFSET + tl.arange(0, 2 * P)[None, :]
    m_x = m_row if P == PAIRS else m_row & (o_dim < OFFSET + 2 * PAIRS)
    b_x = load_gained(
        p_head, p_scale, p_gain,
        o_row, o_scale, o_dim, m_x,
        n_half, n_groups,
        DIM, PACKING, VECTOR, BYTES, GAIN == "before",
    ).to(tl.float32)  # fmt: skip
    b_first, b_second = tl.split(tl.reshape(b_x, [B, P, 2]))
    b_first, b_second = turn_pairs(b_first, b_second, b_cos, b_sin)
    b_y = tl.reshape(tl.join(b_first, b_second), [B, 2 * P])
    if GAIN == "turned":
        b_gain = tl.load(p_gain + o_dim, mask=m_x, other=0.0).to(tl.float32)
        b_first, b_second = tl.split(tl.reshape(b_gain, [B, P, 2]))
        b_first, b_second = turn_pairs(b_first, b_second, b_gain_cos, b_gain_sin)
        b_y += tl.reshape(tl.join(b_first, b_second), [B, 2 * P])
    tl.store(p_out + o_dim, b_y.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit
def place_halves(
    p_head,
    p_scale,
    p_gain,
    p_out,
    o_row,
    o_scale,
    m_row,
    n_half,
    n_groups,
    b_cos,
    b_sin,
    b_gain_cos,
    b_gain_sin,
    P: tl.constexpr,
    PAIRS: tl.constexpr,
    OFFSET: tl.constexpr,
    DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    PACKING: tl.constexpr,
    GAIN: tl.constexpr,
):
    # [B, P]
    o_dim = OFFSET + tl.arange(0, P)[None, :]
    m_x = m_row if P == PAIRS else m_row & (o_dim < OFFSET + PAIRS)
    b_first = load_gained(
        p_head, p_scale, p_gain,
        o_row, o_scale, o_dim, m_x,
        n_half, n_groups,
        DIM, PACKING, VECTOR, BYTES, GAIN == "before",
    ).to(tl.float32)  # fmt: skip
    b_second = load_gained(
        p_head, p_scale, p_gain,
        o_row, o_scale, o_dim + PAIRS, m_x,
        n_half, n_groups,
        DIM, PACKING, VECTOR, BYTES, GAIN == "before",
    ).to(tl.float32)  # fmt: skip
    b_first, b_second = turn_pairs(b_first, b_second, b_cos, b_sin)
    if GAIN == "turned":
        b_gain_first = tl.load(p_gain + o_dim, mask=m_x, other=0.0).to(tl.float32)
        b_gain_second = tl.load(p_gain + o_dim + PAIRS, mask=m_x, other=0.0).to(tl.float32)
        b_gain_first, b_gain_second = turn_pairs(b_gain_first, b_gain_second, b_gain_cos, b_gain_sin)
        b_first += b_gain_first
        b_second += b_gain_second
    tl.store(p_out + o_dim, b_first.to(p_out.dtype.element_ty), mask=m_x)
    tl.store(p_out + o_dim + PAIRS, b_second.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit
def place_still(
    p_head,
    p_scale,
    p_gain,
    p_out,
    o_row,
    o_scale,
    m_row,
    n_half,
    n_groups,
    PAIRS: tl.constexpr,
    OFFSET: tl.constexpr,
    DIM: tl.constexpr,
    STILL: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    PACKING: tl.constexpr,
    GAIN: tl.constexpr,
):
    # [B, STILL]: dimensions before and after those that turn
    o_dim = tl.arange(0, STILL)[None, :]
    m_x = m_row if STILL == DIM - 2 * PAIRS else m_row & (o_dim < DIM - 2 * PAIRS)
    if OFFSET == 0:
        o_dim += 2 * PAIRS
    elif OFFSET + 2 * PAIRS < DIM:
        o_dim = tl.where(o_dim < OFFSET, o_dim, o_dim + 2 * PAIRS)
    b_x = load_gained(
        p_head, p_scale, p_gain,
        o_row, o_scale, o_dim, m_x,
        n_half, n_groups,
        DIM, PACKING, VECTOR, BYTES, GAIN != "none",
    )  # fmt: skip
    tl.store(p_out + o_dim, b_x.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit
def angles_of_rows(o_target, moved, absolute, b_turn, ABSOLUTE: tl.constexpr):
    # [B, P], or [1, P] where all rows move alike
    if ABSOLUTE == "all":
        b_cos, b_sin = sine_cosine_at(o_target, b_turn)
    elif ABSOLUTE == "none":
        b_cos, b_sin = sine_cosine_at(moved + tl.zeros([1], tl.int64), b_turn)
    else:
        b_cos, b_sin = sine_cosine_at(tl.where(absolute != 0, o_target, moved), b_turn)
    return b_cos, b_sin


@triton.jit
def place_part(
    p_place,
    i_first,
    out_ptr,
    gain_ptr,
    b_turn,
    i_share,
    n_shares,
    n_heads,
    s_oh,
    s_or,
    s_gr,
    i_gain,
    n_start,
    n_column,
    B: tl.constexpr,
    P: tl.constexpr,
    PAIRS: tl.constexpr,
    OFFSET: tl.constexpr,
    DIM: tl.constexpr,
    STILL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    ROW: tl.constexpr,
    SOURCE: tl.constexpr,
    PACKING: tl.constexpr,
    GAIN: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    TILE: tl.constexpr,
):
    address = tl.load(p_place)
    n_tokens = tl.load(p_place + 1)
    scales = tl.load(p_place + 2)
    n_groups = tl.load(p_place + 3).to(tl.int32)
    n_group_rows = tl.load(p_place + 4).to(tl.int32)
    first = tl.load(p_place + 5)
    target = tl.load(p_place + 6)
    stop = first + tl.load(p_place + 7)
    moved = tl.load(p_place + 8)
    absolute = tl.load(p_place + 9)
    gain_row = tl.load(p_place + 10)
    n_half = (n_tokens * ROW if DIM < 2 else (n_tokens * DIM + 1) // 2).to(tl.int32)
    n_lower = (n_tokens + 1) // 2
    # int4 takes the rows of a block's lower halves, then those of its upper halves
    PASSES: tl.constexpr = 2 if PACKING == "int4" else 1
    for i_step in range(PASSES * (TILE // B)):
        # [B]
        o_row = i_first + (i_step // PASSES) * B + tl.arange(0, B)
        m_row = o_row < stop
        if PACKING == "int4":
            m_row = o_row < n_lower
            o_row = o_row + (i_step % PASSES) * n_lower
            m_row = m_row & (o_row >= first) & (o_row < stop)
        o_place = o_row - first
        o_target = target + o_place
        if PAIRS > 0:
            b_cos, b_sin = angles_of_rows(o_target, moved, absolute, b_turn, ABSOLUTE)
            b_gain_cos, b_gain_sin = b_cos, b_sin
            if GAIN == "turned":
                b_gain_cos, b_gain_sin = sine_cosine_at(o_target, b_turn)
        p_row = out_ptr + o_target[:, None] * s_or
        p_gain_row = gain_ptr + (gain_row + o_place)[:, None] * s_gr + i_gain
        # within a head 32 bits are enough
        o_row, m_row = o_row.to(tl.int32)[:, None], m_row[:, None]
        o_scale = (o_row // n_group_rows) * DIM
        for i_head in range(i_share, n_heads, n_shares):
            p_head = (address + n_tokens * (n_start + i_head * ROW)).to(tl.pointer_type(SOURCE))
            i_scale = 2 * n_groups * (n_column + tl.cast(i_head, tl.int64) * DIM)
            p_scale = scales.to(tl.pointer_type(tl.bfloat16)) + i_scale
            p_out = p_row + tl.cast(i_head, tl.int64) * s_oh
            p_gain = p_gain_row + i_head * DIM
            if PAIRS > 0:
                if INTERLEAVED:
                    place_neighbours(
                        p_head, p_scale, p_gain, p_out,
                        o_row, o_scale, m_row,
                        n_half, n_groups,
                        b_cos, b_sin, b_gain_cos, b_gain_sin,
                        B, P, PAIRS, OFFSET, DIM,
                        VECTOR, BYTES, PACKING, GAIN,
                    )  # fmt: skip
                else:
                    place_halves(
                        p_head, p_scale, p_gain, p_out,
                        o_row, o_scale, m_row,
                        n_half, n_groups,
                        b_cos, b_sin, b_gain_cos, b_gain_sin,
                        P, PAIRS, OFFSET, DIM,
                        VECTOR, BYTES, PACKING, GAIN,
                    )  # fmt: skip
            if STILL > 0:
                place_still(
                    p_head, p_scale, p_gain, p_out,
                    o_row, o_scale, m_row,
                    n_half, n_groups,
                    PAIRS, OFFSET, DIM, STILL,
                    VECTOR, BYTES, PACKING, GAIN,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "k_start", "k_column",
        "v_start", "v_column",
        "layer_bytes", "layer_columns",
        "n_layers", "n_places", "n_tiles", "n_shares",
    ]
)  # fmt: skip
def place_tiles(
    table_ptr,
    k_ptr,
    v_ptr,
    gain_ptr,
    kf_ptr,
    vf_ptr,
    s_kl,
    s_kh,
    s_kr,
    s_vl,
    s_vh,
    s_vr,
    s_gl,
    s_gr,
    n_k_heads,
    n_v_heads,
    k_start,
    k_column,
    v_start,
    v_column,
    layer_bytes,
    layer_columns,
    n_layers,
    n_places,
    n_tiles,
    n_shares,
    K_B: tl.constexpr,
    K_P: tl.constexpr,
    K_PAIRS: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_DIM: tl.constexpr,
    K_STILL: tl.constexpr,
    K_INTERLEAVED: tl.constexpr,
    K_VECTOR: tl.constexpr,
    K_BYTES: tl.constexpr,
    K_ROW: tl.constexpr,
    V_B: tl.constexpr,
    V_P: tl.constexpr,
    V_PAIRS: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_DIM: tl.constexpr,
    V_STILL: tl.constexpr,
    V_INTERLEAVED: tl.constexpr,
    V_VECTOR: tl.constexpr,
    V_BYTES: tl.constexpr,
    V_ROW: tl.constexpr,
    SOURCE: tl.constexpr,
    PACKING: tl.constexpr,
    GAIN: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    b_k_turn = tl.zeros([K_P], tl.int64)
    b_v_turn = tl.zeros([V_P], tl.int64)
    if K_PAIRS > 0:
        b_k_turn = fractions_of_turns(kf_ptr, K_P, K_PAIRS)
    if V_PAIRS > 0:
        b_v_turn = fractions_of_turns(vf_ptr, V_P, V_PAIRS)
    # layer after layer
    n_items = n_tiles * n_shares * 2
    for i_step in range(tl.program_id(0), n_layers * n_items, tl.num_programs(0)):
        i_layer = tl.cast(i_step // n_items, tl.int64)
        i_item = i_step % n_items
        i_share = (i_item // 2) % n_shares
        p_tile = table_ptr + n_places * FIELDS + i_item // (2 * n_shares) * 2
        p_place = table_ptr + tl.load(p_tile) * FIELDS
        i_first = tl.load(p_tile + 1)
        if i_item % 2 == 0:
            place_part(
                p_place, i_first,
                k_ptr + i_layer * s_kl,
                gain_ptr + i_layer * s_gl,
                b_k_turn,
                i_share, n_shares, n_k_heads,
                s_kh, s_kr, s_gr,
                0,
                k_start + i_layer * layer_bytes,
                k_column + i_layer * layer_columns,
                K_B, K_P, K_PAIRS, K_OFFSET, K_DIM, K_STILL,
                K_INTERLEAVED, K_VECTOR, K_BYTES, K_ROW,
                SOURCE, PACKING, GAIN, ABSOLUTE, TILE,
            )  # fmt: skip
        else:
            place_part(
                p_place, i_first,
                v_ptr + i_layer * s_vl,
                gain_ptr + i_layer * s_gl,
                b_v_turn,
                i_share, n_shares, n_v_heads,
                s_vh, s_vr, s_gr,
                n_k_heads * K_DIM,
                v_start + i_layer * layer_bytes,
                v_column + i_layer * layer_columns,
                V_B, V_P, V_PAIRS, V_OFFSET, V_DIM, V_STILL,
                V_INTERLEAVED, V_VECTOR, V_BYTES, V_ROW,
                SOURCE, PACKING, GAIN, ABSOLUTE, TILE,
            )  # fmt: skip
