"""Policies: the values of their definitions, and that they find an optimum that is known."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from nestpipe.errors import ConfigError
from nestpipe.generative.config import PolicyConfig
from nestpipe.generative.policy_optimisation import Policy, advantages, draw_paths, gate, path_log_probs
from nestpipe.generative.trie import Trie
from nestpipe.rng import Rng

SIZES = (4, 4, 4)
LEAVES = torch.arange(64)
TRIE = Trie(LEAVES, torch.stack(torch.unravel_index(LEAVES, SIZES), 1), SIZES, version="v1")


class TablePolicy:
    """Logits of every prefix, for each context its own."""

    def __init__(self, num_contexts):
        self.tables = [torch.zeros(num_contexts, 4**level, 4, dtype=torch.float64) for level in range(3)]
        for table in self.tables:
            table.requires_grad_()

    def everything(self):
        """Probabilities [N, 64] of all leaves."""
        with torch.no_grad():
            logs = self.tables[0].log_softmax(2).flatten(1)
            for table in self.tables[1:]:
                logs = logs.repeat_interleave(4, 1) + table.log_softmax(2).flatten(1)
        return logs.exp()


class TableDecoder:
    """A request for each context of a table policy."""

    version = "v1"

    def __init__(self, policy):
        self._tables, self._prefix, self._level = policy.tables, None, 0

    def first(self):
        return self._tables[0]

    def next(self, parents, codes, nodes):
        self._level += 1
        before = 0 if self._prefix is None else self._prefix.gather(1, parents) * 4
        self._prefix = before + codes
        return self._tables[self._level].gather(1, self._prefix.unsqueeze(2).expand(-1, -1, 4))


def improve(model, rewards, logged, config, *, steps, lr=0.05, inner=2):
    """Draws and updates of a table policy; the regret of what it expects, and how often its first choice is the best."""
    policy, optimizer = Policy(config), torch.optim.Adam(model.tables, lr=lr)
    contexts = torch.arange(len(rewards))
    for number in range(steps):
        drawn = draw_paths(TableDecoder(model), TRIE, num=config.group_size, rng=Rng(0, number), samples=contexts)
        for _ in range(inner):
            new = path_log_probs(TableDecoder(model), TRIE, drawn.leaves)
            sft_loss = (
                -path_log_probs(TableDecoder(model), TRIE, logged.unsqueeze(1)).sum() if config.sft_weight else None
            )
            found = rewards.gather(1, drawn.leaves)
            loss = policy.loss(new, drawn.log_probs, found, rewards.gather(1, logged.unsqueeze(1)).squeeze(1), sft_loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    chances = model.everything()
    regret = rewards.max(1).values - (chances * rewards).sum(1)
    return float(regret.mean()), float((chances.argmax(1) == rewards.argmax(1)).double().mean())


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.05, 3.0])
def test_the_gate_has_its_values(tau):
    ratios = torch.tensor([0.3, 1.0, 1.7, 4.0], dtype=torch.float64, requires_grad=True)
    values = gate(ratios, tau)
    assert values[1].item() == pytest.approx(2 / tau)
    (slopes,) = torch.autograd.grad(values.sum(), ratios)
    assert slopes[1].item() == pytest.approx(1.0)
    expected = 1 / torch.cosh(tau * (ratios.detach() - 1) / 2) ** 2
    assert slopes.tolist() == pytest.approx(expected.tolist())


def test_advantages_are_deviations_in_their_group():
    found = advantages(torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0]]))
    assert found[0].mean().item() == pytest.approx(0.0, abs=1e-7)
    assert found[0].square().mean().item() == pytest.approx(1.0)
    assert found[1].tolist() == [0.0] * 4, "equal rewards teach nothing"


def problem(dtype=torch.float64):
    rng = np.random.default_rng(4)
    old = torch.from_numpy(-rng.random((2, 3, 2)) - 0.1).to(dtype)
    new = (old + torch.from_numpy(rng.normal(size=old.shape) * 0.3).to(dtype)).requires_grad_()
    rewards = torch.tensor([[0.1, 0.5, 0.9], [0.8, 0.2, 0.3]], dtype=dtype)
    return new, old, rewards


def by_hand(kind, new, old, rewards, logged, config):
    """The objective of the page, path by path and code by code."""
    total = 0.0
    for n in range(len(rewards)):
        group = rewards[n].tolist()
        mean, std = np.mean(group), np.std(group)
        parts = []
        for i, reward in enumerate(group):
            a = (reward - mean) / std
            if kind == "sa_gcpo" and a > 0 and reward < logged[n]:
                a = 0.0
            ratios = [float((new[n, i, t] - old[n, i, t]).exp()) for t in range(2)]
            if kind in ("sa_gcpo", "sapo"):
                tau = config.tau_positive if a > 0 else config.tau_negative
                parts.append(a * np.mean([4 / tau / (1 + np.exp(-tau * (one - 1))) for one in ratios]))
            elif kind == "grpo":
                parts.append(np.mean([min(one * a, float(np.clip(one, 0.8, 1.2)) * a) for one in ratios]))
            else:
                s = float(np.exp(np.mean(np.log(ratios))))
                parts.append(min(s * a, float(np.clip(s, 0.8, 1.2)) * a))
        total -= np.mean(parts)
    return total


@pytest.mark.parametrize("kind", ["sa_gcpo", "sapo", "gspo", "grpo"])
def test_objectives_are_those_of_their_definitions(kind):
    new, old, rewards = problem()
    config = PolicyConfig(kind=kind, sft_weight=0.5)
    logged = torch.tensor([0.7, 0.9], dtype=torch.float64)
    found = Policy(config).loss(new, old, rewards, logged, sft_loss=torch.tensor(3.0))
    assert found.item() == pytest.approx(by_hand(kind, new.detach(), old, rewards, logged.tolist(), config) + 1.5)
    assert Policy(config).loss(new, old, rewards, logged).item() == pytest.approx(found.item() - 1.5)


def test_the_threshold_suppresses_good_luck_in_a_bad_group():
    new, old, rewards = problem()
    policy = Policy(PolicyConfig())
    (grad,) = torch.autograd.grad(policy.loss(new, old, rewards, torch.tensor([0.6, 0.9])), new)
    assert (grad[0, 2] < 0).all(), "0.9 is above the logged 0.6: made more likely"
    assert not grad[1, 0].any(), "0.8 is the best of its group, but below the logged 0.9"
    assert (grad[1, 1] > 0).all(), "what is bad stays bad"
    assert (policy.num_positive, policy.num_suppressed) == (2, 1)
    off = Policy(PolicyConfig(threshold=False))
    (grad,) = torch.autograd.grad(off.loss(new, old, rewards, torch.tensor([0.6, 0.9])), new)
    assert (grad[1, 0] < 0).all()


def test_a_warning_when_nearly_everything_is_suppressed(caplog):
    new, old, rewards = problem()
    for logged, warns in ((0.0, False), (2.0, True)):
        policy = Policy(PolicyConfig(warn_every=3))
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                policy.loss(new, old, rewards, torch.full((2,), logged))
        assert ("6 of 6 positive advantages of the last 3 updates were suppressed" in caplog.text) == warns


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match=r"group_size is 1.*tau_positive is 0"):
        Policy(replace(PolicyConfig(), group_size=1, tau_positive=0.0))


# Five worlds of four contexts with 4x4x4 codes at once: contexts share no parameter, so each is a run of its own.
REWARDS = torch.from_numpy(np.random.default_rng(0).random((20, 64)))
BEST = REWARDS.argmax(1)


def test_the_known_optimum_is_found_from_a_uniform_start():
    config = PolicyConfig(sft_weight=0.0)
    regret, top1 = improve(TablePolicy(20), REWARDS, BEST, config, steps=200, lr=0.1)
    assert regret <= 0.015
    assert top1 >= 0.85


def hidden():
    """A start that hardly ever draws a path with the first code of the best."""
    model = TablePolicy(20)
    with torch.no_grad():
        model.tables[0][torch.arange(20), 0, BEST // 16] = -6.0
    return model


def test_a_hidden_optimum_is_found_with_the_supervised_loss_and_not_without():
    regret, top1 = improve(hidden(), REWARDS, BEST, PolicyConfig(sft_weight=0.1), steps=200, lr=0.1)
    assert regret <= 0.005
    assert top1 == 1.0
    alone, _ = improve(hidden(), REWARDS, BEST, PolicyConfig(sft_weight=0.0), steps=200, lr=0.1)
    assert alone > 5 * 0.005, "the threshold alone does harm: nothing but the logged item may be learned"


@pytest.mark.parametrize("kind", ["sapo", "gspo", "grpo"])
def test_the_others_improve_on_the_same_call(kind):
    before = float((REWARDS.max(1).values - REWARDS.mean(1)).mean())
    regret, _ = improve(TablePolicy(20), REWARDS, BEST, PolicyConfig(kind=kind, sft_weight=0.0), steps=60, lr=0.1)
    assert regret < 0.25 * before
