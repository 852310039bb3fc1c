"""Defines the Triton kernels of one decoding step: few, so that a small model does not wait for launches.

A layer of a Llama is five of them: norm and projection of queries, keys and values; attention, which also turns,
stores and reads the cache; output projection onto the residual; norm, gate and activation; and the
projection back. Norm weights are folded into the projections behind them (see `weights`), so a norm
costs one sum of squares. Shapes: M rows of the batch, E hidden, N outputs, V words, D of a head.

Every kernel does the same for several nodes, each with weights of its own and B rows in every buffer: its third
program id is the node. Weights of a node lie behind those of the node before (`weights.Stack`). Slots and starts of
prompts are numbered through all nodes. With MANY, programs of rows that a node does not have end at once.
"""

import triton
import triton.language as tl


@triton.jit
def _gelu(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2 * inner)  # the tanh form: 0.5 (1 + tanh(z)) is sigmoid(2 z)


@triton.jit
def linear(
    going_Z, x_ME, squares_MS, weight_NE, bias_N, out_MN, low_MN, M, N, E, wide, S, B, stride, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    EVEN: tl.constexpr, MANY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """out = activation(rms_norm(x) weight + bias), or added to out; gated, the weight holds the gate, then the rest.

    Rows of out are `wide`. What is added to is the residual stream: it is also written in low precision, with sums of
    its squares
    by stretches, so that the norm before the next product costs next to nothing there.
    """
    node = tl.program_id(2).to(tl.int64)
    if MANY and tl.program_id(1) * BM >= tl.load(going_Z + node):
        return
    x_ME += node * B * E
    squares_MS += node * B * stride
    weight_NE += node * (2 * N if GATED else N) * E
    out_MN += node * B * wide
    low_MN += node * B * wide
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, E, BK):
        inner = start + tl.arange(0, BK)
        inside = rows[:, None] < M
        there = columns[:, None] < N
        if not EVEN:
            inside &= inner[None, :] < E
            there &= inner[None, :] < E
        x = tl.load(x_ME + rows[:, None] * E + inner, mask=inside, other=0.0)
        weight = tl.load(weight_NE + columns[:, None] * E + inner, mask=there, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if GATED:
            second = tl.load(weight_NE + (columns[:, None] + N) * E + inner, mask=there, other=0.0)
            up = tl.dot(x, tl.trans(second), up, input_precision="ieee")
    if NORM:
        part = tl.arange(0, BS)
        inside = (rows[:, None] < M) & (part[None, :] < S)
        squares = tl.sum(tl.load(squares_MS + rows[:, None] * stride + part, mask=inside, other=0.0), 1)
        scale = tl.rsqrt(squares / E + eps)[:, None]
        acc *= scale
        up *= scale
    if BIAS:
        acc += tl.load(bias_N + node * N + columns, mask=columns < N, other=0.0)
    if ACTIVATION == "silu":
        acc = acc * tl.sigmoid(acc)
    if ACTIVATION == "gelu":
        acc = _gelu(acc)
    if GATED:
        acc *= up
    place = rows[:, None] * wide + columns
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    if ADD:
        acc += tl.load(out_MN + place, mask=inside, other=0.0)
        tl.store(low_MN + place, acc, mask=inside)
        tl.store(squares_MS + rows * stride + tl.program_id(0), tl.sum(acc * acc, 1), mask=rows < M)
    tl.store(out_MN + place, acc, mask=inside)


@triton.jit
def norm(
    going_Z, x_ME, weight_E, bias_E, out_ME, low_ME, squares_MS, E, B, stride, eps,
    CENTRED: tl.constexpr, ADD: tl.constexpr, MANY: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Layer norm (centred) or RMS norm of a row where it cannot be folded into a product; or added to the stream."""
    node = tl.program_id(2)
    if MANY and tl.program_id(0) >= tl.load(going_Z + node):
        return
    row = node * B + tl.program_id(0)
    index = tl.arange(0, BE)
    inside = index < E
    x = tl.load(x_ME + row * E + index, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / E, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    x *= tl.load(weight_E + node * E + index, mask=inside, other=0.0)
    if CENTRED:
        x += tl.load(bias_E + node * E + index, mask=inside, other=0.0)
    if ADD:
        x += tl.load(out_ME + row * E + index, mask=inside, other=0.0)
        tl.store(out_ME + row * E + index, x, mask=inside)
        tl.store(squares_MS + row * stride, tl.sum(x * x, 0))
    tl.store(low_ME + row * E + index, x, mask=inside)


@triton.jit
def embed(
    going_Z, slots_M, tokens_BT, lengths_B, prompt_lengths_B, words_Z, places_Z, out_ME, low_ME,
    squares_MS, T, E, B, stride, scale, PLACES: tl.constexpr, MANY: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The last token of every sequence as a vector, with its place where the model has learned places.

    Vectors of words and places are the trainer's own, of which there is a table of addresses.
    """
    node = tl.program_id(2)
    if MANY and tl.program_id(0) >= tl.load(going_Z + node):
        return
    row = node * B + tl.program_id(0)
    slot = tl.load(slots_M + row)
    length = tl.load(lengths_B + slot)
    token = tl.load(tokens_BT + slot * T + length - 1)
    index = tl.arange(0, BE)
    inside = index < E
    words_VE = tl.multiple_of(tl.load(words_Z + node).to(tl.pointer_type(tl.float32)), 16)
    x = tl.load(words_VE + token * E + index, mask=inside, other=0.0) * scale
    if PLACES:
        places_LE = tl.multiple_of(tl.load(places_Z + node).to(tl.pointer_type(tl.float32)), 16)
        place = tl.load(prompt_lengths_B + slot) + length - 1
        x += tl.load(places_LE + place * E + index, mask=inside, other=0.0)
    tl.store(out_ME + row * E + index, x, mask=inside)
    tl.store(low_ME + row * E + index, x, mask=inside)
    tl.store(squares_MS + row * stride, tl.sum(x * x, 0))


@triton.jit
def _turned(
    start, index, other, sign, inside, norm_D, cos_LD, sin_LD, place, D, eps,
    NORM: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Heads [.., D] loaded from `start`, normalised and rotated as the model wants it."""
    x = tl.load(start + index, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= scale * tl.load(norm_D + index, mask=index < D, other=0.0)
    if TURN:
        y = tl.load(start + other, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            y *= scale * tl.load(norm_D + other, mask=index < D, other=0.0)
        cos = tl.load(cos_LD + place * D + index, mask=index < D, other=0.0)
        sin = tl.load(sin_LD + place * D + index, mask=index < D, other=0.0)
        x = x * cos + sign * y * sin
    return x


@triton.jit
def _attended(q, keys, values, seen, top, total, acc, scale):
    """One block of keys into the running softmax."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(seen, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return new_top, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def attend(
    going_Z, qkv_MN, slots_M, lengths_B, prompt_starts_B, prompt_lengths_B, prompt_keys_NHD, prompt_values_NHD,
    keys_BHTD, values_BHTD, q_norm_D, k_norm_D, cos_LD, sin_LD, out_MN, M, T, H, KH, B, scale, eps, window,
    NORM: tl.constexpr, TURN: tl.constexpr, WINDOW: tl.constexpr, MANY: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one new token over its prompt, which completions share, and what it has written itself.

    One program does the query heads of one key head, of ROWS sequences: neighbours, which mostly have the same prompt,
    read it together. What sequences that have ended compute goes nowhere.
    """
    node = tl.program_id(2)
    first_row = tl.program_id(0) * ROWS
    if MANY:
        M = tl.minimum(M, tl.load(going_Z + node))
        if first_row >= M:
            return
    head = tl.program_id(1)
    group = tl.arange(0, BG)[:, None]  # queries: GROUP heads of a row, then those of the next
    there = (group < ROWS * GROUP) & (first_row + group // GROUP < M)
    row = node * B + tl.minimum(first_row + group // GROUP, M - 1)
    slot = tl.load(slots_M + row)
    written = tl.load(lengths_B + slot) - 1  # before this token
    prompt_length = tl.load(prompt_lengths_B + slot)
    prompt_start = tl.load(prompt_starts_B + slot)
    place = prompt_length + written

    index = tl.arange(0, BD)[None, :]
    other = (index + D // 2) % D
    sign = tl.where(index < D // 2, -1.0, 1.0)
    width = (H + 2 * KH) * D
    inside = there & (index < D)
    q_start = qkv_MN + row * width + (head * GROUP + group % GROUP) * D
    k_start = qkv_MN + row * width + (H + head) * D
    v_start = qkv_MN + row * width + (H + KH + head) * D
    if NORM:
        q_norm_D += node * D
        k_norm_D += node * D
    q = _turned(q_start, index, other, sign, inside, q_norm_D, cos_LD, sin_LD, place, D, eps, NORM, TURN)
    key = _turned(k_start, index, other, sign, inside, k_norm_D, cos_LD, sin_LD, place, D, eps, NORM, TURN)
    kind = keys_BHTD.dtype.element_ty
    key = key.to(kind)
    value = tl.load(v_start + index, mask=inside, other=0.0).to(kind)
    new = ((slot.to(tl.int64) * KH + head) * T + written) * D + index
    tl.store(keys_BHTD + new, key, mask=inside & (group % GROUP == 0))
    tl.store(values_BHTD + new, value, mask=inside & (group % GROUP == 0))

    q = q.to(kind)
    top = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
    total = tl.full((BG,), 1.0, tl.float32)
    acc = tl.zeros((BG, BD), tl.float32) + value.to(tl.float32)
    column = tl.arange(0, BLOCK)
    first = tl.zeros((BG, 1), tl.int32)
    if WINDOW:
        first = tl.maximum(place - window + 1, 0)
    before = -1
    for number in range(ROWS):
        one = tl.load(slots_M + node * B + tl.minimum(first_row + number, M - 1))
        prompt = tl.load(prompt_starts_B + one)
        length = tl.load(prompt_lengths_B + one)
        if prompt != before:
            same = there & (prompt_start == prompt)
            begin = tl.min(tl.where(same, first, 2147483647)) if WINDOW else 0
            prompt_base = (prompt.to(tl.int64) * KH + head) * D
            for start in range(begin // BLOCK * BLOCK, length, BLOCK):
                at = start + column
                lie = prompt_base + at[:, None] * KH * D + index
                mask = (at[:, None] < length) & (index < D)
                keys = tl.load(prompt_keys_NHD + lie, mask=mask, other=0.0)
                values = tl.load(prompt_values_NHD + lie, mask=mask, other=0.0)
                seen = same & (at[None, :] < length)
                if WINDOW:
                    seen &= at[None, :] >= first
                top, total, acc = _attended(q, keys, values, seen, top, total, acc, scale)
        before = prompt
    # All rows in one loop, so that the first keys of a row are on their way while the row before is computed.
    first = tl.maximum(first - prompt_length, 0)
    begin = tl.min(tl.where(there, first, 2147483647)) // BLOCK if WINDOW else 0
    blocks = tl.cdiv(tl.max(tl.where(there, written, 0)), BLOCK) - begin
    for step in range(ROWS * blocks):
        number = step // blocks
        one = tl.load(slots_M + node * B + tl.minimum(first_row + number, M - 1))
        length = tl.load(lengths_B + one) - 1
        at = (begin + step % blocks) * BLOCK + column
        lie = (one.to(tl.int64) * KH + head) * T * D + at[:, None] * D + index
        mask = (at[:, None] < length) & (index < D)
        keys = tl.load(keys_BHTD + lie, mask=mask, other=0.0)
        values = tl.load(values_BHTD + lie, mask=mask, other=0.0)
        seen = there & (group // GROUP == number) & (at[None, :] < length)
        if WINDOW:
            seen &= at[None, :] >= first
        top, total, acc = _attended(q, keys, values, seen, top, total, acc, scale)
    out = out_MN + row * H * D + (head * GROUP + group % GROUP) * D + index
    tl.store(out, acc / total[:, None], mask=inside)


@triton.jit
def survey(
    going_Z, logits_MV, lowest_M, where_MS, top_MS, sum_MS, kept_MS, V, wide, S, B, temperature,
    GREEDY: tl.constexpr, CUT: tl.constexpr, MANY: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One stretch of the vocabulary: its highest logit, what it adds to the sum, and how much of that may be drawn."""
    node = tl.program_id(2)
    if MANY and tl.program_id(0) >= tl.load(going_Z + node):
        return
    row = node * B + tl.program_id(0)
    place = row * S + tl.program_id(1)
    words = tl.program_id(1) * BV + tl.arange(0, BV)
    raw = tl.load(logits_MV + row.to(tl.int64) * wide + words, mask=words < V, other=-float("inf"))
    heated = raw * (1.4426950408889634 / temperature)  # powers of two are faster than those of e
    top = tl.max(heated, 0)
    weight = tl.exp2(heated - top)
    tl.store(top_MS + place, top)
    tl.store(sum_MS + place, tl.sum(weight, 0))
    if GREEDY:
        tl.store(where_MS + place, tl.min(tl.where(heated == top, words, 2147483647), 0))
    if CUT:
        tl.store(kept_MS + place, tl.sum(tl.where(raw >= tl.load(lowest_M + row), weight, 0.0), 0))


@triton.jit
def _drawn(weight, uniform, B: tl.constexpr):
    """A number below B, each as likely as its weight says."""
    heap = tl.cumsum(weight, 0)
    number = tl.arange(0, B)
    last = tl.max(tl.where(weight > 0, number, 0), 0)  # where the aim is rounded up
    return tl.minimum(tl.min(tl.where(heap > uniform * tl.max(heap, 0), number, B), 0), last)


@triton.jit
def pick(
    going_Z, logits_MV, slots_M, lowest_M, seed_Z, where_MS, top_MS, sum_MS, kept_MS, eos, limit_1, tokens_BT,
    logprobs_BT, lengths_B, done_B, V, wide, T, S, B, EOS, temperature, GREEDY: tl.constexpr, CUT: tl.constexpr,
    MANY: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BEOS: tl.constexpr,
):  # fmt: skip
    """The next token of a sequence and its log-probability, from the surveys; ends it at an end token or the limit.

    First a stretch is drawn, then a word of it, with two numbers that depend on seed, sequence and step alone, not on
    who
    else is in the batch.
    """
    node = tl.program_id(2)
    if MANY and tl.program_id(0) >= tl.load(going_Z + node):
        return
    row = node * B + tl.program_id(0)
    slot = tl.load(slots_M + row)
    if tl.load(done_B + slot) != 0:
        return
    step = tl.load(lengths_B + slot)
    part = tl.arange(0, BS)
    inside = part < S
    tops = tl.load(top_MS + row * S + part, mask=inside, other=-float("inf"))
    sums = tl.load(sum_MS + row * S + part, mask=inside, other=0.0)
    top = tl.max(tops, 0)
    scale = tl.exp2(tops - top)
    total = tl.log2(tl.sum(sums * scale, 0)) + top
    heat = 1.4426950408889634 / temperature
    logits = logits_MV + row.to(tl.int64) * wide
    if GREEDY:
        token = tl.load(where_MS + row * S + tl.argmax(tops, 0))
    else:
        if CUT:
            sums = tl.load(kept_MS + row * S + part, mask=inside, other=0.0)
        sequence = (slot - node * (B + 1)).to(tl.int64)  # its number in its node
        one, another, _, _ = tl.rand4x(tl.load(seed_Z + node) + (sequence << 24), step)
        stretch = _drawn(sums * scale, one, BS)
        words = stretch * BV + tl.arange(0, BV)
        raw = tl.load(logits + words, mask=words < V, other=-float("inf"))
        weight = tl.exp2(raw * heat - tl.load(top_MS + row * S + stretch))
        if CUT:
            weight = tl.where(raw >= tl.load(lowest_M + row), weight, 0.0)
        token = stretch * BV + _drawn(weight, another, BV)
    tl.store(tokens_BT + slot * T + step, token)
    tl.store(logprobs_BT + slot * T + step, (tl.load(logits + token) * heat - total) * 0.6931471805599453)
    tl.store(lengths_B + slot, step + 1)
    number = tl.arange(0, BEOS)
    ends = tl.load(eos + number, mask=number < EOS, other=-1)
    ended = tl.max((ends == token).to(tl.int32), 0)
    last = (step + 1 >= tl.load(limit_1)).to(tl.int32)
    tl.store(done_B + slot, tl.maximum(ended, last))


@triton.jit
def transpose(from_RC, to_CR, R, C, B: tl.constexpr):
    """A square of a matrix, the other way round."""
    row, column = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    there = (row[:, None] < R) & (column[None, :] < C)
    square = tl.load(from_RC + row[:, None] * C + column[None, :], mask=there)
    tl.store(to_CR + column[:, None] * R + row[None, :], tl.trans(square), mask=tl.trans(there))
