"""Defines the Triton kernels of one decoding step: few, so that launches do not bound a small model.

A layer of a Llama is five kernels: norm and projection of queries, keys and values; attention, which also rotates,
stores and reads the cache; output projection onto the residual; norm, gate and activation; down projection. Norm
weights are folded into the next projection (see `weights`), so a norm costs one sum of squares. Shapes: M rows of the
batch, E hidden, N outputs, V words, D of a head.

Every kernel serves several nodes, each with its own weights and B rows in every buffer; the third program id is the
node. The weights of a node follow those of the previous node (`weights.Stack`). Slots and prompt starts are numbered
through all nodes. With MANY, programs for rows that a node does not have end at once.
"""

import triton
import triton.language as tl


@triton.jit
def _gelu(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2 * inner)  # the tanh form: 0.5 (1 + tanh(z)) is sigmoid(2 z)


@triton.jit
def linear(
    active_Z, x_ME, squares_MS, weight_NE, bias_N, out_MN, low_MN, M, N, E, out_stride, S, B, stride, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    EVEN: tl.constexpr, MANY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Compute out = activation(rms_norm(x) weight + bias), or add it to out.

    Gated, the weight holds the gate before the rest. `out_stride` is the length of a row of out. Only the residual
    stream is added to: it is also written in low precision, with partial sums of its squares for the next norm.
    """
    node = tl.program_id(2).to(tl.int64)
    if MANY and tl.program_id(1) * BM >= tl.load(active_Z + node):
        return
    x_ME += node * B * E
    squares_MS += node * B * stride
    weight_NE += node * (2 * N if GATED else N) * E
    out_MN += node * B * out_stride
    low_MN += node * B * out_stride
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, E, BK):
        inner = start + tl.arange(0, BK)
        inside = rows[:, None] < M
        valid = columns[:, None] < N
        if not EVEN:
            inside &= inner[None, :] < E
            valid &= inner[None, :] < E
        x = tl.load(x_ME + rows[:, None] * E + inner, mask=inside, other=0.0)
        weight = tl.load(weight_NE + columns[:, None] * E + inner, mask=valid, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if GATED:
            second = tl.load(weight_NE + (columns[:, None] + N) * E + inner, mask=valid, other=0.0)
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
    position = rows[:, None] * out_stride + columns
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    if ADD:
        acc += tl.load(out_MN + position, mask=inside, other=0.0)
        tl.store(low_MN + position, acc, mask=inside)
        tl.store(squares_MS + rows * stride + tl.program_id(0), tl.sum(acc * acc, 1), mask=rows < M)
    tl.store(out_MN + position, acc, mask=inside)


@triton.jit
def norm(
    active_Z, x_ME, weight_E, bias_E, out_ME, low_ME, squares_MS, E, B, stride, eps,
    CENTRED: tl.constexpr, ADD: tl.constexpr, MANY: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Compute a layer norm (centred) or RMS norm that cannot be folded into a product, or add it to the stream."""
    node = tl.program_id(2)
    if MANY and tl.program_id(0) >= tl.load(active_Z + node):
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
    active_Z, slots_M, tokens_BT, lengths_B, prompt_lengths_B, embeddings_Z, positions_Z, out_ME, low_ME,
    squares_MS, T, E, B, stride, scale, POSITIONS: tl.constexpr, MANY: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Embed the last token of every sequence, and its position where the model has position embeddings.

    The embeddings are the trainer's own, through a table of addresses.
    """
    node = tl.program_id(2)
    if MANY and tl.program_id(0) >= tl.load(active_Z + node):
        return
    row = node * B + tl.program_id(0)
    slot = tl.load(slots_M + row)
    length = tl.load(lengths_B + slot)
    token = tl.load(tokens_BT + slot * T + length - 1)
    index = tl.arange(0, BE)
    inside = index < E
    embeddings_VE = tl.multiple_of(tl.load(embeddings_Z + node).to(tl.pointer_type(tl.float32)), 16)
    x = tl.load(embeddings_VE + token * E + index, mask=inside, other=0.0) * scale
    if POSITIONS:
        positions_LE = tl.multiple_of(tl.load(positions_Z + node).to(tl.pointer_type(tl.float32)), 16)
        position = tl.load(prompt_lengths_B + slot) + length - 1
        x += tl.load(positions_LE + position * E + index, mask=inside, other=0.0)
    tl.store(out_ME + row * E + index, x, mask=inside)
    tl.store(low_ME + row * E + index, x, mask=inside)
    tl.store(squares_MS + row * stride, tl.sum(x * x, 0))


@triton.jit
def _rotated_heads(
    start, index, other, sign, inside, norm_D, cos_LD, sin_LD, position, D, eps,
    NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Load heads [.., D] from `start`, normalised and rotated as the model requires."""
    x = tl.load(start + index, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= scale * tl.load(norm_D + index, mask=index < D, other=0.0)
    if ROTATE:
        y = tl.load(start + other, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            y *= scale * tl.load(norm_D + other, mask=index < D, other=0.0)
        cos = tl.load(cos_LD + position * D + index, mask=index < D, other=0.0)
        sin = tl.load(sin_LD + position * D + index, mask=index < D, other=0.0)
        x = x * cos + sign * y * sin
    return x


@triton.jit
def _softmax_step(q, keys, values, seen, top, total, acc, scale):
    """Add one block of keys to the running softmax."""
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
    active_Z, qkv_MN, slots_M, lengths_B, prompt_starts_B, prompt_lengths_B, prompt_keys_NHD, prompt_values_NHD,
    keys_BHTD, values_BHTD, q_norm_D, k_norm_D, cos_LD, sin_LD, out_MN, M, T, H, KH, B, scale, eps, window,
    NORM: tl.constexpr, ROTATE: tl.constexpr, WINDOW: tl.constexpr, MANY: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute attention of one new token over its prompt, which completions share, and its completion.

    One program computes the query heads of one key head for ROWS adjacent sequences, which mostly read the same
    prompt. Results of sequences that have ended are discarded.
    """
    node = tl.program_id(2)
    first_row = tl.program_id(0) * ROWS
    if MANY:
        M = tl.minimum(M, tl.load(active_Z + node))
        if first_row >= M:
            return
    head = tl.program_id(1)
    group = tl.arange(0, BG)[:, None]  # queries: GROUP heads of a row, then those of the next
    valid = (group < ROWS * GROUP) & (first_row + group // GROUP < M)
    row = node * B + tl.minimum(first_row + group // GROUP, M - 1)
    slot = tl.load(slots_M + row)
    written = tl.load(lengths_B + slot) - 1  # before this token
    prompt_length = tl.load(prompt_lengths_B + slot)
    prompt_start = tl.load(prompt_starts_B + slot)
    position = prompt_length + written

    index = tl.arange(0, BD)[None, :]
    other = (index + D // 2) % D
    sign = tl.where(index < D // 2, -1.0, 1.0)
    width = (H + 2 * KH) * D
    inside = valid & (index < D)
    q_start = qkv_MN + row * width + (head * GROUP + group % GROUP) * D
    k_start = qkv_MN + row * width + (H + head) * D
    v_start = qkv_MN + row * width + (H + KH + head) * D
    if NORM:
        q_norm_D += node * D
        k_norm_D += node * D
    q = _rotated_heads(q_start, index, other, sign, inside, q_norm_D, cos_LD, sin_LD, position, D, eps, NORM, ROTATE)
    key = _rotated_heads(k_start, index, other, sign, inside, k_norm_D, cos_LD, sin_LD, position, D, eps, NORM, ROTATE)
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
        first = tl.maximum(position - window + 1, 0)
    before = -1
    for number in range(ROWS):
        one = tl.load(slots_M + node * B + tl.minimum(first_row + number, M - 1))
        prompt = tl.load(prompt_starts_B + one)
        length = tl.load(prompt_lengths_B + one)
        if prompt != before:
            same = valid & (prompt_start == prompt)
            begin = tl.min(tl.where(same, first, 2147483647)) if WINDOW else 0
            prompt_base = (prompt.to(tl.int64) * KH + head) * D
            for start in range(begin // BLOCK * BLOCK, length, BLOCK):
                at = start + column
                offset = prompt_base + at[:, None] * KH * D + index
                mask = (at[:, None] < length) & (index < D)
                keys = tl.load(prompt_keys_NHD + offset, mask=mask, other=0.0)
                values = tl.load(prompt_values_NHD + offset, mask=mask, other=0.0)
                seen = same & (at[None, :] < length)
                if WINDOW:
                    seen &= at[None, :] >= first
                top, total, acc = _softmax_step(q, keys, values, seen, top, total, acc, scale)
        before = prompt
    # All rows in one loop, so that the first keys of a row are prefetched while the previous row is computed.
    first = tl.maximum(first - prompt_length, 0)
    begin = tl.min(tl.where(valid, first, 2147483647)) // BLOCK if WINDOW else 0
    blocks = tl.cdiv(tl.max(tl.where(valid, written, 0)), BLOCK) - begin
    for step in range(ROWS * blocks):
        number = step // blocks
        one = tl.load(slots_M + node * B + tl.minimum(first_row + number, M - 1))
        length = tl.load(lengths_B + one) - 1
        at = (begin + step % blocks) * BLOCK + column
        offset = (one.to(tl.int64) * KH + head) * T * D + at[:, None] * D + index
        mask = (at[:, None] < length) & (index < D)
        keys = tl.load(keys_BHTD + offset, mask=mask, other=0.0)
        values = tl.load(values_BHTD + offset, mask=mask, other=0.0)
        seen = valid & (group // GROUP == number) & (at[None, :] < length)
        if WINDOW:
            seen &= at[None, :] >= first
        top, total, acc = _softmax_step(q, keys, values, seen, top, total, acc, scale)
    out = out_MN + row * H * D + (head * GROUP + group % GROUP) * D + index
    tl.store(out, acc / total[:, None], mask=inside)


@triton.jit
def reduce_logits(
    active_Z, logits_MV, lowest_M, argmax_MS, top_MS, sum_MS, kept_MS, V, out_stride, S, B, temperature,
    GREEDY: tl.constexpr, CUT: tl.constexpr, MANY: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Reduce one block of the vocabulary: its highest logit, its part of the softmax sum, and of the kept sum."""
    node = tl.program_id(2)
    if MANY and tl.program_id(0) >= tl.load(active_Z + node):
        return
    row = node * B + tl.program_id(0)
    position = row * S + tl.program_id(1)
    words = tl.program_id(1) * BV + tl.arange(0, BV)
    raw = tl.load(logits_MV + row.to(tl.int64) * out_stride + words, mask=words < V, other=-float("inf"))
    scaled = raw * (1.4426950408889634 / temperature)  # exp2 is faster than exp
    top = tl.max(scaled, 0)
    weight = tl.exp2(scaled - top)
    tl.store(top_MS + position, top)
    tl.store(sum_MS + position, tl.sum(weight, 0))
    if GREEDY:
        tl.store(argmax_MS + position, tl.min(tl.where(scaled == top, words, 2147483647), 0))
    if CUT:
        tl.store(kept_MS + position, tl.sum(tl.where(raw >= tl.load(lowest_M + row), weight, 0.0), 0))


@triton.jit
def _draw(weight, uniform, B: tl.constexpr):
    """Draw a number below B with probabilities proportional to the weights."""
    cdf = tl.cumsum(weight, 0)
    number = tl.arange(0, B)
    last = tl.max(tl.where(weight > 0, number, 0), 0)  # where the target is rounded up
    return tl.minimum(tl.min(tl.where(cdf > uniform * tl.max(cdf, 0), number, B), 0), last)


@triton.jit
def draw_token(
    active_Z, logits_MV, slots_M, lowest_M, seed_Z, argmax_MS, top_MS, sum_MS, kept_MS, eos, limit_1, tokens_BT,
    logprobs_BT, lengths_B, done_B, V, out_stride, T, S, B, EOS, temperature, GREEDY: tl.constexpr, CUT: tl.constexpr,
    MANY: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BEOS: tl.constexpr,
):  # fmt: skip
    """Draw the next token of a sequence and its log-probability; end it at an end token or the limit.

    Two random numbers choose a block and a token in it. They depend on seed, sequence and step alone, and not on the
    rest of the batch.
    """
    node = tl.program_id(2)
    if MANY and tl.program_id(0) >= tl.load(active_Z + node):
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
    inverse_temperature = 1.4426950408889634 / temperature
    logits = logits_MV + row.to(tl.int64) * out_stride
    if GREEDY:
        token = tl.load(argmax_MS + row * S + tl.argmax(tops, 0))
    else:
        if CUT:
            sums = tl.load(kept_MS + row * S + part, mask=inside, other=0.0)
        sequence = (slot - node * (B + 1)).to(tl.int64)  # its number within the node
        one, another, _, _ = tl.rand4x(tl.load(seed_Z + node) + (sequence << 24), step)
        block = _draw(sums * scale, one, BS)
        words = block * BV + tl.arange(0, BV)
        raw = tl.load(logits + words, mask=words < V, other=-float("inf"))
        weight = tl.exp2(raw * inverse_temperature - tl.load(top_MS + row * S + block))
        if CUT:
            weight = tl.where(raw >= tl.load(lowest_M + row), weight, 0.0)
        token = block * BV + _draw(weight, another, BV)
    tl.store(tokens_BT + slot * T + step, token)
    tl.store(
        logprobs_BT + slot * T + step, (tl.load(logits + token) * inverse_temperature - total) * 0.6931471805599453
    )
    tl.store(lengths_B + slot, step + 1)
    number = tl.arange(0, BEOS)
    ends = tl.load(eos + number, mask=number < EOS, other=-1)
    ended = tl.max((ends == token).to(tl.int32), 0)
    last = (step + 1 >= tl.load(limit_1)).to(tl.int32)
    tl.store(done_B + slot, tl.maximum(ended, last))


@triton.jit
def transpose(from_RC, to_CR, R, C, B: tl.constexpr):
    """Transpose one tile of a matrix."""
    row, column = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    valid = (row[:, None] < R) & (column[None, :] < C)
    square = tl.load(from_RC + row[:, None] * C + column[None, :], mask=valid)
    tl.store(to_CR + column[:, None] * R + row[None, :], tl.trans(square), mask=tl.trans(valid))
