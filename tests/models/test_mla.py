from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.models.deepseek import DeepseekConfig, Mixture
from jaxpaged.models.mla import HeadRows, LatentAttention, LatentConfig, head_matmul
from jaxpaged.models.rope import RopeConfig, rope_table
from jaxpaged.models.sources import Tensor

F32 = jnp.dtype(jnp.float32)
HEADS, HIDDEN, LATENT, NOPE, ROTATED, VALUE = 3, 32, 24, 10, 8, 12
COMMON: dict[str, Any] = {
    "architecture": "DeepseekV3ForCausalLM",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_heads": HEADS,
    "num_kv_heads": HEADS,
    "head_dim": ROTATED,
    "norm_eps": 1e-3,
    "rope": RopeConfig(100.0),
    "max_position": 64,
    "tie_embeddings": False,
    "kv_lora_rank": LATENT,
    "nope_dim": NOPE,
    "value_dim": VALUE,
}


def rows(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def read_checkpoint(module: nnx.Module, sources: dict[str, Any]) -> dict[str, np.ndarray]:
    """Fill the module from random tensors, one per name; returns them."""
    tensors: dict[str, np.ndarray] = {}
    for source in sources.values():
        for tensor in source.tensors:
            shape = tensor.stored_shape
            tensors.setdefault(tensor.name, rows(len(tensors), *shape) * 0.3)
    for path, source in sources.items():
        owner: Any = module
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        parameter = getattr(owner, name)
        read = source.read(lambda name, index: tensors[name][index], parameter[...].shape, ())
        assert read.shape == parameter[...].shape, path
        parameter[...] = jnp.asarray(read)
    return tensors


# ---------------------------------------------------------------- a matrix for each head


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [(1, 64, 128), (1, 512, 128), (4, 16, 32), (3, 24, 40), (16, 128, 512), (16, 512, 128)]
)
def test_a_token_has_the_same_bits_in_any_batch(dtype: str, shape: tuple[int, ...]) -> None:
    heads, inner, outer = shape
    x, run = jnp.asarray(rows(0, 264, heads, inner)), jax.jit(head_matmul)
    weight = jnp.asarray(rows(1, heads, outer, inner), dtype)
    whole = np.asarray(run(x, weight))
    rounded = np.asarray(x.astype(dtype), np.float64)
    expected = np.einsum("tni,noi->tno", rounded, np.asarray(weight, np.float64))
    np.testing.assert_allclose(whole, expected, atol=1e-3)
    for count in (8, 16, 40, 64):
        for first in (0, 264 - count):
            part = np.asarray(run(x[first : first + count], weight))
            assert part.tobytes() == whole[first : first + count].tobytes(), (count, first)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("rank", [None, 20])
def test_equal_to_attention_with_keys_and_values_written_out(
    rank: int | None, interleave: bool
) -> None:
    """Nothing absorbed, nothing reordered: the definition, in float64."""
    config = LatentConfig(
        **COMMON, q_lora_rank=rank, attention_bias=True, rope_interleave=interleave
    )
    layer = LatentAttention(config, F32)
    tensors = read_checkpoint(layer, LatentAttention.sources(config, ""))
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    count = 9
    x = rows(99, count, HIDDEN)
    table = rope_table(config.rope, ROTATED, jnp.arange(count), jnp.zeros(count, jnp.int32))

    def dense(q: Any, k: Any, v: Any, layer_kv: Any, meta: Any, **given: Any) -> Any:
        assert v is None and k.shape == (count, 1, LATENT + ROTATED) and given["window"] is None
        assert q.shape == (count, HEADS, LATENT + ROTATED) and given["value_dim"] == LATENT
        scores = jnp.einsum("tnh,sh->nts", q, k[:, 0]) * given["scale"]
        scores = jnp.where(jnp.tril(jnp.ones((count, count), bool))[None], scores, -jnp.inf)
        return jnp.einsum("nts,sh->tnh", jax.nn.softmax(scores), k[:, 0, :LATENT]), layer_kv

    got = layer(jnp.asarray(x), table, (jnp.zeros(1),), None, dense)[0]

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x: Any) -> Any:
        angle = np.arange(count)[:, None] * 100.0 ** (-np.arange(0, ROTATED, 2) / ROTATED)
        angle = angle.reshape(count, *[1] * (x.ndim - 2), -1)
        half = ROTATED // 2
        pair = (x[..., 0::2], x[..., 1::2]) if interleave else (x[..., :half], x[..., half:])
        point = (pair[0] + 1j * pair[1]) * np.exp(1j * angle)
        return np.concatenate([point.real, point.imag], -1)

    if rank is None:
        q = x @ w["q_proj.weight"].T
    else:
        low = x @ w["q_a_proj.weight"].T + w["q_a_proj.bias"]
        q = norm(low, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    q = q.reshape(count, HEADS, NOPE + ROTATED)
    kv = x @ w["kv_a_proj_with_mqa.weight"].T + w["kv_a_proj_with_mqa.bias"]
    latent = norm(kv[:, :LATENT], w["kv_a_layernorm.weight"])
    pair = (latent @ w["kv_b_proj.weight"].T).reshape(count, HEADS, NOPE + VALUE)
    scores = np.einsum("tnh,snh->nts", q[..., :NOPE], pair[..., :NOPE])
    scores += np.einsum("tnh,sh->nts", turned(q[..., NOPE:]), turned(kv[:, LATENT:]))
    scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
    weights = np.exp(scores / np.sqrt(NOPE + ROTATED))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("nts,snh->tnh", weights, pair[..., NOPE:]).reshape(count, -1)
    expected = mixed @ w["o_proj.weight"].T + w["o_proj.bias"]
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-4)


# ---------------------------------------------------------------- where the weights come from


def test_a_device_reads_the_rows_of_its_heads() -> None:
    tensor = rows(0, 4 * 5, 3)
    asked: list[Any] = []

    def read(name: str, index: tuple[slice, ...]) -> Any:
        asked.append(index)
        return tensor[index]

    source = HeadRows(tensors=(Tensor("t", (20, 3)),), rows=(3, 0), stored=5)
    expected = tensor.reshape(4, 5, 3)[:, [3, 0]]
    assert (source.read(read, (4, 2, 3), ()) == expected).all()
    part = source.read(read, (4, 2, 3), (slice(1, 3), slice(None), slice(None)))
    assert (part == expected[1:3]).all()
    assert asked[-1] == (slice(5, 15),)
    assert (source.read(read, (4, 2, 3), (slice(0, 4), slice(1, 2))) == expected[:, 1:2]).all()

    turned = HeadRows(tensors=(Tensor("t", (20, 3)),), rows=(3, 0), stored=5, transposed=True)
    assert (turned.read(read, (4, 3, 2), (slice(2, 4),)) == expected[2:].swapaxes(1, 2)).all()


# ---------------------------------------------------------------- routing

EXPERTS, CHOSEN = 12, 3


def mixture(*, sigmoid: bool, groups: int, top: int, normalise: bool = False) -> Mixture:
    config = DeepseekConfig(
        **COMMON,
        q_lora_rank=None,
        experts=EXPERTS,
        experts_per_token=CHOSEN,
        groups=groups,
        top_groups=top,
        expert_width=8,
        shared_experts=2,
        dense_layers=0,
        sigmoid_scores=sigmoid,
        normalise=normalise,
        weight_scale=2.5,
    )
    made = Mixture(config, jnp.dtype(jnp.bfloat16))
    assert made.router[...].dtype == jnp.float32
    made.router[...] = jnp.asarray(rows(1, EXPERTS, HIDDEN) * 0.3)
    if made.bias is not None:
        made.bias[...] = jnp.asarray(rows(2, EXPERTS) * 0.3)
    return made


def best(values: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


@pytest.mark.parametrize(
    ("sigmoid", "groups", "top", "normalise"),
    [
        (False, 1, 1, False),
        (False, 4, 2, False),
        (True, 1, 1, True),
        (True, 4, 2, True),
        (True, 3, 1, False),
    ],
)
def test_routing_token_by_token(sigmoid: bool, groups: int, top: int, normalise: bool) -> None:
    made = mixture(sigmoid=sigmoid, groups=groups, top=top, normalise=normalise)
    x = rows(3, 64, HIDDEN)
    ids, weights = made.route(jnp.asarray(x))
    assert (ids.shape, weights.shape) == ((64, CHOSEN), (64, CHOSEN))
    for token in range(64):
        logits = x[token].astype(np.float64) @ np.asarray(made.router[...], np.float64).T
        powers = np.exp(logits)
        scores = 1 / (1 + np.exp(-logits)) if sigmoid else powers / powers.sum()
        choice = scores if made.bias is None else scores + np.asarray(made.bias[...])
        size = EXPERTS // groups
        in_group = [choice[g * size : (g + 1) * size] for g in range(groups)]
        marks = [np.sort(c)[-2:].sum() if sigmoid else c.max() for c in in_group]
        open_groups = best(np.array(marks), top)
        masked = np.where(np.isin(np.arange(EXPERTS) // size, open_groups), choice, -np.inf)
        chosen = best(masked, CHOSEN)
        expected = scores[chosen]
        if normalise:
            expected = expected / expected.sum()
        assert ids[token].tolist() == chosen
        np.testing.assert_allclose(weights[token], expected * 2.5, rtol=1e-5)


def test_of_equal_scores_the_lower_number_comes_first() -> None:
    for sigmoid in (False, True):
        made = mixture(sigmoid=sigmoid, groups=4, top=2)
        made.router[...] = jnp.zeros_like(made.router[...])
        if made.bias is not None:
            made.bias[...] = jnp.zeros_like(made.bias[...])
        assert made.route(jnp.ones((1, HIDDEN)))[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_token_is_routed_alike_in_any_batch(sigmoid: bool) -> None:
    made = mixture(sigmoid=sigmoid, groups=4, top=2, normalise=sigmoid)
    run = jax.jit(made.route)
    x = jnp.asarray(rows(4, 128, HIDDEN))
    whole = [np.asarray(part) for part in run(x)]
    for count in (8, 24, 40, 64):
        for part, wanted in zip(run(x[:count]), whole, strict=True):
            assert np.asarray(part).tobytes() == wanted[:count].tobytes(), count
