"""HSTU, FuXi and SASRec against direct formulas; batch mates, later events and segments change nothing."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from nestpipe import recipes
from nestpipe.config import Config
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.routing import route
from nestpipe.errors import ConfigError
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import FuXiConfig, SASRecConfig
from nestpipe.models.fuxi import FuXi
from nestpipe.models.retrieval import build_retrieval
from nestpipe.ops.kernel_args import bucket_boundaries
from nestpipe.rng import Rng
from tests.small_runs import LOSSES
from tests.small_runs import MODELS as TRAINED

MODELS = TRAINED | {
    "fuxi": FuXiConfig(dim=8, num_heads=2, qk_dim=3, v_dim=5, hidden_dim=6),
    "sasrec-ligr": SASRecConfig(dim=8, num_heads=2, hidden_dim=6, block="ligr"),
    "sasrec-meta": SASRecConfig(dim=8, num_heads=2, block="meta"),
    "fuxi-buckets": FuXiConfig(dim=8, num_heads=2, qk_dim=3, v_dim=5, time="buckets"),
}

CATALOGUE = torch.arange(100, 140)
MAX_LEN = 12


def build(model, loss, dtype=torch.float64):
    counts = torch.arange(len(CATALOGUE))
    return build_retrieval(
        MODELS[model], LOSSES[loss], catalogue=CATALOGUE, max_len=MAX_LEN, seed=1, dtype=dtype, counts=counts
    )


def batch_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(100, 140, (length + 1,), generator=generator).tolist() for length in lengths]
    stamps = [torch.randint(0, 10**6, (length + 1,), generator=generator).sort().values.tolist() for length in lengths]
    return Batch(
        cursor=Cursor(0, 0),
        sample_ids=torch.arange(len(lengths)) + 1000,
        items=Jagged.from_rows([row[:-1] for row in rows]),
        times=Jagged.from_rows([row[:-1] for row in stamps]),
        query_times=Jagged.from_rows([row[1:] for row in stamps]),
        targets=Jagged.from_rows([row[1:] for row in rows]),
        groups=torch.arange(len(lengths)),
    )


def rows_for(lookups, dtype, dim=8):
    plan = route([lookups], ["item"], Owners(1, 1))
    table = torch.randn(200, dim, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    leaf = table.index_select(0, plan.tables["item"].ids.sort().values).requires_grad_()
    return plan.rows(0, {"item": leaf}), leaf


def encode(model, batch, dtype=torch.float64):
    with torch.no_grad():
        return model.encode(rows_for(model.encode_lookups(batch), dtype)[0], batch)


def loss_of(model, batch, step=3):
    rng = Rng(0, step)
    rows, leaf = rows_for(model.lookups(batch, rng), torch.float64)
    return model(rows, batch, rng).loss_sum, leaf


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_batch_mates_do_not_change_scores(model, dtype, tolerance):
    built = build(model, "full", dtype)
    batch = batch_of([5, 12, 1, 7, 12, 3])
    together = encode(built, batch, dtype)
    for place in range(batch.num_samples):
        alone = encode(built, batch.select(torch.tensor([place])), dtype)
        assert torch.allclose(together[place], alone[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_the_loss_of_a_batch_is_the_sum_over_its_samples(model, loss):
    """Dropout and negatives included: their draws belong to (step, sample, position)."""
    built = build(model, loss)
    batch = batch_of([5, 12, 1, 7])
    whole, _ = loss_of(built, batch)
    parts = [loss_of(built, batch.select(torch.tensor([place])))[0] for place in range(4)]
    assert torch.allclose(whole, sum(parts), rtol=1e-12)
    assert not torch.allclose(whole, loss_of(built, batch, step=4)[0], rtol=1e-6), (
        "dropout or negatives ignore the step"
    )
    assert built.weight(batch) == 25


@pytest.mark.parametrize("model", MODELS)
def test_later_events_do_not_change_earlier_rows(model):
    built = build(model, "full").eval()
    batch = batch_of([9])
    rows, _ = rows_for(built.encode_lookups(batch), torch.float64)
    hidden = built.backbone(rows["history"].gather(), batch, None)
    changed = replace(
        batch, items=batch.items.with_values(torch.cat([batch.items.values[:6], batch.items.values[6:].flip(0)]))
    )
    other, _ = rows_for(built.encode_lookups(changed), torch.float64)
    after = built.backbone(other["history"].gather(), changed, None)
    assert torch.equal(hidden[:6], after[:6])
    assert not torch.allclose(hidden[6:], after[6:])


def test_hstu_equals_its_formula():
    """One sequence, written out as in the docstring of the model, with dense matrices and a float logarithm."""
    built, batch = build("hstu", "sampled").eval(), batch_of([7])
    config = built.backbone.config
    rows, _ = rows_for(built.encode_lookups(batch), torch.float64)
    vectors = rows["history"].gather()
    x = vectors * 8**0.5 + built.backbone.input.position[:7]
    gap = (batch.query_times.values[:, None] - batch.times.values).abs().clamp(min=1).double()
    bucket = (gap.log() / 0.301).floor().long().clamp(0, config.num_time_buckets)
    distance = (torch.arange(7)[:, None] - torch.arange(7)).clamp(min=0)
    for unit in built.backbone.blocks:
        u, v, q, k = F.silu(F.layer_norm(x, (8,), eps=1e-6) @ unit.uvqk).split([10, 10, 6, 6], dim=1)
        heads = []
        for h in range(2):
            scores = q[:, 3 * h : 3 * h + 3] @ k[:, 3 * h : 3 * h + 3].T + unit.position[distance] + unit.time[bucket]
            heads.append((F.silu(scores) / MAX_LEN).tril() @ v[:, 5 * h : 5 * h + 5])
        joined = torch.cat(heads, dim=1)
        x = x + F.linear(u * F.layer_norm(joined, (10,), eps=1e-6), unit.out.weight, unit.out.bias)
    assert torch.allclose(built.backbone(vectors, batch, None), x, rtol=1e-12, atol=1e-12)
    assert torch.allclose(encode(built, batch)[0], F.normalize(x, dim=1)[-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", ["fuxi", "fuxi-buckets"])
def test_fuxi_equals_its_formula(model):
    """One sequence, written out as in the docstring of the model."""
    built, batch = build(model, "sampled").eval(), batch_of([7])
    rows, _ = rows_for(built.encode_lookups(batch), torch.float64)
    vectors = rows["history"].gather()
    x = vectors * 8**0.5 + built.backbone.input.position[:7]
    gap = (batch.query_times.values[:, None] - batch.times.values).abs().clamp(min=1).double()
    distance = (torch.arange(7)[:, None] - torch.arange(7)).clamp(min=0)
    norm = lambda values: values / (values.square().mean(1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    for unit in built.backbone.blocks:
        if model == "fuxi":
            alpha, gamma, beta = unit.time[0], torch.exp(-F.softplus(unit.time[1])), torch.sigmoid(unit.time[2])
            by_time = alpha * gamma ** (gap**beta)
        else:
            by_time = unit.time[(gap.log() / 0.301).floor().long().clamp(0, 128)]
        u, v, q, k = F.silu(norm(x) @ unit.uvqk).split([30, 10, 6, 6], dim=1)
        content = [
            F.silu(q[:, 3 * h : 3 * h + 3] @ k[:, 3 * h : 3 * h + 3].T).tril() / MAX_LEN @ v[:, 5 * h : 5 * h + 5]
            for h in range(2)
        ]
        channels = torch.cat([*content, unit.position[distance].tril() @ v, by_time.tril() @ v], dim=1)
        x = x + F.linear(u * norm(channels), unit.out.weight, unit.out.bias)
        x = x + (F.silu(norm(x) @ unit.gate.weight.T) * (norm(x) @ unit.up.weight.T)) @ unit.down.weight.T
    found = built.backbone(vectors, batch, None)
    # The logarithm of the time between is kept in fp32: 1e-7 of an exponent of order ten.
    assert torch.allclose(found, x, rtol=1e-12, atol=1e-6 if model == "fuxi" else 1e-12)


def test_fuxi_long_has_a_fifth_of_a_billion_dense_parameters():
    config = recipes.fuxi_long()
    with torch.device("meta"):
        backbone = FuXi(config.model, max_len=config.data.max_len)
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 203_472_944


@pytest.mark.parametrize(
    "name", [name for name in recipes.RECIPES if name.split("_")[1:] and name.split("_")[1] in recipes.SIZES]
)
def test_sizes_are_legal_configurations_and_grow(name):
    config = recipes.RECIPES[name]()
    config.validate()
    assert config.data.max_len == recipes.SIZES[name.split("_")[1]].max_len
    assert Config.from_json(config.to_json()) == config


def pre_norm_block(x, block):
    normed = F.layer_norm(x, (8,), block.norm_attention.weight, block.norm_attention.bias)
    x = x + torch_attention(normed, normed, block)
    normed = F.layer_norm(x, (8,), block.norm_feed.weight, block.norm_feed.bias)
    return x + block.down(F.relu(block.up(normed)))


def ligr_block(x, block):
    """As RecTools writes it, with the SwiGLU layer in the names of its formula."""
    normed = F.layer_norm(x, (8,), block.norm_attention.weight, block.norm_attention.bias)
    x = x + torch.sigmoid(block.gate_attention(x)) * torch_attention(normed, normed, block)
    normed = F.layer_norm(x, (8,), block.norm_feed.weight, block.norm_feed.bias)
    fed = (F.silu(normed @ block.up.weight.T) * (normed @ block.linear.weight.T)) @ block.down.weight.T
    return x + torch.sigmoid(block.gate_feed(x)) * fed


def meta_block(x, block):
    """As Meta writes it: keys and values of the vectors as they are, sums from normalised vectors."""
    queries = F.layer_norm(x, (8,), eps=1e-8)
    x = F.layer_norm(queries + torch_attention(queries, x, block), (8,), eps=1e-8)
    return x + block.down(F.relu(block.up(x)))


def torch_attention(asking, asked, block):
    """torch's own multi-head attention with the weights of the block."""
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([block.query.weight, block.key.weight, block.value.weight]))
        attention.in_proj_bias.copy_(torch.cat([block.query.bias, torch.zeros(8), block.value.bias]))
        attention.out_proj.load_state_dict(block.out.state_dict())
    later = torch.ones(len(asking), len(asking), dtype=torch.bool).triu(1)
    return attention(asking[None], asked[None], asked[None], attn_mask=later, need_weights=False)[0][0]


@pytest.mark.parametrize(
    ("model", "plain"), [("sasrec", pre_norm_block), ("sasrec-ligr", ligr_block), ("sasrec-meta", meta_block)]
)
def test_sasrec_equals_torchs_transformer_parts(model, plain):
    built, batch = build(model, "full").eval(), batch_of([7])
    rows, _ = rows_for(built.encode_lookups(batch), torch.float64)
    vectors = rows["history"].gather()
    x = vectors * 8**0.5 + built.backbone.input.position[:7]
    for block in built.backbone.blocks:
        x = plain(x, block)
    assert torch.allclose(built.backbone(vectors, batch, None), built.backbone.norm(x), rtol=1e-12, atol=1e-12)


def test_full_softmax_is_cross_entropy_over_the_catalogue():
    built, batch = build("sasrec", "full").eval(), batch_of([5, 3])
    built.backbone.config = replace(built.backbone.config, dropout=0.0)
    rng = Rng(0, 0)
    rows, _ = rows_for(built.lookups(batch, rng), torch.float64)
    hidden = built.backbone(rows["history"].gather(), batch, None)
    scores = hidden @ rows["catalogue"].gather().T
    expected = F.cross_entropy(scores, batch.targets.values - 100, reduction="sum")
    assert torch.allclose(built(rows, batch, rng).loss_sum, expected, rtol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_and_row_in_use_gets_a_gradient(model, loss):
    built = build(model, loss)
    # One group: in a group of one event there is nothing to learn.
    total, leaf = loss_of(built, replace(batch_of([5, 12, 1]), groups=torch.zeros(3, dtype=torch.int64)))
    total.backward()
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name
    assert bool((leaf.grad.abs().sum(1) > 0).all())


@pytest.mark.parametrize("model", MODELS)
def test_empty_histories_and_logs_without_times(model):
    built = build(model, "full")
    batch = batch_of([0, 4, 0])
    bare = replace(batch, times=None, query_times=None)
    queries = encode(built, bare)
    assert queries[0].abs().sum() == queries[2].abs().sum() == 0
    assert queries[1].abs().sum() > 0


def test_buckets_cover_a_hundred_years():
    assert int(torch.bucketize(torch.tensor(100 * 31_557_600), bucket_boundaries(128), right=True)) == 72


def test_full_softmax_refuses_a_large_catalogue():
    with pytest.raises(ConfigError, match=r"all 40 items, above loss.max_full_catalogue 39"):
        build_retrieval(
            MODELS["hstu"], replace(LOSSES["full"], max_full_catalogue=39), catalogue=CATALOGUE, max_len=4, seed=0
        )


def test_initial_weights_are_a_function_of_the_seed_and_leave_global_randomness_alone():
    torch.random.manual_seed(0)
    expected = torch.rand(1)
    torch.random.manual_seed(0)
    one = build("hstu", "full").state_dict()
    assert torch.equal(torch.rand(1), expected)
    assert all(
        torch.equal(a, b) for a, b in zip(one.values(), build("hstu", "full").state_dict().values(), strict=True)
    )
